"""`poolmeter store …`: what is wrong is found and named, backups come back bit for bit, older stores are brought to this version."""

import json
import os
import shutil
import sqlite3
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import httpx
import jsonschema
import pyarrow.parquet as pq
import pytest
from collector_fakes import DAY, EPOCH, NOW, batch, event, records, scalar, slice_, snapshot, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from poolmeter import cli
from poolmeter.books.models import REVISION
from poolmeter.books.writer import Books
from poolmeter.collector import aside, backup
from poolmeter.collector.api import ApiState, create_app
from poolmeter.collector.audit import audit, examine
from poolmeter.collector.backup import MANIFEST, back_up, read_manifest, restore
from poolmeter.collector.catalog import CURRENT, open_any, query
from poolmeter.collector.maintenance import maintain
from poolmeter.collector.migration import STEPS, migrate
from poolmeter.collector.now import newest
from poolmeter.collector.retention import Retention
from poolmeter.collector.segments import Segment, publish_records
from poolmeter.collector.store import Store
from poolmeter.collector.tables import STORE_VERSION, SegmentKind
from poolmeter.errors import DataError, Refused, Unavailable
from poolmeter.model.units import DAY_US, HOUR_US, MINUTE_US
from poolmeter.places import CollectorData

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "store.schema.json").read_text())
GOLDEN = Path(__file__).parent / "golden"
OLD_BOOKS = Path(__file__).parents[1] / "books" / "golden" / "version-1.sql"


def filled(root: Path, nodes: int = 2) -> None:
    """Three publications of each node, a quarantined row, a snapshot; the day before is rolled up."""
    with Store(root) as store:
        for part in range(3):
            made = [batch(records(f"n{n}", EPOCH, 1 + 16 * part, 16, DAY - 6 * MINUTE_US), node=f"n{n}") for n in range(nodes)]
            store.publish(made, [newest(snapshot("n0", EPOCH, NOW))], now_us=NOW)
        store.publish([batch([slice_("n0", EPOCH, 60, DAY, tenant="")], node="n0")], now_us=NOW)
        maintain(store, DAY + 2 * HOUR_US, Retention(9))


def poolmeter(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, str]:
    """Exit code, the JSON on stdout (None: none), and stderr."""
    code = cli.main([*words, "--format", "json"])
    out, said = capsys.readouterr()
    report = json.loads(out) if out else None
    if report is not None:
        jsonschema.validate(report, SCHEMA)
    return code, report, said


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "LOCK"}


def rewritten(path: Path, change: Callable[[Any], Any]) -> None:
    table = pq.ParquetFile(path).read()
    pq.write_table(change(table), path)


def one_segment(root: Path, kind: str = "slice", day: str = "2027-01-15") -> Path:
    return sorted(root.glob(f"segments/{kind}/day={day}/*.parquet"))[0]


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 3] ^= 0x40
    path.write_bytes(body)


def newest_snapshots(root: Path) -> Path:
    """The one live segment of newest snapshots; those before it wait for their readers' grace beside it."""
    files = query(root, "SELECT file FROM segments WHERE kind = 'now'").column(0).to_pylist()
    assert len(files) == 1
    return root / files[0]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "size": lambda path: os.truncate(path, path.stat().st_size - 7),
    "checksum": flip,
}


def test_a_sound_store_has_no_finding_and_says_what_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path / "store")
    (tmp_path / "store" / "segments" / "slice" / "day=2027-01-15" / "left.parquet").write_bytes(b"12345")
    code, report, _ = poolmeter(capsys, "store", "check", "--data", str(tmp_path))
    totals = report["totals"]
    assert code == 0 and report["rows"] == [] and report["schema"] == "poolmeter.store-check/1"
    with Store(tmp_path / "store") as store:
        live = store.state.segments.values()
        assert totals["segments"] == totals["checksummed_segments"] == len(live)
        assert totals["rows"] == sum(segment.rows for segment in live)
        left = set((tmp_path / "store").rglob("*.parquet")) - {tmp_path / "store" / segment.file for segment in live}
    assert totals["leftover_files"] == len(left) > 1 and totals["leftover_bytes"] == sum(path.stat().st_size for path in left)
    assert totals["lost_entries"] == 0


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_named_and_set_aside_with_what_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    root = tmp_path / "store"
    filled(root)
    before = stored(root)
    victim = one_segment(root)
    gone = {(row["node"], row["epoch"], row["sequence"]) for row in pq.ParquetFile(victim).read().to_pylist()}
    name = str(victim.relative_to(root))
    DAMAGE[damage](victim)
    code, report, _ = poolmeter(capsys, "store", "check", "--data", str(tmp_path))
    assert code == 1
    assert [(row["problem"], row["file"], row["rows"]) for row in report["rows"]] == [(damage, name, len(gone))]
    if damage != "checksum":
        with pytest.raises(DataError, match=f"{victim.name}.*--set-aside"):
            Store(root)
    code, report, _ = poolmeter(capsys, "store", "check", "--data", str(tmp_path), "--set-aside", name)
    assert code == 0
    by_node = {node: sum(1 for found, *_ in gone if found == node) for node, *_ in sorted(gone)}
    assert {row["node"]: row["rows"] for row in report["rows"]} == by_node and all(row["exact"] for row in report["rows"])
    code, report, _ = poolmeter(capsys, "store", "check", "--data", str(tmp_path))
    assert code == 0 and report["totals"]["lost_entries"] == len(by_node) and "set aside" in report["warnings"][0]
    assert stored(root) == sorted(set(before) - gone)
    assert scalar(root, "SELECT sum(rows) FROM lost") == len(gone)
    assert (root / "damaged" / f"slice-2027-01-15-{victim.name}").exists() == (damage != "missing")
    with Store(root) as store:  # what is lost stays known: it is neither stored twice nor asked for again
        made = batch(records("n0", EPOCH, 1, 48, DAY - 6 * MINUTE_US), node="n0")
        assert sum(store.publish([made], now_us=NOW).rows.values()) == 0


def test_a_store_wholly_without_its_segments_still_says_whose_rows_are_lost(tmp_path: Path) -> None:
    filled(tmp_path)
    with Store(tmp_path) as store:
        files = [segment.file for segment in store.state.segments.values() if segment.kind is not SegmentKind.QUARANTINE]
        rows = {kind: sum(s.rows for s in store.state.segments.values() if s.kind is kind) for kind in SegmentKind}
    for file in files:
        (tmp_path / file).unlink()
    lost = aside.set_aside(tmp_path, files, NOW)
    assert stored(tmp_path) == [] and audit(tmp_path).problems == []
    assert {row.node for row in lost if row.kind == "slice"} <= {"n0", "n1"}
    for kind in ("device", "slice", "process", "event"):
        assert sum(row.rows for row in lost if row.kind == kind) >= rows[SegmentKind(kind)], kind
    assert not any(row.exact for row in lost if row.kind == "event" and row.node)


def test_a_whole_segment_is_not_set_aside_nor_one_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path / "store")
    before = tree(tmp_path)
    code, _, said = poolmeter(capsys, "store", "check", "--data", str(tmp_path), "--set-aside", one_segment(tmp_path / "store").name)
    assert code == 1 and "is whole, expected a damaged one" in said
    code, _, said = poolmeter(capsys, "store", "check", "--data", str(tmp_path), "--set-aside", "nothing.parquet")
    assert code == 3 and "is not live" in said
    assert tree(tmp_path) == before


def lie(root: Path, sql: str) -> None:
    name = (root / CURRENT).read_text().strip()
    with duckdb.connect(str(root / name)) as connection:
        connection.execute(sql)


@pytest.mark.parametrize(
    ("problem", "sql"),
    [
        ("rows", "UPDATE segments SET rows = rows + 1, sha256 = NULL WHERE kind = 'slice'"),
        ("times", "UPDATE segments SET min_minute_us = min_minute_us - 60000000 WHERE kind = 'device'"),
        ("columns", "UPDATE segments SET kind = 'device' WHERE kind = 'event'"),
        ("day", "UPDATE segments SET day = '2027-01-20' WHERE kind = 'process'"),
        ("unknown sequence", "UPDATE sequences SET last_sequence = 40 WHERE node = 'n1'"),
        ("unknown sequence", "DELETE FROM sequences WHERE node = 'n1'"),
    ],
)
def test_what_segments_hold_and_what_the_catalog_says_must_agree(tmp_path: Path, problem: str, sql: str) -> None:
    filled(tmp_path)
    assert audit(tmp_path).problems == []
    lie(tmp_path, sql)
    assert {found.problem for found in audit(tmp_path).problems} == {problem}


@pytest.mark.parametrize("day", ["2027-01-14", "2027-01-15"])
def test_a_record_stored_twice_is_found_within_a_day_and_across_days(tmp_path: Path, day: str) -> None:
    publish_records(tmp_path, [slice_("n1", EPOCH, n, DAY - MINUTE_US) for n in (1, 2, 3)], now_us=NOW)
    publish_records(tmp_path, [slice_("n1", EPOCH, n, DAY) for n in (4, 5)], now_us=NOW)
    with Store(tmp_path) as store:
        source = next(found for found in store.state.segments.values() if found.day == "2027-01-14")
    moved = DAY if day == "2027-01-15" else DAY - MINUTE_US
    copy = Path(source.file).with_name("copy.parquet").as_posix().replace("2027-01-14", day)
    shutil.copy(tmp_path / source.file, tmp_path / copy)

    def shifted(table: Any) -> Any:
        import pyarrow as pa

        return table.set_column(table.schema.get_field_index("minute_us"), "minute_us", pa.array([moved] * table.num_rows, pa.int64()))

    rewritten(tmp_path / copy, shifted)
    size = (tmp_path / copy).stat().st_size
    lie(tmp_path, f"INSERT INTO segments VALUES ('slice', '{day}', '{copy}', 3, {size}, {moved}, {moved}, 0, NULL)")
    assert [(found.problem, found.rows) for found in audit(tmp_path).problems] == [("stored twice", 3)]


def test_a_torn_catalog_is_a_finding_and_readers_and_the_collector_get_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path / "store")
    name = (tmp_path / "store" / CURRENT).read_text().strip()
    (tmp_path / "store" / name).write_bytes(b"torn" * 4096)
    code, report, _ = poolmeter(capsys, "store", "check", "--data", str(tmp_path))
    assert code == 1 and [row["problem"] for row in report["rows"]] == ["catalog"] and "restore" in report["rows"][0]["advice"]
    for question in (lambda: Store(tmp_path / "store"), lambda: query(tmp_path / "store", "SELECT 1")):
        with pytest.raises(DataError, match=f"{name} cannot be opened"):
            question()
    (tmp_path / "store" / name).unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        Store(tmp_path / "store")


def test_check_and_backup_run_beside_the_owner_and_what_changes_the_store_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path / "store")
    with Store(tmp_path / "store"):
        assert poolmeter(capsys, "store", "check", "--data", str(tmp_path))[0] == 0
        assert poolmeter(capsys, "store", "backup", str(tmp_path / "copy"), "--data", str(tmp_path))[0] == 0
        for words in (["compact"], ["migrate"]):
            code, _, said = poolmeter(capsys, "store", *words, "--data", str(tmp_path))
            assert code == 3 and "owned by another collector" in said
        flip(one_segment(tmp_path / "store"))
        code, _, said = poolmeter(capsys, "store", "check", "--set-aside", one_segment(tmp_path / "store").name, "--data", str(tmp_path))
        assert code == 3 and "owned by another collector" in said
    for words in (["check"], ["compact"], ["migrate"], ["backup", str(tmp_path / "b")], ["restore", str(tmp_path / "nowhere")]):
        code, _, said = poolmeter(capsys, "store", *words, "--data", str(tmp_path / "empty"))
        assert code == 3 and "is not there" in said
        assert not (tmp_path / "empty").exists() and not (tmp_path / "b").exists()


def test_compact_merges_now_and_changes_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        for n in range(3):
            store.publish([batch([slice_("n1", EPOCH, n + 1, NOW + n * MINUTE_US)])], now_us=NOW)
    before = query(root, "SELECT * FROM slice_minutes ORDER BY sequence")
    code, report, _ = poolmeter(capsys, "store", "compact", "--data", str(tmp_path))
    assert code == 0
    assert [(row["kind"], row["segments_before"], row["segments"], row["rows"]) for row in report["rows"]] == [("slice", 3, 1, 3)]
    assert query(root, "SELECT * FROM slice_minutes ORDER BY sequence").equals(before)


def test_damage_is_not_merged_away_and_the_rest_is_kept(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        for n in range(4):
            store.publish([batch([slice_("n1", EPOCH, n + 1, DAY + n * MINUTE_US)])], now_us=NOW)
            store.publish([batch([event("n1", EPOCH, n + 11, DAY + n * MINUTE_US)])], now_us=NOW)
        victim = one_segment(tmp_path)
        flip(victim)
        maintain(store, DAY + DAY_US + 2 * HOUR_US, Retention())
        assert [Path(file).name for file in store.damaged] == [victim.name]
        assert "checksum" in next(iter(store.damaged.values()))
        own = [segment.rows for segment in store.state.segments.values() if segment.kind is SegmentKind.SLICE]
        assert sorted(own) == [1, 3]
        assert [s.rows for s in store.state.segments.values() if s.kind is SegmentKind.EVENT] == [4]
        # A day is not rolled up over a hole, and so its minutes are never dropped.
        assert not [s for s in store.state.segments.values() if s.kind is SegmentKind.SLICE_DAY]
        maintain(store, DAY + 900 * DAY_US, Retention())
        assert sorted(s.rows for s in store.state.segments.values() if s.kind is SegmentKind.SLICE) == [1, 3]
    aside.set_aside(tmp_path, [victim.name], NOW)
    with Store(tmp_path) as store:
        maintain(store, DAY + DAY_US + 2 * HOUR_US, Retention())
        assert scalar(tmp_path, "SELECT sum(records) FROM slice_days") == 3


def test_a_torn_segment_keeps_no_other_record_out_and_its_readers_get_one_sentence(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.publish([batch(records("n1", EPOCH, 1, 8, DAY))], now_us=NOW)
        victim = one_segment(tmp_path)
        victim.write_bytes(b"PAR1" + b"\0" * (victim.stat().st_size - 4))
        os.truncate(quarantined := one_segment(tmp_path, "event"), 9)
        assert sum(store.publish([batch(records("n1", EPOCH, 9, 4, DAY))], now_us=NOW).rows.values()) == 4
        assert store.trouble is None and {Path(file).name for file in store.damaged} == {victim.name, quarantined.name}
        assert scalar(tmp_path, "SELECT count(*) FROM device_minutes") == 3
        store.publish([batch([slice_("n1", EPOCH, 20, DAY, tenant="")])], now_us=NOW)
        for view in ("slice_minutes", "event_log", "slice_days"):
            with pytest.raises(DataError, match=r"cannot be read|is damaged") as caught:
                query(tmp_path, f"SELECT * FROM {view}")
            assert "\n" not in str(caught.value)
        assert {problem.problem for problem in audit(tmp_path).problems} == {"checksum", "size"}
    names = [victim.name, quarantined.name]
    assert sum(row.rows for row in aside.set_aside(tmp_path, names, NOW)) == 4
    assert len(stored(tmp_path)) == 8 and audit(tmp_path).problems == []


async def test_the_health_page_names_a_torn_segment_and_the_collector_stays_ready(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store, Books(tmp_path / "books.sqlite") as books:
        store.publish([batch(records("n1", EPOCH, 1, 8, DAY))], now_us=NOW)
        victim = one_segment(tmp_path / "store")
        os.truncate(victim, 5)
        store.publish([batch(records("n1", EPOCH, 9, 4, DAY))], now_us=NOW)
        state = ApiState(store, books, "secret", tuple, reads_need_token=False)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(state)), base_url="http://collector") as http:
            body = (await http.get("/v1/health")).json()
            assert (await http.get("/readyz")).status_code == 200
    assert body["status"] == "degraded" and body["store"]["writable"] is True
    assert [victim.name in warning for warning in body["warnings"]] == [True]


def test_a_view_of_nothing_but_a_torn_segment_says_so_when_asked(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.publish([batch([slice_("n1", EPOCH, 1, DAY)])], now_us=NOW)
        victim = one_segment(tmp_path)
        os.truncate(victim, 5)
        store.publish([batch([event("n1", EPOCH, 2, DAY)])], now_us=NOW)
        assert scalar(tmp_path, "SELECT count(*) FROM event_log") == 1
        with pytest.raises(DataError, match=f"{victim.name} of the store is damaged .size.: 5 bytes"):
            query(tmp_path, "SELECT * FROM slice_minutes")


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), flip, lambda path: os.truncate(path, 5)])
def test_damaged_newest_snapshots_stop_nothing_and_lose_nothing(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    filled(tmp_path)
    damage(victim := newest_snapshots(tmp_path))
    assert [problem.file for problem in audit(tmp_path).problems] == [str(victim.relative_to(tmp_path))]
    with Store(tmp_path) as store:
        assert not store.state.now and not any(segment.kind is SegmentKind.NOW for segment in store.state.segments.values())
        store.publish([batch([slice_("n1", EPOCH, 99, DAY)])], now_us=NOW)
        assert scalar(tmp_path, "SELECT count(*) FROM now_nodes") == 0
        store.publish([], [newest(snapshot("n0", EPOCH, NOW))], now_us=NOW)
    assert scalar(tmp_path, "SELECT count(*) FROM now_nodes") == 1
    assert audit(tmp_path).problems == []


def test_newest_snapshots_that_are_torn_meanwhile_are_replaced_by_the_next(tmp_path: Path) -> None:
    filled(tmp_path)
    with Store(tmp_path) as store:
        victim = newest_snapshots(tmp_path)
        os.truncate(victim, 5)
        store.publish([batch([slice_("n1", EPOCH, 99, DAY)])], now_us=NOW)
        assert str(victim.relative_to(tmp_path)) in store.damaged
        with pytest.raises(DataError, match=f"{victim.name} of the store is damaged"):
            query(tmp_path, "SELECT * FROM now_nodes")
        store.publish([], [newest(snapshot("n0", EPOCH, NOW))], now_us=NOW)
        assert store.damaged == {} and scalar(tmp_path, "SELECT count(*) FROM now_nodes") == 1


def test_newest_snapshots_are_set_aside_without_a_loss(tmp_path: Path) -> None:
    filled(tmp_path)
    flip(victim := newest_snapshots(tmp_path))
    assert aside.set_aside(tmp_path, [victim.name], NOW) == []
    assert audit(tmp_path).problems == [] and not victim.exists()


def test_upkeep_leaves_newest_snapshots_alone(tmp_path: Path) -> None:
    filled(tmp_path)
    with Store(tmp_path) as store:
        before = [segment for segment in store.state.segments.values() if segment.kind is SegmentKind.NOW]
        maintain(store, NOW + 3000 * DAY_US, Retention(), at_once=True)
        assert before == [segment for segment in store.state.segments.values() if segment.kind is SegmentKind.NOW] != []


def test_a_backup_comes_back_bit_for_bit_with_the_books(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = CollectorData(tmp_path / "data")
    filled(data.store)
    with Books(data.books):
        code, report, _ = poolmeter(capsys, "store", "backup", str(tmp_path / "copy"), "--data", str(data.root))
    assert code == 0 and report["rows"][0]["books"] is True
    with Store(data.store) as store:
        named = {segment.file for segment in store.state.segments.values()}
        name = (data.store / CURRENT).read_text().strip()
    there = tree(tmp_path / "copy")
    assert set(there) == {MANIFEST, "books.sqlite", f"store/{CURRENT}", f"store/{name}"} | {f"store/{file}" for file in named}
    assert all(there[file] == (data.root / file).read_bytes() for file in there if file.startswith("store/"))
    # What was published since is not in it.
    publish_records(data.store, [slice_("n0", EPOCH, 99, DAY)], now_us=NOW)
    code, report, _ = poolmeter(capsys, "store", "restore", str(tmp_path / "copy"), "--data", str(tmp_path / "again"))
    assert code == 0 and report["rows"][0]["generation"] == read_manifest(tmp_path / "copy").generation
    assert tree(tmp_path / "again") == {file: body for file, body in there.items() if file != MANIFEST}
    assert audit(tmp_path / "again" / "store").problems == []
    with sqlite3.connect(data.books) as first, sqlite3.connect(tmp_path / "again" / "books.sqlite") as second:
        assert list(first.iterdump()) == list(second.iterdump())
    with Store(tmp_path / "again" / "store") as store, Books(tmp_path / "again" / "books.sqlite"):
        assert sum(store.publish([batch(records("n0", EPOCH, 1, 48, DAY), node="n0")], now_us=NOW).rows.values()) == 0


def test_an_incremental_backup_shares_what_has_not_changed(tmp_path: Path) -> None:
    data = CollectorData(tmp_path / "data")
    filled(data.store)
    first = back_up(data, tmp_path / "one")
    publish_records(data.store, [slice_("n0", EPOCH, 99, DAY)], now_us=NOW)
    second = back_up(data, tmp_path / "two", tmp_path / "one")
    assert second.linked == len(first.files) - 2 and not first.linked
    restore(tmp_path / "two", CollectorData(tmp_path / "again"))
    assert stored(tmp_path / "again" / "store") == stored(data.store)
    assert os.stat(tmp_path / "again" / read_manifest(tmp_path / "two").files[2].file).st_nlink == 1


def test_backup_and_restore_take_nothing_over_and_leave_nothing_half_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = CollectorData(tmp_path / "data")
    filled(data.store)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    code, _, said = poolmeter(capsys, "store", "backup", str(tmp_path / "taken"), "--data", str(data.root))
    assert code == 1 and "is not empty" in said
    (tmp_path / "empty").mkdir(mode=0o750)
    back_up(data, tmp_path / "empty")
    assert (tmp_path / "empty").stat().st_mode & 0o777 == 0o750
    code, _, said = poolmeter(capsys, "store", "restore", str(tmp_path / "empty"), "--data", str(data.root))
    assert code == 1 and "is not empty" in said
    before = sorted(path.name for path in tmp_path.iterdir())
    victim = one_segment(data.store)
    flip(victim)
    with pytest.raises(DataError, match=f"{victim.name} of store .* is damaged"):
        back_up(data, tmp_path / "copy")
    for damage in (lambda path: path.unlink(), flip):
        damage(one_segment(tmp_path / "empty" / "store"))
        with pytest.raises(DataError, match=r"lacks|is damaged"):
            restore(tmp_path / "empty", CollectorData(tmp_path / "again"))
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    (tmp_path / "empty" / MANIFEST).write_text('{"schema": "poolmeter.backup/1", "files": [{"file": "../../etc/x"}]}')
    with pytest.raises(DataError, match="is torn"):
        restore(tmp_path / "empty", CollectorData(tmp_path / "again"))


def test_a_backup_follows_a_store_that_moves_on_under_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every segment that the first catalog names is merged away and deleted while it is copied."""
    data = CollectorData(tmp_path / "data")
    filled(data.store)
    real, calls = backup._copy, [0]
    with Store(data.store, grace_s=0.0) as store:

        def moving(source: Path, target: Path) -> tuple[int, str]:
            calls[0] += 1
            if calls[0] == 2:
                maintain(store, DAY + DAY_US + 2 * HOUR_US, Retention(9), at_once=True)
                store.sweep()
            return real(source, target)

        monkeypatch.setattr(backup, "_copy", moving)
        made = back_up(data, tmp_path / "copy")
        assert made.generation == store.state.generation
    restore(tmp_path / "copy", CollectorData(tmp_path / "again"))
    assert stored(tmp_path / "again" / "store") == stored(data.store)


def test_backups_beside_a_busy_collector_are_whole_states(tmp_path: Path) -> None:
    data = CollectorData(tmp_path / "data")
    failures: list[str] = []
    with Store(data.store, grace_s=5.0) as store:
        store.publish([], now_us=NOW)

        def work() -> None:
            try:
                for n in range(20):
                    store.publish([batch(records("n1", EPOCH, 1 + 8 * n, 8, DAY))], now_us=NOW)
                    maintain(store, NOW, Retention())
            except Exception as error:
                failures.append(repr(error))

        worker = threading.Thread(target=work)
        worker.start()
        taken = 0
        while worker.is_alive() or not taken:
            back_up(data, tmp_path / f"copy{taken}")
            taken += 1
        worker.join()
    assert failures == []
    for number in range(taken):
        restore(tmp_path / f"copy{number}", CollectorData(tmp_path / f"again{number}"))
        found = [sequence for *_, sequence in stored(tmp_path / f"again{number}" / "store")]
        assert found == list(range(1, len(found) + 1)) and len(found) % 8 == 0
        assert audit(tmp_path / f"again{number}" / "store").problems == []


def golden(version: int, target: Path) -> Path:
    with tarfile.open(GOLDEN / f"store-{version}.tar.gz") as archive:
        archive.extractall(target, filter="data")
    return (target / f"store-{version}").rename(target / "store")


@pytest.mark.parametrize("version", sorted(STEPS))
def test_a_store_of_each_older_version_is_brought_to_this_one(tmp_path: Path, capsys: pytest.CaptureFixture[str], version: int) -> None:
    root = golden(version, tmp_path)
    with pytest.raises(DataError, match=f"has version {version}, expected {STORE_VERSION}: poolmeter store migrate"):
        Store(root)
    before = tree(root / "segments")
    code, report, _ = poolmeter(capsys, "store", "migrate", "--data", str(tmp_path))
    assert code == 0 and report["rows"][0]["version_before"] == version
    after = tree(root / "segments")
    assert before.items() <= after.items() and all(name.startswith("now/") for name in after.keys() - before.keys())
    assert [sequence for *_, sequence in stored(root)] == [*range(1, 10), *range(11, 41), *range(45, 49)]
    assert query(root, "SELECT first_sequence, last_sequence FROM sequences ORDER BY 1").to_pylist() == [
        {"first_sequence": 1, "last_sequence": 40},
        {"first_sequence": 45, "last_sequence": 48},
    ]
    assert scalar(root, "SELECT count(*) FROM quarantine") == 1 and scalar(root, "SELECT count(*) FROM now_slices") == 1
    assert scalar(root, "SELECT sum(records) FROM slice_days") == scalar(root, "SELECT sum(records) FROM slice_hours")
    assert audit(root).problems == []
    with Store(root) as store:
        maintain(store, DAY + DAY_US + 2 * HOUR_US, Retention(9))
        assert store.publish([batch(records("n1", EPOCH, 1, 48, DAY))], now_us=NOW).rows != {}
        assert [sequence for *_, sequence in stored(root)] == [*range(1, 10), *range(11, 49)]
    assert audit(root).problems == []
    code, report, _ = poolmeter(capsys, "store", "migrate", "--data", str(tmp_path))
    assert code == 0 and report["rows"][0]["version_before"] == STORE_VERSION


def test_the_books_are_migrated_with_the_store_or_neither_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, file = golden(1, tmp_path), CollectorData(tmp_path).books
    with sqlite3.connect(file) as books:
        books.executescript(OLD_BOOKS.read_text())
        books.execute("UPDATE books_version SET version = 9")
    code, _, said = poolmeter(capsys, "store", "migrate", "--data", str(tmp_path))
    assert code == 2 and "have version 9, expected 1" in said
    connection, version = open_any(root)
    connection.close()
    assert version == 1
    with sqlite3.connect(file) as books:
        books.execute("UPDATE books_version SET version = 1")
    code, report, _ = poolmeter(capsys, "store", "migrate", "--data", str(tmp_path))
    assert code == 0 and report["rows"][0]["version_before"] == 1
    assert (report["rows"][0]["books_before"], report["rows"][0]["books"]) == ("0001", REVISION)
    with Books(file) as opened:
        assert opened.list()


def test_a_backup_says_that_the_books_of_a_server_are_not_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = CollectorData(tmp_path / "data")
    filled(data.store)
    (tmp_path / "config.toml").write_text('[collector]\nbooks = "postgresql://meter@127.0.0.1:1/books"\n')
    words = ("--data", str(data.root), "--config", str(tmp_path / "config.toml"))
    code, report, _ = poolmeter(capsys, "store", "backup", str(tmp_path / "copy"), *words)
    assert code == 0 and report["rows"][0]["books"] is False
    assert len(report["warnings"]) == 1 and "expected pg_dump for a backup of them" in report["warnings"][0]


def test_a_migration_that_fails_has_not_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from poolmeter.collector import publication

    root = golden(1, tmp_path)
    before = tree(root)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(publication.os, "replace", full)
        with pytest.raises(Unavailable, match="No space left on device"):
            migrate(root)
    connection, version = open_any(root)
    connection.close()
    assert version == 1 and before.items() <= tree(root).items()
    assert migrate(root).before == 1
    Store(root).close()


def test_a_store_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    Store(tmp_path).close()
    lie(tmp_path, f"UPDATE meta SET store_version = {STORE_VERSION + 1}")
    with pytest.raises(DataError, match="a newer poolmeter wrote it"):
        migrate(tmp_path)
    with pytest.raises(DataError, match="a newer poolmeter wrote it"):
        Store(tmp_path)


@settings(max_examples=max(8, settings.default.max_examples // 8))
@given(st.data())
def test_no_change_of_a_byte_passes_for_a_sound_segment(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("store")
    publish_records(root, [slice_("n1", EPOCH, n + 1, DAY + n * MINUTE_US) for n in range(4)], now_us=NOW)
    with Store(root) as store:
        segment: Segment = next(iter(store.state.segments.values()))
    assert examine(root, segment) is None
    body = bytearray((root / segment.file).read_bytes())
    at = data.draw(st.integers(0, len(body) - 1))
    cut = data.draw(st.booleans())
    changed = bytes(body[:at]) if cut else bytes(body[:at]) + bytes([body[at] ^ data.draw(st.integers(1, 255))]) + bytes(body[at + 1 :])
    (root / segment.file).write_bytes(changed)
    found = examine(root, segment)
    assert found is not None and found.problem == ("size" if cut else "checksum")
    with pytest.raises(Refused, match="is whole"):
        (root / segment.file).write_bytes(body)
        aside.set_aside(root, [segment.file], NOW)
