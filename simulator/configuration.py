"""Machine files in TOML: what a simulated node is made of. `docs` of every key: simulator/machines/h200x4.toml."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from poolmeter.errors import BadInput
from poolmeter.model.units import parse_size
from poolmeter.simulator.partition import MAX_VGPUS, MigLayout, VgpuConfig, lay_out
from poolmeter.toml import parse_toml, read_toml

CLOCKS = ("real", "virtual", "manual")
MAX_CARDS = 16


@dataclass(frozen=True)
class CardConfig:
    """One card. Sizes in bytes, times in ns, powers in mW, rates in bytes per second, clocks in MHz, temperatures in degrees Celsius."""

    name: str = "Simulated GPU"
    uuid: str = ""
    serial: str = ""
    bus_id: str = ""
    memory: int = 16 << 30
    reserved: int = 512 << 20
    context_overhead: int = 400 << 20
    sms: int = 64
    threads_per_sm: int = 2048
    compute_capability: str = "9.0"
    bus_width: int = 4096
    slice_ns: int = 2_000_000
    switch_ns: int = 174_000
    sample_ns: int = 200_000_000
    idle_mw: int = 70_000
    active_mw: int = 400_000
    limit_mw: int = 450_000
    h2d_bps: int = 25_000_000_000
    d2h_bps: int = 25_000_000_000
    d2d_bps: int = 1_000_000_000_000
    sm_clock_mhz: int = 1500
    memory_clock_mhz: int = 1500
    temperature_idle_c: int = 35
    temperature_active_c: int = 65
    persistence: bool = True
    compute_mode: str = "default"
    ecc: bool = True
    accounting: bool = False
    mig_capable: bool = False
    gpm: bool = True
    energy_counter: bool = True
    nvlinks: int = 0
    virtualization: str = "none"
    licensed: bool = False
    mig: tuple[MigLayout, ...] | None = None
    vgpus: tuple[VgpuConfig, ...] = ()


@dataclass(frozen=True)
class FaultConfig:
    """A scripted fault or delay; see Machine.script."""

    call: str
    device: int | None = None
    after: int = 0
    times: int | None = None
    code: int = 0
    delay_ms: int = 0


@dataclass(frozen=True)
class MachineConfig:
    """One node."""

    cards: tuple[CardConfig, ...]
    name: str = "machine"
    clock: str = "real"
    participants: int = 0
    launch_ns: int = 0
    driver_version: str = "580.95.05"
    nvml_version: str = "13.580.95.05"
    cuda_version: int = 13000
    faults: tuple[FaultConfig, ...] = field(default=())


_COMPUTE_MODES = {"default": 0, "prohibited": 2, "exclusive-process": 3}
_VIRTUALIZATION = {"none": 0, "passthrough": 1, "vgpu": 2, "host_vgpu": 3}
_VGPU_KEYS: dict[str, type] = {"type": str, "vm": str, "framebuffer": str, "used": str, "busy_percent": int, "licensed": bool}
_SIZES = {"memory", "reserved", "context_overhead"}
_CARD_KEYS: dict[str, tuple[str, type]] = {
    "name": ("name", str),
    "uuid": ("uuid", str),
    "serial": ("serial", str),
    "bus_id": ("bus_id", str),
    "memory": ("memory", str),
    "reserved": ("reserved", str),
    "context_overhead": ("context_overhead", str),
    "sms": ("sms", int),
    "threads_per_sm": ("threads_per_sm", int),
    "compute_capability": ("compute_capability", str),
    "bus_width": ("bus_width", int),
    "slice_us": ("slice_ns", int),
    "switch_us": ("switch_ns", int),
    "sample_ms": ("sample_ns", int),
    "idle_watts": ("idle_mw", int),
    "active_watts": ("active_mw", int),
    "limit_watts": ("limit_mw", int),
    "h2d_gbps": ("h2d_bps", int),
    "d2h_gbps": ("d2h_bps", int),
    "d2d_gbps": ("d2d_bps", int),
    "sm_clock_mhz": ("sm_clock_mhz", int),
    "memory_clock_mhz": ("memory_clock_mhz", int),
    "temperature_idle_c": ("temperature_idle_c", int),
    "temperature_active_c": ("temperature_active_c", int),
    "persistence": ("persistence", bool),
    "compute_mode": ("compute_mode", str),
    "ecc": ("ecc", bool),
    "accounting": ("accounting", bool),
    "mig_capable": ("mig_capable", bool),
    "gpm": ("gpm", bool),
    "energy_counter": ("energy_counter", bool),
    "nvlinks": ("nvlinks", int),
    "virtualization": ("virtualization", str),
    "licensed": ("licensed", bool),
}
_SCALE = {
    "slice_us": 1000,
    "switch_us": 1000,
    "sample_ms": 1_000_000,
    "idle_watts": 1000,
    "active_watts": 1000,
    "limit_watts": 1000,
} | dict.fromkeys(("h2d_gbps", "d2h_gbps", "d2d_gbps"), 1_000_000_000)
_MACHINE_KEYS: dict[str, type] = {
    "name": str,
    "clock": str,
    "participants": int,
    "launch_ns": int,
    "driver_version": str,
    "nvml_version": str,
    "cuda_version": int,
}
_FAULT_KEYS: dict[str, type] = {"call": str, "device": int, "after": int, "times": int, "code": int, "delay_ms": int}


def load_machine(source: str | Path) -> MachineConfig:
    """The machine described by a TOML file, or by the name of one that comes with poolmeter (`h200x4`).

    Raises BadInput naming file, key, value found and value expected.
    """
    path = Path(source)
    if not path.suffix and not path.exists():
        known = Path(__file__).parent / "machines" / f"{source}.toml"
        if not known.exists():
            names = ", ".join(sorted(entry.stem for entry in known.parent.glob("*.toml")))
            raise BadInput(f"no machine is named {source}: expected a TOML file or one of {names}")
        path = known
    return parse_machine(read_toml(path, f"the machine file {path}").decode("utf-8", "replace"), str(path))


def parse_machine(text: str, where: str) -> MachineConfig:
    """The machine that the TOML text describes; `where` names it in errors."""
    data = parse_toml(text.encode(), where)
    machine = _table(data.pop("machine", {}), _MACHINE_KEYS, f"{where}: machine")
    defaults = data.pop("defaults", {})
    cards = data.pop("card", None)
    faults = data.pop("fault", [])
    if data:
        raise BadInput(f"{where} has the unknown table {sorted(data)[0]}: expected machine, defaults, card and fault")
    if not isinstance(cards, list) or not cards:
        raise BadInput(f"{where} describes no card: expected at least one [[card]]")
    if machine.get("clock", "real") not in CLOCKS:
        raise BadInput(f"{where}: machine.clock is {machine['clock']!r}, expected one of {', '.join(CLOCKS)}")
    expanded: list[dict[str, Any]] = []
    for card in cards:
        count = card.pop("count", 1)
        if type(count) is not int or not 1 <= count <= MAX_CARDS:
            raise BadInput(f"{where}: card.count is {count!r}, expected 1 to {MAX_CARDS}")
        if count > 1 and {"uuid", "serial", "bus_id"} & card.keys():
            raise BadInput(f"{where}: a card with count {count} names its uuid, serial or bus_id, which only one card can have")
        expanded += [card] * count
    if len(expanded) > MAX_CARDS:
        raise BadInput(f"{where} describes {len(expanded)} cards, expected at most {MAX_CARDS}")
    name = machine.get("name", Path(where).stem)
    built = tuple(_card(defaults | card, index, str(name), where) for index, card in enumerate(expanded))
    if len({card.uuid for card in built}) != len(built):
        raise BadInput(f"{where} gives one uuid to two cards, expected each to have its own")
    rules = tuple(FaultConfig(**_table(fault, _FAULT_KEYS, f"{where}: fault", required=("call",))) for fault in faults)
    return MachineConfig(cards=built, faults=rules, **({"name": name} | machine))


def _table(table: Any, keys: dict[str, type], where: str, required: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise BadInput(f"{where} is {table!r}, expected a table")
    for key, value in table.items():
        if key not in keys:
            raise BadInput(f"{where} has the unknown key {key}: expected one of {', '.join(keys)}")
        if type(value) is not keys[key]:
            raise BadInput(f"{where}.{key} is {value!r}, expected {_type_word(keys[key])}")
        if type(value) is int and value < 0:
            raise BadInput(f"{where}.{key} is {value}, expected 0 or more")
    for key in required:
        if key not in table:
            raise BadInput(f"{where} has no {key}, which it needs")
    return dict(table)


def _type_word(kind: type) -> str:
    return {str: "a text", int: "a whole number", bool: "true or false"}[kind]


def _card(raw: dict[str, Any], index: int, machine: str, where: str) -> CardConfig:
    parts: dict[str, Any] = {key: raw[key] for key in ("mig", "vgpu") if key in raw}
    rest = {key: value for key, value in raw.items() if key not in parts}
    table = _table(rest, {key: kind for key, (_, kind) in _CARD_KEYS.items()}, f"{where}: card {index}")
    values = _partitions(parts, f"{where}: card {index}")
    for key, value in table.items():
        target, _ = _CARD_KEYS[key]
        if target in _SIZES:
            try:
                value = parse_size(value)
            except BadInput as error:
                raise BadInput(f"{where}: card {index}.{key}: {error}") from None
        values[target] = value * _SCALE.get(key, 1) if type(value) is int else value
    card = CardConfig(**values)
    named = _identify(card, index, machine)
    card = replace(card, uuid=card.uuid or named.uuid, serial=card.serial or named.serial)
    if not card.bus_id:
        card = replace(card, bus_id=f"00000000:{0x18 + index * 0x10 & 0xFF:02X}:00.0")
    _check_card(card, f"{where}: card {index}")
    return card


def _partitions(parts: dict[str, Any], where: str) -> dict[str, Any]:
    """MIG devices and vGPUs of a card."""
    values: dict[str, Any] = {}
    if "mig" in parts:
        profiles = parts["mig"]
        if not isinstance(profiles, list) or not all(isinstance(profile, str) for profile in profiles):
            raise BadInput(f"{where}.mig is {profiles!r:.80}, expected a list of profiles like 1g.18gb")
        values["mig"] = lay_out(profiles, where)
    if "vgpu" in parts:
        if not isinstance(parts["vgpu"], list) or len(parts["vgpu"]) > MAX_VGPUS:
            raise BadInput(f"{where}.vgpu is no list of at most {MAX_VGPUS} tables")
        tables = [_table(item, _VGPU_KEYS, f"{where}.vgpu", required=("type", "vm", "framebuffer")) for item in parts["vgpu"]]
        try:
            for item in tables:
                item |= {key: parse_size(item[key]) for key in ("framebuffer", "used") if key in item}
        except BadInput as error:
            raise BadInput(f"{where}.vgpu: {error}") from None
        values["vgpus"] = tuple(VgpuConfig(**item) for item in tables)
    return values


def _identify(card: CardConfig, index: int, machine: str) -> CardConfig:
    """The card with a uuid and a serial that follow from its machine's name and its number."""
    digest = hashlib.sha256(f"{machine}/{index}".encode()).hexdigest()
    uuid = f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"
    return replace(card, uuid=uuid, serial=str(int(digest[32:44], 16))[:13].rjust(13, "1"))


def rename_machine(config: MachineConfig, name: str) -> MachineConfig:
    """The same machine under another name, its cards other ones: nodes of one pool share no uuid."""
    return replace(config, name=name, cards=tuple(_identify(card, index, name) for index, card in enumerate(config.cards)))


def _check_card(card: CardConfig, where: str) -> None:
    if card.compute_mode not in _COMPUTE_MODES:
        raise BadInput(f"{where}.compute_mode is {card.compute_mode!r}, expected one of {', '.join(_COMPUTE_MODES)}")
    if card.virtualization not in _VIRTUALIZATION:
        raise BadInput(f"{where}.virtualization is {card.virtualization!r:.40}, expected one of {', '.join(_VIRTUALIZATION)}")
    if card.mig is not None and not card.mig_capable:
        raise BadInput(f"{where}.mig is given for a card that is not mig_capable")
    if card.vgpus and card.virtualization != "host_vgpu":
        raise BadInput(f"{where}.vgpu is given for a card whose virtualization is {card.virtualization}, expected host_vgpu")
    if not _uuid_ok(card.uuid):
        raise BadInput(f"{where}.uuid is {card.uuid!r}, expected GPU- and a UUID of hexadecimal digits")
    if card.reserved + card.context_overhead >= card.memory:
        raise BadInput(f"{where}.memory is {card.memory} bytes, expected more than reserved and context_overhead together")
    if card.slice_ns < 10_000:
        raise BadInput(f"{where}.slice_us is {card.slice_ns // 1000}, expected 10 or more")
    if card.sample_ns < 10_000_000:
        raise BadInput(f"{where}.sample_ms is {card.sample_ns // 1_000_000}, expected 10 or more")
    if card.active_mw < card.idle_mw:
        raise BadInput(f"{where}.active_watts is {card.active_mw // 1000}, expected at least idle_watts ({card.idle_mw // 1000})")
    if card.sms < 1 or card.threads_per_sm < 1:
        raise BadInput(f"{where}.sms is {card.sms}, expected 1 or more")
    major, dot, minor = card.compute_capability.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise BadInput(f"{where}.compute_capability is {card.compute_capability!r}, expected MAJOR.MINOR")


def _uuid_ok(text: str) -> bool:
    parts = text.split("-")
    lengths = [len(part) for part in parts]
    return lengths == [3, 8, 4, 4, 4, 12] and parts[0] == "GPU" and all(c in "0123456789abcdef" for part in parts[1:] for c in part)


def compute_mode_number(card: CardConfig) -> int:
    """The card's compute mode as NVML and CUDA number it."""
    return _COMPUTE_MODES[card.compute_mode]


def virtualization_number(card: CardConfig) -> int:
    """The card's virtualization mode as NVML numbers it."""
    return _VIRTUALIZATION[card.virtualization]
