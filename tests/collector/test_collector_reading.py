"""Reading the store: its columns, damage and foreign versions, readers beside the writer."""

import os
import re
import threading
from pathlib import Path

import duckdb
import pytest
from collector_fakes import ALL_ROWS, DAY, EPOCH, MINUTES, NOW, batch, device, records, scalar, slice_, snapshot, stored

from poolmeter import arrow
from poolmeter.collector import catalog
from poolmeter.collector.catalog import CURRENT, open_catalog, query
from poolmeter.collector.maintenance import FAN_IN, maintain
from poolmeter.collector.retention import Retention
from poolmeter.collector.segments import publish_records
from poolmeter.collector.store import Store
from poolmeter.collector.tables import STORE_VERSION, TABLES, VIEWS, view_fields
from poolmeter.errors import BadInput, DataError, Unavailable
from poolmeter.model.units import DAY_US, MINUTE_US
from poolmeter.model.usage import RecordKind, UsageRecord


def test_an_empty_store_has_every_view_and_table_with_the_columns_of_the_schema(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with open_catalog(tmp_path) as connection:
        for view in VIEWS:
            found = [(name, kind) for name, kind, *_ in connection.execute(f"DESCRIBE {view}").fetchall()]
            assert found == [(field.name, field.type) for field in view_fields(view)], view
            assert connection.execute(f"SELECT count(*) FROM {view}").fetchall() == [(0,)]
        for name, wanted in TABLES.items():
            found = [(column, kind) for column, kind, *_ in connection.execute(f"DESCRIBE {name}").fetchall()]
            assert found == [(field.name, field.type) for field in wanted], name


def test_a_full_store_has_the_same_columns_and_gives_records_back_exactly(tmp_path: Path) -> None:
    made = records("n1", EPOCH, 1, 16, DAY)
    publish_records(tmp_path, made, [snapshot("n1", EPOCH, NOW)], now_us=NOW)
    with open_catalog(tmp_path) as connection:
        for view in VIEWS:
            found = [(name, kind) for name, kind, *_ in connection.execute(f"DESCRIBE {view}").fetchall()]
            assert found == [(field.name, field.type) for field in view_fields(view)], view
    for kind, view in [*MINUTES.items(), (RecordKind.EVENT, "event_log")]:
        names = [column.name for column in arrow.kind_schema(kind)]
        got = query(tmp_path, f"SELECT * FROM {view} ORDER BY sequence").select(names).to_pylist()
        want = [{name: getattr(record, name) for name in names} for record in made if type(record).__name__.lower().startswith(kind.value)]
        assert got == want and want
    assert query(tmp_path, "SELECT node, uuid, index, vendor FROM devices").to_pylist() == [
        {"node": "n1", "uuid": "GPU-1", "index": 0, "vendor": "nvidia"}
    ]
    assert scalar(tmp_path, "SELECT memory_limit_bytes FROM now_slices") == 1 << 30
    assert query(tmp_path, "SELECT node, simulated, pool, last_sequence FROM nodes").to_pylist() == [
        {"node": "n1", "simulated": True, "pool": "p", "last_sequence": 16}
    ]


def test_the_reference_page_lists_exactly_these_columns() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "store.md").read_text("utf-8")
    sections = {part.split("\n", 1)[0].strip(): part for part in page.split("\n### ")[1:]}
    wanted = {view: view_fields(view) for view in VIEWS} | TABLES
    assert set(sections) == set(wanted)
    for name, columns in wanted.items():
        listed = re.findall(r"^\| (\w+) \| ([^|]+) \| (may be NULL)? ?\|$", sections[name], re.M)[1:]
        assert listed == [(column.name, column.type, "may be NULL" if column.nullable else "") for column in columns], name


WRONG = (
    "SELEC",
    "SELECT colour FROM device_minutes",
    "SELECT * FROM nowhere",
    "SELECT CAST(node AS INTEGER) FROM device_minutes",
    "SELECT strptime(node, '%Y') FROM device_minutes",
    "SELECT 9223372036854775807 + count(*) FROM device_minutes",
    "SELECT * FROM device_minutes WHERE node = ?",
)


@pytest.mark.parametrize("body", [b"", b"PAR1", b"x" * 4096])
def test_a_torn_segment_is_damage_and_wrong_sql_is_not(tmp_path: Path, body: bytes) -> None:
    with Store(tmp_path) as store:
        store.publish([batch(records("n1", EPOCH, 1, 16, DAY))], now_us=NOW)
    for wrong in WRONG:
        with pytest.raises(duckdb.Error):
            query(tmp_path, wrong)
    with pytest.raises(Unavailable, match="cannot be read: Out of Memory"):
        query(tmp_path, "SET memory_limit = '1MB'; SELECT count(*) FROM (SELECT DISTINCT range, random() FROM range(10000000))")
    for path in tmp_path.rglob("*.parquet"):
        path.write_bytes(body)
    with pytest.raises(DataError, match="cannot be read") as caught:
        query(tmp_path, ALL_ROWS)
    assert "\n" not in str(caught.value)


def test_missing_and_foreign_stores_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="is not there"):
        open_catalog(tmp_path / "nowhere")
    (tmp_path / CURRENT).write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="is no text"):
        open_catalog(tmp_path)
    (tmp_path / CURRENT).unlink()
    Store(tmp_path).close()
    name = (tmp_path / CURRENT).read_text().strip()
    with duckdb.connect(str(tmp_path / name)) as connection:
        connection.execute("UPDATE meta SET store_version = 9")
    with pytest.raises(DataError, match=f"has version 9, expected {STORE_VERSION}"):
        open_catalog(tmp_path)
    with pytest.raises(DataError, match=f"has version 9, expected {STORE_VERSION}"):
        Store(tmp_path)
    (tmp_path / name).write_bytes(b"torn" * 2000)
    with pytest.raises(DataError, match="cannot be opened"):
        open_catalog(tmp_path)
    (tmp_path / CURRENT).write_text("../../etc/passwd\n")
    with pytest.raises(DataError, match="expected the name of a catalog"):
        open_catalog(tmp_path)
    with pytest.raises(BadInput, match="comma"):
        Store(tmp_path / "a,b")


def test_a_torn_segment_is_named_at_the_start(tmp_path: Path) -> None:
    publish_records(tmp_path, records("n1", EPOCH, 1, 4, DAY), now_us=NOW)
    victim = next(tmp_path.glob("segments/slice/*/*.parquet"))
    size = victim.stat().st_size
    os.truncate(victim, size - 5)
    with pytest.raises(DataError, match=f"has {size - 5} bytes, expected {size}"):
        Store(tmp_path)
    victim.unlink()
    with pytest.raises(DataError, match="is missing, expected"):
        Store(tmp_path)


def test_a_reader_between_two_publications_opens_the_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path).close()
    stale = (tmp_path / CURRENT).read_text().strip()
    publish_records(tmp_path, records("n1", EPOCH, 1, 4, DAY), now_us=NOW)
    (tmp_path / stale).unlink()
    real, answers = catalog.current_name, [stale]
    monkeypatch.setattr(catalog, "current_name", lambda root: answers.pop() if answers else real(root))
    assert len(stored(tmp_path)) == 4


def test_a_question_whose_segment_goes_away_is_asked_again_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(tmp_path, grace_s=0.0) as store:
        store.publish([batch([slice_("n1", EPOCH, 1, DAY)])], now_us=NOW)
        stale = (tmp_path / CURRENT).read_text().strip()
        kept = (tmp_path / stale).read_bytes()
        store.publish([batch([slice_("n1", EPOCH, 2, DAY)])], now_us=NOW)
        maintain(store, DAY + 2 * DAY_US, Retention())
        store.sweep()
        assert not (tmp_path / stale).exists()
        (tmp_path / stale).write_bytes(kept)
        real, answers = catalog.current_name, [stale]
        monkeypatch.setattr(catalog, "current_name", lambda root: answers.pop() if answers else real(root))
        assert query(tmp_path, "SELECT sequence FROM slice_minutes ORDER BY 1").column(0).to_pylist() == [1, 2]
        answers += [stale, stale]
        with pytest.raises(Unavailable, match="cannot be read"):
            query(tmp_path, "SELECT sequence FROM slice_minutes")


def test_a_store_moved_elsewhere_still_answers(tmp_path: Path) -> None:
    publish_records(tmp_path / "one", records("n1", EPOCH, 1, 8, DAY), now_us=NOW)
    os.rename(tmp_path / "one", tmp_path / "two")
    assert len(stored(tmp_path / "two")) == 8


def test_readers_beside_a_writer_see_whole_states_and_no_error(tmp_path: Path) -> None:
    """Every publication adds ten rows of each kind: any other count is a torn read. Merges go on meanwhile, files go at once."""
    errors: list[str] = []
    reads = [0]
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                with open_catalog(tmp_path) as connection:
                    counts = connection.execute(
                        "SELECT (SELECT count(*) FROM slice_minutes), (SELECT count(*) FROM device_minutes), (SELECT max(last_sequence) FROM sequences)"
                    ).fetchall()[0]
                if counts[0] != counts[1] or counts[0] % 10 or counts[0] * 2 != (counts[2] or 0):
                    errors.append(f"counts {counts}")
                reads[0] += 1
            except Exception as error:
                errors.append(repr(error))

    with Store(tmp_path, grace_s=5.0) as store:
        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for n in range(FAN_IN + 1):
            first = 20 * n + 1
            made: list[UsageRecord] = [slice_("n1", EPOCH, first + k, DAY + n * MINUTE_US) for k in range(10)]
            made += [device("n1", EPOCH, first + 10 + k, DAY + n * MINUTE_US) for k in range(10)]
            store.publish([batch(made)], now_us=NOW)
            maintain(store, NOW, Retention())
        done.set()
        for reader in readers:
            reader.join()
    assert errors == [] and reads[0] > 0
