"""Fractions of a card: MIG by placement and compute slices, MPS by active-thread percentage, and the capacity identity with them."""

import dataclasses
import itertools
from fractions import Fraction

import pytest
from amounts_fakes import Pool
from exporter_fakes import CARD, GIB, SECOND, Node, device, identity, of
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.exporter.instances import Layout
from poolmeter.model.allocation import AllocationState, Mode
from poolmeter.model.hardware import Hardware, MigInstance
from poolmeter.model.plain import canonical_json
from poolmeter.model.units import FULL_SHARE_PPM, MINUTE_US
from poolmeter.model.usage import DeviceRecord, SliceRecord
from poolmeter.sharing.mig import compute_fraction, of_the_card, placement_ppm
from poolmeter.sharing.mps import thread_fraction, thread_ppm

HALF, SMALL = "MIG-00000000-0000-0000-0000-00000000000a", "MIG-00000000-0000-0000-0000-00000000000b"


def instance(uuid: str, start: int, size: int, compute: int, busy: int | None = None, memory: int | None = None) -> MigInstance:
    """An instance of a card of 100 GiB."""
    return MigInstance(
        uuid=uuid,
        gpu_instance_id=start + 1,
        compute_instance_id=0,
        placement_start=start,
        placement_size=size,
        compute_slices=compute,
        memory_total_bytes=memory or size * 12 * GIB,
        busy_us_total=busy,
    )


@given(st.integers(1, 8), st.data())
def test_placements_side_by_side_make_up_the_card(slots: int, data: st.DataObject) -> None:
    cuts = sorted({0, slots, *data.draw(st.lists(st.integers(0, slots), max_size=8))})
    parts = [placement_ppm(start, end - start, slots) for start, end in itertools.pairwise(cuts)]
    assert sum(parts) == FULL_SHARE_PPM and all(part > 0 for part in parts)
    for part, (start, end) in zip(parts, itertools.pairwise(cuts), strict=True):
        assert abs(Fraction(part, FULL_SHARE_PPM) - Fraction(end - start, slots)) < Fraction(1, FULL_SHARE_PPM)


@given(st.lists(st.integers(0, MINUTE_US), min_size=7, max_size=7))
def test_instances_together_never_use_more_than_the_card(busy: list[int]) -> None:
    assert sum(of_the_card(us, 1, 7) for us in busy) <= MINUTE_US


def test_bounds_of_fractions() -> None:
    assert compute_fraction(3, 7) == Fraction(3, 7) and thread_fraction(30) == Fraction(3, 10) and thread_ppm(7) == 70_000
    for wrong in (lambda: placement_ppm(7, 2, 8), lambda: placement_ppm(0, 0, 8), lambda: compute_fraction(8, 7), lambda: thread_ppm(0)):
        with pytest.raises(ValueError, match="expected"):
            wrong()


def test_an_instance_is_the_part_of_the_card_that_it_occupies(node: Node) -> None:
    layout = (instance(HALF, 0, 4, 3, busy=0), instance(SMALL, 4, 1, 1, busy=0))
    node.sampler.change(CARD, mig=True, busy_us_total=None, utilization_ppm=None, hardware=Hardware(instances=layout))
    node.tick()
    node.create("half", ppm=FULL_SHARE_PPM, memory=48 * GIB, uuids=(HALF,), meter=False, mode=Mode.MIG)
    node.create("small", ppm=FULL_SHARE_PPM, memory=12 * GIB, uuids=(SMALL,), mode=Mode.MIG)
    node.meters["small"].attach()
    for second in range(1, 60):
        node.meters["small"].count(SMALL, busy_ns=second * 700_000_000, memory=2 * GIB)
        busy = (instance(HALF, 0, 4, 3, busy=second * 700_000), instance(SMALL, 4, 1, 1, busy=second * 700_000))
        node.sampler.change(CARD, hardware=Hardware(instances=busy))
        node.tick()
    (card,), parts = of(node.records(), DeviceRecord), {record.allocation_id: record for record in of(node.records(), SliceRecord)}
    assert identity(card) == card.span_us and card.device_uuid == CARD
    assert (parts["half"].promise_ppm, parts["small"].promise_ppm) == (500_000, 125_000)
    assert parts["half"].allocated_us == pytest.approx(59 * SECOND // 2, abs=2) and parts["small"].device_uuid == CARD
    # The one by hardware activity, the other by its meter; both as parts of the card's compute.
    assert (parts["half"].used_basis, parts["small"].used_basis) == ("sampled", "hook")
    assert parts["half"].used_us == pytest.approx(58 * 700_000 * 3 // 7, rel=0.02)
    assert parts["small"].used_us == 59 * 700_000 // 7
    assert (parts["half"].state, parts["small"].memory_used_kib_us is not None) == ("active", True)
    page = node.agent.page()
    assert page is not None and {part.device_uuid for part in page.snapshot.slices} == {CARD}
    assert [part.memory_used_bytes for part in page.snapshot.slices if part.allocation_id == "small"] == [2 * GIB]
    assert not [record for record in node.records() if getattr(record, "event", "") == "tampered"]


@pytest.mark.parametrize("old", ["released", "retired", "suspended"])
def test_an_instance_is_its_new_tenants_whatever_is_left_of_the_old_ones(node: Node, old: str) -> None:
    def show(busy: int) -> None:
        node.sampler.change(CARD, mig=True, busy_us_total=None, hardware=Hardware(instances=(instance(HALF, 0, 4, 3, busy=busy),)))
        node.tick()

    show(0)
    # The folder that is listed last belongs to the one that is gone.
    before = node.create("old", ppm=FULL_SHARE_PPM, memory=48 * GIB, uuids=(HALF,), meter=False, mode=Mode.MIG)
    show(0)
    if old == "suspended":
        node.change(before, "suspended", state=AllocationState.SUSPENDED)
    else:
        node.release(before)
    if old == "retired":  # what its file says was not written any more
        (node.run.retired / "old" / "allocation.json").write_text(canonical_json(before))
    node.create("new", ppm=FULL_SHARE_PPM, memory=48 * GIB, uuids=(HALF,), meter=False, mode=Mode.MIG)
    for second in range(5):
        show(second * 700_000)
    shared = {key.partition("|")[2]: part.shared_us_total for key, part in node.agent.ledger.slices.items()}
    assert shared["new"] == 4 * 300_000 and not shared.get("old") and not node.agent.ledger.devices[CARD].unaccounted_us_total


def test_an_instance_that_begins_anew_is_counted_from_its_beginning() -> None:
    pool, layout = Pool(), Layout()
    pool.seen_instances = layout.use
    for busy, counted in ((0, 0), (700_000, 300_000), (1_400_000, 600_000), (0, 600_000), (700_000, 900_000), (350_000, 1_050_000)):
        pool.change(mig=True, busy_us_total=None, hardware=Hardware(instances=(instance(HALF, 0, 4, 3, busy=busy),)))
        layout.learn(pool.readings.values())
        pool.step()
        assert pool.ledger.devices[CARD].unaccounted_us_total == counted


def test_an_instance_without_an_allocation_is_unaccounted_and_one_that_tells_nothing_is_unknown() -> None:
    pool = Pool()
    layout = Layout()

    def show(busy: int | None) -> None:
        pool.change(mig=True, busy_us_total=None, hardware=Hardware(instances=(instance(HALF, 0, 4, 3, busy=busy),)))
        layout.learn(pool.readings.values())

    show(0)
    pool.seen_instances = layout.use
    pool.step()
    show(700_000)
    pool.step()
    assert pool.ledger.devices[CARD].unaccounted_us_total == 300_000
    show(None)
    assert layout.use(pool.readings.values()) == {}


def test_the_layout_of_a_small_card_is_told_by_its_memory() -> None:
    card = device(CARD, memory_total_bytes=24 * GIB, hardware=Hardware(instances=(instance(HALF, 2, 2, 2, memory=int(11.8 * GIB)),)))
    layout = Layout()
    layout.learn([card])
    pool = Pool()
    pool.allocate("a")
    promise = dataclasses.replace(pool.allocations["a"].slices[0], device_uuid=HALF)
    placed = layout.allocation(dataclasses.replace(pool.allocations["a"], slices=(promise,)))
    assert [(part.device_uuid, part.promise_ppm) for part in placed.slices] == [(CARD, 500_000)]
