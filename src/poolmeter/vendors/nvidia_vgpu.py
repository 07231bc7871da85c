"""vGPU: the active instances of a host with their use, and the licence of a guest."""

import ctypes
import time
from dataclasses import dataclass, field
from typing import Any

from poolmeter.model.hardware import Vgpu
from poolmeter.vendors.nvidia_samples import Ahead, Cover, Steps
from poolmeter.vendors.nvml import Nvml, number, optional_text, text, wide


@dataclass
class _Use:
    busy_us: int = 0
    newest_us: int | None = None
    utilization_ppm: int | None = None


@dataclass
class Vgpus:
    """What is kept of a host card's vGPUs between readings."""

    nvml: Nvml
    _facts: dict[int, Vgpu] = field(default_factory=dict)
    _use: dict[int, _Use] = field(default_factory=dict)
    _newest_us: int = 0
    _sampled: bool = False
    _cover: Cover = field(default_factory=Cover)
    _steps: Steps = field(default_factory=Steps)
    _ahead: Ahead[tuple[int, int, int]] = field(default_factory=Ahead)

    def read(self, handle: Any) -> tuple[Vgpu, ...] | None:
        """All active vGPUs; None where the card does not tell."""
        active = self.nvml.ask("nvmlDeviceGetActiveVgpus", handle)
        if active is None:
            return None
        numbers = [int(getattr(instance, "value", instance)) for instance in active]
        self._samples(handle, set(numbers))
        self._facts = {instance: facts for instance, facts in self._facts.items() if instance in numbers}
        self._use = {instance: use for instance, use in self._use.items() if instance in numbers}
        return tuple(self._reading(instance) for instance in numbers)

    def _samples(self, handle: Any, active: set[int]) -> None:
        nvml = self.nvml.binding
        for use in self._use.values():
            use.utilization_ppm = None
        wall_us = time.time_ns() // 1000
        self._set_back(self._steps.back_us(wall_us, time.monotonic_ns() // 1000))
        try:
            samples = self.nvml.call("nvmlDeviceGetVgpuUtilization", handle, self._newest_us)
        except nvml.NVMLError as fault:
            self._sampled = self._sampled or self.nvml.code(fault) == nvml.NVML_ERROR_NOT_FOUND
            return  # nothing new, or never told
        told = [
            (int(sample.vgpuInstance), int(sample.timeStamp), percent)
            for sample in samples
            if (percent := number(sample.smUtil.uiVal)) is not None
        ]
        self._sampled = self._sampled or bool(told) or not samples
        told = self._ahead.sift([(item[1], item) for item in told], wall_us)
        fresh: dict[int, list[tuple[int, int]]] = {}
        for instance, at, percent in told:
            if instance in active and at > self._newest_us:
                fresh.setdefault(instance, []).append((at, min(100, percent)))
        for instance, mine in fresh.items():
            use = self._use.setdefault(instance, _Use())
            for at, percent in sorted(mine):
                if use.newest_us is not None and at > use.newest_us:
                    use.busy_us += percent * self._cover.of(at - use.newest_us) // 100
                use.newest_us = at
            use.utilization_ppm = sum(percent for _, percent in mine) * 10_000 // len(mine)
        self._newest_us = max([self._newest_us, *(at for mine in fresh.values() for at, _ in mine)])

    def _set_back(self, back_us: int) -> None:
        if not back_us:
            return
        self._newest_us, self._ahead.due = max(0, self._newest_us - back_us), True
        for use in self._use.values():
            use.newest_us = None if use.newest_us is None else use.newest_us - back_us

    def _reading(self, instance: int) -> Vgpu:
        ask = self.nvml.ask
        facts = self._facts.get(instance)
        if facts is None:
            kind = ask("nvmlVgpuInstanceGetType", instance)
            name = ask("nvmlVgpuTypeGetName", kind) if kind is not None else None
            machine = ask("nvmlVgpuInstanceGetVmID", instance)
            uuid = ask("nvmlVgpuInstanceGetUUID", instance)
            facts = Vgpu(
                uuid=text(uuid or f"vgpu-{instance}"),
                type_name=optional_text(name),
                vm_id=optional_text(machine[0]) if machine is not None else None,
                framebuffer_total_bytes=wide(ask("nvmlVgpuTypeGetFramebufferSize", kind)) if kind is not None else None,
            )
            if uuid:
                self._facts[instance] = facts  # a name of its own that cannot be asked now is asked for again
        licence, use = ask("nvmlVgpuInstanceGetLicenseInfo_v2", instance), self._use.get(instance)
        return Vgpu(
            uuid=facts.uuid,
            type_name=facts.type_name,
            vm_id=facts.vm_id,
            framebuffer_total_bytes=facts.framebuffer_total_bytes,
            framebuffer_used_bytes=_framebuffer(self.nvml, instance),
            licensed=bool(licence.isLicensed) if licence is not None else None,
            utilization_ppm=use.utilization_ppm if use else None,
            busy_us_total=use.busy_us if use else 0 if self._sampled else None,
        )


def _framebuffer(nvml: Nvml, instance: int) -> int | None:
    """Bytes in use. The binding reads 32 bits of a value of 64, so its function is called with the room it needs."""
    pointer = getattr(nvml.binding, "_nvmlGetFunctionPointer", None)
    if pointer is None:
        return wide(nvml.ask("nvmlVgpuInstanceGetFbUsage", instance))
    used = ctypes.c_ulonglong(0)
    try:
        code = pointer("nvmlVgpuInstanceGetFbUsage")(instance, ctypes.byref(used))
    except nvml.binding.NVMLError:
        return None
    return wide(used.value) if code == 0 else None


def guest_licence(nvml: Nvml, handle: Any) -> tuple[bool | None, str | None]:
    """Whether a guest's card is licensed, and for what; (None, None) where it does not tell."""
    features = nvml.ask("nvmlDeviceGetGridLicensableFeatures_v4", handle)
    if features is None or not features.isGridLicenseSupported:
        return None, None
    mine = [features.gridLicensableFeatures[place] for place in range(number(features.licensableFeaturesCount) or 0)]
    active = [feature for feature in mine if feature.featureState]
    chosen = next(iter(active or mine), None)
    return (bool(active) if mine else None), (optional_text(chosen.productName) if chosen is not None else None)
