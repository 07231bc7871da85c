"""The register of devices: what snapshots and rows tell of them, noted when it changes, and when they were last seen, to the minute."""

from dataclasses import replace
from typing import Any

from collector_fakes import DAY, EPOCH, device, snapshot
from hypothesis import given
from hypothesis import strategies as st

from poolmeter import arrow
from poolmeter.collector.now import newest
from poolmeter.collector.state import SEEN_US, DeviceRow, with_devices
from poolmeter.model.snapshot import Snapshot
from poolmeter.model.units import MINUTE_US

CARDS = ("GPU-1", "GPU-2", "GPU-3")


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """One of a node at some second of an hour, with some cards, some of them with another driver or place."""
    taken = snapshot(draw(st.sampled_from(["n1", "n2"])), EPOCH, DAY + draw(st.integers(0, 3600)) * 1_000_000)
    cards = draw(st.lists(st.sampled_from(CARDS), unique=True, max_size=3))
    return replace(
        taken,
        devices=tuple(
            replace(taken.devices[0], uuid=uuid, index=draw(st.integers(0, 1)), driver_version=draw(st.sampled_from(["580", "590"])))
            for uuid in cards
        ),
    )


@given(st.lists(snapshots(), max_size=12), st.integers(1, 4))
def test_a_device_is_noted_when_it_changes_and_at_least_once_a_minute(taken: list[Snapshot], together: int) -> None:
    taken.sort(key=lambda one: one.taken_us)
    devices: dict[tuple[str, str], DeviceRow] = {}
    before: dict[str, Any] = {}
    plain: dict[tuple[str, str], list[Snapshot]] = {}
    for first in range(0, len(taken), together):
        group = [newest(one) for one in taken[first : first + together]]
        devices = with_devices(devices, None, group, before)
        before |= {one.node: one.tables for one in group}
        for one in taken[first : first + together]:
            for card in one.devices:
                plain.setdefault((one.node, card.uuid), []).append(one)
        assert devices.keys() == plain.keys()
        for (node, uuid), seen in plain.items():
            row = devices[(node, uuid)]
            last = next(card for card in seen[-1].devices if card.uuid == uuid)
            assert (row.number, row.model, row.driver) == (last.index, last.model, last.driver_version)
            assert row.first_seen_us == seen[0].taken_us and seen[-1].taken_us - SEEN_US < row.last_seen_us <= seen[-1].taken_us


def test_rows_tell_of_devices_that_no_snapshot_has_shown() -> None:
    rows = arrow.to_table([device("n1", EPOCH, n + 1, DAY + n * MINUTE_US, uuid_=f"GPU-{n % 2}") for n in range(4)])
    devices = with_devices({}, rows, [], {})
    assert {key: (row.number, row.first_seen_us, row.last_seen_us) for key, row in devices.items()} == {
        ("n1", "GPU-0"): (None, DAY, DAY + 2 * MINUTE_US),
        ("n1", "GPU-1"): (None, DAY + MINUTE_US, DAY + 3 * MINUTE_US),
    }
    # A snapshot says more of them, and rows of before say nothing new.
    known = with_devices(devices, None, [newest(replace(snapshot("n1", EPOCH, DAY + 9 * MINUTE_US), devices=_cards("GPU-0", "GPU-1")))], {})
    assert {row.number for row in known.values()} == {0} and with_devices(known, rows, [], {}) == known


def _cards(*uuids: str) -> tuple[Any, ...]:
    return tuple(replace(snapshot("n1", EPOCH, DAY).devices[0], uuid=uuid) for uuid in uuids)
