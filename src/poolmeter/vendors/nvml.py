"""Asking NVML: a call's result, or why there is none. What a card does not support is None, a card that is gone raises."""

import math
from typing import Any

from poolmeter.errors import PoolmeterError

UINT32_MAX, UINT64_MAX = 2**32 - 1, 2**64 - 1


class LostDevice(PoolmeterError):
    """The device fell off the bus or needs a reset."""


class ReplacedDriver(PoolmeterError):
    """Another driver was loaded under this process; its library can talk to it no more."""


class Nvml:
    """Calls of a binding by name. A function that the binding or the driver lacks is one that the card does not support."""

    def __init__(self, binding: Any) -> None:
        self.binding = binding

    def code(self, fault: Exception) -> int | None:
        """NVML's number of an error."""
        value = getattr(fault, "value", None)
        return value if isinstance(value, int) else None

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """The call's result. Raises LostDevice, ReplacedDriver, or NVMLError for anything else."""
        nvml = self.binding
        function = getattr(nvml, name, None)
        if function is None:
            raise nvml.NVMLError(nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        try:
            return function(*arguments, **options)
        except nvml.NVMLError as fault:
            code = self.code(fault)
            if code in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise LostDevice(str(fault)) from None
            if code == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
                raise ReplacedDriver(str(fault)) from None
            raise

    def ask(self, name: str, *arguments: Any, **options: Any) -> Any:
        """As `value`, and nobody is told of the error: for what many cards rightly lack."""
        return self.value([], name, *arguments, **options)

    def value(self, errors: list[str], name: str, *arguments: Any, **options: Any) -> Any:
        """The call's result, or None with the error noted; a lost device raises."""
        try:
            return self.call(name, *arguments, **options)
        except self.binding.NVMLError as fault:
            errors.append(f"{name}: {fault}")
            return None


def number(value: Any) -> int | None:
    """A count or size; None for what drivers write for "not available"."""
    if value is None or isinstance(value, (bytes, str)):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    found = int(value)
    return None if found in (UINT32_MAX, UINT64_MAX) or found < 0 else found


def wide(value: Any) -> int | None:
    """As `number`, of a value of 64 bits that may well be 2**32 - 1."""
    return UINT32_MAX if value is not None and int(value) == UINT32_MAX else number(value)


def percent_ppm(value: Any) -> int | None:
    """Parts per million of a percentage, within 0 to 100; None when it is no number."""
    if value is None or not math.isfinite(value):
        return None
    return min(1_000_000, max(0, round(float(value) * 10_000)))


def text(value: Any) -> str:
    """Text of what the binding gives as bytes or text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def optional_text(value: Any) -> str | None:
    """Text, None for what boards without such a thing answer ("0", "N/A", "Unknown")."""
    found = None if value is None else text(value).strip()
    return None if found in (None, "", "0", "N/A", "[N/A]", "Unknown") else found
