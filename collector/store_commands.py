"""`poolmeter store check|compact|backup|restore|migrate`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from poolmeter.clock import SystemClock
from poolmeter.collector.commands import retention
from poolmeter.config import load_config
from poolmeter.errors import BadInput
from poolmeter.places import CollectorData, data_folder
from poolmeter.progress import Progress
from poolmeter.report import Report, write

if TYPE_CHECKING:
    from poolmeter.collector.store import Store

COLUMNS = ("problem", "file", "found", "expected", "rows", "advice")


def _data(args: argparse.Namespace) -> CollectorData:
    return CollectorData(data_folder(args.data))


class StoreCheck:
    """Read every live segment and compare it with what the catalog says: bytes, checksum, rows, times, and that no record is stored twice.

    Only reads, and may run beside the collector. Exits with 1 when something is wrong; each row says what, and what to do.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--set-aside",
            metavar="FILE",
            action="append",
            default=[],
            help="move a damaged segment to store/damaged and go on without it: its rows are listed as lost (repeatable; no collector may run)",
        )

    def run(self, args: argparse.Namespace) -> int:
        root = _data(args).store
        return self._set_aside(root, args) if args.set_aside else self._check(root, args)

    def _check(self, root: Path, args: argparse.Namespace) -> int:
        from poolmeter.collector.audit import audit
        from poolmeter.collector.catalog import query

        with Progress(100, "%") as bar:
            found = audit(root, lambda done, total: bar.show(100 * done / max(total, 1)))
        rows = tuple({name: value for name, value in vars(problem).items() if value is not None} for problem in found.problems)
        lost = 0 if found.generation is None else query(root, "SELECT count(*) AS entries FROM lost").column(0)[0].as_py()
        totals = {
            "generation": found.generation,
            "segments": found.segments,
            "rows": found.rows,
            "bytes": found.bytes,
            "checksummed_segments": found.checksummed,
            "replaced_meanwhile": found.replaced,
            "leftover_files": found.leftovers,
            "leftover_bytes": found.leftover_bytes,
            "lost_entries": lost,
        }
        warnings = []
        if lost:
            warnings.append("rows of segments that were set aside are missing: the table lost of the catalog says which")
        if found.replaced:
            warnings.append("segments were merged while they were read: sequences were not compared, run it again")
        write(Report("store-check", COLUMNS, rows, totals=totals, warnings=tuple(warnings)), args.format, args.output)
        return 1 if rows else 0

    def _set_aside(self, root: Path, args: argparse.Namespace) -> int:
        from poolmeter.collector.aside import set_aside

        lost = set_aside(root, args.set_aside, SystemClock().wall_us())
        rows = tuple({name: value for name, value in vars(row).items() if value is not None} for row in lost)
        columns = ("kind", "day", "file", "node", "rows", "exact", "min_minute_us", "max_minute_us", "at_us", "reason")
        write(Report("store-lost", columns, rows), args.format, args.output)
        return 0


class StoreCompact:
    """Merge small segments and roll closed days up now, instead of waiting for the collector to do so.

    No collector may own the store meanwhile. Replaced files are deleted by the next collector, after its readers' time of grace.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        pass

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.collector.maintenance import maintain
        from poolmeter.collector.store import Store

        root = _data(args).store
        _expect_store(root)
        with Store(root) as store:
            before = _by_kind(store)
            steps = maintain(store, SystemClock().wall_us(), retention(load_config(args.config).collector), at_once=True)
            after = _by_kind(store)
            warnings = tuple(store.damaged.values())
        rows = tuple(
            {
                "kind": kind,
                "segments_before": before.get(kind, (0, 0, 0))[0],
                "segments": after.get(kind, (0, 0, 0))[0],
                "bytes_before": before.get(kind, (0, 0, 0))[1],
                "bytes": after.get(kind, (0, 0, 0))[1],
                "rows": after.get(kind, (0, 0, 0))[2],
            }
            for kind in sorted(before | after)
        )
        columns = ("kind", "segments_before", "segments", "bytes_before", "bytes", "rows")
        write(Report("store-compact", columns, rows, totals={"steps": steps}, warnings=warnings), args.format, args.output)
        return 1 if warnings else 0


class StoreBackup:
    """Copy the store as one catalog names it, and the books, into a new folder; the collector may go on meanwhile.

    The folder appears when all of it was read again and found whole. It is laid out like a data folder.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("target", metavar="FOLDER", help="where to: an empty folder, or none yet")
        parser.add_argument("--since", metavar="BACKUP", help="an earlier backup: what has not changed is linked to it instead of copied")

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.books.backup import elsewhere
        from poolmeter.collector.backup import back_up

        target = _path(args.target)
        with Progress(100, "%") as bar:
            since = None if args.since is None else _path(args.since)
            made = back_up(_data(args), target, since, lambda done, total: bar.show(100 * done / max(total, 1)))
        row = {
            "backup": str(target),
            "generation": made.generation,
            "files": len(made.files),
            "bytes": made.bytes,
            "linked_files": made.linked,
            "books": made.books,
        }
        configured = load_config(args.config).collector.books
        warnings = []
        if configured is not None:
            warnings.append(f"{elsewhere(configured)}: these were not backed up")
        elif not made.books:
            warnings.append(f"there are no books at {_data(args).books}: the store alone was backed up")
        write(Report("store-backup", tuple(row), (row,), warnings=tuple(warnings)), args.format, args.output)
        return 0


class StoreRestore:
    """Make an empty data folder what a backup holds, after every file of the backup was checked; nothing is put in place otherwise."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("source", metavar="BACKUP", help="a folder that store backup made")

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.collector.backup import restore

        data = _data(args)
        with Progress(100, "%") as bar:
            found = restore(_path(args.source), data, lambda done, total: bar.show(100 * done / max(total, 1)))
        row = {
            "data": str(data.root),
            "generation": found.generation,
            "files": len(found.files),
            "bytes": found.bytes,
            "books": found.books,
        }
        write(Report("store-restore", tuple(row), (row,)), args.format, args.output)
        return 0


class StoreMigrate:
    """Bring the store of an older poolmeter, and its books, to this version: a new catalog is written, no segment changes.

    No collector may own the store meanwhile. Take a backup with the older poolmeter first: it cannot read the store or the books afterwards.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        pass

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.collector.migration import migrate
        from poolmeter.collector.tables import STORE_VERSION

        data = _data(args)
        configured = load_config(args.config).collector.books
        file = data.books if data.books.exists() else None
        done = migrate(data.store, file if configured is None else configured)
        row = {"store": str(data.store), "version_before": done.before, "version": STORE_VERSION, "generation": done.generation}
        if done.books is not None:
            row |= {"books_before": done.books.before or "none", "books": done.books.after}
        write(Report("store-migrate", tuple(row), (row,)), args.format, args.output)
        return 0


def _path(text: str) -> Path:
    if not text:
        raise BadInput("the folder is '', expected a path")
    return Path(text).absolute()


def _expect_store(root: Path) -> None:
    """Raises Unavailable where there is no store: opening one to write would found an empty one."""
    from poolmeter.collector.catalog import open_catalog

    open_catalog(root).close()


def _by_kind(store: "Store") -> dict[str, tuple[int, int, int]]:
    """Live segments, their bytes and their rows, by kind."""
    out: dict[str, tuple[int, int, int]] = {}
    for segment in store.state.segments.values():
        count, size, rows = out.get(segment.kind.value, (0, 0, 0))
        out[segment.kind.value] = (count + 1, size + segment.bytes, rows + segment.rows)
    return out
