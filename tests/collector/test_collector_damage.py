"""A store that is damaged in whatever way: each command says so in one sentence with its exit code, and deletes nothing that could be kept."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from collector_fakes import DAY, EPOCH, NOW, batch, records, snapshot, stored
from collector_served import client, collector

from poolmeter import cli
from poolmeter.books.writer import Books
from poolmeter.collector.audit import audit
from poolmeter.collector.backup import back_up, read_manifest, restore, verify
from poolmeter.collector.maintenance import maintain
from poolmeter.collector.now import newest
from poolmeter.collector.retention import Retention
from poolmeter.collector.store import Store
from poolmeter.errors import DataError, PoolmeterError, Refused, Unavailable
from poolmeter.model.units import DAY_US, HOUR_US, MINUTE_US
from poolmeter.places import CollectorData


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with books and a store of some segments of every kind."""
    folder = tmp_path_factory.mktemp("good")
    with Store(folder / "store") as store:
        for part in range(3):
            made = [batch(records(f"n{n}", EPOCH, 1 + 16 * part, 16, DAY - 6 * MINUTE_US), node=f"n{n}") for n in range(2)]
            store.publish(made, [newest(snapshot("n0", EPOCH, NOW))], now_us=NOW)
        maintain(store, DAY + 2 * HOUR_US, Retention(9))
    Books(folder / "books.sqlite").close()
    return folder


@pytest.fixture
def data(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "data"))


def current(data: Path) -> Path:
    return data / "store" / "CURRENT"


def catalog(data: Path) -> Path:
    return data / "store" / current(data).read_text().strip()


def segment(data: Path, kind: str = "slice") -> Path:
    """One that is live."""
    with duckdb.connect(str(catalog(data)), read_only=True) as connection:
        name = connection.execute("SELECT file FROM segments WHERE kind = ? ORDER BY file", [kind]).fetchall()[0][0]
    return data / "store" / str(name)


def in_catalog(*statements: str) -> Callable[[Path], object]:
    def damage(data: Path) -> None:
        with duckdb.connect(str(catalog(data))) as connection:
            for statement in statements:
                connection.execute(statement)

    return damage


def in_place_of(find: Callable[[Path], Path], make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(data: Path) -> None:
        path = find(data)
        path.unlink()
        make(path)

    return damage


def foreign_catalog(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE cats (name VARCHAR)")


def renamed_columns(data: Path) -> None:
    table = pq.read_table(segment(data))
    pq.write_table(table.rename_columns([f"x{name}" for name in table.column_names]), segment(data))


CATALOGS: dict[str, Callable[[Path], object]] = {
    "no CURRENT": lambda data: current(data).unlink(),
    "empty CURRENT": lambda data: current(data).write_text(""),
    "CURRENT of a catalog that is not there": lambda data: current(data).write_text("catalog-999.duckdb\n"),
    "CURRENT outside": lambda data: current(data).write_text("../catalog-1.duckdb"),
    "CURRENT of bytes": lambda data: current(data).write_bytes(b"\xff\x00" * 50_000_000),
    "CURRENT a folder": in_place_of(current, Path.mkdir),
    "catalog empty": lambda data: catalog(data).write_bytes(b""),
    "catalog cut": lambda data: os.truncate(catalog(data), catalog(data).stat().st_size // 2),
    "catalog a folder": in_place_of(catalog, Path.mkdir),
    "catalog another program's": in_place_of(catalog, foreign_catalog),
    "catalog without segments": in_catalog("DROP TABLE segments"),
    "catalog without nodes": in_catalog("DROP TABLE nodes"),
    "catalog with another column": in_catalog("ALTER TABLE nodes RENAME COLUMN pool TO other"),
    "catalog without a version": in_catalog("DELETE FROM meta"),
    "catalog of version nothing": in_catalog("UPDATE meta SET store_version = NULL"),
    "catalog of a newer version": in_catalog("UPDATE meta SET store_version = 99"),
    "catalog of version 0": in_catalog("UPDATE meta SET store_version = 0"),
}
SEGMENTS: dict[str, Callable[[Path], object]] = {
    "missing": lambda data: segment(data).unlink(),
    "empty": lambda data: segment(data).write_bytes(b""),
    "torn": lambda data: os.truncate(segment(data), 200),
    "foreign": lambda data: pq.write_table(pa.table({"a": [1]}), segment(data)),
    "of another schema": renamed_columns,
    "a folder": in_place_of(segment, Path.mkdir),
    "a pipe that nobody writes": in_place_of(segment, os.mkfifo),
    "a link to nowhere": in_place_of(segment, lambda path: path.symlink_to("nowhere")),
    "all gone": lambda data: shutil.rmtree(data / "store" / "segments"),
}


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = cli.main([*words, "--format", "csv"])
    out, said = capsys.readouterr()
    return code, out + said


def files(data: Path) -> set[str]:
    return {str(path.relative_to(data)) for path in (data / "store").rglob("*.parquet")}


def opened(data: Path) -> None:
    """Like a collector that starts, and sweeps long after."""
    with Store(data / "store", grace_s=0) as store:
        store.sweep()


@pytest.mark.parametrize("name", CATALOGS)
def test_a_damaged_catalog_is_told_by_everybody_and_nothing_is_deleted(data: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    before = files(data)
    CATALOGS[name](data)
    assert run(capsys, "store", "check", "--data", str(data))[0] == (2 if "version 0" in name or "newer" in name else 1)
    for verb in ("compact", "migrate", "backup"):
        words = [str(data.parent / "backup")] if verb == "backup" else []
        code, said = run(capsys, "store", verb, *words, "--data", str(data))
        assert code in (2, 3) and said.count("\n") == 1 and "internal error" not in said and ".tmp-" not in said, (verb, code, said)
        assert "expected" in said, said
    with pytest.raises(PoolmeterError):
        opened(data)
    assert files(data) == before and not (data.parent / "backup").exists()


@pytest.mark.parametrize("name", ["no CURRENT", "empty CURRENT", "CURRENT a folder", "CURRENT of a catalog that is not there"])
def test_a_store_whose_current_is_lost_comes_back_by_what_the_sentence_says(
    data: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    rows, catalog_name = stored(data / "store"), catalog(data).name
    CATALOGS[name](data)
    _, said = run(capsys, "store", "compact", "--data", str(data))
    assert f"{catalog_name} is whole: with that name as its one line" in said
    if current(data).is_dir():
        current(data).rmdir()
    current(data).write_text(f"{catalog_name}\n")
    opened(data)
    assert stored(data / "store") == rows and not audit(data / "store").problems


def test_without_any_catalog_segments_are_not_taken_for_leftovers(data: Path) -> None:
    before = files(data)
    for path in [current(data), *(data / "store").glob("catalog-*.duckdb")]:
        path.unlink()
    with pytest.raises(DataError, match="CURRENT is missing beside segments, expected the name of a catalog; poolmeter store restore"):
        opened(data)
    assert files(data) == before


@pytest.mark.parametrize("name", SEGMENTS)
def test_a_damaged_segment_is_named_and_set_aside_and_the_rest_is_kept(data: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    wanted = str(segment(data).relative_to(data / "store"))
    SEGMENTS[name](data)
    code, said = run(capsys, "store", "check", "--data", str(data))
    assert code == 1 and wanted in said
    code, said = run(capsys, "store", "backup", str(data.parent / "backup"), "--data", str(data))
    assert code in (2, 3) and ".parquet" in said and "faster" not in said and "cannot be written" not in said, said
    assert run(capsys, "store", "compact", "--data", str(data))[0] == 2
    with pytest.raises(DataError, match="set-aside"):
        opened(data)
    bad = sorted({problem.file for problem in audit(data / "store").problems if problem.file})
    words = [word for file in bad for word in ("--set-aside", file)]
    assert run(capsys, "store", "check", "--data", str(data), *words)[0] == 0
    opened(data)
    assert not audit(data / "store").problems
    assert run(capsys, "store", "backup", str(data.parent / "backup"), "--data", str(data))[0] == 0


def test_what_is_not_the_stores_is_left_alone_and_links_are_followed(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = stored(data / "store")
    foreign = [data / "store" / name for name in ("notes.txt", "catalog-x.duckdb", ".hidden", "segments.bak")]
    for path in foreign:
        path.write_text("x")
    moved = data / "moved.parquet"
    path = segment(data)
    path.rename(moved)
    path.symlink_to(moved)
    (data / "store").rename(data / "disk")
    (data / "store").symlink_to(data / "disk")
    opened(data)
    assert stored(data / "store") == rows and all(path.exists() for path in foreign)
    assert run(capsys, "store", "check", "--data", str(data))[0] == 0
    back_up(CollectorData(data), data.parent / "backup")
    restore(data.parent / "backup", CollectorData(data.parent / "again"))
    assert stored(data.parent / "again" / "store") == rows


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("find", [current, catalog, segment])
def test_what_this_user_may_not_read_is_said(data: Path, capsys: pytest.CaptureFixture[str], find: Callable[[Path], Path]) -> None:
    find(data).chmod(0)
    for verb in ("check", "compact", "backup"):
        words = [str(data.parent / "backup")] if verb == "backup" else []
        code, said = run(capsys, "store", verb, *words, "--data", str(data))
        assert code in (1, 2, 3) and "ermission" in said and "internal" not in said


def test_nothing_is_restored_over_what_is_there(data: Path, tmp_path: Path) -> None:
    back_up(CollectorData(data), tmp_path / "backup")
    before = files(data)
    with pytest.raises(Refused, match="not empty"):
        restore(tmp_path / "backup", CollectorData(data))
    with pytest.raises(Refused, match="not empty"):
        back_up(CollectorData(data), tmp_path / "backup")
    (tmp_path / "file").write_text("x")
    with pytest.raises(Refused):
        restore(tmp_path / "backup", CollectorData(tmp_path / "file"))
    assert files(data) == before and (tmp_path / "file").read_text() == "x"


COPIER = """
import sys
from pathlib import Path
from poolmeter.collector.backup import back_up, restore
from poolmeter.places import CollectorData
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[1] == "backup":
    back_up(CollectorData(Path(sys.argv[2])), Path(sys.argv[3]))
else:
    restore(Path(sys.argv[3]), CollectorData(Path(sys.argv[2])))
"""


@pytest.mark.parametrize("what", ["backup", "restore"])
def test_a_copy_that_is_killed_is_whole_or_not_there(data: Path, tmp_path: Path, what: str, rounds: Callable[[int, int], object]) -> None:
    back_up(CollectorData(data), tmp_path / "source")
    outcomes = set()
    for number in rounds(8, 200):  # type: ignore[attr-defined]
        target = tmp_path / f"target-{number}"
        folders = (data, target) if what == "backup" else (target, tmp_path / "source")
        process = subprocess.Popen([sys.executable, "-c", COPIER, what, *map(str, folders)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.stdin.write(b"\n")
        process.stdin.flush()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.02 * (number % 8))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        outcomes.add(target.exists())
        if target.exists() and what == "backup":
            verify(target, read_manifest(target))
        elif target.exists():
            assert stored(target / "store") == stored(data / "store") and not audit(target / "store").problems
    for number in range(3):  # what it left beside keeps nobody out
        if what == "backup":
            back_up(CollectorData(data), tmp_path / f"after-{number}")
        else:
            restore(tmp_path / "source", CollectorData(tmp_path / f"after-{number}"))
    assert outcomes <= {True, False}
    assert not audit(data / "store").problems


def test_a_clock_that_is_set_back_over_midnight_loses_and_doubles_nothing(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Store(root, grace_s=0) as store:
        for turn, now in enumerate((DAY + HOUR_US, DAY - HOUR_US, DAY + 2 * HOUR_US, DAY - 3 * DAY_US, DAY + 3 * HOUR_US)):
            made = batch(records("n1", EPOCH, 1 + 16 * turn, 16, DAY - 60 * MINUTE_US), now=DAY + 3 * HOUR_US)
            store.publish([made], now_us=now)
            store.publish([made], now_us=now)
            maintain(store, now, Retention())
            store.sweep()
    assert [row[2] for row in stored(root)] == list(range(1, 81)) and not audit(root).problems


def test_a_second_owner_is_turned_away_whatever_it_wants(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(data / "store"):
        for words in (["compact"], ["migrate"], ["check", "--set-aside", str(segment(data).relative_to(data / "store"))]):
            code, said = run(capsys, "store", *words, "--data", str(data))
            assert code in (1, 3) and ("owned by another" in said or "is whole" in said), said
        with pytest.raises(Unavailable, match="owned by another"):
            Store(data / "store")


@pytest.mark.parametrize("step", ["segment", "synced", "catalog", "current"])
def test_a_store_that_is_killed_in_its_first_publication_opens_again(tmp_path: Path, step: str) -> None:
    """It is founded before any segment is written, so that segments without `CURRENT` are never an honest store's."""

    class Killed(BaseException):
        pass

    seen: list[str] = []

    def on_step(name: str) -> None:
        seen.append(name)
        if name == step and "segment" in seen:
            raise Killed

    rows = batch(records("n1", EPOCH, 1, 8, DAY))
    store = Store(tmp_path, on_step=on_step)
    assert (tmp_path / "CURRENT").exists() and "segment" not in seen
    with contextlib.suppress(Killed):
        store.publish([rows], now_us=NOW)
    assert step in seen
    store.close()
    with Store(tmp_path) as again:
        again.publish([rows], now_us=NOW)
    assert [sequence for _, _, sequence in stored(tmp_path)] == list(range(1, 9))


async def test_a_torn_segment_is_no_fault_of_who_asks(tmp_path: Path) -> None:
    with collector(tmp_path) as state:
        state.store.publish([batch(records("n1", EPOCH, 1, 8, DAY))], now_us=NOW)
        for file in state.store.state.segments:
            (state.store.root / file).write_bytes(b"torn")
        async with client(state) as http:
            answer = await http.get("/v1/usage", params={"from": "2027-01-15", "to": "2027-01-16"})
        assert answer.status_code == 503 and "cannot be read" in answer.json()["error"]
