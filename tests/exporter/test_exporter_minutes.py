"""Minutes: what is closed and what it adds up to."""

import dataclasses
from collections.abc import Callable, Iterator

import pytest
from exporter_fakes import CARD, SECOND, T0, Node, identity, of, process

from poolmeter.model.allocation import AllocationState
from poolmeter.model.units import GIB, MINUTE_US
from poolmeter.model.usage import DeviceRecord, EventRecord, ProcessRecord, SliceRecord


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
