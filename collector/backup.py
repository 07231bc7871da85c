"""Backups: exactly the segments that one catalog names, that catalog, and the books; taken beside a running collector.

A backup is a folder like a data folder (`store/`, `books.sqlite`) and `backup.json`, which names every file with its size and SHA-256.
It appears whole or not at all: it is made in a folder beside its place, read again, and renamed.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from poolmeter.books.backup import backup as copy_books
from poolmeter.clock import SystemClock
from poolmeter.collector.audit import digest_of, live_segments, open_file
from poolmeter.collector.catalog import CURRENT, current_name, open_catalog
from poolmeter.collector.segments import TEMPORARY, Segment, sync_folder
from poolmeter.errors import BadInput, DataError, Refused, Unavailable
from poolmeter.places import CollectorData

MANIFEST = "backup.json"
SCHEMA = "poolmeter.backup/1"
_ATTEMPTS = 3
Show = Callable[[int, int], None]


@dataclass(frozen=True)
class Entry:
    """One file of a backup, by its path in there."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Backup:
    """A backup's manifest; `linked` files are shared with an earlier backup; `books` is false when there were none to take."""

    generation: int
    taken_us: int
    files: tuple[Entry, ...]
    linked: int
    books: bool

    @property
    def bytes(self) -> int:
        """Bytes of all its files."""
        return sum(entry.bytes for entry in self.files)


def nothing(done: int, total: int) -> None:
    """Show no progress."""


def back_up(data: CollectorData, target: Path, since: Path | None = None, show: Show = nothing) -> Backup:
    """Take a backup into `target`, which must be absent or an empty folder; `since` is an earlier backup, whose files are linked.

    Raises Refused (something is there), Unavailable (no store, a disk that takes nothing), DataError (a damaged segment, a torn `since`).
    """
    _refuse_taken(target, "backup")
    earlier = {entry.file: entry for entry in read_manifest(since).files} if since is not None else {}
    work = _work_folder(target)
    try:
        for last in [False] * (_ATTEMPTS - 1) + [True]:
            try:
                found = _fill(data, work, since, earlier, show)
                break
            except FileNotFoundError as error:
                # Merged away and its grace over: take the newer catalog.
                if error.filename is not None and _still_named(data.store, Path(error.filename)):
                    raise DataError(
                        f"{error.filename} is missing, expected every file of the catalog; poolmeter store check tells more"
                    ) from None
                if last:
                    raise Unavailable(f"store {data.store} changes faster than it can be copied: {error.filename} is gone") from None
                shutil.rmtree(work)
                work.mkdir()
        _write_synced(work / MANIFEST, json.dumps({"schema": SCHEMA, **asdict(found)}, indent=1).encode() + b"\n")
        _sync_tree(work)
        verify(work, found, nothing)
        os.rename(work, target)
        sync_folder(target.parent)
        return found
    except OSError as error:
        raise Unavailable(f"backup {target} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _still_named(root: Path, missing: Path) -> bool:
    """Whether the newest catalog names a file that is not there: then no later try finds it."""
    with open_catalog(root) as connection:
        return not missing.exists() and any(root / segment.file == missing for segment in live_segments(connection))


def restore(source: Path, data: CollectorData, show: Show = nothing) -> Backup:
    """Make `data` what the backup holds, bit for bit, after every file of it was checked. Raises Refused when `data` is not empty.

    Raises DataError when a file of the backup is damaged or missing: nothing is put in place then.
    """
    _refuse_taken(data.root, "data folder")
    found = read_manifest(source)
    work = _work_folder(data.root)
    try:
        done = 0
        for entry in found.files:
            target = work / entry.file
            target.parent.mkdir(parents=True, exist_ok=True)
            copied = _copy(_inside(source, entry.file), target)
            if copied != (entry.bytes, entry.sha256):
                raise DataError(_damaged(source, entry, copied[0]))
            done += entry.bytes
            show(done, found.bytes)
        _sync_tree(work)
        with open_catalog(work / "store"):
            pass  # it is a catalog of this version
        os.rename(work, data.root)
        sync_folder(data.root.parent)
        return found
    except FileNotFoundError as error:
        raise DataError(f"backup {source} lacks {error.filename}, expected every file of its {MANIFEST}") from None
    except OSError as error:
        raise Unavailable(f"data folder {data.root} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def verify(folder: Path, backup: Backup, show: Show = nothing) -> None:
    """Read every file of a backup again. Raises DataError naming the first that is not what the manifest says."""
    done = 0
    for entry in backup.files:
        try:
            found = digest_of(_inside(folder, entry.file))
        except FileNotFoundError:
            raise DataError(f"backup {folder} lacks {entry.file}, expected every file of its {MANIFEST}") from None
        if found != (entry.bytes, entry.sha256):
            raise DataError(_damaged(folder, entry, found[0]))
        done += entry.bytes
        show(done, backup.bytes)


def read_manifest(folder: Path) -> Backup:
    """The manifest of a backup. Raises Unavailable when there is none, DataError when it is torn or of another version."""
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_bytes())
        schema = body.pop("schema", None)
        if schema != SCHEMA:
            raise DataError(f"backup {path} has schema {schema!r:.60}, expected {SCHEMA}")
        entries = tuple(Entry(str(row["file"]), int(row["bytes"]), str(row["sha256"])) for row in body.pop("files"))
        return Backup(files=entries, **body)
    except FileNotFoundError:
        raise Unavailable(
            f"backup {folder} is not there (no file {MANIFEST}), expected a folder that poolmeter store backup made"
        ) from None
    except OSError as error:
        raise Unavailable(f"backup {path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"backup {path} is torn ({error!r:.80}), expected the manifest that poolmeter store backup writes") from None


def _fill(data: CollectorData, work: Path, since: Path | None, earlier: dict[str, Entry], show: Show) -> Backup:
    store = work / "store"
    store.mkdir()
    name = current_name(data.store)
    if name is None:
        raise Unavailable(f"store {data.store} is not there (no file {CURRENT}), expected the data folder of a collector that has run")
    # The catalog first: it lives for seconds, its segments for minutes after they are replaced.
    entries = [Entry(f"store/{name}", *_copy(data.store / name, store / name))]
    body = f"{name}\n".encode()
    _write_synced(store / CURRENT, body)
    entries.append(Entry(f"store/{CURRENT}", *digest_of(store / CURRENT)))
    try:
        opened = open_catalog(store)
    except DataError as error:  # the copy is what the store has
        raise type(error)(str(error).replace(str(store), str(data.store))) from None
    with opened as connection:
        segments = live_segments(connection)
        generation = connection.execute("SELECT generation FROM meta").fetchall()[0][0]
    total, done, linked = sum(segment.bytes for segment in segments), 0, 0
    for segment in segments:
        target = store / segment.file
        target.parent.mkdir(parents=True, exist_ok=True)
        known = earlier.get(f"store/{segment.file}")
        if since is not None and known is not None and segment.sha256 in (None, known.sha256) and _link(since / known.file, target):
            entries.append(known)
            linked += 1
        else:
            entries.append(_taken(data.store, segment, target))
        done += segment.bytes
        show(done, total)
    # After the store: an outcome that the stored events tell is in the books by then, or comes again.
    books = data.books.exists()
    if books:
        copy_books(data.books, work / "books.sqlite")
        entries.append(Entry("books.sqlite", *digest_of(work / "books.sqlite")))
    return Backup(generation, SystemClock().wall_us(), tuple(entries), linked, books)


def _taken(root: Path, segment: Segment, target: Path) -> Entry:
    size, digest = _copy(root / segment.file, target)
    if size != segment.bytes or segment.sha256 not in (None, digest):
        raise DataError(
            f"segment {segment.file} of store {root} is damaged, expected {segment.bytes} bytes with SHA-256 {segment.sha256 or 'unknown'};"
            " poolmeter store check tells more"
        )
    return Entry(f"store/{segment.file}", size, digest)


def _copy(source: Path, target: Path) -> tuple[int, str]:
    """Copy a file, synced; its bytes and SHA-256 as they are in the copy."""
    with _source(source) as read, target.open("xb") as written:
        shutil.copyfileobj(read, written, 1 << 20)
        written.flush()
        os.fsync(written.fileno())
    return digest_of(target)


def _source(path: Path) -> BinaryIO:
    try:
        return open_file(path)
    except FileNotFoundError:
        raise
    except OSError as error:  # what is wrong is not the disk that is written
        raise Unavailable(f"{path} cannot be read: {error.strerror or error}, expected a file that this user may read") from None


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        return False
    return True


def _refuse_taken(target: Path, what: str) -> None:
    try:
        taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError as error:
        raise Unavailable(f"{what} {target} cannot be read: {error.strerror}") from None
    if taken:
        raise Refused(f"{what} {target} is not empty, expected an empty folder or none")


def _work_folder(target: Path) -> Path:
    work = target.parent / f"{TEMPORARY}{target.name}-{secrets.token_hex(4)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir(mode=0o700)
        if target.exists():
            os.chmod(work, target.stat().st_mode & 0o7777)
    except OSError as error:
        raise Unavailable(f"folder {target.parent} cannot be written: {error.strerror}") from None
    return work


def _inside(folder: Path, name: str) -> Path:
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise BadInput(f"backup {folder} names the file {name!r:.200}, expected a path inside it")
    return folder / path


def _damaged(folder: Path, entry: Entry, size: int) -> str:
    return f"{entry.file} of backup {folder} is damaged: {size} bytes, expected {entry.bytes} with SHA-256 {entry.sha256}; nothing was restored"


def _write_synced(path: Path, body: bytes) -> None:
    with path.open("xb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def _sync_tree(folder: Path) -> None:
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync_folder(path)
