"""What is kept of each node between snapshots: the last one, counters of the last seconds (for rates), trends, and how fresh it is."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from poolmeter.exporter.top.feed import Answer
from poolmeter.model.hardware import MigInstance, Vgpu
from poolmeter.model.snapshot import Snapshot
from poolmeter.model.units import FULL_SHARE_PPM, MICROSECONDS

RATE_US = 3 * MICROSECONDS  # rates are over this long, so that short bursts neither vanish nor fill the screen
TREND_US = 240 * MICROSECONDS
TREND_STEP_US = 2 * MICROSECONDS
FRESH_US = 5 * MICROSECONDS
POOLED_FRESH_US = 120 * MICROSECONDS  # a collector's snapshots are as old as its pulls

Counter = tuple[str, int | None, int | None]  # origin, busy or used, throttled


@dataclass
class NodeHistory:
    """One node of one address."""

    url: str
    pooled: bool
    loopback: bool
    snapshot: Snapshot
    changed_us: int  # monotonic: when it last had something new
    skew_us: int  # our wall time less its own when it had
    moved: bool = False  # whether something new has ever come while we looked
    step_us: int = 0
    gone_since_us: int | None = None  # wall time of the last good answer, while there is none
    error: str | None = None
    counters: deque[tuple[int, dict[tuple[str, ...], Counter]]] = field(default_factory=deque)
    trends: dict[str, deque[tuple[int, int | None]]] = field(default_factory=dict)

    def take(self, snapshot: Snapshot, monotonic_us: int, wall_us: int) -> None:
        """A snapshot came; the same one again changes nothing."""
        if self.counters and snapshot.taken_us == self.snapshot.taken_us and snapshot.epoch == self.snapshot.epoch:
            return
        if self.counters:
            self.moved = True
            self.step_us = max(0, min(snapshot.taken_us - self.snapshot.taken_us, 120 * MICROSECONDS))
        if self.counters and snapshot.taken_us <= self.counters[-1][0]:  # its clock was set back
            self.counters.clear()
        self.snapshot, self.changed_us, self.skew_us = snapshot, monotonic_us, wall_us - snapshot.taken_us
        self.counters.append((snapshot.taken_us, _counters(snapshot)))
        while len(self.counters) > 2 and snapshot.taken_us - self.counters[1][0] >= RATE_US:
            self.counters.popleft()
        self._trend(snapshot)

    def _trend(self, snapshot: Snapshot) -> None:
        present = set()
        for device in snapshot.devices:
            present.add(device.uuid)
            kept = self.trends.setdefault(device.uuid, deque())
            rate = self.rate(("device", device.uuid)) if device.up else None
            kept.append((snapshot.taken_us, device.utilization_ppm if rate is None and device.up else rate))
            while kept and not snapshot.taken_us - TREND_US < kept[0][0] <= snapshot.taken_us:
                kept.popleft()
        for uuid in set(self.trends) - present:
            del self.trends[uuid]

    def rate(self, key: tuple[str, ...], throttled: bool = False) -> int | None:
        """Parts per million of the time since the oldest counter kept; None when there is no older one of the same origin."""
        if len(self.counters) < 2:
            return None
        now_us, newest = self.counters[-1]
        last = newest.get(key)
        place = 2 if throttled else 1
        if last is None or last[place] is None:
            return None
        for then_us, counters in self.counters:
            first = counters.get(key)
            if then_us >= now_us:
                break
            if first is None or first[place] is None or first[0] != last[0]:
                continue
            used = int(last[place] or 0) - int(first[place] or 0)
            return used * FULL_SHARE_PPM // (now_us - then_us) if used >= 0 else None
        return None

    def trend(self, uuid: str, points: int) -> tuple[int | None, ...]:
        """The last `points` steps of two seconds each, the newest last: the mean of what is known, None where nothing is."""
        kept = self.trends.get(uuid, deque())
        newest = self.snapshot.taken_us // TREND_STEP_US
        sums: dict[int, list[int]] = {}
        for at_us, value in kept:
            if value is not None:
                sums.setdefault(at_us // TREND_STEP_US, []).append(value)
        steps = range(newest - points + 1, newest + 1)
        return tuple(sum(sums[step]) // len(sums[step]) if step in sums else None for step in steps)

    def age_us(self, monotonic_us: int) -> int:
        """How old the newest snapshot is: by both clocks until a second one has come, from then on by ours alone."""
        since = monotonic_us - self.changed_us
        return since if self.moved else since + max(0, self.skew_us)

    def stale(self, monotonic_us: int) -> bool:
        """Whether what is shown is not what is."""
        if self.gone_since_us is not None:
            return True
        least = POOLED_FRESH_US if self.pooled else FRESH_US
        return self.age_us(monotonic_us) > max(least, 3 * self.step_us)


def _counters(snapshot: Snapshot) -> dict[tuple[str, ...], Counter]:
    found: dict[tuple[str, ...], Counter] = {}
    for device in snapshot.devices:
        if device.up:
            found["device", device.uuid] = (device.origin, device.busy_us_total, None)
            found["unaccounted", device.uuid] = (device.origin, device.unaccounted_us_total, None)
            if device.hardware is not None:
                parts: tuple[MigInstance | Vgpu, ...] = (*(device.hardware.instances or ()), *(device.hardware.vgpus or ()))
                for kept in parts:
                    found["part", kept.uuid] = (device.hardware.origin or "", kept.busy_us_total, None)
    for part in snapshot.slices:
        found["slice", part.device_uuid, part.allocation_id] = (part.origin, part.busy_us_total, part.throttled_us_total)
    for process in snapshot.processes:
        found["process", process.device_uuid, str(process.pid), str(process.start_ticks)] = (snapshot.epoch, process.busy_us_total, None)
    return found


class Histories:
    """All nodes of all addresses, and addresses that have never answered."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[str, str], NodeHistory] = {}
        self.missing: dict[str, tuple[int, str]] = {}

    def take(self, answers: Sequence[Answer], loopback: Iterable[str], monotonic_us: int, wall_us: int) -> None:
        """One round of answers; `loopback` are the addresses on this machine."""
        near = set(loopback)
        for answer in answers:
            known = [node for (url, _), node in self.nodes.items() if url == answer.url]
            if answer.error is not None:
                for node in known:
                    node.error = answer.error
                    node.gone_since_us = node.gone_since_us or wall_us
                if not known:
                    self.missing[answer.url] = (self.missing.get(answer.url, (wall_us, ""))[0], answer.error)
                continue
            self.missing.pop(answer.url, None)
            for snapshot in answer.snapshots:
                key = (answer.url, snapshot.node)
                if key not in self.nodes:
                    made = NodeHistory(answer.url, answer.pooled, answer.url in near, snapshot, monotonic_us, wall_us - snapshot.taken_us)
                    self.nodes[key] = made
                node = self.nodes[key]
                node.gone_since_us, node.error = None, None
                node.take(snapshot, monotonic_us, wall_us)
            present = {snapshot.node for snapshot in answer.snapshots}
            for key in [key for key in self.nodes if key[0] == answer.url and key[1] not in present]:
                del self.nodes[key]  # another node answers there now, or the collector knows it no longer
