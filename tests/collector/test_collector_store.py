"""Writing the store: idempotence, crashes at every step, faults of the disk, one owner."""

import errno
import hashlib
import os
import resource
import uuid
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from collector_fakes import DAY, EPOCH, NOW, batch, device, event, records, scalar, slice_, snapshot, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from poolmeter.collector import publication, segments
from poolmeter.collector.catalog import query
from poolmeter.collector.now import newest
from poolmeter.collector.state import NodeRow
from poolmeter.collector.store import Published, Store
from poolmeter.collector.tables import SegmentKind
from poolmeter.errors import Unavailable
from poolmeter.model.units import MINUTE_US
from poolmeter.model.usage import RecordKind, UsageRecord

few = settings(max_examples=max(8, settings.default.max_examples // 8))
STEPS = [("segment", 0), ("segment", 2), ("synced", 0), ("catalog", 0), ("current", 0)]


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


def test_a_closed_store_publishes_nothing_over_its_next_owner(tmp_path: Path) -> None:
    first = Store(tmp_path)
    first.publish([batch(records("n1", EPOCH, 1, 8, DAY))], now_us=NOW)
    first.close()
    with Store(tmp_path) as second:
        for change in (
            lambda: first.publish([batch(records("n1", EPOCH, 9, 8, DAY))], now_us=NOW),
            lambda: first.swap(tuple(first.state.segments.values()), list, lambda state: state.generation),
        ):
            with pytest.raises(Unavailable, match="is closed"):
                change()
        second.publish([batch(records("n1", EPOCH, 9, 8, DAY))], now_us=NOW)
        assert len(stored(tmp_path)) == 16 and len(second.state.segments) == len(list(tmp_path.rglob("*.parquet")))


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


def test_a_store_that_cannot_be_founded_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Path:
        raise duckdb.IOException("no space left\non device")

    monkeypatch.setattr(publication.CatalogWriter, "write", full)
    with pytest.raises(Unavailable, match=r"cannot be written: no space left$"):
        Store(tmp_path)
    monkeypatch.undo()
    Store(tmp_path).close()


def test_nodes_configured_no_more_are_forgotten_with_their_snapshot(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        rows = [NodeRow(f"http://{node}", node, EPOCH, NOW, "up") for node in ("n1", "n2")]
        store.publish([], [newest(snapshot("n1", EPOCH, NOW)), newest(snapshot("n2", EPOCH, NOW))], rows, now_us=NOW)
        store.publish([], [], [rows[0]], now_us=NOW, forget=["http://n2"])
        assert query(tmp_path, "SELECT node FROM nodes").column(0).to_pylist() == ["n1"]
        assert query(tmp_path, "SELECT node FROM now_nodes").column(0).to_pylist() == ["n1"]
        assert query(tmp_path, "SELECT count(*) FROM devices").column(0).to_pylist() == [2]


def test_published_counts_say_what_happened(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        done = store.publish([batch(records("n1", EPOCH, 1, 8, DAY))], now_us=NOW)
    assert done == Published(2, dict.fromkeys(RecordKind, 2), 0, 0)


@few
@given(st.lists(st.one_of(st.none(), st.integers(-(1 << 63), (1 << 63) - 1)), min_size=1, max_size=300))
def test_every_number_comes_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, numbers: list[int | None]) -> None:
    root = tmp_path_factory.mktemp("store")
    wanted = [
        {"node": "n1", "sequence": number, "minute_us": number, "received_us": n, "reason": "r", "rows": 1}
        for n, number in enumerate(numbers)
    ]
    table = pa.Table.from_pylist(wanted, schema=segments.arrow_schema(SegmentKind.QUARANTINE))
    written = segments.write_segment(root, SegmentKind.QUARANTINE, "2027-01-15", table)
    with duckdb.connect() as connection:
        found = connection.execute(f"SELECT sequence, minute_us FROM '{root / written.file}' ORDER BY received_us").fetchall()
    assert found == [(number, number) for number in numbers]
    assert hashlib.sha256((root / written.file).read_bytes()).hexdigest() == written.sha256
