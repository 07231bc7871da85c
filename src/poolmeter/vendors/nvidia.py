"""NVIDIA through NVML (PyPI nvidia-ml-py, module `pynvml`). Meant for a child process: a call into the library can hang for ever.

Facts worth knowing: process utilisation names only processes active in the last period and answers NOT_FOUND for "nothing new"; its
size call may return SUCCESS with 0, which the binding raises as a bare error; a lost card says so on any call; the energy counter is
in mJ since the driver was loaded. The simulated pool is this code on the simulated library, found by the loader's search path.
"""

import contextlib
import time
import uuid as uuids
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from poolmeter.vendors.proc import command_of, start_ticks_of
from poolmeter.vendors.reading import DeviceReading, ProcessReading, VendorReading

_MHZ = 1_000_000
_FORGET_AFTER_US = 120_000_000  # an ended process stays this long, so that whoever reads seldom still sees its last use


class _Lost(Exception):
    """The device fell off the bus or needs a reset."""


@dataclass
class _Busy:
    """Integrated use of one process."""

    start_ticks: int | None
    command: str | None
    total_us: int = 0
    seen_us: int = 0


@dataclass
class _Card:
    """What is kept of one device between readings."""

    identity: DeviceReading
    handle: Any
    busy_us: int | None = None
    rates_us: int | None = None  # when utilisation rates were last integrated
    sample_us: int | None = None  # newest utilisation sample taken
    process_sample_us: int | None = None
    process_samples: bool = False  # whether the card tells the use of processes
    processes: dict[int, _Busy] = field(default_factory=dict)


class NvidiaVendor:
    """Reads every NVIDIA device, and integrates utilisation from reading to reading."""

    name = "nvidia"

    def __init__(self, proc: Path = Path("/proc")) -> None:
        import pynvml

        self._nvml = pynvml
        self._proc = proc
        self._origin = uuids.uuid4().hex
        self._started = False
        self._cards: dict[int, _Card] = {}
        self._driver: str | None = None

    def read(self) -> VendorReading:
        """All devices now; `error` when the library is missing or refuses."""
        began = time.monotonic_ns()
        at_us = time.time_ns() // 1000
        nvml = self._nvml
        devices: list[DeviceReading] = []
        unidentified = 0
        error = None
        try:
            if not self._started:
                nvml.nvmlInit()
                self._started = True
                self._driver = str(nvml.nvmlSystemGetDriverVersion())
            for index in range(int(nvml.nvmlDeviceGetCount())):
                reading = self._device(index)
                if reading is None:
                    unidentified += 1
                else:
                    devices.append(reading)
        except nvml.NVMLError as fault:
            devices, error = [], f"NVML does not answer: {fault}"
            self._forget()
        return VendorReading(
            vendor=self.name,
            origin=self._origin,
            at_us=at_us,
            duration_us=(time.monotonic_ns() - began) // 1000,
            devices=tuple(devices),
            error=error,
            unidentified=unidentified,
        )

    def _forget(self) -> None:
        # The next reading starts the library anew; what was integrated so far keeps its value and its origin.
        if self._started:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
        self._started = False
        for card in self._cards.values():
            card.handle = None

    def _device(self, index: int) -> DeviceReading | None:
        card = self._cards.get(index)
        try:
            handle = self._call(self._nvml.nvmlDeviceGetHandleByIndex, index)
            uuid = _text(self._call(self._nvml.nvmlDeviceGetUUID, handle))
            if card is None or card.identity.uuid != uuid:
                card = _Card(identity=self._identity(index, handle, uuid), handle=handle)
                self._cards[index] = card
            card.handle = handle
            return self._values(card)
        except _Lost as lost:
            return replace(card.identity, up=False, reason=str(lost)) if card else None
        except self._nvml.NVMLError as fault:
            return replace(card.identity, up=False, reason=f"no handle: {fault}") if card else None

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The call's result; _Lost when the device is gone, NVMLError for anything else."""
        nvml = self._nvml
        try:
            return function(*arguments)
        except nvml.NVMLError as fault:
            if getattr(fault, "value", None) in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise _Lost(str(fault)) from None
            raise

    def _identity(self, index: int, handle: Any, uuid: str) -> DeviceReading:
        nvml, errors = self._nvml, list[str]()
        pci = self._value(errors, nvml.nvmlDeviceGetPciInfo, handle)
        return DeviceReading(
            uuid=uuid,
            index=index,
            model=_text(self._value(errors, nvml.nvmlDeviceGetName, handle) or "unknown"),
            vendor=self.name,
            up=True,
            memory_total_bytes=int(self._call(nvml.nvmlDeviceGetMemoryInfo, handle).total),
            pci_bus_id=_text(pci.busId) if pci is not None else None,
            minor=self._value(errors, nvml.nvmlDeviceGetMinorNumber, handle),
            serial=_optional_text(self._value(errors, nvml.nvmlDeviceGetSerial, handle)),
            driver_version=self._driver,
        )

    def _value(self, errors: list[str], function: Callable[..., Any], *arguments: Any) -> Any:
        """The call's result, or None with the error noted; a lost device raises."""
        try:
            return self._call(function, *arguments)
        except self._nvml.NVMLError as fault:
            errors.append(f"{function.__name__}: {fault}")
            return None

    def _memory_v2(self, handle: Any) -> Any:
        return self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2)

    def _values(self, card: _Card) -> DeviceReading:
        nvml, handle, errors = self._nvml, card.handle, list[str]()
        memory = self._value(errors, self._memory_v2, handle)
        reserved = int(memory.reserved) if memory is not None else None
        if memory is None:
            memory = self._value(errors, nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._value(errors, nvml.nvmlDeviceGetUtilizationRates, handle)
        mig = self._value(errors, nvml.nvmlDeviceGetMigMode, handle)
        energy = self._value(errors, nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        utilization = min(100, int(rates.gpu)) * 10_000 if rates is not None else None
        self._integrate_device(card, utilization, errors)
        self._integrate_processes(card, errors)
        processes, known = self._processes(card, errors)
        clock = self._value(errors, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        memory_clock = self._value(errors, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM)
        return replace(
            card.identity,
            memory_total_bytes=int(memory.total) if memory is not None else card.identity.memory_total_bytes,
            memory_used_bytes=int(memory.used) if memory is not None else None,
            memory_reserved_bytes=reserved,
            utilization_ppm=utilization,
            busy_us_total=card.busy_us,
            energy_uj_total=int(energy) * 1000 if energy is not None else None,
            power_mw=self._value(errors, nvml.nvmlDeviceGetPowerUsage, handle),
            temperature_celsius=self._value(errors, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            sm_clock_hz=int(clock) * _MHZ if clock is not None else None,
            memory_clock_hz=int(memory_clock) * _MHZ if memory_clock is not None else None,
            mig=bool(mig[0]) if mig is not None else None,
            processes=processes,
            processes_known=known,
            errors=tuple(errors),
        )

    def _integrate_device(self, card: _Card, utilization_ppm: int | None, errors: list[str]) -> None:
        """Adds to `busy_us`: from the sample buffer, each sample over the time since the one before it; else the rate over the interval."""
        nvml = self._nvml
        now_us = time.time_ns() // 1000
        try:
            _, samples = self._call(nvml.nvmlDeviceGetSamples, card.handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, card.sample_us or 0)
        except nvml.NVMLError as fault:
            if getattr(fault, "value", None) == nvml.NVML_ERROR_NOT_FOUND:
                card.busy_us = card.busy_us or 0
                return  # nothing new in the buffer; the next sample covers the time
            errors.append(f"nvmlDeviceGetSamples: {fault}")
            if utilization_ppm is not None:
                if card.rates_us is not None and now_us > card.rates_us:
                    card.busy_us = (card.busy_us or 0) + utilization_ppm * (now_us - card.rates_us) // 1_000_000
                elif card.busy_us is None:
                    card.busy_us = 0
                card.rates_us = now_us
            return
        fresh = sorted((int(sample.timeStamp), min(100, int(sample.sampleValue.uiVal))) for sample in samples)
        fresh = [(at, value) for at, value in fresh if at > (card.sample_us or 0)]
        if card.sample_us is None:
            # What lies in the buffer at the first look was used before anybody watched.
            card.sample_us = fresh[-1][0] if fresh else None
            card.busy_us = card.busy_us or 0
            return
        for at, value in fresh:
            card.busy_us = (card.busy_us or 0) + value * (at - card.sample_us) // 100
            card.sample_us = at

    def _integrate_processes(self, card: _Card, errors: list[str]) -> None:
        """Adds each process's samples to its total; together they never exceed the time since the last look.

        One entry of a process is its mean over all sample periods since the last look, whenever in them it was active; of several
        entries each is the mean since the one before. The newest sample of the device says how far those periods reach.
        """
        nvml = self._nvml
        now_us = time.time_ns() // 1000
        last = card.process_sample_us
        samples: list[Any] = []
        for attempt in range(3):
            try:
                samples = self._call(nvml.nvmlDeviceGetProcessUtilization, card.handle, last or 0)
                break
            except nvml.NVMLError as fault:
                code = getattr(fault, "value", None)
                if code == nvml.NVML_ERROR_INSUFFICIENT_SIZE and attempt < 2:
                    continue  # a process started between the size call and the second call
                if code not in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_SUCCESS):
                    errors.append(f"nvmlDeviceGetProcessUtilization: {fault}")
                    return
                break
        card.process_samples = True
        # The driver has been seen to return a hundred zero entries and absurd values: only what is newer and non-zero counts.
        fresh = sorted((int(s.timeStamp), int(s.pid), min(100, int(s.smUtil))) for s in samples if int(s.timeStamp) > (last or 0))
        newest = max([at for at, _, _ in fresh] + [at for at in (card.sample_us, last) if at is not None], default=None)
        card.process_sample_us = newest
        if last is None or newest is None:
            return  # what lies in the buffer at the first look was used before anybody watched
        entries: dict[int, list[tuple[int, int]]] = {}
        for at, pid, value in fresh:
            entries.setdefault(pid, []).append((at, value))
        used: dict[int, int] = {}
        for pid, mine in entries.items():
            ends = [at for at, _ in mine[:-1]] + [newest if len(mine) == 1 else mine[-1][0]]
            starts = [last, *ends[:-1]]
            used[pid] = sum(value * (end - start) // 100 for (_, value), start, end in zip(mine, starts, ends, strict=True))
        total, window = sum(used.values()), newest - last
        for pid, amount in used.items():
            busy = self._process(card, pid, now_us)
            if busy is not None:
                busy.total_us += amount * window // total if total > window else amount

    def _process(self, card: _Card, pid: int, now_us: int) -> _Busy | None:
        """What is kept of the process that has `pid` now; None for a pid that nobody ever saw (samples outlive their process)."""
        busy, start = card.processes.get(pid), start_ticks_of(pid, self._proc)
        if start is not None and (busy is None or busy.start_ticks != start):
            busy = _Busy(start, command_of(pid, self._proc))
            card.processes[pid] = busy
        if busy is not None:
            busy.seen_us = now_us
        return busy

    def _processes(self, card: _Card, errors: list[str]) -> tuple[tuple[ProcessReading, ...], bool]:
        """Processes with a context, once each (the compute, MPS and graphics lists overlap), and those with fresh use; and whether any list answered."""
        nvml = self._nvml
        now_us = time.time_ns() // 1000
        memory: dict[int, int | None] = {}
        known = False
        for function in (
            nvml.nvmlDeviceGetComputeRunningProcesses_v3,
            nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3,
            nvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
        ):
            listed = self._value(errors, function, card.handle)
            known = known or listed is not None
            for process in listed or ():
                held = int(process.usedGpuMemory) if process.usedGpuMemory is not None else None
                pid = int(process.pid)
                memory[pid] = max((value for value in (memory.get(pid), held) if value is not None), default=None)
        for pid in memory:
            self._process(card, pid, now_us)
        for pid in [pid for pid, busy in card.processes.items() if now_us - busy.seen_us > _FORGET_AFTER_US]:
            del card.processes[pid]
        measured = card.process_samples
        readings = []
        for pid in sorted(memory.keys() | card.processes.keys()):
            busy = card.processes.get(pid)
            readings.append(
                ProcessReading(
                    pid=pid,
                    start_ticks=busy.start_ticks if busy else None,
                    command=busy.command if busy else None,
                    memory_bytes=memory.get(pid),
                    busy_us_total=busy.total_us if busy and measured else None,
                    listed=pid in memory,
                )
            )
        return tuple(readings), known


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _optional_text(value: Any) -> str | None:
    # "0" and "N/A" are what boards without a serial number answer.
    text = None if value is None else _text(value)
    return None if text in (None, "", "0", "N/A") else text
