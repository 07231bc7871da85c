"""Minutes in which something was away: the exporter, a card, the right time."""

import itertools
from pathlib import Path

from exporter_fakes import CARD, GIB, OTHER, SECOND, T0, Node, device, identity, of, process

from poolmeter.model.units import MINUTE_US
from poolmeter.model.usage import DeviceRecord, EventRecord, SliceRecord


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


def test_a_card_taken_out_while_a_program_holds_its_slot(tmp_path: Path) -> None:
    node = Node(tmp_path, CARD, OTHER)
    node.create("a", uuids=(CARD, OTHER))
    node.meters["a"].attach()
    for number, uuid in enumerate((CARD, OTHER), 1):
        node.meters["a"].count(uuid, busy_ns=number * 1_000_000_000, memory=GIB)
    node.sampler.change(OTHER, processes=(process(77, 7, 0, GIB),))
    node.tick(turns=70)
    page = node.agent.page()
    assert page is not None and {p.device_uuid for p in page.snapshot.processes} == {CARD, OTHER}
    node.kill()
    held = node.sampler.devices.pop(OTHER)
    node.start()
    for _ in range(180):
        node.tick()  # none of them fails
        page = node.agent.page()
        assert page is not None and page.snapshot.taken_us == node.clock.wall
    assert [p.device_uuid for p in page.snapshot.processes] == [part.device_uuid for part in page.snapshot.slices] == [CARD]
    node.kill()
    node.sampler.devices[OTHER] = held
    node.start()
    node.tick(turns=60)
    page = node.agent.page()
    assert page is not None and {p.device_uuid for p in page.snapshot.processes if p.hooked} == {CARD, OTHER}
    used = [part.used_us for part in of(node.records(), SliceRecord) if part.device_uuid == OTHER]
    assert sum(used) == 2 * SECOND  # counted once, whatever came between
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
