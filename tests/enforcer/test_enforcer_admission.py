"""Admission: no sequence of requests promises more than the cards can keep, and nothing that fits is refused."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.enforcer.admission import OverCommit, admit_change, demand_of, objection, occupancy, place, promise_on
from poolmeter.enforcer.inventory import Device
from poolmeter.enforcer.request import AllocationRequest
from poolmeter.errors import BadInput, Refused
from poolmeter.model.allocation import Allocation, AllocationState, Labels, Mode, SlicePromise

GIB = 1 << 30
CARD = 80 * GIB
DEVICES = tuple(Device(f"GPU-{index}", index, "Test Card", CARD) for index in range(4))

shares = st.none() | st.sampled_from([1, 100_000, 250_000, 333_333, 500_000, 1_000_000]) | st.integers(1, 1_000_000)
sizes = st.none() | st.sampled_from([1, GIB, 20 * GIB, CARD, CARD + 1]) | st.integers(1, CARD + GIB)
requests = st.builds(
    AllocationRequest,
    labels=st.just(Labels("acme")),
    mode=st.sampled_from([Mode.HOOK, Mode.HOOK, Mode.HOOK, Mode.WHOLE]),
    devices=st.just(()) | st.lists(st.sampled_from(["0", "1", "GPU-2", "GPU-3"]), unique=True, max_size=3).map(tuple),
    device_count=st.integers(1, 5),
    compute_ppm=shares,
    memory_bytes=sizes,
)
overs = st.builds(OverCommit, st.decimals(1, 3, places=2), st.decimals(1, 3, places=2))


def allocation(number: int, request: AllocationRequest, slices: tuple[SlicePromise, ...]) -> Allocation:
    return Allocation(
        id=f"a-{number}",
        labels=request.labels,
        mode=request.mode,
        slices=slices,
        state=AllocationState.ACTIVE,
        generation=2,
        created_us=number,
        changed_us=number,
    )


@given(st.lists(requests, max_size=30), overs, st.data())
def test_no_card_is_promised_beyond_its_over_commit(asked: list[AllocationRequest], over: OverCommit, data: st.DataObject) -> None:
    held: list[Allocation] = []
    for number, request in enumerate(asked):
        if held and data.draw(st.integers(0, 3)) == 0:
            held.pop(data.draw(st.integers(0, len(held) - 1)))
        cards = occupancy(DEVICES, held)
        fitting = {card.device.uuid for card in cards if objection(card, promise_on(card.device, request), request.mode, over) is None}
        named = {device.uuid for device in DEVICES if device.uuid in request.devices or str(device.index) in request.devices}
        try:
            slices = place(request, cards, over)
        except Refused:
            assert not named <= fitting if named else len(fitting) < request.device_count
            continue
        assert {item.device_uuid for item in slices} == named if named else len(slices) == request.device_count
        held.append(allocation(number, request, slices))
        for card in occupancy(DEVICES, held):
            assert card.promised_ppm <= 1_000_000 * over.compute
            assert card.promised_bytes <= CARD * over.memory
            on_card = [item for item in held if card.device.uuid in {part.device_uuid for part in item.slices}]
            assert not any(item.mode is Mode.WHOLE for item in on_card) or len(on_card) == 1
            for item in on_card:
                assert all(0 < part.promise_ppm <= 1_000_000 and 0 < part.memory_bytes <= CARD for part in item.slices)


@given(st.integers(1, 40))
def test_equal_shares_fill_a_card_exactly_n_times(count: int) -> None:
    request = AllocationRequest(Labels("acme"), device_count=1, compute_ppm=1_000_000 // count)
    by_memory = AllocationRequest(Labels("acme"), device_count=1, memory_bytes=CARD // count)
    for asked in (request, by_memory):
        held: list[Allocation] = []
        for number in range(count):
            held.append(allocation(number, asked, place(asked, occupancy(DEVICES[:1], held), OverCommit())))


def test_neither_share_is_the_whole_card_without_a_limit() -> None:
    (item,) = place(AllocationRequest(Labels("acme")), occupancy(DEVICES, ()), OverCommit())
    assert item == SlicePromise("GPU-0", 1_000_000, CARD, None)


def test_compute_alone_promises_the_same_fraction_of_the_memory_and_limits_both() -> None:
    (item,) = place(AllocationRequest(Labels("acme"), compute_ppm=250_000), occupancy(DEVICES, ()), OverCommit())
    assert item == SlicePromise("GPU-0", 250_000, 20 * GIB, 250_000)


def test_memory_alone_promises_the_same_fraction_of_time_and_does_not_limit_it() -> None:
    (item,) = place(AllocationRequest(Labels("acme"), memory_bytes=20 * GIB), occupancy(DEVICES, ()), OverCommit())
    assert item == SlicePromise("GPU-0", 250_000, 20 * GIB, None)


def held_on(uuid: str, ppm: int, memory: int, number: int = 0) -> Allocation:
    request = AllocationRequest(Labels("other"))
    return allocation(number, request, (SlicePromise(uuid, ppm, memory),))


def test_best_fit_takes_the_card_with_the_least_left_that_has_room() -> None:
    held = [held_on("GPU-1", 600_000, GIB), held_on("GPU-2", 800_000, GIB), held_on("GPU-3", 600_000, 2 * GIB)]
    cards = occupancy(DEVICES, held)
    request = AllocationRequest(Labels("acme"), device_count=3, compute_ppm=300_000)
    assert [item.device_uuid for item in place(request, cards, OverCommit())] == ["GPU-3", "GPU-1", "GPU-0"]


def test_a_refusal_names_what_is_asked_and_what_is_free() -> None:
    cards = occupancy(DEVICES[:1], [held_on("GPU-0", 800_000, 10 * GIB)])
    with pytest.raises(Refused, match=r"1 device\(s\) asked, 0 of 1 have room \(device 0: 30 % of its time is asked, 20 % is free\)"):
        place(AllocationRequest(Labels("acme"), compute_ppm=300_000), cards, OverCommit())
    with pytest.raises(Refused, match=r"device GPU-0 \(index 0\) has no room: 71.0 GiB is asked, 70.0 GiB is free"):
        place(AllocationRequest(Labels("acme"), devices=("0",), compute_ppm=1, memory_bytes=71 * GIB), cards, OverCommit())


def test_over_commit_promises_more_than_the_card_but_no_single_promise_above_it() -> None:
    cards = occupancy(DEVICES[:1], [held_on("GPU-0", 1_000_000, CARD)])
    over = OverCommit(Decimal("1.5"), Decimal(2))
    assert place(AllocationRequest(Labels("acme"), compute_ppm=500_000), cards, over)
    with pytest.raises(Refused, match="the card has"):
        place(AllocationRequest(Labels("acme"), memory_bytes=CARD + 1), cards, OverCommit(Decimal(9), Decimal(9)))


def test_a_card_with_a_problem_takes_nothing() -> None:
    devices = (Device("GPU-0", 0, "Test Card", CARD, "it is in MIG mode"),)
    with pytest.raises(Refused, match="MIG mode"):
        place(AllocationRequest(Labels("acme")), occupancy(devices, ()), OverCommit())


def test_one_card_named_twice_or_unknown_is_bad_input() -> None:
    cards = occupancy(DEVICES, ())
    with pytest.raises(BadInput, match="one card twice"):
        place(AllocationRequest(Labels("acme"), devices=("0", "GPU-0")), cards, OverCommit())
    with pytest.raises(BadInput, match=r"device is '7', expected one of this node: 0 \(GPU-0\)"):
        place(AllocationRequest(Labels("acme"), devices=("7",)), cards, OverCommit())


@given(shares, shares, st.integers(0, 1_000_000), sizes, sizes, st.integers(0, CARD))
def test_a_resize_may_always_shrink_and_grows_only_into_what_is_free(
    before: int | None, after: int | None, others: int, memory: int | None, new_memory: int | None, others_memory: int
) -> None:
    mine = held_on("GPU-0", before or 1, min(memory or 1, CARD))
    rest = [held_on("GPU-0", others, others_memory, 1)] if others and others_memory else []
    asked = (SlicePromise("GPU-0", after or 1, new_memory or 1),)
    old = mine.slices[0]
    grows_too_far = (after or 1) > old.promise_ppm and (after or 1) + (others if rest else 0) > 1_000_000
    grows_too_far |= (new_memory or 1) > old.memory_bytes and (new_memory or 1) + (others_memory if rest else 0) > CARD
    if grows_too_far:
        with pytest.raises(Refused):
            admit_change(mine, asked, occupancy(DEVICES, rest), OverCommit())
    else:
        admit_change(mine, asked, occupancy(DEVICES, rest), OverCommit())


def test_a_demand_keeps_the_shape_of_what_was_refused() -> None:
    request = AllocationRequest(Labels("acme"), device_count=2, memory_bytes=40 * GIB, cpu_milli=500)
    demand = demand_of(request, occupancy(DEVICES, ()))
    assert (demand.devices, demand.promise_ppm, demand.memory_bytes, demand.cpu_milli) == (2, 500_000, 40 * GIB, 500)
