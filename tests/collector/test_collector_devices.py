"""The register of devices: what snapshots and rows tell of them, noted when it changes, and when they were last seen, to the minute."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

from collector_fakes import DAY, EPOCH, NOW, batch, device, records, scalar, snapshot
from hypothesis import given
from hypothesis import strategies as st

from poolmeter import arrow
from poolmeter.collector.now import newest
from poolmeter.collector.state import DEVICES_MOST, EPOCHS_MOST, SEEN_US, DeviceRow, with_devices
from poolmeter.collector.store import Batch, Store
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


def test_a_node_that_invents_epochs_and_devices_takes_no_room_without_end(tmp_path: Path) -> None:
    """Each catalog has all that is known of both; what a node invents costs no other node's, and not what is newest of its own."""

    def invented(turn: int) -> list[Batch]:
        epochs = [str(UUID(int=50 * turn + number + 1, version=4)) for number in range(50)]
        rows = {
            epoch: [device("n1", epoch, n + 1, DAY + turn * MINUTE_US, uuid_=f"GPU-{epoch}-{n}") for n in range(10)] for epoch in epochs
        }
        return [batch(found, epoch=epoch) for epoch, found in rows.items()]

    honest = batch(records("n2", EPOCH, 1, 8, DAY), "n2")
    with Store(tmp_path) as store:
        store.publish([honest], now_us=NOW)
        for turn in range(4):
            assert store.publish(invented(turn), now_us=NOW).known == 0
        assert store.publish([honest, *invented(3)], now_us=NOW).known == 8 + 500
        state = store.state
        assert sum(node == "n1" for node, _ in state.sequences) == EPOCHS_MOST and ("n2", EPOCH) in state.sequences
        assert sum(node == "n1" for node, _ in state.devices) == DEVICES_MOST and ("n2", "GPU-1") in state.devices
        assert {row.last_seen_us for row in state.devices.values() if row.node == "n1"} == {DAY + n * MINUTE_US for n in (1, 2, 3)}
    with Store(tmp_path) as store:
        assert store.state.sequences == state.sequences and store.state.devices == state.devices
    assert scalar(tmp_path, "SELECT COUNT(*) FROM device_minutes WHERE node = 'n1'") == 2000
