"""One simulated node: made from a TOML description, kept in a file that the simulated driver libraries map.

The file is all there is of the machine: any process that can open it sees the same cards, and the truth about who used them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType

from poolmeter.errors import BadInput, Unavailable
from poolmeter.native import native_path
from poolmeter.simulator import partition
from poolmeter.simulator.configuration import CLOCKS, MachineConfig, compute_mode_number, load_machine, virtualization_number
from poolmeter.simulator.library import Truth, load_library

MACHINE_VARIABLE = "POOLMETER_SIM_MACHINE"
_NEVER = 2**64 - 1
ROOM_BYTES = 16 << 20


@dataclass(frozen=True)
class ProcessTruth:
    """What is true of one process on one card, as the simulator kept it. Times in ns, memory in bytes."""

    pid: int
    start_time: int  # clock ticks since boot, field 22 of /proc/PID/stat
    name: str
    device: int
    live: bool
    killed: bool  # ended without saying so (a signal), found dead by another process
    attached_ns: int
    ended_ns: int | None
    busy_ns: int  # union of its kernels' run time, without neighbours' slices and switches
    fill_ns: int  # its memsets ran and none of its kernels did; the card's time as well
    copy_ns: int  # union of its copies' time on the copy engines, beside whatever the card ran
    kernels: int  # completed
    launches: int  # kernel launches submitted, graphs not counted
    graph_launches: int  # completed
    h2d_bytes: int
    d2h_bytes: int
    d2d_bytes: int
    set_bytes: int
    memory: int  # explicit device memory now, without the contexts' overhead
    memory_peak: int
    overhead: int
    refused: int  # allocations the card had no room for


@dataclass(frozen=True)
class DeviceTruth:
    """What is true of one card. Times in ns since the machine was made."""

    time_ns: int
    busy_ns: int
    fill_ns: int  # as of processes; busy, filling and switching exclude each other
    copy_ns: int
    switched_ns: int
    switches: int
    energy_mj: int
    kernels: int
    h2d_bytes: int
    d2h_bytes: int
    d2d_bytes: int
    set_bytes: int
    memory_used: int


@dataclass(frozen=True)
class CallCount:
    """How often a driver function was called on this machine, and whether the simulator implements it."""

    name: str
    count: int
    implemented: bool


@dataclass(frozen=True)
class Rule:
    """A scripted fault or delay that is in force."""

    number: int
    call: str


class _DeviceTruth(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_uint64) for field in fields(DeviceTruth)]


def _check_room(path: Path) -> None:
    # The file is mapped and sparse: on a full disk the first write to a page that has no block ends the process.
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:
        return  # whoever makes the file says what is wrong
    if free < ROOM_BYTES:
        raise Unavailable(
            f"simulated machine {path} cannot be made: {free >> 20} MiB are free on its disk, expected at least {ROOM_BYTES >> 20} MiB"
        )


class Machine:
    """An open simulated machine. Close it, or use it as a context manager; the file stays until it is removed."""

    def __init__(self, file: Path, library: ctypes.CDLL, handle: int) -> None:
        self.file = file
        self._library = library
        self._handle = handle

    @classmethod
    def create(
        cls, description: MachineConfig | str | Path, file: str | Path, *, clock: str | None = None, participants: int | None = None
    ) -> Machine:
        """Makes a machine from a description (record, TOML path or known name) in `file`, replacing what was there.

        `clock` and `participants` override the description. Raises BadInput for a bad description, Unavailable when the file cannot be made.
        """
        config = description if isinstance(description, MachineConfig) else load_machine(description)
        path = Path(file).absolute()
        _check_room(path)
        machine = cls._mapped(path, "psim_create")
        machine._fill(config, clock or config.clock, config.participants if participants is None else participants)
        if os.geteuid() == 0:
            path.chmod(0o666)  # root's machine is also for programs that root runs as others
        machine._library.psim_ready(machine._handle)
        for fault in config.faults:
            machine.script(fault.call, device=fault.device, after=fault.after, times=fault.times, code=fault.code, delay_ms=fault.delay_ms)
        return machine

    @classmethod
    def open(cls, file: str | Path) -> Machine:
        """The machine that lives in `file`. Raises Unavailable when there is none."""
        return cls._mapped(Path(file).absolute(), "psim_open")

    @classmethod
    def _mapped(cls, path: Path, how: str) -> Machine:
        library = load_library()
        error = ctypes.create_string_buffer(512)
        handle = getattr(library, how)(os.fsencode(path), error, len(error))
        if not handle:
            raise Unavailable(error.value.decode())
        return cls(path, library, handle)

    def _fill(self, config: MachineConfig, clock: str, participants: int) -> None:
        if clock not in CLOCKS:
            raise BadInput(f"the clock is {clock!r}, expected one of {', '.join(CLOCKS)}")
        numbers = {"clock": CLOCKS.index(clock), "participants_wanted": participants, "launch_ns": config.launch_ns}
        numbers |= {"cuda_version": config.cuda_version, "devices": len(config.cards)}
        for key, value in numbers.items():
            self._set(-1, key, value)
        self._set_text(-1, "driver_version", config.driver_version)
        self._set_text(-1, "nvml_version", config.nvml_version)
        for index, card in enumerate(config.cards):
            for key in ("name", "uuid", "serial", "bus_id"):
                self._set_text(index, key, getattr(card, key))
            for key in _COPIED:
                self._set(index, key, int(getattr(card, key)))
            major, _, minor = card.compute_capability.partition(".")
            derived = {"minor": index, "cc_major": int(major), "cc_minor": int(minor), "graphics_clock_mhz": card.sm_clock_mhz}
            derived |= {"compute_mode": compute_mode_number(card)}
            derived |= {
                "virtualization": virtualization_number(card),
                "licensed": int(card.licensed),
                "mig_mode": int(card.mig is not None),
            }
            for key, value in derived.items():
                self._set(index, key, value)
            partition.set_instances(self._library, self._handle, index, card.uuid, card.mig or ())
            partition.set_vgpus(self._library, self._handle, index, card.uuid, card.vgpus)

    def _set(self, device: int, key: str, value: int) -> None:
        if self._library.psim_set(self._handle, device, key.encode(), value) != 0:
            raise BadInput(f"the simulated {'machine' if device < 0 else f'card {device}'} has no number {key}")

    def _set_text(self, device: int, key: str, value: str) -> None:
        if self._library.psim_set_text(self._handle, device, key.encode(), value.encode()) != 0:
            raise BadInput(
                f"the {key} of the simulated {'machine' if device < 0 else f'card {device}'} is {value!r}, expected at most 95 bytes"
            )

    def _get(self, device: int, key: str) -> int:
        value = ctypes.c_uint64()
        if self._library.psim_get(self._handle, device, key.encode(), ctypes.byref(value)) != 0:
            raise BadInput(f"the simulated {'machine' if device < 0 else f'card {device}'} has no number {key}")
        return value.value

    def _get_text(self, device: int, key: str) -> str:
        value = ctypes.create_string_buffer(128)
        if self._library.psim_get_text(self._handle, device, key.encode(), value, len(value)) != 0:
            raise BadInput(f"the simulated {'machine' if device < 0 else f'card {device}'} has no text {key}")
        return value.value.decode()

    # --- cards

    @property
    def devices(self) -> int:
        """How many cards there are."""
        return self._get(-1, "devices")

    def uuid(self, device: int) -> str:
        """The UUID of a card, as NVML writes it."""
        return self._get_text(device, "uuid")

    def setting(self, key: str, device: int | None = None) -> int:
        """A number of the machine, or of a card, by the name it has in the machine file (`memory`, `switch_ns`, `recoveries`…)."""
        return self._get(-1 if device is None else device, key)

    def set(self, key: str, value: int, device: int | None = None) -> None:
        """Changes a number at run time (`lost`, `active_mw`, `ecc_volatile_uncorrectable`, `clocks_event_reasons`…)."""
        self._set(-1 if device is None else device, key, value)

    def lose(self, device: int, *, lost: bool = True) -> None:
        """The card falls off the bus: NVML answers GPU_IS_LOST for it and CUDA calls on it fail; or it comes back."""
        self._set(device, "lost", int(lost))

    def xid(self, device: int, number: int) -> None:
        """Raises an Xid event on the card; event sets registered before it see it."""
        self._library.psim_xid(self._handle, device, number)

    # --- partitions

    def mig(self, device: int, *profiles: str) -> None:
        """Turns MIG on and lays the card's MIG devices out anew by profile (none: on, without one); processes on the old ones run on none."""
        layout = partition.lay_out(profiles, f"card {device}")
        self._set(device, "mig_mode", 1)
        partition.set_instances(self._library, self._handle, device, self.uuid(device), layout)

    def assign(self, pid: int, device: int, slot: int) -> None:
        """The process runs on the MIG device in the slot: its memory and time are that one's too."""
        if self._library.psim_assign(self._handle, pid, device, slot) != 0:
            raise BadInput(f"process {pid} is not on the simulated machine, or card {device} has no slot {slot}")

    def vgpus(self, device: int, *vgpus: partition.VgpuConfig) -> None:
        """Makes the vGPUs of a host's card anew."""
        partition.set_vgpus(self._library, self._handle, device, self.uuid(device), vgpus)

    # --- time and truth

    def now_ns(self) -> int:
        """Machine time: ns since it was made, on its own clock."""
        return int(self._library.psim_now(self._handle))

    def advance(self, ns: int = 0) -> int:
        """Moves a virtual or manual clock forward by `ns` and brings the cards up to now; returns the machine time."""
        return int(self._library.psim_advance(self._handle, ns))

    def truth(self) -> tuple[ProcessTruth, ...]:
        """One record per process and card it used, ended processes first."""
        size = 256
        while True:
            rows = (Truth * size)()
            count = int(self._library.psim_truth(self._handle, rows, size))
            if count <= size:
                break
            size = count + 64
        return tuple(_process_truth(rows[index]) for index in range(count))

    def device_truth(self, device: int) -> DeviceTruth:
        """The truth about one card."""
        raw = _DeviceTruth()
        if self._library.psim_device_truth(self._handle, device, ctypes.byref(raw)) != 0:
            raise BadInput(f"the simulated machine has no card {device}, expected 0 to {self.devices - 1}")
        return DeviceTruth(**{field.name: int(getattr(raw, field.name)) for field in fields(DeviceTruth)})

    # --- scripted calls

    def script(
        self,
        call: str,
        *,
        device: int | None = None,
        pid: int | None = None,
        after: int = 0,
        times: int | None = None,
        code: int = 0,
        delay_ms: int = 0,
    ) -> Rule:
        """From now on, calls of `call` wait `delay_ms` and return `code` instead of running (0: they run).

        `call` is a symbol, a name without version and stream suffix (all its variants), or a prefix with `*`. `after` calls pass first, then
        `times` calls are hit (None: all that follow). `device` is the card's number in the machine: the card a CUDA thread's current context is
        on, or the card an NVML handle names. Raises BadInput for a call neither library has, or when 64 rules are in force.
        """
        number = self._library.psim_script(
            self._handle,
            call.encode(),
            -1 if device is None else device,
            pid or 0,
            after,
            _NEVER if times is None else times,
            code,
            delay_ms * 1_000_000,
        )
        if number == -1:
            raise BadInput(f"neither simulated library has a call {call}")
        if number < 0:
            raise BadInput("the simulated machine has 64 rules in force, which is as many as it holds")
        return Rule(number, call)

    def unscript(self, rule: Rule) -> None:
        """The rule is no longer in force."""
        self._library.psim_unscript(self._handle, rule.number)

    def hits(self, rule: Rule) -> int:
        """How many calls the rule has hit."""
        seen, hit = ctypes.c_uint64(), ctypes.c_uint64()
        self._library.psim_rule(self._handle, rule.number, ctypes.byref(seen), ctypes.byref(hit))
        return hit.value

    def calls(self) -> dict[str, CallCount]:
        """Every driver function that was called on this machine, by symbol."""
        found: dict[str, CallCount] = {}
        index = 0
        name, count, implemented = ctypes.c_char_p(), ctypes.c_uint64(), ctypes.c_int()
        while self._library.psim_call(self._handle, index, ctypes.byref(name), ctypes.byref(count), ctypes.byref(implemented)) == 0:
            if count.value:
                symbol = (name.value or b"").decode()
                found[symbol] = CallCount(symbol, count.value, bool(implemented.value))
            index += 1
        return found

    # --- programs on it

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment (`base`, else this process's) in which a program finds the simulated driver first, and this machine."""
        env = dict(os.environ if base is None else base)
        folder = str(native_path("sim/libcuda.so.1").parent)
        rest = [entry for entry in env.get("LD_LIBRARY_PATH", "").split(os.pathsep) if entry and entry != folder]
        env["LD_LIBRARY_PATH"] = os.pathsep.join([folder, *rest])
        env[MACHINE_VARIABLE] = str(self.file)
        return env

    def close(self) -> None:
        """Lets go of the mapping; the machine lives on in its file."""
        if self._handle:
            self._library.psim_close(self._handle)
            self._handle = 0

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


_COPIED = (
    "memory", "reserved", "context_overhead", "sms", "threads_per_sm", "bus_width", "slice_ns", "switch_ns", "sample_ns", "idle_mw", "active_mw", "limit_mw",
    "h2d_bps", "d2h_bps", "d2d_bps", "sm_clock_mhz", "memory_clock_mhz", "temperature_idle_c", "temperature_active_c", "persistence", "ecc",
    "accounting", "mig_capable", "gpm", "energy_counter", "nvlinks",
)  # fmt: skip


def _process_truth(raw: Truth) -> ProcessTruth:
    values = {field.name: getattr(raw, field.name) for field in fields(ProcessTruth)}
    values["name"] = raw.name.decode(errors="replace")
    values["live"] = bool(raw.live)
    values["killed"] = bool(raw.killed)
    values["ended_ns"] = None if raw.live else int(raw.ended_ns)
    return ProcessTruth(**values)
