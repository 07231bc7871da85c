"""MIG: the instances of a card. Handles are asked for at every reading, so a layout changed between two readings is seen at the next."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

from poolmeter.model.hardware import MigInstance
from poolmeter.vendors.nvidia_gpm import Gpm
from poolmeter.vendors.nvml import Nvml, number, text, wide

_PROFILE = re.compile(r"\bMIG (\S+)")
_MIB = 1 << 20
_LASTING = ("profile", "placement_start", "placement_size", "compute_slices", "multiprocessors", "memory_total_bytes")


@dataclass
class Instances:
    """What is kept of a card's instances between readings."""

    nvml: Nvml
    _known: dict[str, MigInstance] = field(default_factory=dict)
    _at: dict[int, str] = field(default_factory=dict)  # the instance that an index last had
    _gpm: dict[int, Gpm] = field(default_factory=dict)
    _most: int | None = None

    def read(self, device: Any, at_us: int) -> tuple[MigInstance, ...] | None:
        """All instances of a card with MIG on; none may exist. Numbers have holes: an instance that was destroyed leaves one.

        One that the driver does not say is gone stays, with what can be told of it. None: the card does not tell.
        """
        if self._most is None:
            self._most = number(self.nvml.ask("nvmlDeviceGetMaxMigDeviceCount", device))
        if self._most is None:
            return None
        found: dict[str, MigInstance] = {}
        sampled: set[int] = set()
        for index in range(self._most):
            handle, facts = self._instance(device, index)
            if facts is None:
                continue
            gpu_instance = facts.gpu_instance_id
            if gpu_instance not in sampled:
                sampled.add(gpu_instance)
                self._gpm.setdefault(gpu_instance, Gpm(self.nvml, gpu_instance)).read(device, at_us)
            gpm = self._gpm[gpu_instance]
            memory = self.nvml.ask("nvmlDeviceGetMemoryInfo", handle) if handle is not None else None
            processes = self.nvml.ask("nvmlDeviceGetComputeRunningProcesses_v3", handle) if handle is not None else None
            found[facts.uuid] = replace(
                facts,
                memory_total_bytes=wide(memory.total) if memory is not None else facts.memory_total_bytes,
                memory_used_bytes=wide(memory.used) if memory is not None else None,
                processes=len({int(process.pid) for process in processes}) if processes is not None else None,
                activity=gpm.activity,
                busy_us_total=gpm.busy_us,
            )
        for gone in self._gpm.keys() - sampled:
            self._gpm.pop(gone).close()
        self._known = {uuid: facts for uuid, facts in self._known.items() if uuid in found}
        return tuple(sorted(found.values(), key=lambda item: (item.gpu_instance_id, item.compute_instance_id)))

    def _instance(self, device: Any, index: int) -> tuple[Any, MigInstance | None]:
        """The handle and the facts of the instance at an index: no facts where there is none, no handle where it cannot be asked now."""
        nvml = self.nvml.binding
        try:
            handle = self.nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", device, index)
            uuid = text(self.nvml.call("nvmlDeviceGetUUID", handle))
        except nvml.NVMLError as fault:
            gone = (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_NOT_SUPPORTED)
            if self.nvml.code(fault) in gone:
                self._at.pop(index, None)
            return None, self._known.get(self._at.get(index, ""))
        self._at[index] = uuid
        return handle, self._facts(device, handle, uuid)

    def _facts(self, device: Any, handle: Any, uuid: str) -> MigInstance | None:
        """What does not change of an instance while it exists; what it has not told yet is asked again."""
        known = self._known.get(uuid)
        if known is None:
            gpu = number(self.nvml.ask("nvmlDeviceGetGpuInstanceId", handle))
            compute = number(self.nvml.ask("nvmlDeviceGetComputeInstanceId", handle))
            if gpu is None or compute is None:
                return None
            old = self._gpm.pop(gpu, None) if not any(item.gpu_instance_id == gpu for item in self._known.values()) else None
            if old is not None:
                old.close()  # another instance took the number: what the old one did is not its
            known = MigInstance(uuid=uuid, gpu_instance_id=gpu, compute_instance_id=compute)
        elif None not in (getattr(known, name) for name in _LASTING):
            return known
        attributes = self.nvml.ask("nvmlDeviceGetAttributes_v2", handle)
        instance = self.nvml.ask("nvmlDeviceGetGpuInstanceById", device, known.gpu_instance_id)
        info = self.nvml.ask("nvmlGpuInstanceGetInfo", instance) if instance is not None else None
        name = _PROFILE.search(text(self.nvml.ask("nvmlDeviceGetName", handle) or ""))
        mib = number(attributes.memorySizeMB) if attributes is not None else None
        told = {
            "profile": name.group(1) if name else None,
            "placement_start": number(info.placement.start) if info is not None else None,
            "placement_size": number(info.placement.size) if info is not None else None,
            "compute_slices": number(attributes.computeInstanceSliceCount) if attributes is not None else None,
            "multiprocessors": number(attributes.multiprocessorCount) if attributes is not None else None,
            "memory_total_bytes": mib * _MIB if mib is not None else None,
        }
        self._known[uuid] = replace(known, **{key: value for key, value in told.items() if value is not None})  # type: ignore[arg-type]
        return self._known[uuid]

    def close(self) -> None:
        """Let go of everything."""
        for gpm in self._gpm.values():
            gpm.close()
        self._gpm.clear()
        self._known.clear()
        self._at.clear()
