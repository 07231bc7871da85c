"""The book: promises, grants and journal stay one, also when the enforcer is cut off in the middle of any of its steps."""

import contextlib
import fcntl
import os
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from poolmeter.clock import ManualClock
from poolmeter.enforcer import allocations as disk
from poolmeter.enforcer.actuators import ACTUATORS
from poolmeter.enforcer.book import Book
from poolmeter.enforcer.changes import Owner
from poolmeter.enforcer.journal import Journal, read_events
from poolmeter.enforcer.request import AllocationRequest, ResizeRequest
from poolmeter.errors import BadInput, Refused, Unavailable
from poolmeter.model.allocation import Allocation, AllocationState, Labels, Mode
from poolmeter.pages import layout
from poolmeter.pages.grant import read_grant
from poolmeter.places import NodeRun

GIB = 1 << 30
SMALL = AllocationRequest(Labels("acme", project="vision"), compute_ppm=250_000)


def test_a_created_allocation_is_on_the_disk_in_the_grant_and_in_the_journal(open_book, agree) -> None:
    book = open_book()
    allocation = book.create(replace(SMALL, device_count=2, soft=True, weight=7, charge_copies=True), Owner(uid=0))
    agree(book)
    grant = read_grant(book.run.allocations / allocation.id / "grant")
    assert [(item.weight, item.soft, item.device_memory) for item in grant.devices] == [(7, True, 80 * GIB)] * 2
    assert (grant.on_fault, grant.charge_copies) == ("refuse", True)
    assert (book.run.allocations / allocation.id / "meter").stat().st_mode & 0o777 == 0o666
    agree(open_book())


def test_ids_sort_by_time_and_do_not_repeat() -> None:
    ids = [disk.new_id(at) for at in range(1_800_000_000_000_000, 1_800_000_000_002_000)]
    assert ids == sorted(ids) and len(set(ids)) == len(ids)


def test_a_resize_changes_the_mapped_page_and_names_what_it_changes(open_book, agree) -> None:
    book = open_book()
    first = book.create(replace(SMALL, device_count=2), Owner())
    page = book.run.allocations / first.id / "grant"
    inode = page.stat().st_ino
    changed = book.resize(ResizeRequest(first.id, memory_bytes=8 * GIB, device="GPU-00000001"))
    assert changed.allocation.generation == first.generation + 2
    assert changed.warnings == ()
    assert [item.memory_bytes for item in changed.allocation.slices] == [20 * GIB, 8 * GIB]
    assert [item.promise_ppm for item in changed.allocation.slices] == [250_000, 250_000]
    changed = book.resize(ResizeRequest(first.id, compute_ppm=500_000))
    assert [(item.promise_ppm, item.compute_limit_ppm) for item in changed.allocation.slices] == [(500_000, 500_000)] * 2
    assert page.stat().st_ino == inode  # programs that have it mapped see the change
    agree(book)


def test_a_refused_resize_changes_nothing(open_book, agree) -> None:
    book = open_book(count=1)
    first = book.create(SMALL, Owner())
    book.create(replace(SMALL, compute_ppm=700_000), Owner())
    before = book.journal.path.read_bytes()
    with pytest.raises(Refused, match=r"30\.1 % of its time is asked, 30 % is free"):
        book.resize(ResizeRequest(first.id, compute_ppm=301_000))
    with pytest.raises(BadInput, match="names no new limit"):
        book.resize(ResizeRequest(first.id))
    with pytest.raises(BadInput, match="compute share"):
        book.resize(ResizeRequest(first.id, compute_ppm=0))
    with pytest.raises(BadInput, match="allocation id"):
        book.resize(ResizeRequest("../../etc", compute_ppm=1))
    with pytest.raises(Refused, match="not on this node"):
        book.resize(ResizeRequest("a-0000000000-0123456789ab", compute_ppm=1))
    assert book.journal.path.read_bytes() == before
    book.resize(ResizeRequest(first.id, compute_ppm=300_000))
    agree(book)


def test_a_suspended_share_makes_room_and_comes_back_when_there_is_some(open_book, agree) -> None:
    book = open_book(count=1)
    first = book.create(AllocationRequest(Labels("acme"), compute_ppm=700_000, memory_bytes=60 * GIB), Owner())
    rest = AllocationRequest(Labels("acme"), compute_ppm=500_000, memory_bytes=40 * GIB)
    with pytest.raises(Refused, match="is free"):
        book.create(rest, Owner())
    resting = book.suspend(first.id).allocation
    assert (resting.state, resting.slices, resting.generation) == (AllocationState.SUSPENDED, first.slices, first.generation + 2)
    agree(book)
    second = book.create(rest, Owner())
    for use, told in ((book.suspend, "is suspended, expected an active one"), (book.resume, "cannot grow on device")):
        with pytest.raises(Refused, match=told):
            use(first.id)
    with pytest.raises(Refused, match="is suspended, expected an active one to resize"):
        book.resize(ResizeRequest(first.id, compute_ppm=1))
    book = open_book(count=1)  # it is still suspended after a restart
    assert book.get(first.id).state is AllocationState.SUSPENDED
    agree(book)
    book.release(second.id)
    back = book.resume(first.id).allocation
    assert (back.state, back.slices) == (AllocationState.ACTIVE, first.slices)
    with pytest.raises(Refused, match="is active, expected a suspended one"):
        book.resume(first.id)
    agree(book)
    book.suspend(first.id)
    book.release(first.id)
    agree(book)
    assert [event.kind for event in read_events(book.journal.path)].count("suspended") == 2


def test_a_suspended_share_keeps_the_memory_that_its_programs_hold(open_book) -> None:
    book = open_book(count=1)
    first = book.create(AllocationRequest(Labels("acme"), compute_ppm=500_000, memory_bytes=60 * GIB), Owner())
    meter = book.run.allocations / first.id / "meter"
    with meter.open("r+b") as file:  # 30 GiB, in units of 512 bytes
        file.seek(layout.Meter.from_buffer_copy(meter.read_bytes()).devices_offset + layout.MeterDevice.memory_word.offset)
        file.write((30 * GIB // 512).to_bytes(8, "little"))
    assert "30.0 GiB on device" in book.suspend(first.id).warnings[0]
    with pytest.raises(Refused, match=r"50\.0 GiB is free"):
        book.create(AllocationRequest(Labels("acme"), compute_ppm=1_000_000, memory_bytes=51 * GIB), Owner())
    book.create(AllocationRequest(Labels("acme"), compute_ppm=1_000_000, memory_bytes=50 * GIB), Owner())


def test_a_whole_card_is_nobody_elses_and_is_not_resized(open_book, agree) -> None:
    book = open_book(count=1)
    whole = book.create(AllocationRequest(Labels("acme"), mode=Mode.WHOLE), Owner())
    (entry,) = read_grant(book.run.allocations / whole.id / "grant").devices
    assert (entry.compute_ppm, entry.memory_bytes) == (None, None)
    with pytest.raises(Refused, match="held whole"):
        book.create(SMALL, Owner())
    with pytest.raises(Refused, match="mode whole"):
        book.resize(ResizeRequest(whole.id, compute_ppm=1))
    agree(book)


@pytest.mark.parametrize("actuator", ACTUATORS, ids=lambda actuator: actuator.mode.value)
def test_each_mode_is_carried_out_or_refused_with_what_is_supported(actuator, open_book, agree) -> None:
    book = open_book()
    request = AllocationRequest(Labels("acme"), mode=actuator.mode)
    if actuator.mode in (Mode.HOOK, Mode.WHOLE):
        book.create(request, Owner())
    else:
        with pytest.raises(Refused, match="expected hook or whole"):
            book.create(request, Owner())
        (event,) = read_events(book.journal.path)
        assert (event.kind, event.demand["mode"]) == ("refused", actuator.mode.value)
    agree(book)


def test_a_released_grant_takes_no_new_memory(open_book, agree) -> None:
    book = open_book()
    for mode in (Mode.HOOK, Mode.WHOLE):
        allocation = book.create(AllocationRequest(Labels("acme"), mode=mode), Owner())
        assert book.release(allocation.id).state is AllocationState.RELEASED
        grant = read_grant(book.run.retired / allocation.id / "grant")
        assert grant.suspended and [item.memory_bytes for item in grant.devices] == [0]
        with pytest.raises(Refused, match="not on this node"):
            book.release(allocation.id)
    agree(book)


def take_slot(folder: Path, *, pid: int, ticks: int) -> int:
    """Makes the meter show a live process, as the hook does: a slot and its lock. Returns the descriptor that holds the lock."""
    descriptor = os.open(folder / "meter", os.O_RDWR)
    header = layout.Meter.from_buffer_copy(os.pread(descriptor, 4096, 0))
    slot = layout.Slot(
        state=layout.SLOT_LIVE,
        pid=pid,
        generation=1,
        pid_namespace=os.stat("/proc/self/ns/pid").st_ino,
        start_time_ticks=ticks,
        comm=b"tenant",
    )
    os.pwrite(descriptor, bytes(slot), header.slots_offset)
    os.pwrite(descriptor, (1).to_bytes(4, "little"), layout.Meter.slots_used.offset)
    # struct flock: type, whence, start, length, pid; an open file description lock on the slot's byte
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, layout.LOCK_SLOTS, 1, 0))
    return descriptor


def test_a_release_is_refused_while_a_process_holds_a_slot_unless_forced(open_book, agree) -> None:
    book = open_book()
    allocation = book.create(SMALL, Owner())
    lock = take_slot(book.run.allocations / allocation.id, pid=os.getpid(), ticks=disk.start_ticks(os.getpid()))
    with pytest.raises(Refused, match=rf"used by 1 process\(es\), {os.getpid()} \(tenant\)"):
        book.release(allocation.id)
    book.release(allocation.id, force=True)
    os.close(lock)
    agree(book)


def test_an_owner_that_died_is_released_when_its_last_process_is_gone(open_book, agree) -> None:
    book = open_book()
    gone = book.create(SMALL, Owner(0, 2**22 + 1, 1))
    held = book.create(SMALL, Owner(0, 2**22 + 1, 1))
    alive = book.create(SMALL, Owner(0, os.getpid(), disk.start_ticks(os.getpid())))
    reused = book.create(SMALL, Owner(0, os.getpid(), 1))  # the pid is somebody else's by now
    free = book.create(SMALL, Owner())
    lock = take_slot(book.run.allocations / held.id, pid=os.getpid(), ticks=disk.start_ticks(os.getpid()))
    assert set(book.tend()) == {gone.id, reused.id}
    os.close(lock)
    assert book.tend() == (held.id,)
    assert [item.id for item in book.entries()] == [alive.id, free.id]
    agree(book)


def test_slots_that_stay_dead_are_folded_after_a_while(open_book) -> None:
    book = open_book()
    clock = ManualClock(wall=1)
    book.clock = clock
    allocation = book.create(SMALL, Owner())
    folder = book.run.allocations / allocation.id
    os.close(take_slot(folder, pid=2**22 + 1, ticks=1))
    book.tend()
    clock.advance(9_000_000)
    book.tend()
    assert disk.has_dead_slot(folder)  # the exporter may want to read it first
    clock.advance(2_000_000)
    book.tend()
    assert not disk.has_dead_slot(folder)
    assert book.entries() == (allocation,)


def test_a_spoiled_meter_holds_no_promise(open_book, agree) -> None:
    book = open_book()
    allocation = book.create(SMALL, Owner(0, 2**22 + 1, 1))
    os.truncate(book.run.allocations / allocation.id / "meter", 10)
    assert book.tend() == (allocation.id,)


def test_a_board_that_somebody_spoiled_makes_room_for_a_new_one(open_book) -> None:
    book = open_book()
    whole, torn, linked, unfinished = (book.run.devices / name for name in ("GPU-1", "GPU-2", "GPU-3", "GPU-4.123"))
    whole.write_bytes(bytes(layout.Board()))
    torn.write_bytes(b"x")
    linked.symlink_to("/etc/passwd")
    unfinished.write_bytes(b"x")
    book.tend()
    assert sorted(path.name for path in book.run.devices.iterdir()) == ["GPU-1", "GPU-4.123"]


def test_one_enforcer_a_run_folder(open_book, cards, tmp_path: Path) -> None:
    book = open_book()
    with pytest.raises(Unavailable, match="has an enforcer already"):
        Book(book.run, Journal(tmp_path / "other.jsonl"), cards()).open()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")
def test_a_run_folder_of_somebody_else_is_refused(cards, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", 4242, 4242)
    with pytest.raises(Unavailable, match="belongs to uid 4242, expected 0"):
        Book(NodeRun(tmp_path / "run"), Journal(tmp_path / "events.jsonl"), cards()).open()


def test_folders_gone_with_a_restart_of_the_machine_are_released(open_book, agree) -> None:
    book = open_book()
    book.create(SMALL, Owner())
    book.close()
    shutil.rmtree(book.run.root)
    book = open_book()
    assert book.entries() == ()
    assert [(event.kind, event.reason) for event in read_events(book.journal.path)][-1] == ("released", "its folder is gone")
    agree(book)


def test_a_lost_journal_is_written_anew_from_the_folders(open_book, agree) -> None:
    book = open_book()
    allocation = book.create(SMALL, Owner())
    book.close()
    book.journal.path.unlink()
    book = open_book()
    (event,) = read_events(book.journal.path)
    assert (event.kind, event.at_us, event.allocation_id) == ("created", allocation.created_us, allocation.id)
    agree(book)


def test_a_folder_that_cannot_be_read_is_set_aside(open_book) -> None:
    book = open_book()
    allocation = book.create(SMALL, Owner())
    book.close()
    book.journal.path.unlink()
    (book.run.allocations / allocation.id / "allocation.json").write_text("{")
    book = open_book()
    assert book.entries() == ()
    assert [folder.name for folder in book.run.allocations.iterdir()] == [f".broken-{allocation.id}"]


def test_a_grant_whose_writer_died_at_work_is_written_to_its_end(open_book, agree) -> None:
    book = open_book()
    allocation = book.create(SMALL, Owner())
    book.close()
    page = book.run.allocations / allocation.id / "grant"
    page.chmod(0o644)
    with page.open("r+b") as file:
        file.seek(layout.Grant.generation.offset)
        file.write((3).to_bytes(8, "little"))
    book = open_book()
    assert book.get(allocation.id).generation == 4
    (*_, last) = read_events(book.journal.path)
    assert (last.kind, last.reason) == ("resized", "the grant page had another generation")
    agree(book)
    assert book.resize(ResizeRequest(allocation.id, compute_ppm=100_000)).allocation.generation == 6


def test_a_page_that_cannot_be_written_keeps_its_promise_and_the_node_starts(open_book) -> None:
    book = open_book()
    allocation = book.create(SMALL, Owner())
    book.close()
    page = book.run.allocations / allocation.id / "grant"
    page.unlink()
    page.write_bytes(b"nonsense")
    book = open_book()
    assert book.entries() == (allocation,)
    with pytest.raises(Unavailable, match="keeps its limits"):
        book.resize(ResizeRequest(allocation.id, compute_ppm=100_000))
    assert book.entries() == (allocation,)


# ---- cut off at every step -----------------------------------------------------------------------------------------

EVENTS = ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "fcntl.fcntl", "ctypes.dlsym")


def in_child(work: Callable[[], object], step: int) -> bool:
    """Runs `work` in a child that is gone at its step-th touch of the file system; whether it got to its end."""
    pid = os.fork()
    if pid == 0:
        left = step

        def trip(event: str, _: object) -> None:
            nonlocal left
            if event in EVENTS:
                left -= 1
                if left < 0:
                    os._exit(9)

        with contextlib.suppress(BaseException):
            sys.addaudithook(trip)
            work()
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("verb", ["create", "resize", "release", "decision", "suspend", "resume"])
def test_cut_off_at_any_step_the_next_start_finds_one_story(verb: str, open_book, cards, agree, tmp_path: Path) -> None:
    book = open_book()
    book.create(replace(SMALL, device_count=4, compute_ppm=600_000), Owner())
    mine = book.create(SMALL, Owner())
    if verb == "resume":
        book.suspend(mine.id)
    book.close()
    before = (2, "suspended" if verb == "resume" else 20 * GIB)
    finished = False
    outcomes = set()
    for step in range(400):
        root = tmp_path / f"step{step}"
        shutil.copytree(tmp_path / "run", root / "run")
        shutil.copytree(tmp_path / "data", root / "data")
        one = Book(NodeRun(root / "run"), Journal(root / "data" / "events.jsonl"), cards())
        after: Allocation | None = None

        def work(one: Book = one) -> None:
            one.open()
            _act(one, verb, mine)

        finished = in_child(work, step)
        one = Book(NodeRun(root / "run"), Journal(root / "data" / "events.jsonl"), cards())
        one.open()
        agree(one)
        entries = {item.id: item for item in one.entries()}
        after = entries.get(mine.id)
        rests = after is not None and after.state is AllocationState.SUSPENDED
        state = (len(entries), "suspended" if rests else after is not None and after.slices[0].memory_bytes)
        outcomes.add(state)
        assert state in {before, _done(verb)}
        if finished:
            assert state == _done(verb)
        if verb == "decision" and state == _done(verb):
            assert "d-1" in one.decided
        one.close()
        shutil.rmtree(root)
        if finished:
            break
    assert finished
    assert outcomes == {before, _done(verb)}  # both sides of the commit point were tried


def _act(book: Book, verb: str, mine: Allocation) -> None:
    if verb == "create":
        book.create(replace(SMALL, devices=("3",)), Owner())
    elif verb == "resize":
        book.resize(ResizeRequest(mine.id, memory_bytes=8 * GIB))
    elif verb == "release":
        book.release(mine.id)
    elif verb == "suspend":
        book.suspend(mine.id)
    elif verb == "resume":
        book.resume(mine.id)
    else:
        after = book.admitted(mine, None, 8 * GIB, mine.slices[0].device_uuid, "d-1")
        book.decide("d-1", mine.id, "applied", "lower", after)


def _done(verb: str) -> tuple[int, object]:
    others: dict[str, tuple[int, object]] = {"suspend": (2, "suspended"), "resume": (2, 20 * GIB)}
    return (others | {"create": (3, 20 * GIB), "release": (1, False)}).get(verb, (2, 8 * GIB))
