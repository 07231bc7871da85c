"""MIG: the instances of a card. Handles are asked for at every reading, so a layout changed between two readings is seen at the next."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

from poolmeter.model.hardware import MigInstance
from poolmeter.vendors.nvidia_gpm import Gpm
from poolmeter.vendors.nvml import Nvml, number, text, wide

_PROFILE = re.compile(r"\bMIG (\S+)")
_MIB = 1 << 20


@dataclass
class Instances:
    """What is kept of a card's instances between readings."""

    nvml: Nvml
    _known: dict[str, MigInstance] = field(default_factory=dict)
    _gpm: dict[int, Gpm] = field(default_factory=dict)
    _most: int | None = None

    def read(self, device: Any, at_us: int) -> tuple[MigInstance, ...]:
        """All instances of a card with MIG on; none may exist. Numbers have holes: an instance that was destroyed leaves one."""
        if self._most is None:
            self._most = number(self.nvml.ask("nvmlDeviceGetMaxMigDeviceCount", device))
        found: dict[str, MigInstance] = {}
        sampled: set[int] = set()
        for index in range(self._most or 0):
            handle = self.nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", device, index)
            uuid = self.nvml.ask("nvmlDeviceGetUUID", handle) if handle is not None else None
            facts = self._facts(device, handle, text(uuid)) if uuid is not None else None
            if facts is None:
                continue
            gpu_instance = facts.gpu_instance_id
            if gpu_instance not in sampled:
                sampled.add(gpu_instance)
                self._gpm.setdefault(gpu_instance, Gpm(self.nvml, gpu_instance)).read(device, at_us)
            gpm = self._gpm[gpu_instance]
            memory = self.nvml.ask("nvmlDeviceGetMemoryInfo", handle)
            processes = self.nvml.ask("nvmlDeviceGetComputeRunningProcesses_v3", handle)
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

    def _facts(self, device: Any, handle: Any, uuid: str) -> MigInstance | None:
        """What does not change of an instance while it exists."""
        if uuid in self._known:
            return self._known[uuid]
        gpu = number(self.nvml.ask("nvmlDeviceGetGpuInstanceId", handle))
        compute = number(self.nvml.ask("nvmlDeviceGetComputeInstanceId", handle))
        if gpu is None or compute is None:
            return None
        old = self._gpm.pop(gpu, None) if not any(item.gpu_instance_id == gpu for item in self._known.values()) else None
        if old is not None:
            old.close()  # another instance took the number: what the old one did is not its
        attributes = self.nvml.ask("nvmlDeviceGetAttributes_v2", handle)
        instance = self.nvml.ask("nvmlDeviceGetGpuInstanceById", device, gpu)
        info = self.nvml.ask("nvmlGpuInstanceGetInfo", instance) if instance is not None else None
        name = _PROFILE.search(text(self.nvml.ask("nvmlDeviceGetName", handle) or ""))
        facts = MigInstance(
            uuid=uuid,
            gpu_instance_id=gpu,
            compute_instance_id=compute,
            profile=name.group(1) if name else None,
            placement_start=number(info.placement.start) if info is not None else None,
            placement_size=number(info.placement.size) if info is not None else None,
            compute_slices=number(attributes.computeInstanceSliceCount) if attributes is not None else None,
            multiprocessors=number(attributes.multiprocessorCount) if attributes is not None else None,
            memory_total_bytes=int(attributes.memorySizeMB) * _MIB if attributes is not None else None,
        )
        self._known[uuid] = facts
        return facts

    def close(self) -> None:
        """Let go of everything."""
        for gpm in self._gpm.values():
            gpm.close()
        self._gpm.clear()
        self._known.clear()
