"""The node's allocation book: every change admitted, journalled, carried out, in that order, so that a crash leaves nothing half done.

The journal is the commit point. A new allocation is built in a folder nobody knows, journalled, then published by one rename; a
change is journalled with the allocation after it, then written to grant and allocation.json; a release is journalled, then the
folder moves to retired/. `open` repeats whatever a dead enforcer had journalled and not yet done, and undoes what it had not.
"""

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import replace

from poolmeter.clock import Clock, SystemClock
from poolmeter.enforcer import allocations as disk
from poolmeter.enforcer.actuators import actuator_of
from poolmeter.enforcer.admission import OverCommit, admit_change, demand_of, find, occupancy, place
from poolmeter.enforcer.changes import (
    STEP,
    Changed,
    Owner,
    below_use,
    claim_of,
    granted,
    released,
    resized,
    resumed,
    suspended,
    without_memory,
)
from poolmeter.enforcer.compaction import compact
from poolmeter.enforcer.inventory import Device, DeviceInventory
from poolmeter.enforcer.journal import Journal
from poolmeter.enforcer.request import MAX_ALLOCATIONS, AllocationRequest, ResizeRequest, check_id, check_request, check_resize
from poolmeter.errors import DataError, PoolmeterError, Refused, Unavailable
from poolmeter.model.allocation import Allocation, AllocationState
from poolmeter.model.decision import JournalEvent
from poolmeter.model.plain import from_plain, to_plain
from poolmeter.model.units import format_size
from poolmeter.pages.grant import read_grant
from poolmeter.pages.meter import create_meter, reclaim
from poolmeter.places import NodeRun

log = logging.getLogger(__name__)

_FOLD_AFTER_US = 10_000_000


class Book:
    """The allocations of one node. Its methods may be called from any thread; one change happens at a time."""

    def __init__(
        self, run: NodeRun, journal: Journal, inventory: DeviceInventory, over: OverCommit | None = None, clock: Clock | None = None
    ) -> None:
        self.run = run
        self.journal = journal
        self.inventory = inventory
        self.over = over or OverCommit()
        self.clock = clock or SystemClock()
        self.decided: set[str] = set()
        self._allocations: dict[str, Allocation] = {}
        self._lock = threading.RLock()
        self._claim: int | None = None
        self._dead_since: dict[str, int] = {}

    # ---- life ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Takes the run folder and brings journal, folders and grants to agree.

        Raises Unavailable when another enforcer has the folder or it cannot be written, DataError for a broken journal.
        """
        try:
            fresh = not self.run.root.exists()
            if not fresh and self.run.root.stat().st_uid not in (0, os.geteuid()):
                owner = self.run.root.stat().st_uid
                raise Unavailable(
                    f"run folder {self.run.root} belongs to uid {owner}, expected {os.geteuid()}: its owner could fake grants"
                )
            for folder in (self.run.root, self.run.allocations, self.run.retired, self.run.devices):
                folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            if os.geteuid() == 0:
                if fresh:
                    self.run.root.chmod(0o755)  # whatever the umask: programs of any user come here
                # Programs of any user make the boards that the hooks of a device share; nobody removes another's.
                self.run.devices.chmod(0o1777)
                # Ids are not to be guessed, and not to be listed: a meter can be written by whoever finds it.
                self.run.allocations.chmod(0o711)
                self.run.retired.chmod(0o711)
            self._claim = os.open(self.run.root / "enforcer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Unavailable(f"run folder {self.run.root} cannot be used: {error.strerror} ({error.filename})") from None
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._claim)
            self._claim = None
            raise Unavailable(f"run folder {self.run.root} has an enforcer already, expected none") from None
        try:
            with self._lock:
                self._reconcile()
                self._compact()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets go of the run folder; every allocation stays."""
        with self._lock:
            self.journal.close()
            if self._claim is not None:
                os.close(self._claim)
                self._claim = None

    # ---- questions -------------------------------------------------------------------------------------------------

    def entries(self) -> tuple[Allocation, ...]:
        """The allocations in force, oldest first."""
        with self._lock:
            return tuple(self._allocations[key] for key in sorted(self._allocations))

    def get(self, allocation_id: str) -> Allocation:
        """One allocation. Raises Refused when the node does not have it."""
        with self._lock:
            allocation = self._allocations.get(check_id(allocation_id))
        if allocation is None:
            raise Refused(f"allocation {allocation_id} is not on this node, expected one of poolmeter allocation list")
        return allocation

    # ---- changes ---------------------------------------------------------------------------------------------------

    def create(self, request: AllocationRequest, owner: Owner) -> Allocation:
        """A new allocation, promised and granted. Raises BadInput, Refused (journalled with its demand) or Unavailable."""
        check_request(request)
        devices = self.inventory.devices()
        with self._lock:
            cards = occupancy(devices, self._claims())
            try:
                if len(self._allocations) >= MAX_ALLOCATIONS:
                    raise Refused(f"this node has {len(self._allocations)} allocations, expected fewer than {MAX_ALLOCATIONS}")
                actuator_of(request.mode).check(request)
                slices = place(request, cards, self.over)
            except Refused as refusal:
                if request.record_refusal:
                    self.journal.append(
                        "refused",
                        self.clock.wall_us(),
                        tenant=request.labels.tenant,
                        outcome="refused",
                        reason=str(refusal),
                        demand=to_plain(demand_of(request, cards)),
                    )
                raise
            now = self.clock.wall_us()
            allocation = granted(disk.new_id(now), request, slices, owner, now)
            self._build(allocation, devices)
            return allocation

    def resize(self, request: ResizeRequest) -> Changed:
        """New limits, in force when this returns. Raises BadInput, Refused or Unavailable; then nothing has changed."""
        check_resize(request)
        devices = self.inventory.devices()
        with self._lock:
            allocation = self.get(request.id)
            only = None
            if request.device is not None:
                only = find(request.device, occupancy(devices, ())).device.uuid
                if only not in {item.device_uuid for item in allocation.slices}:
                    raise Refused(f"allocation {allocation.id} has no share of device {only}, expected one of its own devices")
            after = self._resized(allocation, request.compute_ppm, request.memory_bytes, only, devices)
            self._change(allocation, after, devices, "resized")
            return Changed(self._allocations[allocation.id], below_use(after, disk.memory_in_use(disk.folder_of(self.run, after.id))))

    def suspend(self, allocation_id: str) -> Changed:
        """Gives device time and unused memory back to admission; its programs wait at their next launch and get no new memory.

        What they hold of a card's memory stays there, and is counted until they free it. Raises Refused or Unavailable.
        """
        devices = self.inventory.devices()
        with self._lock:
            before = self.get(allocation_id)
            after = suspended(before, self.clock.wall_us())
            self._change(before, after, devices, "suspended")
            used = disk.memory_in_use(disk.folder_of(self.run, after.id))
            held = tuple(
                f"{format_size(used[item.device_uuid])} on device {item.device_uuid} stay in use until its programs free them"
                for item in after.slices
                if used.get(item.device_uuid)
            )
            return Changed(self._allocations[after.id], held)

    def resume(self, allocation_id: str) -> Changed:
        """All that was promised, in force again when this returns. Raises Refused when the cards cannot give it now, or Unavailable."""
        devices = self.inventory.devices()
        with self._lock:
            before = self.get(allocation_id)
            after = resumed(before, self.clock.wall_us())
            nothing = replace(before, slices=tuple(replace(item, promise_ppm=0, memory_bytes=0) for item in before.slices))
            admit_change(nothing, after.slices, occupancy(devices, self._claims(without=before.id)), self.over)
            self._change(before, after, devices, "resumed")
            return Changed(self._allocations[after.id])

    def release(self, allocation_id: str, *, force: bool = False, reason: str | None = None) -> Allocation:
        """Ends an allocation. Raises Refused while programs use it, unless forced.

        Forced, its grant takes no new memory from then on; the programs themselves are left to their owner.
        """
        with self._lock:
            allocation = self.get(allocation_id)
            folder = disk.folder_of(self.run, allocation_id)
            live = disk.live_slots(folder)
            if live and not force:
                told = ", ".join(f"{slot.pid} ({slot.comm})" for slot in live[:8])
                raise Refused(f"allocation {allocation_id} is used by {len(live)} process(es), {told}: expected none, or --force")
            after = released(allocation, self.clock.wall_us())
            self._journal("released", after, reason=reason)
            self._finish_release(after)
            return after

    def decide(
        self, decision_id: str, allocation_id: str, outcome: str, reason: str | None, after: Allocation | None = None
    ) -> JournalEvent:
        """Journals what became of a decision, and carries it out when `after` is given. A decision is decided once.

        Raises Refused, with nothing journalled, when the allocation has changed since `after` was made from it.
        """
        devices = self.inventory.devices() if after is not None else ()
        with self._lock:
            if decision_id in self.decided:
                raise Refused(f"decision {decision_id} was decided before, expected a new one")
            if after is not None:
                before = self.get(allocation_id)
                if after.generation != before.generation + STEP:
                    raise Refused(f"allocation {allocation_id} has moved on to generation {before.generation} meanwhile")
                return self._change(before, after, devices, "decision", decision_id, reason)
            tenant = self._allocations[allocation_id].labels.tenant if allocation_id in self._allocations else None
            event = self.journal.append(
                "decision",
                self.clock.wall_us(),
                allocation_id=allocation_id,
                tenant=tenant,
                decision_id=decision_id,
                outcome=outcome,
                reason=reason,
            )
            self.decided.add(decision_id)
            return event

    def admitted(
        self, allocation: Allocation, compute_ppm: int | None, memory_bytes: int | None, device_uuid: str, decision_id: str
    ) -> Allocation:
        """The allocation as a decision would leave it. Raises Refused when the cards cannot give that."""
        devices = self.inventory.devices()
        with self._lock:
            after = self._resized(allocation, compute_ppm, memory_bytes, device_uuid, devices)
            return replace(after, decision_id=decision_id)

    def tend(self) -> tuple[str, ...]:
        """Releases what has lost its owner and its last process; the ids released.

        Slots that have been dead for a while and that nobody has folded are folded, so that nothing of theirs stays reserved.
        """
        ended = []
        with self._lock:
            self._compact()
        disk.remove_torn_boards(self.run)
        for allocation in self.entries():
            folder = disk.folder_of(self.run, allocation.id)
            self._fold_dead(allocation.id)
            if allocation.owner_pid is None or disk.start_ticks(allocation.owner_pid) == allocation.owner_start_ticks:
                continue
            if disk.live_slots(folder):
                continue
            try:
                self.release(allocation.id, reason="its owner has ended")
            except Refused:
                continue  # a process came in between, or somebody else released it
            ended.append(allocation.id)
        return tuple(ended)

    def _compact(self) -> None:
        if not self.journal.is_long:
            return
        there = {*self._allocations, *disk.published(self.run), *disk.staged(self.run)}
        now = self.clock.wall_us()
        try:
            self.journal.rewrite(lambda lines: compact(lines, there, now))
        except PoolmeterError as error:
            log.error("%s", error)  # it goes on growing, and is tried again

    def _fold_dead(self, allocation_id: str) -> None:
        # Survivors fold at once, the exporter after it has read what each process used: both come first.
        folder = disk.folder_of(self.run, allocation_id)
        now = self.clock.monotonic_us()
        if not disk.has_dead_slot(folder):
            self._dead_since.pop(allocation_id, None)
        elif now - self._dead_since.setdefault(allocation_id, now) >= _FOLD_AFTER_US:
            try:
                reclaim(folder / "meter")
            except (PoolmeterError, OSError) as error:
                log.debug("slots of %s stay as they are: %s", allocation_id, error)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _claims(self, without: str | None = None) -> list[Allocation]:
        """What the allocations (but one) hold of the cards."""
        return [
            claim_of(item, disk.memory_in_use(disk.folder_of(self.run, item.id)) if item.state is AllocationState.SUSPENDED else {})
            for item in self._allocations.values()
            if item.id != without
        ]

    def _build(self, allocation: Allocation, devices: tuple[Device, ...]) -> None:
        try:
            folder = disk.staging(self.run, allocation.id)
            create_meter(folder / "meter", [item.device_uuid for item in allocation.slices], allocation_id=allocation.id)
            actuator_of(allocation.mode).apply(folder, allocation, _by_uuid(devices))
            disk.save(folder, allocation)
            self._journal("created", allocation)
        except BaseException as error:
            disk.discard(self.run, allocation.id)
            if isinstance(error, OSError):
                raise Unavailable(f"allocation {allocation.id} cannot be stored under {self.run.allocations}: {error.strerror}") from None
            raise
        try:
            disk.publish(self.run, allocation.id)
        except OSError as error:
            self._journal("released", released(allocation, self.clock.wall_us()), reason=f"it could not be stored: {error.strerror}")
            disk.discard(self.run, allocation.id)
            raise Unavailable(f"allocation {allocation.id} cannot be stored under {self.run.allocations}: {error.strerror}") from None
        self._allocations[allocation.id] = allocation

    def _resized(
        self, allocation: Allocation, compute_ppm: int | None, memory_bytes: int | None, only: str | None, devices: tuple[Device, ...]
    ) -> Allocation:
        after = resized(allocation, compute_ppm, memory_bytes, only, self.clock.wall_us())
        admit_change(allocation, after.slices, occupancy(devices, self._claims(without=allocation.id)), self.over)
        return after

    def _change(
        self,
        before: Allocation,
        after: Allocation,
        devices: tuple[Device, ...],
        kind: str,
        decision_id: str | None = None,
        reason: str | None = None,
    ) -> JournalEvent:
        outcome = "applied" if decision_id is not None else None
        event = self._journal(kind, after, decision_id=decision_id, outcome=outcome, reason=reason)
        if decision_id is not None:
            self.decided.add(decision_id)
        try:
            self._put(after, devices)
        except (OSError, PoolmeterError) as error:
            # What is journalled and not in force must not stay so: the old limits are what holds.
            self._journal("resized", before, reason=f"the new limits could not be written: {error}")
            with contextlib.suppress(OSError, PoolmeterError):
                self._restore(before, devices)
            raise Unavailable(f"allocation {after.id} keeps its limits: {error}") from None
        return event

    def _put(self, allocation: Allocation, devices: tuple[Device, ...]) -> None:
        """Puts the limits in force. Another generation than expected (a page that a dead enforcer left) is journalled as well."""
        folder = disk.folder_of(self.run, allocation.id)
        generation = actuator_of(allocation.mode).apply(folder, allocation, _by_uuid(devices))
        if generation != allocation.generation:
            allocation = replace(allocation, generation=generation)
            self._journal("resized", allocation, decision_id=allocation.decision_id, reason="the grant page had another generation")
        disk.save(folder, allocation)
        self._allocations[allocation.id] = allocation

    def _finish_release(self, allocation: Allocation) -> None:
        folder = disk.folder_of(self.run, allocation.id)
        try:
            generation = actuator_of(allocation.mode).apply(folder, without_memory(allocation), {})
            disk.save(folder, replace(allocation, generation=generation))
        except (OSError, PoolmeterError) as error:
            log.warning("allocation %s: its grant could not be closed: %s", allocation.id, error)
        self._allocations.pop(allocation.id, None)
        self._dead_since.pop(allocation.id, None)
        try:
            disk.retire(self.run, allocation.id)
        except OSError as error:  # it is journalled; the next start moves it
            log.error("allocation %s: its folder could not be moved to %s: %s", allocation.id, self.run.retired, error)

    def _journal(
        self, kind: str, allocation: Allocation, *, decision_id: str | None = None, outcome: str | None = None, reason: str | None = None
    ) -> JournalEvent:
        return self.journal.append(
            kind,
            self.clock.wall_us(),
            allocation_id=allocation.id,
            allocation=to_plain(allocation),
            tenant=allocation.labels.tenant,
            decision_id=decision_id,
            outcome=outcome,
            reason=reason,
        )

    # ---- after a crash ---------------------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        here = {*disk.published(self.run), *disk.staged(self.run)}
        told: dict[str, tuple[int, dict[str, object]]] = {}  # the last word on each allocation that is in force or still on the disk

        def see(event: JournalEvent) -> None:
            if event.kind == "decision" and event.decision_id is not None:
                self.decided.add(event.decision_id)
            if event.allocation is not None and event.allocation_id is not None:
                told[event.allocation_id] = (event.sequence, event.allocation)
                if event.kind == "released" and event.allocation_id not in here:
                    del told[event.allocation_id]

        self.journal.open(see)
        journalled = {
            key: from_plain(Allocation, plain, f"{self.journal.path} event {sequence}") for key, (sequence, plain) in told.items()
        }
        for allocation_id in disk.staged(self.run):
            known = journalled.get(allocation_id)
            if known is not None and known.state is not AllocationState.RELEASED and not disk.folder_of(self.run, allocation_id).exists():
                disk.publish(self.run, allocation_id)
            else:
                disk.discard(self.run, allocation_id)
        folders = disk.published(self.run)
        devices = self.inventory.devices() if folders else ()
        for allocation_id, folder in folders.items():
            known = journalled.get(allocation_id)
            try:
                stored = disk.load(folder)
            except DataError as error:
                if known is None:
                    log.error("%s; set aside as %s", error, disk.set_aside(self.run, folder))
                    continue
                stored = known  # written again below
            if known is None:
                self.journal.append(
                    "created",
                    stored.created_us,
                    allocation_id=stored.id,
                    allocation=to_plain(stored),
                    tenant=stored.labels.tenant,
                    reason="found on the disk without an event",
                )
                known = stored
            if known.state is AllocationState.RELEASED:
                self._finish_release(known)
                continue
            try:
                self._restore(known, devices)
            except (OSError, PoolmeterError) as error:
                # One page that cannot be written must not keep the whole node down; the promise stands as journalled.
                log.error("allocation %s: its limits could not be put in force again: %s", known.id, error)
                self._allocations[known.id] = known
        for allocation in journalled.values():
            if allocation.state is not AllocationState.RELEASED and allocation.id not in self._allocations:
                self._journal("released", released(allocation, self.clock.wall_us()), reason="its folder is gone")

    def _restore(self, allocation: Allocation, devices: tuple[Device, ...]) -> None:
        folder = disk.folder_of(self.run, allocation.id)
        try:
            in_force = read_grant(folder / "grant").generation
        except PoolmeterError as error:
            log.warning("%s; it is written again", error)
            in_force = None
        if in_force == allocation.generation:
            disk.save(folder, allocation)
            self._allocations[allocation.id] = allocation
        else:
            self._put(allocation, devices)


def _by_uuid(devices: tuple[Device, ...]) -> Mapping[str, Device]:
    return {device.uuid: device for device in devices}
