"""The store: idempotence, crashes at every step, late rows, merges, retention, faults of the disk, versions, readers beside the writer."""

import errno
import os
import re
import resource
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

import duckdb
import pytest
from collector_fakes import device, event, process, records, slice_, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st

from poolmeter import arrow
from poolmeter.collector import catalog, publication, segments
from poolmeter.collector.catalog import CURRENT, open_catalog, query
from poolmeter.collector.check import Expected, check_usage
from poolmeter.collector.maintenance import FAN_IN, due_rollups, maintain, next_merge
from poolmeter.collector.now import newest
from poolmeter.collector.rollup import day_select
from poolmeter.collector.segments import publish_records
from poolmeter.collector.state import NodeRow
from poolmeter.collector.store import Batch, Published, Store
from poolmeter.collector.tables import DAY_SOURCES, TABLES, VIEWS, SegmentKind, view_fields
from poolmeter.errors import BadInput, DataError, Unavailable
from poolmeter.model.units import DAY_US, HOUR_US, MINUTE_US
from poolmeter.model.usage import RecordKind, UsageRecord

DAY = 1_799_971_200_000_000  # 2027-01-15
NOW = DAY + 12 * HOUR_US
EPOCH = "0b8f1c1e-5a55-4c59-9a55-0d6a4a2c7b11"
MINUTES = {RecordKind.DEVICE: "device_minutes", RecordKind.SLICE: "slice_minutes", RecordKind.PROCESS: "process_minutes"}
ALL_ROWS = " UNION ALL ".join(f"SELECT node, epoch, sequence FROM {view}" for view in (*MINUTES.values(), "event_log"))


def batch(rows: Sequence[UsageRecord], node: str = "n1", epoch: str = EPOCH, last: int = 1 << 40, now: int = NOW + 20 * DAY_US) -> Batch:
    return Batch(node, epoch, check_usage(arrow.to_table(rows), Expected(node, epoch, last, now)), now)


def stored(root: Path) -> list[tuple[str, str, int]]:
    return sorted((row["node"], row["epoch"], row["sequence"]) for row in query(root, ALL_ROWS).to_pylist())


def scalar(root: Path, sql: str) -> object:
    return query(root, sql).column(0)[0].as_py()


class Crash(BaseException):
    """The process dies here: nothing may clean up behind it."""


class Crasher:
    """Crashes at the given occurrence of a step."""

    def __init__(self, step: str, number: int = 0) -> None:
        self.step, self.left = step, number

    def __call__(self, step: str) -> None:
        if step == self.step:
            if self.left == 0:
                raise Crash(step)
            self.left -= 1


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


few = settings(max_examples=max(8, settings.default.max_examples // 8))


@few
@given(st.data())
def test_any_order_and_any_repetition_of_batches_stores_every_row_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("store")
    epochs = [EPOCH, str(uuid.UUID(int=7))]
    made = {epoch: records("n1", epoch, 1, 24, DAY - 8 * MINUTE_US) for epoch in epochs}
    pieces: list[tuple[str, list[UsageRecord]]] = []
    for epoch in epochs:
        cuts = sorted(data.draw(st.lists(st.integers(0, 24), max_size=4)))
        for first, last in zip([0, *cuts], [*cuts, 24], strict=True):
            pieces.append((epoch, made[epoch][first:last]))
    order = data.draw(st.permutations(pieces + data.draw(st.lists(st.sampled_from(pieces), max_size=4))))
    groups = data.draw(st.integers(1, 3))
    known = rows = 0
    with Store(root) as store:
        for start in range(0, len(order), groups):
            done = store.publish([batch(piece, epoch=epoch) for epoch, piece in order[start : start + groups]], now_us=NOW)
            known += done.known
            rows += sum(done.rows.values())
    assert stored(root) == sorted(("n1", epoch, n) for epoch in epochs for n in range(1, 25))
    assert rows == 48 and known == sum(len(piece) for _, piece in order) - 48


STEPS = [("segment", 0), ("segment", 2), ("synced", 0), ("catalog", 0), ("current", 0)]


@few
@given(st.lists(st.sampled_from([*STEPS, None]), min_size=1, max_size=5), st.booleans())
def test_killed_at_any_step_the_acknowledged_rows_are_there_once(
    tmp_path_factory: pytest.TempPathFactory, crashes: list[tuple[str, int] | None], with_bad_rows: bool
) -> None:
    root = tmp_path_factory.mktemp("store")
    Store(root).close()
    made = records("n1", EPOCH, 1, 40, DAY - 4 * MINUTE_US)
    if with_bad_rows:
        made[9] = slice_("n1", EPOCH, 10, DAY, tenant="")
    acknowledged = 0
    for crash in [*crashes, None, None]:
        piece = [record for record in made if acknowledged < record.sequence <= acknowledged + 12]
        store = Store(root, on_step=Crasher(*crash) if crash else None)
        try:
            store.publish([batch(piece)], [newest(snapshot("n1", EPOCH, NOW))], now_us=NOW)
            acknowledged = min(40, acknowledged + 12)
        except Crash:
            pass
        finally:
            store.close()
        found = [sequence for _, _, sequence in stored(root)]
        assert len(found) == len(set(found))
        bad = {10} if with_bad_rows and acknowledged >= 10 else set()
        assert set(range(1, acknowledged + 1)) - bad <= set(found)
        assert set(found) <= set(range(1, acknowledged + 13))
    count = scalar(root, "SELECT coalesce(sum(rows), 0) FROM quarantine")
    assert count == (1 if with_bad_rows and acknowledged >= 10 else 0)


def test_leftovers_of_a_crash_are_gone_after_the_grace(tmp_path: Path) -> None:
    Store(tmp_path).close()
    store = Store(tmp_path, on_step=Crasher("synced"))
    with pytest.raises(Crash):
        store.publish([batch(records("n1", EPOCH, 1, 8, DAY))], now_us=NOW)
    store.close()
    (tmp_path / ".tmp-catalog-9.duckdb").write_bytes(b"half")
    assert len(list(tmp_path.glob("segments/*/*/*.parquet"))) == 4
    with Store(tmp_path, grace_s=0.0) as again:
        again.sweep()
        assert list(tmp_path.glob("segments/*/*/*.parquet")) == []
        assert not (tmp_path / ".tmp-catalog-9.duckdb").exists()
        again.publish([batch(records("n1", EPOCH, 1, 8, DAY))], now_us=NOW)
        again.sweep()
    assert len(stored(tmp_path)) == 8
    assert len(list(tmp_path.glob("catalog-*.duckdb"))) == 1


def test_bad_rows_are_quarantined_with_their_reason_and_only_once(tmp_path: Path) -> None:
    made = [device("n1", EPOCH, 1, DAY), device("n1", EPOCH, 2, DAY, down_us=3), device("n2", EPOCH, 3, DAY)]
    with Store(tmp_path) as store:
        first = store.publish([batch(made)], now_us=NOW)
        second = store.publish([batch(made)], now_us=NOW)
    assert (first.quarantined, second.quarantined, second.known) == (2, 0, 1)
    rows = query(tmp_path, "SELECT sequence, reason, rows, node FROM quarantine ORDER BY sequence").to_pylist()
    assert [(row["sequence"], row["rows"], row["node"]) for row in rows] == [(2, 1, "n1"), (3, 1, "n1")]
    assert "expected span_us" in rows[0]["reason"] and rows[1]["reason"] == "node is 'n2', expected 'n1'"


def rolled(root: Path, kind: SegmentKind) -> list[dict[str, object]]:
    view = "slice_days" if kind is SegmentKind.SLICE_DAY else "device_days"
    with open_catalog(root) as connection:
        return connection.sql(f"SELECT * FROM {view} ORDER BY ALL").to_arrow_table().to_pylist()


def from_minutes(root: Path, kind: SegmentKind) -> list[dict[str, object]]:
    source = "slice_minutes" if kind is SegmentKind.SLICE_DAY else "device_minutes"
    with open_catalog(root) as connection:
        sql = f"SELECT *, make_timestamp(day_us)::DATE AS day FROM ({day_select(kind, source)}) ORDER BY ALL"
        return connection.sql(sql).to_arrow_table().to_pylist()


def test_days_are_the_same_live_and_stored_and_take_late_rows_in(tmp_path: Path) -> None:
    late = [slice_("n1", EPOCH, 900 + n, DAY - HOUR_US + n * MINUTE_US, tenant="late", used_us=None) for n in range(3)]
    with Store(tmp_path) as store:
        for start in range(1, 401, 40):
            store.publish([batch(records("n1", EPOCH, start, 40, DAY - 60 * MINUTE_US))], now_us=NOW)
        before = {kind: rolled(tmp_path, kind) for kind in DAY_SOURCES}
        assert len(before[SegmentKind.SLICE_DAY]) == 2
        maintain(store, DAY + DAY_US + 2 * HOUR_US, 400)
        assert {segment.kind for segment in store.state.segments.values()} >= set(DAY_SOURCES)
        assert due_rollups(store.state, DAY + DAY_US + 2 * HOUR_US) == []
        assert {kind: rolled(tmp_path, kind) for kind in DAY_SOURCES} == before
        store.publish([batch(late)], now_us=NOW)
        assert {segment.day for segment in store.state.segments.values() if segment.kind is SegmentKind.SLICE_DAY} == {"2027-01-15"}
        after = rolled(tmp_path, SegmentKind.SLICE_DAY)
        unknown = [row for row in after if row["tenant"] == "late"]
        assert [(row["used_us"], row["measured_span_us"], row["records"]) for row in unknown] == [(None, 0, 3)]
        maintain(store, DAY + DAY_US + 2 * HOUR_US, 400)
        for kind in DAY_SOURCES:
            assert rolled(tmp_path, kind) == from_minutes(tmp_path, kind)
        assert rolled(tmp_path, SegmentKind.SLICE_DAY) == after


def test_a_day_of_a_large_card_does_not_overflow(tmp_path: Path) -> None:
    most = (1 << 63) - 1
    made = [slice_("n1", EPOCH, n + 1, DAY + n * MINUTE_US, memory_allocated_kib_us=most) for n in range(3)]
    publish_records(tmp_path, made, now_us=NOW)
    assert int(str(scalar(tmp_path, "SELECT memory_allocated_kib_us FROM slice_days"))) == 3 * most
    with Store(tmp_path) as store:
        maintain(store, DAY + 3 * DAY_US, 1)
    assert int(str(scalar(tmp_path, "SELECT memory_allocated_kib_us FROM slice_days"))) == 3 * most


def test_small_segments_are_merged_and_no_row_changes(tmp_path: Path) -> None:
    with Store(tmp_path, grace_s=0.0) as store:
        for n in range(FAN_IN + 1):
            store.publish([batch([slice_("n1", EPOCH, n + 1, DAY + n * MINUTE_US, used_us=n)])], now_us=NOW)
        before = query(tmp_path, "SELECT * FROM slice_minutes ORDER BY sequence")
        assert len(store.state.segments) == FAN_IN + 1
        assert maintain(store, NOW, 1) == 1
        assert [segment.level for segment in store.state.segments.values()] == [1]
        assert query(tmp_path, "SELECT * FROM slice_minutes ORDER BY sequence").equals(before)
        maintain(store, DAY + DAY_US + 2 * HOUR_US, 1)
        own = [segment for segment in store.state.segments.values() if segment.kind is SegmentKind.SLICE]
        assert len(own) == 1 and own[0].rows == FAN_IN + 1
        assert query(tmp_path, "SELECT * FROM slice_minutes ORDER BY sequence").equals(before)
        store.sweep()
        assert len(list(tmp_path.glob("segments/slice/*/*.parquet"))) == 1
        assert next_merge(store.state, DAY + 9 * DAY_US) is None


def test_a_merge_whose_ground_changed_is_dropped(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.publish([batch([slice_("n1", EPOCH, 1, DAY)])], now_us=NOW)
        old = list(store.state.segments.values())

        def write_late() -> list[segments.Segment]:
            made = segments.write_segment(
                tmp_path, SegmentKind.SLICE, "2027-01-15", query(tmp_path, "SELECT * FROM slice_minutes"), "minute_us"
            )
            store.publish([batch([slice_("n1", EPOCH, 2, DAY)])], now_us=NOW)
            return [made]

        assert not store.swap(old, write_late, lambda state: len(state.segments))
        assert [sequence for _, _, sequence in stored(tmp_path)] == [1, 2]
        assert len(list(tmp_path.glob("segments/slice/*/*.parquet"))) == 2


def test_process_rows_are_forgotten_after_their_days_and_slices_are_not(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        made = [process("n1", EPOCH, 1, DAY - DAY_US), slice_("n1", EPOCH, 2, DAY - DAY_US), process("n1", EPOCH, 3, DAY)]
        store.publish([batch(made)], now_us=NOW)
        maintain(store, DAY + DAY_US - MINUTE_US, 1)
        assert scalar(tmp_path, "SELECT count(*) FROM process_minutes") == 2
        maintain(store, DAY + DAY_US, 1)
        assert query(tmp_path, "SELECT sequence FROM process_minutes").column(0).to_pylist() == [3]
        assert scalar(tmp_path, "SELECT count(*) FROM slice_minutes") == 1
        assert store.publish([batch(made)], now_us=NOW).known == 3


def test_one_collector_owns_a_root(tmp_path: Path) -> None:
    with Store(tmp_path), pytest.raises(Unavailable, match="owned by another collector"):
        Store(tmp_path)
    Store(tmp_path).close()


def test_a_full_disk_stores_nothing_acknowledges_nothing_and_recovers(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    made = [event("n1", EPOCH, n + 1, DAY, detail=str(uuid.uuid4()) * 40) for n in range(600)]
    with Store(tmp_path) as store:
        before = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
        # The kernel refuses bytes past the limit as it does on a full disk: in the middle of a write.
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
        try:
            with pytest.raises(Unavailable, match="cannot be written"):
                store.publish([batch(made)], now_us=NOW)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert store.trouble is not None and "cannot be written" in store.trouble
        assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == before
        assert stored(tmp_path) == []
        assert sum(store.publish([batch(made)], now_us=NOW).rows.values()) == 600
        assert store.trouble is None
    assert len(stored(tmp_path)) == 600


@pytest.mark.parametrize(
    "failing_sync", [2, 6, 15, 16, 17, 18], ids=["segment", "folder", "catalog", "catalog name", "CURRENT", "CURRENT name"]
)
def test_an_error_anywhere_leaves_the_state_readable_and_the_next_try_stores_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_sync: int
) -> None:
    made = records("n1", EPOCH, 1, 8, DAY)
    with Store(tmp_path) as store:
        with monkeypatch.context() as patch:
            number = {"fsync": 0}
            real = os.fsync

            def failing(handle: int) -> None:
                number["fsync"] += 1
                if number["fsync"] == failing_sync:
                    raise OSError(errno.EIO, "Input/output error")
                real(handle)

            for module in (segments, publication):
                patch.setattr(module.os, "fsync", failing)
            with pytest.raises(Unavailable, match="Input/output error"):
                store.publish([batch(made)], now_us=NOW)
        assert [sequence for _, _, sequence in stored(tmp_path)] == (list(range(1, 9)) if failing_sync == 18 else [])
        store.publish([batch(made)], now_us=NOW)
        assert [sequence for _, _, sequence in stored(tmp_path)] == list(range(1, 9))
    with Store(tmp_path) as store:
        assert store.publish([batch(made)], now_us=NOW).known == 8


@pytest.mark.parametrize("body", [b"", b"PAR1", b"x" * 4096])
def test_a_torn_segment_is_damage_and_wrong_sql_is_not(tmp_path: Path, body: bytes) -> None:
    with Store(tmp_path) as store:
        store.publish([batch(records("n1", EPOCH, 1, 16, DAY))], now_us=NOW)
    with pytest.raises(duckdb.BinderException):
        query(tmp_path, "SELECT colour FROM device_minutes")
    for path in tmp_path.rglob("*.parquet"):
        path.write_bytes(body)
    with pytest.raises(DataError, match="cannot be read") as caught:
        query(tmp_path, ALL_ROWS)
    assert "\n" not in str(caught.value)


def test_a_store_that_cannot_be_founded_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Path:
        raise duckdb.IOException("no space left\non device")

    monkeypatch.setattr(publication.CatalogWriter, "write", full)
    with pytest.raises(Unavailable, match=r"cannot be written: no space left$"):
        Store(tmp_path)
    monkeypatch.undo()
    Store(tmp_path).close()


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
    with pytest.raises(DataError, match="has version 9, expected 1"):
        open_catalog(tmp_path)
    with pytest.raises(DataError, match="has version 9, expected 1"):
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
    with pytest.raises(DataError, match="has None bytes"):
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
        maintain(store, DAY + 2 * DAY_US, 1)
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


def test_nodes_configured_no_more_are_forgotten_with_their_snapshot(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        rows = [NodeRow(f"http://{node}", node, EPOCH, NOW, "up") for node in ("n1", "n2")]
        store.publish([], [newest(snapshot("n1", EPOCH, NOW)), newest(snapshot("n2", EPOCH, NOW))], rows, now_us=NOW)
        store.publish([], [], [rows[0]], now_us=NOW, forget=["http://n2"])
        assert query(tmp_path, "SELECT node FROM nodes").column(0).to_pylist() == ["n1"]
        assert query(tmp_path, "SELECT node FROM now_nodes").column(0).to_pylist() == ["n1"]
        assert query(tmp_path, "SELECT count(*) FROM devices").column(0).to_pylist() == [2]


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
            maintain(store, NOW, 1)
        done.set()
        for reader in readers:
            reader.join()
    assert errors == [] and reads[0] > 0


def test_published_counts_say_what_happened(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        done = store.publish([batch(records("n1", EPOCH, 1, 8, DAY))], now_us=NOW)
    assert done == Published(2, dict.fromkeys(RecordKind, 2), 0, 0)
