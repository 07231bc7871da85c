"""Snapshots as rows: cards with their slices, tenants summed over cards, processes. Pure but for what `look` reads of this machine."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from poolmeter.exporter.owners import process_key, unbilled
from poolmeter.exporter.top.attribution import UNNAMED, Named, named
from poolmeter.exporter.top.history import Histories, NodeHistory
from poolmeter.exporter.top.host import HostFacts
from poolmeter.model.hardware import BusFunction, MigInstance, Vgpu
from poolmeter.model.snapshot import DeviceSnapshot, ProcessSnapshot, SliceSnapshot
from poolmeter.model.units import FULL_SHARE_PPM

UNACCOUNTED = "(unaccounted)"
TREND_POINTS = 120

Look = Callable[[int, int], HostFacts | None]


@dataclass(frozen=True)
class NodeRow:
    """One node's line of the header. `trouble`: sources that fail, each one sentence; `skew_us`: how far its clock is behind ours."""

    name: str
    url: str
    stale: bool
    age_us: int
    taken_us: int
    simulated: bool
    pool: str | None = None
    driver: str | None = None
    skew_us: int | None = None
    gone_since_us: int | None = None
    error: str | None = None
    trouble: tuple[str, ...] = ()


@dataclass(frozen=True)
class SliceRow:
    """An allocation's part of a card; `obtained_ppm` is of the whole card, over the last seconds."""

    node: str
    card: int
    stale: bool
    slice: SliceSnapshot
    obtained_ppm: int | None
    throttled_ppm: int | None

    @property
    def state(self) -> str:
        """The slice's state when the snapshot was taken."""
        return self.slice.state


@dataclass(frozen=True)
class PartRow:
    """What the hardware made of a card: a MIG instance or a vGPU; or what is on the bus and not in the library (`card` None).

    `use_ppm` is of the part's own time, or of the card's for a vGPU. `state` is empty where there is nothing to say.
    """

    node: str
    card: int | None
    stale: bool
    kind: str
    name: str
    id: str
    state: str = ""
    use_ppm: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    processes: int | None = None
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class CardRow:
    """A card, with its parts and slices. `state`: ok, lost or unknown, with the reason where there is one."""

    node: str
    stale: bool
    device: DeviceSnapshot
    state: str
    modes: str
    use_ppm: int | None
    unaccounted_ppm: int | None
    trend: tuple[int | None, ...]
    slices: tuple[SliceRow, ...] = ()
    reason: str | None = None
    parts: tuple[PartRow, ...] = ()


@dataclass(frozen=True)
class ProcessRow:
    """A process on a card; `use_ppm` is its part of the card's time over the last seconds. `workload`: of its allocation."""

    node: str
    card: int
    stale: bool
    local: bool
    process: ProcessSnapshot
    use_ppm: int | None
    host: HostFacts | None = None
    workload: str | None = None
    label_user: str | None = None
    named: Named = UNNAMED
    billed: bool = True

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What stays the same from snapshot to snapshot."""
        return self.node, self.process.device_uuid, self.process.pid, self.process.start_ticks

    @property
    def tenant(self) -> str:
        """Whose it is: the tenant it is accounted to."""
        return self.process.tenant or UNACCOUNTED


@dataclass(frozen=True)
class TenantRow:
    """A tenant over all cards. Sums of which a part is unknown are None; `promise_ppm` counts 1,000,000 a card; `throttled_ppm` is the mean."""

    tenant: str
    stale: bool
    cards: int
    allocations: int
    promise_ppm: int | None
    use_ppm: int | None
    memory_used_bytes: int | None
    memory_limit_bytes: int | None
    throttled_ppm: int | None
    denied: int | None
    processes: int
    states: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Frame:
    """Everything one screen shows, of one instant. `functions`: what is on the bus and not in the library; `missing`: addresses that have

    never answered, since when, and why.
    """

    at_us: int
    nodes: tuple[NodeRow, ...] = ()
    cards: tuple[CardRow, ...] = ()
    tenants: tuple[TenantRow, ...] = ()
    processes: tuple[ProcessRow, ...] = ()
    missing: tuple[tuple[str, int, str], ...] = field(default=())
    functions: tuple[PartRow, ...] = ()


def build(histories: Histories, look: Look, monotonic_us: int, wall_us: int) -> Frame:
    """The rows of now, in the order of nodes, cards, tenants and pids. `look` is asked about processes of this machine alone."""
    nodes: list[NodeRow] = []
    cards: list[CardRow] = []
    processes: list[ProcessRow] = []
    functions: list[PartRow] = []
    for history in sorted(histories.nodes.values(), key=lambda node: (node.snapshot.node, node.url)):
        stale = history.stale(monotonic_us)
        nodes.append(_node(history, stale, monotonic_us))
        cards += _cards(history, stale)
        processes += _processes(history, stale, look)
        functions += (_function(history.snapshot.node, stale, part) for part in history.snapshot.functions)
    missing = tuple((url, since, why) for url, (since, why) in sorted(histories.missing.items()))
    return Frame(wall_us, tuple(nodes), tuple(cards), tuple(_tenants(cards, processes)), tuple(processes), missing, tuple(functions))


def _node(history: NodeHistory, stale: bool, monotonic_us: int) -> NodeRow:
    snapshot = history.snapshot
    drivers = sorted({device.driver_version for device in snapshot.devices if device.driver_version})
    # Both clocks are known to disagree only while new snapshots come in.
    skewed = history.moved and not stale and not history.pooled and abs(history.skew_us) > 5_000_000
    return NodeRow(
        name=snapshot.node,
        url=history.url,
        stale=stale,
        age_us=history.age_us(monotonic_us),
        taken_us=snapshot.taken_us,
        simulated=snapshot.simulated,
        pool=snapshot.pool,
        driver=", ".join(drivers) or None,
        skew_us=history.skew_us if skewed else None,
        gone_since_us=history.gone_since_us,
        error=history.error,
        trouble=tuple(f"{source.source}: {source.reason or 'it fails'}" for source in snapshot.sources if not source.ok),
    )


def _cards(history: NodeHistory, stale: bool) -> Iterable[CardRow]:
    snapshot = history.snapshot
    nvml = next((source for source in snapshot.sources if source.source == "nvml"), None)
    parts: dict[str, list[SliceSnapshot]] = {}
    for part in snapshot.slices:
        parts.setdefault(part.device_uuid, []).append(part)
    for device in sorted(snapshot.devices, key=lambda device: (device.index, device.uuid)):
        slices = tuple(
            SliceRow(
                snapshot.node,
                device.index,
                stale,
                part,
                history.rate(("slice", part.device_uuid, part.allocation_id)),
                history.rate(("slice", part.device_uuid, part.allocation_id), throttled=True),
            )
            for part in sorted(parts.get(device.uuid, ()), key=lambda part: (part.tenant, part.allocation_id))
        )
        if device.up:
            state, reason = "ok", None
        elif nvml is not None and not nvml.ok:
            state, reason = "unknown", nvml.reason
        else:
            state, reason = "lost", "it does not answer"
        modes = sorted({row.slice.mode for row in slices})
        rate = history.rate(("device", device.uuid))
        yield CardRow(
            node=snapshot.node,
            stale=stale,
            device=device,
            state=state,
            modes="mig" if device.mig else "+".join(modes) or ("free" if device.up else "?"),
            use_ppm=(device.utilization_ppm if rate is None else min(rate, FULL_SHARE_PPM)) if device.up else None,
            unaccounted_ppm=history.rate(("unaccounted", device.uuid)) if device.up else None,
            trend=history.trend(device.uuid, TREND_POINTS),
            slices=slices,
            reason=reason,
            parts=tuple(_parts(history, stale, device)),
        )


def _parts(history: NodeHistory, stale: bool, device: DeviceSnapshot) -> Iterable[PartRow]:
    hardware = device.hardware if device.up else None
    for instance in (hardware.instances if hardware else None) or ():
        yield _instance(history, stale, device, instance)
    for vgpu in (hardware.vgpus if hardware else None) or ():
        yield _vgpu(history, stale, device, vgpu)


def _instance(history: NodeHistory, stale: bool, device: DeviceSnapshot, part: MigInstance) -> PartRow:
    rate = history.rate(("part", part.uuid))
    window = part.activity.graphics_ppm if part.activity is not None else None
    facts = [("GPU instance, compute instance", f"{part.gpu_instance_id}, {part.compute_instance_id}")]
    if part.placement_start is not None:
        facts.append(("memory slices", f"{part.placement_size} from {part.placement_start}"))
    facts += [(name, str(value)) for name, value in (("compute slices", part.compute_slices), ("SMs", part.multiprocessors)) if value]
    return PartRow(
        node=history.snapshot.node,
        card=device.index,
        stale=stale,
        kind="mig",
        name=part.profile or f"GPU instance {part.gpu_instance_id}",
        id=part.uuid,
        use_ppm=window if rate is None else min(rate, FULL_SHARE_PPM),
        memory_used_bytes=part.memory_used_bytes,
        memory_total_bytes=part.memory_total_bytes,
        processes=part.processes,
        facts=tuple(facts),
    )


def _vgpu(history: NodeHistory, stale: bool, device: DeviceSnapshot, part: Vgpu) -> PartRow:
    rate = history.rate(("part", part.uuid))
    return PartRow(
        node=history.snapshot.node,
        card=device.index,
        stale=stale,
        kind="vgpu",
        name=part.type_name or "vGPU",
        id=part.uuid,
        state={True: "licensed", False: "no licence", None: ""}[part.licensed],
        use_ppm=part.utilization_ppm if rate is None else min(rate, FULL_SHARE_PPM),
        memory_used_bytes=part.framebuffer_used_bytes,
        memory_total_bytes=part.framebuffer_total_bytes,
        facts=(("virtual machine", part.vm_id),) if part.vm_id else (),
    )


def _function(node: str, stale: bool, part: BusFunction) -> PartRow:
    told = (("driver", part.driver), ("device", part.device_id), ("part of", part.parent), ("profile", part.profile), ("mdev", part.uuid))
    return PartRow(
        node=node,
        card=None,
        stale=stale,
        kind="bus",
        name=part.profile or part.device_id or "device",
        id=part.pci_bus_id,
        state=part.state.replace("_", " "),
        facts=tuple((name, value) for name, value in told if value),
    )


def _processes(history: NodeHistory, stale: bool, look: Look) -> Iterable[ProcessRow]:
    snapshot = history.snapshot
    index = {device.uuid: device.index for device in snapshot.devices}
    workloads = {(part.allocation_id, part.device_uuid): part for part in snapshot.slices}
    names, nobody = named(snapshot), unbilled(snapshot)
    for process in sorted(snapshot.processes, key=lambda item: (index.get(item.device_uuid, -1), item.pid, item.start_ticks)):
        part = workloads.get((process.allocation_id or "", process.device_uuid))
        host = look(process.pid, process.start_ticks) if history.loopback else None
        yield ProcessRow(
            node=snapshot.node,
            card=index.get(process.device_uuid, -1),
            stale=stale,
            local=host is not None,
            process=process,
            use_ppm=history.rate(("process", process.device_uuid, str(process.pid), str(process.start_ticks))),
            host=host,
            workload=part.workload if part else None,
            label_user=part.user if part else None,
            named=names.get((process.pid, process.start_ticks), UNNAMED),
            billed=process_key(process) not in nobody,
        )


def _tenants(cards: Iterable[CardRow], processes: Iterable[ProcessRow]) -> list[TenantRow]:
    cards = list(cards)
    owned: dict[str, list[SliceRow]] = {}
    for card in cards:
        for row in card.slices:
            owned.setdefault(row.slice.tenant, []).append(row)
    counts: dict[str, set[tuple[str, int, int]]] = {}
    for process in processes:
        name = process.process.tenant or UNACCOUNTED
        counts.setdefault(name, set()).add((process.node, process.process.pid, process.process.start_ticks))
    made = [_tenant(name, rows, len(counts.get(name, ()))) for name, rows in sorted(owned.items())]
    old = {card.node for card in cards if card.stale}
    strangers = len(counts.get(UNACCOUNTED, ()))
    shown = [card for card in cards if card.unaccounted_ppm or card.device.unaccounted_memory_bytes]
    if strangers or shown:
        made.append(
            TenantRow(
                tenant=UNACCOUNTED,
                stale=any(card.stale for card in shown) or any(node in old for node, _, _ in counts.get(UNACCOUNTED, ())),
                cards=len(shown),
                allocations=0,
                promise_ppm=None,
                use_ppm=_sum(card.unaccounted_ppm for card in cards if card.device.up),
                memory_used_bytes=_sum(card.device.unaccounted_memory_bytes for card in cards if card.device.up),
                memory_limit_bytes=None,
                throttled_ppm=None,
                denied=None,
                processes=strangers,
            )
        )
    return made


def _tenant(name: str, rows: list[SliceRow], processes: int) -> TenantRow:
    states: dict[str, int] = {}
    for row in rows:
        states[row.state] = states.get(row.state, 0) + 1
    throttled = _sum(row.throttled_ppm for row in rows)
    return TenantRow(
        tenant=name,
        stale=any(row.stale for row in rows),
        cards=len({(row.node, row.slice.device_uuid) for row in rows}),
        allocations=len({(row.node, row.slice.allocation_id) for row in rows}),
        promise_ppm=sum(row.slice.promise_ppm for row in rows),
        use_ppm=_sum(row.obtained_ppm for row in rows),
        memory_used_bytes=_sum(row.slice.memory_used_bytes for row in rows),
        memory_limit_bytes=_sum(row.slice.memory_limit_bytes for row in rows),
        throttled_ppm=None if throttled is None else throttled // len(rows),
        denied=_sum(row.slice.denied_allocations_total for row in rows),
        processes=processes,
        states=tuple(sorted(states.items())),
    )


def _sum(values: Iterable[int | None]) -> int | None:
    # A sum with an unknown part is unknown.
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total
