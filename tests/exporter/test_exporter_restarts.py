"""Killed at any moment: what the records say is what the counters gained, once."""

import dataclasses
import itertools
import tempfile
from pathlib import Path

from exporter_fakes import CARD, OTHER, SECOND, Node
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.exporter.spread import minutes_between, spread, spread_time
from poolmeter.model.units import MINUTE_US
from poolmeter.model.usage import DeviceRecord, SliceRecord, UsageRecord

STEP = st.one_of(
    st.tuples(st.just("tick"), st.integers(1, 30 * SECOND)),
    st.tuples(st.just("kill"), st.integers(1, 200 * SECOND)),
    st.tuples(st.just("use"), st.integers(0, SECOND)),
    st.tuples(st.just("resize"), st.integers(1, 500_000)),
    st.tuples(st.just("acknowledge"), st.integers(0, 5)),
    st.tuples(st.just("die"), st.just(0)),
)


@given(st.lists(STEP, min_size=3, max_size=25))
def test_records_say_what_the_counters_gained(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder), CARD, OTHER)
        began = node.clock.wall
        allocation = node.create("a", ppm=300_000, uuids=(CARD, OTHER))
        meter = node.meters["a"]
        meter.attach()
        used = {CARD: 0, OTHER: 0}
        promised, ppm, changed = 0, 300_000, node.clock.wall
        energy = 0
        stored: dict[int, UsageRecord] = {}
        retired = {CARD: 0, OTHER: 0}
        generation = 1
        for what, amount in [*steps, ("tick", MINUTE_US), ("tick", MINUTE_US), ("tick", 3 * MINUTE_US)]:
            if what == "tick":
                node.tick(amount)
            elif what == "kill":
                node.kill()
                node.clock.advance(amount)
                node.start()
            elif what == "use":
                used[CARD] += amount * 1000 + 7
                used[OTHER] += amount * 500
                energy += amount // 10_000  # never more than a board can draw, however short the step
                meter.count(CARD, busy_ns=used[CARD], launches=used[CARD] // 1000)
                meter.count(OTHER, busy_ns=used[OTHER], launches=1)
                node.sampler.change(CARD, energy_uj_total=energy)
            elif what == "resize":
                promised += ppm * (node.clock.wall - changed)
                ppm, changed = amount, node.clock.wall
                allocation = node.change(allocation, slices=tuple(dataclasses.replace(s, promise_ppm=ppm) for s in allocation.slices))
            elif what == "die":
                meter.die()
                meter.fold()
                generation += 1
                meter.attach(generation=generation)
                # From now on the slot counts from zero; what it had is in the retired totals.
                retired = {uuid: retired[uuid] + amount for uuid, amount in used.items()}
                used = dict.fromkeys(used, 0)
            elif what == "acknowledge":
                for record in node.spool.read(None, 0).records[:amount]:
                    stored[record.sequence] = record
                    node.spool.acknowledge("collector", node.spool.epoch, record.sequence)
        node.agent.stop()
        for record in node.records():
            stored[record.sequence] = record
        records = [stored[sequence] for sequence in sorted(stored)]
        assert [record.sequence for record in records] == list(range(1, len(records) + 1))
        promised += ppm * (node.clock.wall - changed)
        for uuid in (CARD, OTHER):
            parts = [record for record in records if isinstance(record, SliceRecord) and record.device_uuid == uuid]
            devices = [record for record in records if isinstance(record, DeviceRecord) and record.device_uuid == uuid]
            backlog = node.agent.ledger.slices[f"{uuid}|a"].backlog_us
            assert sum(part.used_us or 0 for part in parts) + backlog == (retired[uuid] + used[uuid]) // 1000
            assert all((part.used_us or 0) <= part.span_us for part in parts)
            assert sum(device.span_us for device in devices) == node.clock.wall - began
            assert all(first.start_us + first.span_us == second.start_us for first, second in itertools.pairwise(devices))
            for device in devices:
                parts_sum = device.allocated_us + device.unallocated_us + device.suspended_us + device.down_us + device.reserved_unused_us
                assert parts_sum == device.span_us and device.span_us <= MINUTE_US
            assert abs(sum(device.allocated_us for device in devices) - promised // 1_000_000) <= len(devices)
            assert sum(device.allocated_us for device in devices) == sum(part.allocated_us for part in parts)
        assert sum(r.energy_uj or 0 for r in records if isinstance(r, DeviceRecord) and r.device_uuid == CARD) == energy
        node.close()


@given(st.integers(0, 10**12), st.lists(st.integers(1, MINUTE_US), min_size=1, max_size=9), st.integers(-5, MINUTE_US))
def test_spreading_is_exact_and_bounded(amount: int, lengths: list[int], spare: int) -> None:
    assert sum(spread(amount, lengths)) == amount
    parts = spread_time(amount, lengths, spare)
    rooms = [lengths[0] + max(0, spare), *lengths[1:]]
    assert all(0 <= part <= room for part, room in zip(parts, rooms, strict=True))
    assert sum(parts) == min(amount, sum(rooms))


@given(st.integers(0, 10**15), st.integers(0, 10**9))
def test_minutes_cover_without_a_gap(start: int, length: int) -> None:
    pieces = minutes_between(start, start + length)
    assert sum(end - begin for begin, end in pieces) == length
    assert all(first[1] == second[0] and first[1] % MINUTE_US == 0 for first, second in itertools.pairwise(pieces))
    assert all(0 < end - begin <= MINUTE_US for begin, end in pieces)
