"""The agent: one turn a second over all sources, one immutable snapshot, records into the spool."""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from poolmeter import __version__
from poolmeter.clock import Clock
from poolmeter.exporter.allocations import AllocationFolders, AllocationReading, delete_retired, reclaim_dead
from poolmeter.exporter.attribution import Allocations, OwnAllocations, ProcessKey, Who
from poolmeter.exporter.collectors.family import Outputs, Page
from poolmeter.exporter.hardware import HardwareTotals, stale
from poolmeter.exporter.instances import Layout
from poolmeter.exporter.integrate import Integrator, Observation, Outcome
from poolmeter.exporter.journal import read_journal
from poolmeter.exporter.ledger import Ledger, ledger_from
from poolmeter.exporter.placement import boot_id, place, place_after_boot
from poolmeter.exporter.sampling import Source
from poolmeter.exporter.snapshots import take_snapshot
from poolmeter.exporter.spool import Spool, event
from poolmeter.model.decision import JournalEvent
from poolmeter.model.hardware import BusFunction
from poolmeter.model.plain import canonical_json
from poolmeter.model.snapshot import Snapshot, SourceHealth
from poolmeter.model.units import DAY_US, MICROSECONDS, MINUTE_US
from poolmeter.model.usage import EventRecord, UsageRecord
from poolmeter.period import rfc3339
from poolmeter.places import NodeData, NodeRun
from poolmeter.vendors.reading import DeviceReading, VendorReading

_LOG = logging.getLogger("poolmeter.exporter")
BRIDGE_US = DAY_US  # minutes missed are made up for this far back
CHECKPOINT_US = 2 * MICROSECONDS
EXPIRE_US = 10 * MINUTE_US


@dataclass(frozen=True)
class Settings:
    """What an agent is told."""

    node: str
    pool: str
    interval_ms: int = 1000
    retention_days: int = 7
    simulated: bool = False

    @property
    def stale_us(self) -> int:
        """How old a reading may be before it is published no more: a slow card's last one is better than none, a dead source's is not."""
        return max(3 * self.interval_ms * 1000, 5 * MICROSECONDS)


class Agent:
    """Everything of one node. `turn()` is called by one thread; `page()` by any."""

    def __init__(
        self,
        settings: Settings,
        run: NodeRun,
        data: NodeData,
        spool: Spool,
        sampler: Source,
        clock: Clock,
        boot: Callable[[], str] = boot_id,
        attribution: OwnAllocations | None = None,
        who: Who | None = None,
    ) -> None:
        self.settings = settings
        self.spool = spool
        self._data, self._sampler, self._clock = data, sampler, clock
        self._folders = AllocationFolders(run)
        self._boot = boot()
        self._attribution = attribution or OwnAllocations()
        self._who = who or Who([Allocations(self._attribution)])
        self._layout = Layout()
        self._reading: VendorReading | None = None
        self._functions: tuple[BusFunction, ...] = ()
        self._functions_at = 0  # monotonic
        self._reading_at = 0  # monotonic
        self._health: dict[str, SourceHealth] = {}
        self._page: Page | None = None
        self._page_at = 0  # monotonic
        self.outputs: Callable[[], Outputs] = Outputs
        self._released_until: int | None = None  # monotonic
        self._ready = threading.Event()
        self._checkpoint_at = self._expire_at = clock.monotonic_us()
        self._queue: list[UsageRecord] = []  # closed, not yet committed
        self._seen: dict[str, AllocationReading] = {}
        self._undeletable: set[str] = set()
        saved = spool.load_state()
        self.ledger = ledger_from(saved) if saved else Ledger(clock.wall_us(), clock.monotonic_us(), self._boot)
        self._integrator = Integrator(self.ledger, self._attribution, self._who, self._live_us, fresh=saved is None)
        self._totals = HardwareTotals(self.ledger.hardware, spool.epoch)
        self._look_back(saved is None)

    @property
    def _live_us(self) -> int:
        return max(5 * self.settings.interval_ms * 1000, 5 * MICROSECONDS)

    def _look_back(self, fresh: bool) -> None:
        """Events about the spool itself, and a bound on how many minutes are made up for."""
        now = self._clock.wall_us()
        if self.spool.moved_aside is not None:
            self._event("gap", f"the spool was corrupted and moved to {self.spool.moved_aside}; what it held is lost", now)
        if fresh:
            # Allocations that exist already stand from now on; the journal's past is not this spool's.
            part = read_journal(self._data.journal, 0, "")
            self.ledger.timeline.learn(part.events)
            self.ledger.journal_offset, self.ledger.journal_head = part.offset, part.head
        elif now - self.ledger.cursor_us > BRIDGE_US:
            start = now - BRIDGE_US
            lost = start - self.ledger.cursor_us
            self._event(
                "gap", f"the exporter was down for {(now - self.ledger.cursor_us) // MICROSECONDS} s, longer than is made up for", now, lost
            )
            outcome = Outcome()
            self._integrator.close(outcome)
            self._queue += outcome.records
            for _ in self.ledger.timeline.advance(self.ledger.cursor_us, start):
                pass
            self.ledger.cursor_us = start
            self.ledger.boot_id = ""  # placement starts from the wall clock

    def turn(self, budget_s: float) -> Snapshot:
        """One tick: look, count, commit, publish. `budget_s` is how long to wait for the vendor's library."""
        ledger = self.ledger
        self._sample(budget_s)
        same_boot = ledger.boot_id == self._boot
        moment = place(self._clock, ledger.cursor_us, ledger.monotonic_us) if same_boot else place_after_boot(self._clock, ledger.cursor_us)
        if self._reading is not None:
            self._layout.learn(self._reading.devices)
        events = self._events()
        allocations = self._allocations(moment.watched_us)
        if self._layout.known:
            self.ledger.timeline.place(self._layout.allocation)
        devices = None
        if self._reading is not None and self._health["nvml"].ok:
            devices = {device.uuid: device for device in self._reading.devices}
        self._ask_who(devices, allocations)
        origin, unidentified = (self._reading.origin, self._reading.unidentified) if self._reading else ("", 0)
        use = self._layout.use(devices.values()) if devices else {}
        seen = Observation(devices, origin, allocations, unidentified, use)
        outcome = self._integrator.advance(seen, moment.watched_us)
        if moment.at_us > moment.watched_us:
            self._integrator.close(outcome)
            jump = moment.at_us - moment.watched_us
            self._integrator.jump(jump)
            self._event("gap", f"the clock was set forward by {jump // MICROSECONDS} s; no time passed", moment.at_us)
            for _ in ledger.timeline.advance(moment.watched_us, moment.at_us):
                pass
            ledger.cursor_us = moment.at_us
        ledger.monotonic_us, ledger.boot_id = moment.monotonic_us, self._boot
        for allocation_id, device, reason in outcome.tampered:
            _LOG.warning("%s", reason)
            self._event("tampered", reason, ledger.cursor_us, allocation_id=allocation_id, device_uuid=device)
        self._queue += [self._journal_record(item) for item in events]
        self._commit(outcome.records)
        self._housekeeping(allocations)
        return self._publish(seen)

    def recover(self) -> None:
        """Go back to what was committed last, as after a kill: a turn that failed half-way has counted half."""
        saved = self.spool.load_state()
        if saved is not None:
            self.ledger = ledger_from(saved)
            self._integrator = Integrator(self.ledger, self._attribution, self._who, self._live_us, fresh=False)
            self._totals = HardwareTotals(self.ledger.hardware, self.spool.epoch)
            self._queue = []

    def stop(self) -> None:
        """Close the running minute with its own span."""
        moment_us = self.ledger.cursor_us
        outcome = Outcome()
        self._integrator.close(outcome)
        self._commit(outcome.records)
        _LOG.info("closed the running minute at %d with %d records", moment_us, len(outcome.records))
        if self._page is not None:
            self._page = replace(self._page, snapshot=replace(self._page.snapshot, sequence=self.spool.last_sequence))

    def page(self) -> Page | None:
        """The newest snapshot with what `/metrics` adds to it; None before the first turn."""
        return self._page

    @property
    def stalled_us(self) -> int:
        """How old a page may be before turns are taken to have stopped: well beyond what one slow turn takes."""
        return max(15 * MICROSECONDS, 3 * self.settings.interval_ms * 1000)

    def age_us(self) -> int | None:
        """Time since the newest page was made, None without one."""
        return None if self._page is None else self._clock.monotonic_us() - self._page_at

    def release(self, for_us: int) -> str | None:
        """Let go of the cards: the child that holds them ends, and is not started again for so long or until `resume`.

        Returns what still holds them: a child that is stuck in the kernel, which cannot be killed yet; None when nothing does.
        """
        self._released_until = self._clock.monotonic_us() + for_us
        self._reading = None
        self._sampler.close()
        return self._sampler.trouble if self._sampler.stuck else None

    def resume(self) -> None:
        """Take the cards back at the next turn."""
        self._released_until = None

    def released_us(self) -> int | None:
        """For how long the cards stay released, None when they are not."""
        until = self._released_until
        left = None if until is None else until - self._clock.monotonic_us()
        return left if left is not None and left > 0 else None

    def wait_first(self, timeout_s: float) -> bool:
        """Whether the first turn is done within the time."""
        return self._ready.wait(timeout_s)

    # ---- sources -----------------------------------------------------------------------------------------------------------------

    def _note(self, source: str, began_ns: int, reason: str | None) -> None:
        duration = (time.monotonic_ns() - began_ns) // 1000
        known = self._health.get(source)
        at = self._clock.wall_us() if reason is None else (known.at_us if known else None)
        self._set_health(source, at, duration, reason)

    def _set_health(self, source: str, at_us: int | None, duration_us: int | None, reason: str | None) -> None:
        known, ok = self._health.get(source), reason is None
        since = known.since_us if known is not None and known.ok == ok else self._clock.wall_us()
        self._health[source] = SourceHealth(source=source, ok=ok, at_us=at_us, duration_us=duration_us, reason=reason, since_us=since)

    def _sample(self, budget_s: float) -> None:
        left = self.released_us()
        if left is not None:
            known = self._health.get("nvml")
            until = rfc3339((self._clock.wall_us() + left) // MICROSECONDS * MICROSECONDS)
            self._set_health("nvml", known.at_us if known else None, None, f"the cards are released, until {until} or a resume")
            return
        self._released_until = None
        reading = self._sampler.poll(budget_s)
        now = self._clock.monotonic_us()
        known = self._health.get("nvml")
        if reading is not None:
            # Of the bus rather than of the library: known also while that does not answer, as on a node whose cards are all passed through.
            self._functions, self._functions_at = reading.functions, now
        if reading is not None and reading.error is None:
            self._reading, self._reading_at = self._totals.carry(reading), now
            reason = f"{reading.unidentified} devices do not say who they are" if reading.unidentified and not reading.devices else None
            self._set_health("nvml", reading.at_us, reading.duration_us, reason)
            return
        trouble = reading.error if reading is not None else self._sampler.trouble
        if trouble is None and self._reading is not None and now - self._reading_at <= self.settings.stale_us:
            self._reading = stale(self._reading)
            return  # a slow tick: the last reading stays for a while, with its own time on it
        if trouble is None:
            trouble = (
                "NVML has not answered yet" if self._reading is None else f"NVML has not answered for {(now - self._reading_at) // 1000} ms"
            )
        self._set_health("nvml", known.at_us if known else None, known.duration_us if known else None, trouble)

    def _allocations(self, now_us: int) -> dict[str, AllocationReading]:
        began = time.monotonic_ns()
        found, trouble = self._folders.read()
        readings = {name: self._layout.reading(reading) for name, reading in found.items()}
        self.ledger.timeline.adopt(reading.allocation for reading in readings.values() if reading.allocation is not None)
        self._note("allocations", began, trouble)
        faults = [fault for reading in readings.values() for fault in reading.faults if not reading.retired]
        self._attribution.refresh(readings, now_us)
        self._note("hook", began, faults[0] if faults else None)
        self._seen = readings
        return readings

    def _ask_who(self, devices: dict[str, DeviceReading] | None, allocations: dict[str, AllocationReading]) -> None:
        hooked: list[ProcessKey] = []
        for reading in allocations.values():
            for slot in reading.meter.slots if reading.meter else ():
                host = self._attribution.host_of(reading.id, slot) if slot.locked is not False else None
                if host is not None:
                    hooked.append(host)
        self._sampler.hooked = frozenset(hooked)
        self._who.refresh(devices, hooked, self._clock.monotonic_us())
        sources = {health.source: health for health in self._who.health()}
        for name in (self._who.names | {"attribution"}) - sources.keys() - {"allocations"}:
            self._health.pop(name, None)
        self._health.update(sources)

    def _events(self) -> list[JournalEvent]:
        began = time.monotonic_ns()
        reason = None
        fresh: list[JournalEvent] = []
        try:
            part = read_journal(self._data.journal, self.ledger.journal_offset, self.ledger.journal_head)
            fresh, faults = self.ledger.timeline.learn(part.events)
            self.ledger.journal_offset, self.ledger.journal_head = part.offset, part.head
            wrong = [*part.faults, *faults]
            for fault in wrong:
                _LOG.warning("%s", fault)
            reason = wrong[0] if wrong else None
        except OSError as error:
            reason = f"journal {self._data.journal} cannot be read: {error.strerror}"
        self._note("events", began, reason)
        return fresh

    # ---- records -----------------------------------------------------------------------------------------------------------------

    def _event(self, name: str, reason: str, at_us: int, span_us: int = 0, **details: object) -> None:
        self._queue.append(event("", "", 0, at_us, name, reason, span_us, {key: value for key, value in details.items() if value}))

    def _journal_record(self, item: JournalEvent) -> EventRecord:
        record = event("", "", 0, item.at_us, item.kind, item.reason or "")
        slices = (item.allocation or {}).get("slices")
        only = slices[0].get("device_uuid") if isinstance(slices, list) and len(slices) == 1 and isinstance(slices[0], dict) else None
        return replace(
            record,
            device_uuid=only,
            allocation_id=item.allocation_id,
            tenant=item.tenant,
            decision_id=item.decision_id,
            outcome=item.outcome,
            reason=item.reason,
            detail=canonical_json(item),
        )

    def _commit(self, closed: list[UsageRecord]) -> None:
        """Records and the ledger that explains them, in one transaction; without records, now and then, the ledger alone.

        A full disk keeps the records here, and the next turn tries again.
        """
        now = self._clock.monotonic_us()
        self._queue += closed
        if not self._queue and now - self._checkpoint_at < CHECKPOINT_US and self._page is not None:
            return
        records = self._number(self._queue)
        if closed:
            self._settle(records[-1].sequence)
        began = time.monotonic_ns()
        try:
            self.spool.commit(records, self.ledger.to_json(), durable=bool(records))
        except sqlite3.Error as error:
            _LOG.error("spool %s cannot be written: %s", self.spool.path, error)
            self._note("spool", began, f"spool {self.spool.path} cannot be written: {error}")
            return
        self._note("spool", began, None)
        self._queue = []
        self._checkpoint_at = now

    def _number(self, records: list[UsageRecord]) -> list[UsageRecord]:
        return [
            replace(
                record,
                node=self.settings.node,
                epoch=self.spool.epoch,
                sequence=sequence,
                pool=record.pool or self.settings.pool,
            )
            for sequence, record in enumerate(records, self.spool.last_sequence + 1)
        ]

    def _settle(self, sequence: int) -> None:
        """Note which retired allocations are in the records for good, and forget those whose folder is gone."""
        ledger = self.ledger
        for reading in self._seen.values():
            if reading.retired and reading.id not in ledger.timeline.standing and not reading.alive and not self._open(reading.id):
                ledger.settled.setdefault(reading.id, sequence)
        if not self._health["allocations"].ok:
            return  # a folder that could not be listed is not a folder that is gone: its counters must not be counted anew
        kept = self._seen.keys() | ledger.timeline.standing.keys() | {allocation.id for _, allocation in ledger.timeline.pending}
        kept |= {part.allocation_id for part in ledger.slices.values() if self._open(part.allocation_id)}
        ledger.settled = {key: value for key, value in ledger.settled.items() if key in self._seen}
        ledger.slices = {key: part for key, part in ledger.slices.items() if part.allocation_id in kept}
        ledger.known = {key: allocation for key, allocation in ledger.known.items() if key in kept}
        gone = [key for key, process in ledger.processes.items() if process.hooked and process.allocation_id not in kept]
        for key in gone:
            del ledger.processes[key]

    def _open(self, allocation_id: str) -> bool:
        """Whether the open minute holds anything of an allocation, or device time of it still waits to be counted."""
        return any(
            part.backlog_us or part.m_used_us or part.m_launches or part.m_graph_launches or part.m_throttled_us or part.m_denied
            for part in self.ledger.slices.values()
            if part.allocation_id == allocation_id
        ) or any(allocation_id in device.parts.promised for device in self.ledger.devices.values())

    def _housekeeping(self, allocations: dict[str, AllocationReading]) -> None:
        for reading in allocations.values():
            reclaim_dead(reading)
        self.tidy()
        now = self._clock.monotonic_us()
        if now >= self._expire_at:
            self._expire_at = now + EXPIRE_US
            dropped = self.spool.expire(self._clock.wall_us(), self.settings.retention_days)
            if dropped is not None:
                count, first, last = dropped
                reason = f"{count} records older than {self.settings.retention_days} days were dropped unacknowledged"
                self._event("gap", reason, self.ledger.cursor_us, records=count, first_sequence=first, last_sequence=last)

    def tidy(self) -> None:
        """Delete retired allocations whose last record every consumer has."""
        if not self.ledger.settled:
            return
        through = self.spool.acknowledged()
        for allocation_id, sequence in list(self.ledger.settled.items()):
            reading = self._seen.get(allocation_id)
            if sequence > through or reading is None or not reading.retired or allocation_id in self._undeletable:
                continue
            if delete_retired(reading):
                del self.ledger.settled[allocation_id]
            else:
                self._undeletable.add(allocation_id)  # said once; somebody else has to

    def _publish(self, seen: Observation) -> Snapshot:
        snapshot = take_snapshot(
            self.ledger,
            seen,
            self._attribution,
            self._who,
            self._integrator.unhooked,
            self._integrator.shared,
            self._health.values(),
            node=self.settings.node,
            pool=self.settings.pool,
            epoch=self.spool.epoch,
            sequence=self.spool.last_sequence,
            simulated=self.settings.simulated,
        )
        if self._clock.monotonic_us() - self._functions_at <= self.settings.stale_us:
            snapshot = replace(snapshot, functions=self._functions)
        before = self._page.snapshot if self._page is not None else None
        unattributed = {uuid: device.unattributed_us_total for uuid, device in self.ledger.devices.items()}
        self._page = Page(snapshot, self.spool.held(), __version__, before, self.outputs(), unattributed)
        self._page_at = self._clock.monotonic_us()
        self._ready.set()
        return snapshot
