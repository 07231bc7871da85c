"""How much: a card's time and energy are handed out once, by the best source of each, and every number says where it comes from."""

import sys

import pytest
from amounts_fakes import Hooked, Pool
from exporter_fakes import CARD, GIB, SECOND, T0, process
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.exporter.room import Rank, Room
from poolmeter.model.allocation import Mode
from poolmeter.model.units import MINUTE_US
from poolmeter.model.usage import DeviceRecord, ProcessRecord, SliceRecord
from poolmeter.vendors.reading import ProcessReading

AMOUNT = st.one_of(st.integers(0, 3 * SECOND), st.sampled_from([SECOND, 4 * SECOND, 30 * SECOND]))


def stranger(
    pid: int, busy: int | None = None, accounted: int | None = None, memory: int | None = GIB, divided: bool = False
) -> ProcessReading:
    """A process without the hook, as the card lists it."""
    return ProcessReading(
        pid=pid, start_ticks=pid, command="cuda", memory_bytes=memory, busy_us_total=busy, accounted_us_total=accounted, divided=divided
    )


def slices(pool: Pool, name: str) -> list[SliceRecord]:
    return [record for record in pool.records if isinstance(record, SliceRecord) and record.allocation_id == name]


def devices(pool: Pool) -> list[DeviceRecord]:
    return [record for record in pool.records if isinstance(record, DeviceRecord)]


# ---- handed out once -------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, MINUTE_US), min_size=1, max_size=4),
    st.integers(0, MINUTE_US),
    st.lists(st.tuples(st.integers(0, 2 * MINUTE_US), st.sampled_from(list(Rank)), st.integers(0, 5)), max_size=8),
)
def test_a_room_gives_no_more_than_it_has_and_leaves_nothing_that_is_asked_for(
    lengths: list[int], spare: int, asked: list[tuple[int, Rank, int]]
) -> None:
    room = Room(lengths, spare)
    given_: list[tuple[int, list[int]]] = []
    whole = room.left
    for wanted, rank, weight in asked:
        room.claim(rank, wanted, lambda parts, wanted=wanted: given_.append((wanted, parts)), weight)  # type: ignore[misc]
    for rank in Rank:
        room.settle(rank)
    assert len(given_) == len(asked) and all(min(parts) >= 0 and sum(parts) <= wanted for wanted, parts in given_)
    assert sum(sum(parts) for _, parts in given_) == min(whole, sum(wanted for wanted, _, _ in asked))
    for index, length in enumerate(lengths):
        assert sum(parts[index] for _, parts in given_) <= length + (spare if index == 0 else 0)


MODES = st.sampled_from([Mode.HOOK, Mode.MPS, Mode.TIMESLICE, Mode.WHOLE, Mode.MIG])
SLICES = st.lists(st.tuples(MODES, st.booleans(), st.integers(1, 600_000)), max_size=4)
WORK = st.lists(
    st.tuples(
        st.integers(0, 5), st.sampled_from(["hook", "accounting", "sampled", "divided", "none"]), st.lists(AMOUNT, min_size=6, max_size=6)
    ),
    max_size=7,
)


@given(
    SLICES,
    WORK,
    st.lists(AMOUNT, min_size=6, max_size=6),
    st.lists(st.sampled_from([SECOND, 4 * SECOND, 25 * SECOND]), min_size=6, max_size=6),
)
def test_nothing_sums_to_more_than_the_card(
    promises: list[tuple[Mode, bool, int]], work: list[tuple[int, str, list[int]]], busy: list[int], ticks: list[int]
) -> None:
    """Any mix of modes and bases, late ticks, counters that say too much: slices, processes and what is unaccounted stay within the card."""
    pool = Pool()
    for number, (mode, meter, ppm) in enumerate(promises):
        pool.allocate(f"a{number}", mode, ppm, meter)
    said = dict.fromkeys(range(len(work)), 0)
    for pid, (place, _, _) in enumerate(work):
        if place < len(promises):
            pool.owners[1000 + pid] = f"a{place}"
    before: dict[tuple[str, str], int] = {}
    for tick, length in enumerate(ticks):
        found = []
        for number, (place, basis, gains) in enumerate(work):
            said[number] += gains[tick]
            name = f"a{place}"
            if basis == "hook" and name in pool.slots:
                pool.slots[name].setdefault(number, Hooked(1000 + number)).busy_us = said[number]
            elif basis != "none":
                accounted = said[number] if basis == "accounting" else None
                found.append(stranger(1000 + number, said[number], accounted, divided=basis == "divided"))
        pool.processes(*found)
        pool.change(busy_us_total=sum(busy[: tick + 1]))
        pool.step(length)
        shown = pool.snapshot()
        counted = {("slice", part.allocation_id): part.busy_us_total or 0 for part in shown.slices}
        counted[("device", "unaccounted")] = shown.devices[0].unaccounted_us_total or 0
        assert all(value >= before.get(key, 0) for key, value in counted.items())
        before |= counted
        assert sum(before.values()) <= pool.now - T0
        if tick == 2:
            pool.restart()
    pool.step(MINUTE_US)
    for device in devices(pool):
        minute = [r for r in pool.records if r.minute_us == device.minute_us]
        used = [r.used_us for r in minute if isinstance(r, SliceRecord)]
        own = [r.used_us for r in minute if isinstance(r, ProcessRecord)]
        assert sum(us or 0 for us in used) + (device.unaccounted_us or 0) <= device.span_us
        assert sum(us or 0 for us in own) <= device.span_us
        energy = [r.energy_uj for r in minute if isinstance(r, SliceRecord)]
        assert sum(uj or 0 for uj in energy) <= (device.energy_uj or 0)
        for record in minute:
            if isinstance(record, SliceRecord):
                assert (record.used_us is None) == (record.used_basis == "allocated")


def test_one_value_of_the_card_is_never_copied_to_its_sharers() -> None:
    pool = Pool()
    pool.allocate("a", Mode.TIMESLICE, meter=False)
    pool.allocate("b", Mode.TIMESLICE, meter=False)
    for second in range(1, 61):
        pool.change(busy_us_total=second * 800_000, utilization_ppm=800_000)
        pool.step()
    assert [(r.used_us, r.used_basis, r.completeness_ppm) for r in slices(pool, "a") + slices(pool, "b")] == [(None, "allocated", 0)] * 2
    assert {part.state for part in pool.snapshot().slices} == {"unknown"}


def test_sharers_get_what_their_own_processes_used() -> None:
    pool = Pool()
    pool.allocate("a", Mode.TIMESLICE, meter=False)
    pool.allocate("b", Mode.TIMESLICE, meter=False)
    pool.owners |= {11: "a", 12: "b", 13: "b"}
    for second in range(1, 61):
        pool.processes(
            stranger(11, second * 300_000), stranger(12, second * 200_000), stranger(13, second * 50_000), stranger(14, second * 100_000)
        )
        pool.change(busy_us_total=second * 700_000)
        pool.step()
    (a,), (b,), (card,) = slices(pool, "a"), slices(pool, "b"), devices(pool)
    assert (a.used_us, a.used_basis, b.used_us, b.used_basis) == (18 * SECOND, "sampled", 15 * SECOND, "sampled")
    assert a.completeness_ppm == 1_000_000 and a.state == "active" and a.launches is None
    assert (card.unaccounted_us, card.switch_overhead_us, card.hooked_us) == (6 * SECOND, 3 * SECOND, 0)
    assert a.memory_used_kib_us == GIB // 1024 * MINUTE_US and b.memory_peak_bytes == 2 * GIB
    shown = {part.allocation_id: part for part in pool.snapshot().slices}
    assert shown["b"].busy_us_total == 15 * SECOND and shown["b"].used_basis == "sampled" and shown["b"].processes == 2


def test_shares_that_say_more_than_the_card_are_divided() -> None:
    pool = Pool()
    for name in ("a", "b"):
        pool.allocate(name, Mode.TIMESLICE, meter=False)
    pool.owners |= {11: "a", 12: "b"}
    for second in range(1, 61):
        pool.processes(stranger(11, second * 900_000), stranger(12, second * 600_000))
        pool.step()
    (a,), (b,) = slices(pool, "a"), slices(pool, "b")
    assert a.used_us is not None and b.used_us is not None and a.used_us + b.used_us <= MINUTE_US
    assert a.used_us + b.used_us >= MINUTE_US - 2 * SECOND and a.used_us / b.used_us == pytest.approx(1.5, rel=0.05)


def test_the_hook_is_believed_before_samples() -> None:
    pool = Pool()
    pool.allocate("a")
    pool.slots["a"][0] = Hooked(11)
    for second in range(1, 61):
        pool.slots["a"][0].busy_us = second * 900_000
        pool.processes(stranger(11, second * 500_000), stranger(12, second * 500_000))
        pool.step()
    (a,), (card,) = slices(pool, "a"), devices(pool)
    assert (a.used_us, a.used_basis, card.unaccounted_us) == (54 * SECOND, "hook", 6 * SECOND)


def test_what_the_card_had_no_room_for_is_carried_on_for_a_while_and_then_given_up() -> None:
    pool = Pool()
    for name in ("a", "b"):
        pool.allocate(name)
        pool.slots[name][0] = Hooked(ord(name))
    for _ in range(60):
        for name in ("a", "b"):
            pool.slots[name][0].busy_us += 600_000
        pool.step()
    for _ in range(240):
        pool.step()
    used = [sum(r.used_us or 0 for r in slices(pool, name)) for name in ("a", "b")]
    assert used == [36 * SECOND] * 2 and not pool.tampered  # twelve seconds late, all there
    for _ in range(600):
        for name in ("a", "b"):
            pool.slots[name][0].busy_us += SECOND
        pool.step()
    assert all(part.backlog_us <= MINUTE_US // 2 for part in pool.ledger.slices.values()) and not pool.tampered
    last = [r for r in pool.records if r.minute_us == devices(pool)[-1].minute_us]
    assert sum(r.used_us or 0 for r in last if isinstance(r, SliceRecord)) == MINUTE_US
    assert sum(r.used_us or 0 for r in last if isinstance(r, ProcessRecord)) == MINUTE_US
    assert sum(part.busy_us_total or 0 for part in pool.snapshot().slices) <= pool.now - devices(pool)[0].start_us


def test_mps_divides_concurrent_spans_by_thread_share() -> None:
    pool = Pool()
    pool.allocate("a", Mode.MPS, 300_000)
    pool.allocate("b", Mode.MPS, 100_000)
    for name in ("a", "b"):
        pool.slots[name][0] = Hooked(ord(name))
    for _ in range(60):
        for name in ("a", "b"):
            pool.slots[name][0].busy_us += SECOND
        pool.step()
    (a,), (b,) = slices(pool, "a"), slices(pool, "b")
    assert (a.used_us, b.used_us, a.used_basis) == (45 * SECOND, 15 * SECOND, "hook")
    for _ in range(60):
        pool.step()  # concurrent time is not late time: nothing of it is charged to an idle minute
    assert slices(pool, "a")[1].used_us == 0


def test_what_is_divided_among_mps_clients_is_marked() -> None:
    pool = Pool()
    pool.allocate("a", Mode.MPS, meter=False)
    pool.owners[11] = "a"
    for second in range(1, 61):
        pool.processes(stranger(11, second * 300_000, divided=True))
        pool.step()
    (a,) = slices(pool, "a")
    (one,) = (r for r in pool.records if isinstance(r, ProcessRecord))
    assert (a.used_us, a.used_basis, one.used_basis) == (18 * SECOND, "mixed", "mixed")


# ---- accounting ------------------------------------------------------------------------------------------------------------------


def test_accounting_is_believed_before_samples() -> None:
    pool = Pool()
    pool.allocate("a", Mode.TIMESLICE, meter=False)
    pool.owners[11] = "a"
    pool.step()
    for second in range(1, 60):
        pool.processes(stranger(11, second * 100_000, accounted=second * 400_000))
        pool.step()
    (a,) = slices(pool, "a")
    assert (a.used_us, a.used_basis) == (59 * 400_000, "accounting")
    # Switched off in between: sampling goes on where it is, nothing twice.
    for second in range(60, 120):
        pool.processes(stranger(11, second * 100_000))
        pool.step()
    assert [(r.used_us, r.used_basis) for r in slices(pool, "a")][1] == (6 * SECOND + 100_000 - 100_000, "sampled")
    assert pool.snapshot().slices[0].used_basis == "mixed"


def test_what_accounting_counted_before_anybody_watched_is_nobodys() -> None:
    pool = Pool()
    pool.processes(stranger(11, 0, accounted=500 * SECOND))
    pool.step()
    pool.processes(stranger(11, 0, accounted=500 * SECOND + 1000), stranger(12, 0, accounted=2000))
    pool.step()
    assert pool.ledger.devices[CARD].unaccounted_us_total == 3000


def test_the_final_word_on_an_ended_process_adds_only_what_was_not_counted() -> None:
    pool = Pool()
    pool.step()
    for second in range(1, 11):
        pool.processes(stranger(11, second * 200_000))
        pool.step()
    ended = ProcessReading(pid=11, start_ticks=11, command="cuda", busy_us_total=2 * SECOND, listed=False, accounted_us_total=3 * SECOND)
    pool.processes(ended)
    for _ in range(49):
        pool.step()
    (one,) = (r for r in pool.records if isinstance(r, ProcessRecord))
    (card,) = devices(pool)
    assert (one.used_us, one.used_basis, one.ended, card.unaccounted_us) == (3 * SECOND, "mixed", True, 3 * SECOND)


# ---- whole cards -----------------------------------------------------------------------------------------------------------------


def test_a_whole_card_without_a_meter_is_its_only_users() -> None:
    pool = Pool()
    pool.allocate("w", Mode.WHOLE, 1_000_000, meter=False)
    for second in range(1, 61):
        pool.processes(stranger(11, second * 480_000))
        pool.change(busy_us_total=second * 500_000, utilization_ppm=500_000)
        pool.step()
    (whole,), (card,) = slices(pool, "w"), devices(pool)
    assert (whole.used_us, whole.used_basis, whole.state, whole.completeness_ppm) == (30 * SECOND, "sampled", "active", 1_000_000)
    assert (card.unaccounted_us, card.switch_overhead_us) == (0, 0)
    assert pool.snapshot().slices[0].busy_us_total == 30 * SECOND


@given(st.lists(st.tuples(st.integers(0, SECOND), st.sampled_from(["", "", "", "", "other", "restart", "late"])), min_size=1, max_size=150))
def test_the_total_of_a_whole_card_moves_with_every_turn_and_never_falls(steps: list[tuple[int, str]]) -> None:
    pool = Pool()
    pool.allocate("w", Mode.WHOLE, 1_000_000, meter=False)
    busy = shown = 0
    shared = False
    for gained, event in steps:
        busy += gained
        if event == "other":
            shared = True
            pool.release("o") if "o" in pool.allocations else pool.allocate("o", Mode.TIMESLICE, 1, meter=False)
        elif event == "restart":
            pool.restart()
        pool.change(busy_us_total=busy)
        pool.step(4 * SECOND if event == "late" else SECOND)
        found = next(part for part in pool.snapshot().slices if part.allocation_id == "w")
        if found.busy_us_total is not None:
            assert shown <= found.busy_us_total <= busy
            shown = found.busy_us_total
        if not shared:
            assert (found.busy_us_total, found.used_basis) == (busy, "sampled")
            recorded = sum(record.used_us or 0 for record in slices(pool, "w"))
            assert recorded <= busy and (pool.now % MINUTE_US or recorded == busy)


# ---- memory ----------------------------------------------------------------------------------------------------------------------


def test_memory_by_hook_by_nvml_and_the_difference() -> None:
    pool = Pool()
    pool.allocate("a")
    pool.slots["a"][0] = Hooked(11, memory=4 * GIB)
    pool.processes(stranger(11, 0, memory=4 * GIB + 500), process(12, 12, 0, 2 * GIB))
    pool.change(memory_used_bytes=7 * GIB)
    pool.step()
    (part,), (card,) = pool.snapshot().slices, pool.snapshot().devices
    assert (part.memory_used_bytes, part.nvml_memory_bytes, part.memory_difference_bytes) == (4 * GIB, 4 * GIB + 500, 500)
    assert (card.hooked_memory_bytes, card.unaccounted_memory_bytes, card.memory_difference_bytes) == (4 * GIB, 2 * GIB, GIB)
    pool.processes(stranger(11, 0, memory=None), process(12, 12, 0, 2 * GIB))
    pool.step()
    (part,), (card,) = pool.snapshot().slices, pool.snapshot().devices
    assert part.nvml_memory_bytes is None and part.memory_difference_bytes is None
    pool.change(memory_used_bytes=None)
    pool.step()
    assert pool.snapshot().devices[0].memory_difference_bytes is None


def test_a_snapshot_takes_a_work_that_grows_with_the_slices_and_no_faster() -> None:
    def steps(count: int) -> int:
        pool = Pool()
        for number in range(count):
            pool.allocate(f"a{number}", ppm=1000)
            pool.slots[f"a{number}"][0] = Hooked(1000 + number, memory=GIB // 100)
        pool.processes(*[stranger(1000 + number, 0, memory=GIB // 100 + number) for number in range(count)])
        pool.step()
        made = 0

        def count_one(*_: object) -> None:
            nonlocal made
            made += 1

        sys.setprofile(count_one)
        try:
            snapshot = pool.snapshot()
        finally:
            sys.setprofile(None)
        assert [part.memory_difference_bytes for part in snapshot.slices] == list(range(count))
        return made

    assert steps(120) < 2.5 * steps(60)


# ---- the node --------------------------------------------------------------------------------------------------------------------


def test_an_unknown_request_of_cpu_is_not_nothing() -> None:
    pool = Pool()
    pool.allocate("a", cpu_milli=4000, host_memory_bytes=8 * GIB)
    pool.step()
    host = pool.snapshot().host
    assert host is not None and host.cpu_milli is not None and host.memory_bytes is not None
    assert (host.cpu_requested_milli, host.memory_requested_bytes) == (4000, 8 * GIB)
    pool.allocate("b", host_memory_bytes=GIB)
    host = pool.snapshot().host
    assert host is not None and (host.cpu_requested_milli, host.memory_requested_bytes) == (None, 9 * GIB)
    assert [(request.allocation_id, request.cpu_milli) for request in host.requests] == [("a", 4000), ("b", None)]


# ---- series end with what they are of --------------------------------------------------------------------------------------------


def test_a_process_leaves_the_snapshot_when_it_ends() -> None:
    pool = Pool()
    pool.processes(stranger(11, SECOND), stranger(12, SECOND))
    pool.step()
    assert [p.pid for p in pool.snapshot().processes] == [11, 12]
    pool.processes(stranger(12, 2 * SECOND))
    pool.step()
    assert [p.pid for p in pool.snapshot().processes] == [12]
