"""Minutes: what is closed, what it adds up to, and what survives."""

import dataclasses
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from exporter_fakes import CARD, OTHER, SECOND, T0, Meter, Node, device, process
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.model.allocation import AllocationState, Mode
from poolmeter.model.units import GIB, MINUTE_US
from poolmeter.model.usage import DeviceRecord, EventRecord, ProcessRecord, SliceRecord, UsageRecord


def of(records: tuple[UsageRecord, ...], kind: type) -> list:
    return [record for record in records if isinstance(record, kind)]


def identity(record: DeviceRecord) -> int:
    return record.allocated_us + record.reserved_unused_us + record.unallocated_us + record.suspended_us + record.down_us


def test_a_minute_of_one_tenant(node: Node) -> None:
    allocation = node.create("a")
    node.meters["a"].attach()
    for second in range(60):
        node.meters["a"].count(CARD, busy_ns=(second + 1) * 250_000_000, launches=(second + 1) * 10, memory=4 * GIB)
        node.sampler.change(
            CARD, busy_us_total=(second + 1) * 260_000, energy_uj_total=(second + 1) * 100 * SECOND, memory_used_bytes=5 * GIB
        )
        node.tick()
    (device,) = of(node.records(), DeviceRecord)
    (part,) = of(node.records(), SliceRecord)
    (one,) = of(node.records(), ProcessRecord)
    (created,) = of(node.records(), EventRecord)
    assert device.minute_us == device.start_us == T0 and device.span_us == MINUTE_US == identity(device)
    assert device.allocated_us == part.allocated_us == part.promised_us == MINUTE_US // 2
    assert device.busy_us == 15_600_000 and device.hooked_us == 15_000_000
    assert device.unaccounted_us == 0 and device.switch_overhead_us == 600_000
    assert device.energy_uj == 6000 * SECOND and device.completeness_ppm == 1_000_000
    assert device.memory_used_kib_us == 5 * GIB // 1024 * MINUTE_US and device.memory_peak_bytes == 5 * GIB
    assert (part.used_us, part.used_basis, part.launches, part.state) == (15_000_000, "hook", 600, "held")
    assert part.memory_used_kib_us == 4 * GIB // 1024 * MINUTE_US and part.memory_peak_bytes == 4 * GIB
    assert part.memory_limit_bytes == 10 * GIB and part.compute_limit_ppm is None and part.promise_ppm == 500_000
    assert part.energy_uj is not None and 0 < part.energy_uj < device.energy_uj
    assert (one.used_us, one.launches, one.hooked, one.tenant, one.command) == (15_000_000, 600, True, "tenant-a", "tenant")
    assert created.event == "created" and created.allocation_id == allocation.id and created.device_uuid == CARD
    assert {record.pool for record in node.records()} == {"lab"} and {record.node for record in node.records()} == {"node-a"}
    assert [record.sequence for record in node.records()] == [1, 2, 3, 4]


def test_a_short_process_between_two_ticks(node: Node) -> None:
    node.tick()
    allocation = node.create("short")
    meter = node.meters["short"]
    meter.attach()
    meter.count(CARD, busy_ns=290_000_000, launches=29, memory=GIB)
    node.clock.advance(300_000)
    meter.die()
    node.release(allocation)
    node.tick(700_000)
    node.tick(turns=59)
    (part,) = of(node.records(), SliceRecord)
    (one,) = of(node.records(), ProcessRecord)
    assert part.allocated_us == 150_000 and part.used_us == 290_000 and part.launches == 29 and part.state == "unallocated"
    assert (one.used_us, one.ended) == (290_000, True)
    assert part.memory_limit_bytes == 10 * GIB  # what it ran under, not what the closed grant says
    assert (node.run.retired / "short").exists()
    node.spool.acknowledge("collector", node.spool.epoch, node.spool.last_sequence)
    node.tick()
    assert not (node.run.retired / "short").exists()


def test_the_last_acknowledgement_after_a_stop_frees_the_folder(node: Node) -> None:
    allocation = node.create("a")
    node.tick()
    node.release(allocation)
    node.tick()
    node.agent.stop()
    node.agent.tidy()
    assert (node.run.retired / "a").exists()
    node.spool.acknowledge("collector", node.spool.epoch, node.spool.last_sequence)
    node.agent.tidy()
    assert not (node.run.retired / "a").exists()


def test_a_slot_folded_between_two_ticks_is_counted(node: Node) -> None:
    node.create("a")
    meter = node.meters["a"]
    meter.attach()
    meter.count(CARD, busy_ns=100_000_000)
    node.tick()
    meter.count(CARD, busy_ns=400_000_000)
    meter.die()
    meter.fold()
    node.tick(turns=59)
    (part,) = of(node.records(), SliceRecord)
    (one,) = of(node.records(), ProcessRecord)
    assert part.used_us == one.used_us == 400_000 and one.ended


def test_resizing_and_suspending_split_the_minute(node: Node) -> None:
    allocation = node.create("a", ppm=200_000)
    node.tick(turns=15)
    slices = tuple(dataclasses.replace(s, promise_ppm=600_000) for s in allocation.slices)
    allocation = node.change(allocation, slices=slices)
    node.tick(turns=15)
    allocation = node.change(allocation, "suspended", state=AllocationState.SUSPENDED)
    node.tick(turns=30)
    (device,) = of(node.records(), DeviceRecord)
    (part,) = of(node.records(), SliceRecord)
    assert device.allocated_us == part.allocated_us == 12 * SECOND
    assert device.suspended_us == part.suspended_us == 18 * SECOND
    assert identity(device) == MINUTE_US and part.state == "suspended" and part.generation == 3


def test_the_exporter_was_down_for_minutes(node: Node) -> None:
    allocation = node.create("a")
    meter = node.meters["a"]
    meter.attach()
    meter.count(CARD, busy_ns=1_000_000_000)
    node.tick(turns=90)
    node.kill()
    node.clock.advance(3 * MINUTE_US)
    node.release(allocation)
    meter.count(CARD, busy_ns=101_000_000_007)
    node.clock.advance(MINUTE_US)
    node.start()
    node.tick(turns=31)
    devices, parts = of(node.records(), DeviceRecord), of(node.records(), SliceRecord)
    assert [device.minute_us for device in devices] == [T0 + minute * MINUTE_US for minute in range(6)]
    assert all(device.span_us == MINUTE_US == identity(device) for device in devices)
    assert sum(part.used_us for part in parts) == 101_000_000
    assert sum(device.allocated_us for device in devices) == sum(part.allocated_us for part in parts) == (90 + 180) * SECOND // 2
    assert [device.completeness_ppm for device in devices] == [1_000_000, 500_000, 0, 0, 0, 500_000]
    assert devices[2].busy_us is None and devices[2].memory_used_kib_us is None and devices[2].unaccounted_us is None


def test_a_long_absence_is_a_gap(node: Node) -> None:
    node.create("a")
    node.tick(turns=30)
    node.kill()
    node.clock.advance(3 * 1440 * MINUTE_US)
    node.start()
    gaps = [record for record in of(node.records(), EventRecord) if record.event == "gap"]
    checkpointed = 29 * SECOND  # the last second before the kill was not checkpointed yet, and lies in the gap
    assert len(gaps) == 1 and gaps[0].span_us == 2 * 1440 * MINUTE_US + SECOND
    devices = of(node.records(), DeviceRecord)
    assert len(devices) == 1 + 1440 and all(identity(device) == device.span_us for device in devices)
    assert devices[0].span_us == checkpointed and devices[1].start_us == T0 + 30 * SECOND + 2 * 1440 * MINUTE_US


def test_programs_without_the_hook(node: Node) -> None:
    node.create("a")
    meter = node.meters["a"]
    meter.attach(pid=4_000_001, start=7)
    for second in range(1, 61):
        meter.count(CARD, busy_ns=second * 100_000_000, memory=GIB)
        node.sampler.change(
            CARD,
            busy_us_total=second * 400_000,
            processes=(process(4_000_001, 7, second * 110_000, GIB), process(4_000_002, 9, second * 250_000, 2 * GIB)),
        )
        node.tick()
    (device,) = of(node.records(), DeviceRecord)
    stranger, own = sorted(of(node.records(), ProcessRecord), key=lambda record: record.hooked)
    assert device.unaccounted_us == stranger.used_us == 15 * SECOND and device.hooked_us == own.used_us == 6 * SECOND
    assert device.switch_overhead_us == 3 * SECOND
    assert device.unaccounted_memory_kib_us == 2 * GIB // 1024 * MINUTE_US
    assert (stranger.allocation_id, stranger.tenant, stranger.used_basis) == (None, None, "sampled")


def test_stopping_closes_the_running_minute(node: Node) -> None:
    node.create("a")
    node.tick(turns=20)
    node.agent.stop()
    (device,) = of(node.records(), DeviceRecord)
    assert device.span_us == 20 * SECOND == identity(device)
    node.kill()
    node.start()
    node.tick(turns=40)
    first, second = of(node.records(), DeviceRecord)
    assert second.minute_us == first.minute_us == T0 and second.start_us == T0 + 20 * SECOND and second.span_us == 40 * SECOND


def test_a_lost_card_is_down_and_the_other_is_not(tmp_path: Path) -> None:
    node = Node(tmp_path, CARD, OTHER)
    node.create("a")
    node.tick(turns=30)
    node.sampler.change(CARD, up=False, reason="GPU is lost", memory_used_bytes=None)
    node.tick(turns=30)
    first, second = sorted(of(node.records(), DeviceRecord), key=lambda record: record.device_uuid)
    (part,) = of(node.records(), SliceRecord)
    assert first.down_us == 30 * SECOND and first.allocated_us == part.allocated_us == 15 * SECOND and identity(first) == MINUTE_US
    assert part.promised_us == 30 * SECOND
    assert second.down_us == 0 and second.unallocated_us == MINUTE_US
    page = node.agent.page()
    assert page is not None
    lost, good = page.snapshot.devices
    assert not lost.up and lost.power_mw is None and good.up and good.power_mw == 80_000
    node.close()


def test_clock_set_back_and_forward(node: Node) -> None:
    node.create("a")
    node.tick(turns=30)
    node.clock.wall -= 10 * MINUTE_US
    node.tick(turns=90)
    node.clock.wall += 30 * MINUTE_US
    node.tick(turns=60)
    devices = of(node.records(), DeviceRecord)
    assert all(device.span_us > 0 and identity(device) == device.span_us for device in devices)
    ends = [(device.start_us, device.start_us + device.span_us) for device in devices]
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    node.agent.stop()
    assert sum(device.span_us for device in of(node.records(), DeviceRecord)) == 180 * SECOND


@pytest.mark.parametrize("damage", ["short", "fifo", "back", "jump"])
def test_a_tampered_meter_stops_nothing(node: Node, damage: str) -> None:

    node.create("a")
    node.create("b", ppm=300_000)
    for name in ("a", "b"):
        node.meters[name].attach()
        node.meters[name].count(CARD, busy_ns=1_000_000_000)
    node.tick(turns=10)
    bad, path = node.meters["a"], node.meters["a"].path
    if damage == "short":
        os.truncate(path, 100)
    elif damage == "fifo":
        path.unlink()
        os.mkfifo(path)
    elif damage == "back":
        bad.count(CARD, busy_ns=1)
    else:
        bad.count(CARD, busy_ns=10**17)
    node.meters["b"].count(CARD, busy_ns=2_000_000_000)
    node.tick(turns=50)
    events = [record for record in of(node.records(), EventRecord) if record.event == "tampered"]
    assert [event.allocation_id for event in events] == ["a"]
    first, second = sorted(of(node.records(), SliceRecord), key=lambda record: record.allocation_id)
    assert second.used_us == 2 * SECOND and 0 <= first.used_us <= MINUTE_US and first.allocated_us == MINUTE_US // 2
    (device,) = of(node.records(), DeviceRecord)
    assert identity(device) == MINUTE_US


def test_a_new_page_is_a_new_origin(node: Node) -> None:
    node.create("a")
    node.meters["a"].attach()
    node.meters["a"].count(CARD, busy_ns=5_000_000_000, launches=50)
    node.tick(turns=10)
    path = node.meters["a"].path
    path.unlink()
    node.meters["a"].close()
    node.meters["a"] = Meter(path, CARD, allocation_id="a")
    node.meters["a"].attach()
    node.meters["a"].count(CARD, busy_ns=3_000_000_000, launches=30)
    node.tick(turns=50)
    (part,) = of(node.records(), SliceRecord)
    assert part.used_us == 8 * SECOND and part.launches == 80


def test_a_meter_that_lists_another_card(tmp_path: Path) -> None:
    node = Node(tmp_path, CARD, OTHER)
    node.create("a")
    path = node.meters["a"].path
    path.unlink()
    node.meters["a"].close()
    node.meters["a"] = Meter(path, CARD, OTHER, allocation_id="a")
    node.meters["a"].attach()
    node.meters["a"].count(CARD, busy_ns=1_000_000_000)
    node.meters["a"].count(OTHER, busy_ns=2_000_000_000)
    node.tick(turns=60)
    assert [part.device_uuid for part in of(node.records(), SliceRecord)] == [CARD]
    assert [device.hooked_us for device in of(node.records(), DeviceRecord)] == [SECOND, 0]
    assert {event.event for event in of(node.records(), EventRecord)} == {"created", "tampered"}
    node.close()


def test_a_turn_that_fails_half_way_counts_nothing_twice(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.create("a")
    node.meters["a"].attach()
    node.tick(turns=10)
    node.meters["a"].count(CARD, busy_ns=1_000_000_000, launches=10)

    def fails(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(node.agent._integrator, "_gauge", fails)
        with pytest.raises(RuntimeError):
            node.tick()
        node.agent.recover()
    node.tick(turns=50)
    (part,) = of(node.records(), SliceRecord)
    (device,) = of(node.records(), DeviceRecord)
    assert (part.used_us, part.launches, device.span_us, identity(device)) == (SECOND, 10, MINUTE_US, MINUTE_US)


def test_a_card_taken_out_between_two_runs(tmp_path: Path) -> None:
    node = Node(tmp_path, CARD, OTHER)
    node.tick(turns=70)
    node.kill()
    del node.sampler.devices[OTHER]
    node.start()
    node.tick(turns=51)
    page = node.agent.page()
    assert page is not None and [device.uuid for device in page.snapshot.devices] == [CARD]
    node.tick(turns=60)
    assert [device.device_uuid for device in of(node.records(), DeviceRecord)] == [CARD, OTHER, CARD, OTHER, CARD]
    del node.sampler.devices[CARD]  # this one vanishes while it is watched
    node.tick(turns=59)
    assert len(of(node.records(), DeviceRecord)) == 6
    last = of(node.records(), DeviceRecord)[-1]
    assert last.device_uuid == CARD and last.down_us == 59 * SECOND
    node.close()


def test_a_card_put_in_between_two_runs(tmp_path: Path) -> None:
    node = Node(tmp_path, CARD)
    node.tick(turns=30)
    node.kill()
    node.clock.advance(10 * MINUTE_US)
    node.sampler.devices[OTHER] = device(OTHER, 1)
    node.start()
    node.tick(turns=90)
    seen = [record.device_uuid for record in of(node.records(), DeviceRecord)]
    assert seen.count(CARD) == 12 and seen.count(OTHER) == 2
    first = next(record for record in of(node.records(), DeviceRecord) if record.device_uuid == OTHER)
    assert first.start_us == T0 + 10 * MINUTE_US + 30 * SECOND and first.span_us == 30 * SECOND
    node.close()


def test_a_new_journal_is_read_and_an_old_one_not_again(node: Node) -> None:
    first = node.create("a", ppm=200_000)
    node.tick(turns=10)
    lines = node.data.journal.read_text()
    node.data.journal.write_text("")
    node.tick()
    node.data.journal.write_text(lines)  # the same one, restored
    node.tick(turns=9)
    assert len(of(node.records(), EventRecord)) == 1
    node.data.journal.unlink()
    node.sequence = 0
    node.change(first, slices=tuple(dataclasses.replace(s, promise_ppm=600_000) for s in first.slices))
    node.tick(turns=40)
    (device,) = of(node.records(), DeviceRecord)
    assert len(of(node.records(), EventRecord)) == 2 and device.allocated_us == (20 * 2 + 40 * 6) * SECOND // 10


def test_turns_without_end_hold_no_more_than_what_is_there(node: Node, rounds: Callable[[int, int], Iterator[int]]) -> None:
    """Allocations and strangers come and go; what is kept is what stands."""
    sizes: list[int] = []
    for turn in rounds(40, 2000):
        allocation = node.create(f"churn-{turn}", ppm=100_000)
        meter = node.meters[allocation.id]
        meter.attach()
        meter.count(CARD, busy_ns=100_000_000, memory=GIB)
        node.sampler.change(CARD, processes=(process(5_000_000 + turn, turn + 1, 10_000, GIB),))
        node.tick(5 * SECOND)
        meter.die()
        node.release(allocation)
        node.tick(5 * SECOND)
        node.meters.pop(allocation.id).close()
        node.spool.acknowledge("collector", node.spool.epoch, node.spool.last_sequence)
        sizes.append(len(node.agent.ledger.to_json()) + len(list(node.run.retired.iterdir())))
    ledger = node.agent.ledger
    assert len(ledger.slices) <= 16 and len(ledger.known) <= 16 and len(ledger.processes) <= 32 and len(ledger.settled) <= 16
    assert max(sizes[len(sizes) // 2 :]) <= 1.1 * max(sizes[: len(sizes) // 2]) and node.spool.held() == 0
    assert len(node.agent._attribution._owners) <= 64


def test_a_whole_card_without_a_hook(node: Node) -> None:
    allocation = node.create("w", ppm=1_000_000, meter=False, mode=Mode.WHOLE)
    for second in range(1, 61):
        node.sampler.change(CARD, busy_us_total=second * 700_000)
        node.tick()
    (part,) = of(node.records(), SliceRecord)
    assert (part.used_us, part.used_basis, part.launches, part.memory_used_kib_us) == (42 * SECOND, "sampled", None, None)
    node.create("other", ppm=0, meter=False, mode=Mode.WHOLE)
    node.tick(turns=60)
    # The card's own time is never copied to two.
    assert [(p.used_us, p.used_basis) for p in of(node.records(), SliceRecord)[1:]] == [(None, "allocated")] * 2
    assert allocation.mode is Mode.WHOLE


def test_a_hook_share_without_a_meter_is_unknown(node: Node) -> None:
    node.create("a", meter=False)
    node.sampler.change(CARD, busy_us_total=30 * SECOND)
    node.tick(turns=60)
    (part,) = of(node.records(), SliceRecord)
    assert part.used_us is None and part.used_basis == "allocated" and part.state == "unknown" and part.completeness_ppm == 0
    page = node.agent.page()
    assert page is not None and page.snapshot.slices[0].busy_us_total is None and page.snapshot.slices[0].state == "unknown"


@given(
    st.lists(st.tuples(st.integers(0, 333_333), st.integers(0, 60 * SECOND)), max_size=3),
    st.integers(0, 60 * SECOND),
    st.integers(0, 40_000 * SECOND),
)
def test_energy_of_slices_and_the_rest_make_the_boards(shares: list[tuple[int, int]], busy_us: int, energy_uj: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder))
        for index, (ppm, used) in enumerate(shares):
            node.create(f"a{index}", ppm=ppm)
            node.meters[f"a{index}"].attach()
            node.meters[f"a{index}"].count(CARD, busy_ns=used * 1000)
        node.sampler.change(CARD, busy_us_total=busy_us, energy_uj_total=energy_uj)
        node.tick(MINUTE_US)
        (device,) = of(node.records(), DeviceRecord)
        parts = of(node.records(), SliceRecord)
        assert device.energy_uj == energy_uj and all(part.energy_uj >= 0 for part in parts)
        assert sum(part.energy_uj for part in parts) <= energy_uj
        if device.unallocated_us == 0 and device.busy_us == device.hooked_us and parts:
            assert sum(part.energy_uj for part in parts) == energy_uj
        node.close()


def test_a_card_allocated_and_used_in_full_gives_all_its_energy_away(node: Node) -> None:
    for name, ppm in (("a", 300_000), ("b", 700_000)):
        node.create(name, ppm=ppm)
        node.meters[name].attach()
        node.meters[name].count(CARD, busy_ns=ppm * 30_000)
    node.sampler.change(CARD, busy_us_total=30 * SECOND, energy_uj_total=12_345_678_901)
    node.tick(MINUTE_US)
    (device,), parts = of(node.records(), DeviceRecord), of(node.records(), SliceRecord)
    assert sum(part.energy_uj for part in parts) == device.energy_uj == 12_345_678_901
