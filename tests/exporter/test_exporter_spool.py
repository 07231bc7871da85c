"""The spool: positions, acknowledgements, retention, damage."""

import sqlite3
from pathlib import Path

import pytest
from exporter_fakes import CARD, T0, Node

from poolmeter.errors import BadInput, DataError, Refused, Unavailable
from poolmeter.exporter.spool import Spool, event
from poolmeter.model.units import DAY_US, MINUTE_US
from poolmeter.model.usage import EventRecord, UsageRecord


def records(spool: Spool, count: int, at_us: int = T0) -> list[UsageRecord]:
    first = spool.last_sequence + 1
    return [event("n", spool.epoch, sequence, at_us, "created", f"number {sequence}") for sequence in range(first, first + count)]


def sequences(spool: Spool, after: int = 0, epoch: str | None = None, limit: int = 100) -> list[int]:
    return [record.sequence for record in spool.read(epoch, after, limit).records]


def test_positions_and_limits(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", "n", ("collector",))
    spool.commit(records(spool, 5), "{}")
    assert sequences(spool) == [1, 2, 3, 4, 5] and sequences(spool, 3, spool.epoch) == [4, 5]
    batch = spool.read(spool.epoch, 1, 2)
    assert (batch.last, batch.more, len(batch.records)) == (3, True, 2)
    end = spool.read(spool.epoch, 5)
    assert (end.last, end.more, end.records) == (5, False, ())
    # A reader of another epoch starts anew.
    assert sequences(spool, 4, "00000000-0000-0000-0000-000000000000") == [1, 2, 3, 4, 5]


def test_reading_frees_nothing_and_the_slowest_consumer_decides(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", "n", ("one", "two"))
    spool.commit(records(spool, 5), "{}")
    assert sequences(spool) == sequences(spool)
    spool.acknowledge("one", spool.epoch, 4)
    assert spool.held() == 5 and spool.acknowledged() == 0
    assert spool.acknowledge("two", spool.epoch, 2) == 2
    assert sequences(spool) == [3, 4, 5] and spool.acknowledged() == 2
    assert spool.acknowledge("two", spool.epoch, 1) == 2  # going back changes nothing
    spool.close()
    again = Spool(tmp_path / "s", "n", ("one",))
    assert again.acknowledged() == 4 and again.last_sequence == 5  # a consumer no longer configured holds nothing
    again.commit(records(again, 1), "{}")
    assert sequences(again, 4) == [5, 6]


@pytest.mark.parametrize(
    ("consumer", "sequence", "error", "said"),
    [
        ("stranger", 1, BadInput, "expected one of collector"),
        ("collector", 6, Refused, "expected at most 5"),
        ("collector", -1, Refused, "at most 5"),
    ],
)
def test_refused_acknowledgements(tmp_path: Path, consumer: str, sequence: int, error: type[Exception], said: str) -> None:
    spool = Spool(tmp_path / "s", "n", ("collector",))
    spool.commit(records(spool, 5), "{}")
    with pytest.raises(error, match=said):
        spool.acknowledge(consumer, spool.epoch, sequence)
    with pytest.raises(Refused, match="epoch is"):
        spool.acknowledge("collector", "elsewhere", 1)
    assert spool.held() == 5


def test_records_and_state_are_one(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", "n", ())
    spool.commit(records(spool, 2), '{"a": 1}')
    with pytest.raises(ValueError, match="do not continue"):
        spool.commit([event("n", "e", 9, T0, "x", "")], '{"a": 2}')
    wrong = records(spool, 1)
    object.__setattr__(wrong[0], "minute_us", None)  # the table refuses it, after the record was begun
    with pytest.raises(sqlite3.IntegrityError):
        spool.commit(wrong, '{"a": 3}')
    assert spool.load_state() == {"a": 1} and sequences(spool) == [1, 2] and spool.last_sequence == 2
    spool.commit(records(spool, 1), '{"a": 4}')
    assert sequences(spool) == [1, 2, 3]


def test_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", "n", ())
    spool.close()
    with sqlite3.connect(tmp_path / "s") as db:
        db.execute("UPDATE meta SET value = 'poolmeter.spool/9' WHERE key = 'schema'")
    before = (tmp_path / "s").read_bytes()
    with pytest.raises(DataError, match=r"has schema poolmeter\.spool/9, expected poolmeter\.spool/1") as caught:
        Spool(tmp_path / "s", "n", ())
    assert caught.value.exit_code == 2 and (tmp_path / "s").read_bytes() == before


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "s") as db:
        db.execute("CREATE TABLE cats (name)")
    with pytest.raises(DataError, match="has schema unknown"):
        Spool(tmp_path / "s", "n", ())


def test_one_writer(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", "n", ())
    with pytest.raises(Unavailable, match="in use by another exporter"):
        Spool(tmp_path / "s", "n", ())
    spool.close()
    Spool(tmp_path / "s", "n", ()).close()


def test_damage_is_moved_aside_and_told(node: Node) -> None:
    node.create("a")
    node.tick(turns=61)
    epoch = node.spool.epoch
    node.kill()
    body = bytearray(node.data.spool.read_bytes())
    body[0:4096] = b"rubbish!" * 512
    node.data.spool.write_bytes(body)
    node.start()
    node.tick()
    assert node.spool.epoch != epoch and list(node.data.root.glob("spool.sqlite.corrupted-*"))
    (told,) = [record for record in node.records() if isinstance(record, EventRecord)]
    assert told.event == "gap" and told.reason is not None and "corrupted" in told.reason
    page = node.agent.page()
    assert page is not None and [part.allocation_id for part in page.snapshot.slices] == ["a"]  # what stands is known from the journal


def test_what_is_too_old_goes_and_is_told(node: Node) -> None:
    node.tick(turns=61)
    old = node.spool.held()
    node.clock.advance(8 * DAY_US)
    node.tick()
    for _ in range(3):
        node.tick(10 * MINUTE_US)
    gaps = [
        record
        for record in node.records()
        if isinstance(record, EventRecord) and record.event == "gap" and "dropped" in (record.reason or "")
    ]
    assert gaps and gaps[0].detail is not None and f'"records":{old}' in gaps[0].detail
    assert min(record.minute_us for record in node.records()) >= node.clock.wall - 7 * DAY_US - MINUTE_US


def test_a_full_disk_loses_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.create("a")
    node.tick(turns=58)

    def full(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(node.spool, "commit", full)
        node.tick(turns=4)
        page = node.agent.page()
        assert page is not None and [s.source for s in page.snapshot.sources if not s.ok] == ["spool"]
    node.tick()
    kinds = [(type(record).__name__, getattr(record, "device_uuid", None)) for record in node.records()]
    assert kinds == [("EventRecord", CARD), ("DeviceRecord", CARD), ("SliceRecord", CARD)]
