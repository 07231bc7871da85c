"""Minutes of meters: damaged, new, foreign and absent ones, and whose the energy is."""

import os
import tempfile
from pathlib import Path

import pytest
from exporter_fakes import CARD, GIB, OTHER, SECOND, Meter, Node, identity, of, process
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.exporter.collectors import FAMILIES
from poolmeter.exporter.collectors.family import Page
from poolmeter.exporter.render import Renderer
from poolmeter.model.allocation import Mode
from poolmeter.model.units import MINUTE_US
from poolmeter.model.usage import DeviceRecord, EventRecord, ProcessRecord, SliceRecord


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


@pytest.mark.parametrize("damage", ["short", "fifo", "folder", "back"])
def test_a_meter_that_cannot_be_read_or_believed_is_not_nothing(tmp_path: Path, damage: str) -> None:
    node = Node(tmp_path, CARD, OTHER)
    for name, uuid in (("a", CARD), ("b", CARD), ("c", OTHER)):
        node.create(name, uuids=(uuid,))
        node.meters[name].attach()
        node.meters[name].count(uuid, busy_ns=SECOND, memory=2 * GIB)
        node.sampler.change(uuid, memory_used_bytes=5 * GIB)
    node.tick()
    assert [(d.hooked_memory_bytes, d.memory_difference_bytes) for d in _page(node).snapshot.devices] == [
        (4 * GIB, GIB),
        (2 * GIB, 3 * GIB),
    ]
    path = node.meters["a"].path
    if damage == "short":
        os.truncate(path, 100)
    elif damage == "back":
        node.meters["a"].count(CARD, busy_ns=1)
    else:
        path.unlink()
        (os.mkfifo if damage == "fifo" else os.mkdir)(path)
    node.tick()
    assert [(d.hooked_memory_bytes, d.memory_difference_bytes) for d in _page(node).snapshot.devices] == [(None, None), (2 * GIB, 3 * GIB)]
    page = Renderer(FAMILIES).render(_page(node)).decode()
    assert f'hooked_memory_bytes{{uuid="{OTHER}"}}' in page and f'hooked_memory_bytes{{uuid="{CARD}"}}' not in page
    node.close()


def _page(node: Node) -> Page:
    page = node.agent.page()
    assert page is not None
    return page


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


def test_a_hooked_program_of_less_than_a_tick_is_no_stranger(node: Node) -> None:
    node.create("a")
    node.tick(turns=3)
    meter = node.meters["a"]
    meter.attach(pid=4_190_001, start=77)
    meter.count(CARD, busy_ns=400_000_000, launches=4)
    meter.die()
    meter.fold()
    node.sampler.change(
        CARD, busy_us_total=600_000, processes=(process(4_190_001, 77, 400_000, GIB, listed=False), process(4_190_002, 77, 200_000, GIB))
    )
    node.tick(turns=57)
    (device,) = of(node.records(), DeviceRecord)
    assert (device.hooked_us, device.unaccounted_us) == (400_000, 200_000)
    assert [(record.pid, record.hooked) for record in of(node.records(), ProcessRecord)] == [(4_190_002, False)]
