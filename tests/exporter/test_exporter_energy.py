"""Energy: the board's counter is divided among slices and what is nobody's, to the microjoule, whatever becomes of the counter."""

from amounts_fakes import Hooked, Pool
from exporter_fakes import CARD, SECOND, Node
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.model.allocation import Mode
from poolmeter.model.units import MINUTE_US
from poolmeter.model.usage import DeviceRecord, SliceRecord

J = 1_000_000
STEPS = st.lists(
    st.tuples(
        st.sampled_from([SECOND, SECOND, 4 * SECOND, 20 * SECOND, 90 * SECOND]),
        st.one_of(st.integers(0, 700 * J), st.sampled_from(["reset", "unknown", "silent", "asked seldom"])),
        st.lists(st.integers(0, SECOND), min_size=3, max_size=3),
    ),
    min_size=1,
    max_size=25,
)


def minutes(pool: Pool) -> list[tuple[DeviceRecord, list[SliceRecord]]]:
    """Every device record with the slice records of its minute."""
    cards = [r for r in pool.records if isinstance(r, DeviceRecord)]
    return [(card, [r for r in pool.records if isinstance(r, SliceRecord) and r.start_us == card.start_us]) for card in cards]


@given(st.lists(st.tuples(st.sampled_from([Mode.HOOK, Mode.MPS, Mode.MIG]), st.integers(1, 600_000)), max_size=3), STEPS, st.booleans())
def test_records_add_up_to_the_boards_counter(
    promises: list[tuple[Mode, int]], steps: list[tuple[int, int | str, list[int]]], restart: bool
) -> None:
    pool = Pool()
    for number, (mode, ppm) in enumerate(promises):
        pool.allocate(f"a{number}", mode, ppm)
        pool.slots[f"a{number}"][0] = Hooked(100 + number)
    counter, read, expected, late = 0, 0, 0, 0
    for index, (length, energy, used) in enumerate(steps):
        for number, slots in enumerate(pool.slots.values()):
            slots[0].busy_us += used[number]
        pool.answers = energy != "silent"
        if energy == "reset":
            counter, late = 5 * J, 0  # the driver was loaded anew, and drew this since
        elif energy == "asked seldom":  # drawn like any other, and told with the next
            late += 9000 * J * (length // SECOND)
        elif isinstance(energy, int):
            counter += energy * (length // SECOND) + late
            late = 0
        pool.change(energy_uj_total=None if energy == "unknown" else counter)
        if pool.answers and energy != "unknown":
            expected += counter - read if counter >= read else counter
            read = counter
        pool.step(length)
        if restart and index == len(steps) // 2:
            pool.restart()
    pool.answers = True
    pool.change(energy_uj_total=None)
    pool.step(MINUTE_US)
    found = minutes(pool)
    assert sum(card.energy_uj or 0 for card, _ in found) == expected == (pool.ledger.devices[CARD].energy_uj_total or 0)
    for card, parts in found:
        assert [part.energy_uj is None for part in parts] == [card.energy_uj is None] * len(parts)
        if card.energy_uj is not None:
            assert min((part.energy_uj or 0 for part in parts), default=0) >= 0
            assert sum(part.energy_uj or 0 for part in parts) <= card.energy_uj
            if parts and card.unallocated_us == 0 and card.busy_us == 0 and sum(part.used_us or 0 for part in parts) == card.span_us:
                assert sum(part.energy_uj or 0 for part in parts) == card.energy_uj
    shown = {part.allocation_id: part.energy_uj_total or 0 for part in pool.snapshot().slices}
    for name, total in shown.items():
        assert total == sum(part.energy_uj or 0 for _, parts in found for part in parts if part.allocation_id == name)


def test_the_active_part_goes_by_use_and_the_idle_part_by_allocation() -> None:
    pool = Pool()
    pool.allocate("worker", ppm=250_000)
    pool.allocate("idler", ppm=500_000)
    pool.slots["worker"][0] = Hooked(11)
    for second in range(1, 61):
        pool.slots["worker"][0].busy_us = second * 500_000
        pool.change(busy_us_total=second * 500_000, energy_uj_total=second * 400 * J)
        pool.step()
    ((card, parts),) = minutes(pool)
    energy = {part.allocation_id: part.energy_uj for part in parts}
    # Half of the minute was active, all of it the worker's; of the idle half a quarter is his, a half the idler's, a quarter nobody's.
    assert card.energy_uj == 24_000 * J and energy == {"worker": 15_000 * J, "idler": 6_000 * J}


def test_an_unknown_counter_is_absent_and_not_nothing() -> None:
    pool = Pool()
    pool.allocate("a")
    pool.change(energy_uj_total=None)
    for _ in range(60):
        pool.step()
    ((card, (part,)),) = minutes(pool)
    assert card.energy_uj is None and part.energy_uj is None
    assert pool.snapshot().devices[0].energy_uj_total is None and pool.snapshot().slices[0].energy_uj_total is None


def test_a_counter_that_was_silent_for_long_loses_nothing_and_a_wild_one_counts_nothing() -> None:
    pool = Pool()
    pool.change(energy_uj_total=0)
    pool.step()
    pool.answers = False
    for _ in range(30):
        pool.step()
    pool.answers = True
    pool.change(energy_uj_total=21_000 * J)  # 700 W all the while
    pool.step()
    assert pool.ledger.devices[CARD].energy_uj_total == 21_000 * J
    pool.change(energy_uj_total=10**15)
    pool.step()
    pool.change(energy_uj_total=10**15 + J)
    pool.step()
    assert pool.ledger.devices[CARD].energy_uj_total == 21_001 * J


def test_a_card_in_mig_has_one_counter_and_instances_a_divided_part() -> None:
    """Nothing tells the use of an instance on an A100: its energy goes by allocation alone, and says that it was divided."""
    pool = Pool()
    pool.change(mig=True, busy_us_total=None, utilization_ppm=None, processes_known=False)
    pool.allocate("a", Mode.MIG, 500_000, meter=False)
    pool.allocate("b", Mode.MIG, 125_000, meter=False)
    for second in range(1, 61):
        pool.change(energy_uj_total=second * 80 * J)
        pool.step()
    ((card, parts),) = minutes(pool)
    assert {part.allocation_id: part.energy_uj for part in parts} == {"a": 2400 * J, "b": 600 * J}
    assert card.energy_uj == 4800 * J and {part.used_us for part in parts} == {None}
    assert {part.energy_divided for part in pool.snapshot().slices} == {True}


@given(st.integers(1, 59), st.integers(16, 600), st.booleans())
def test_what_an_outage_drew_is_not_whoevers_has_the_card_now(before: int, outage: int, restart: bool) -> None:
    pool = Pool()
    pool.allocate("first", Mode.WHOLE, 1_000_000)
    pool.change(energy_uj_total=0)
    for second in range(1, before + 1):
        pool.change(energy_uj_total=second * 100 * J)
        pool.step()
    pool.answers = False  # the cards do not answer, and meanwhile another tenant gets the card
    for _ in range(outage):
        pool.step()
    pool.release("first")
    pool.allocate("second", Mode.WHOLE, 1_000_000)
    pool.answers = True
    if restart:
        pool.restart()
    into = (before + outage) % 60  # of the open minute
    for second in range(before + outage + 1, before + outage + 122 - into):
        pool.change(energy_uj_total=second * 100 * J)
        pool.step()
    found = minutes(pool)
    drawn = sum(card.energy_uj or 0 for card, _ in found) + (pool.ledger.devices[CARD].m_energy_uj or 0)
    assert drawn == (pool.ledger.devices[CARD].energy_uj_total or 0) == (before + outage + 121 - into) * 100 * J
    second_ = {card.start_us: part.energy_uj or 0 for card, parts in found for part in parts if part.allocation_id == "second"}
    assert second_ and max(second_.values()) <= 60 * 100 * J


def test_a_clock_that_is_set_forward_does_not_make_energy_nobodys(node: Node) -> None:
    node.create("w", ppm=1_000_000)
    for second in range(1, 240):
        node.sampler.change(CARD, energy_uj_total=second // 5 * 500 * J)
        if second == 93:
            node.clock.wall += 3600 * SECOND
        node.tick()
    slices = [record for record in node.records() if isinstance(record, SliceRecord)]
    cards = [record for record in node.records() if isinstance(record, DeviceRecord)]
    assert sum(part.energy_uj or 0 for part in slices) == sum(card.energy_uj or 0 for card in cards) > 15_000 * J
