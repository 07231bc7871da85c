"""Places for books of every kind: a new file, a new database of a real PostgreSQL (Debian package postgresql) on a Unix socket."""

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from poolmeter.books.backend import Backend
from poolmeter.books.database import BACKENDS
from poolmeter.books.postgres import Postgres
from poolmeter.books.sqlite import Sqlite
from poolmeter.books.upgrade import upgrade

WAIT_S = 30.0
FOLDERS = [Path(name).resolve().parent for name in [shutil.which("postgres")] if name] + sorted(
    Path("/usr/lib/postgresql").glob("*/bin"), reverse=True
)
PROGRAMS = next((folder for folder in FOLDERS if (folder / "postgres").exists() and (folder / "initdb").exists()), None)
needs_postgres = pytest.mark.skipif(PROGRAMS is None, reason="PostgreSQL is not installed (Debian package postgresql)")
# Every back end of the books, each with its mark: what is here runs every test of the suite.
KINDS = tuple(
    pytest.param(backend, marks=[needs_postgres] if backend is Postgres else [], id=backend.__name__.lower()) for backend in BACKENDS
)


def _other_user() -> dict[str, Any]:
    """Arguments of subprocess: PostgreSQL does not run as root."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    user = names.get("postgres") or names["nobody"]
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@dataclass
class Server:
    """A PostgreSQL of our own in a folder, with no TCP port; everybody who reaches its socket is trusted, but `guarded`."""

    folder: Path
    process: "subprocess.Popen[bytes] | None" = None
    _connection: Any = None
    _numbers: int = 0

    def make(self) -> None:
        """Initialise it."""
        other = _other_user()
        if other:
            os.chown(self.folder, other["user"], other["group"])
        words = [
            f"{PROGRAMS}/initdb",
            "-D",
            f"{self.folder}/data",
            "-U",
            "poolmeter",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C.UTF-8",
            "-N",
        ]
        made = subprocess.run(words, capture_output=True, text=True, cwd=self.folder, timeout=100, check=False, **other)
        assert made.returncode == 0, made.stdout + made.stderr
        (self.folder / "data/pg_hba.conf").write_text("local all guarded scram-sha-256\nlocal all all trust\n")

    def start(self) -> None:
        """Run it, until it answers."""
        settings = {
            "listen_addresses": "", "unix_socket_directories": str(self.folder), "fsync": "off", "max_connections": "60",
            "shared_buffers": "16MB", "autovacuum": "off",
        }  # fmt: skip
        words = [f"{PROGRAMS}/postgres", "-D", f"{self.folder}/data", *(f"-c{name}={value}" for name, value in settings.items())]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, cwd=self.folder, **_other_user())
        deadline = time.monotonic() + WAIT_S
        while self.psql("postgres", "SELECT 1", check=False).returncode != 0:
            assert self.process.poll() is None and time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it: SIGINT throws its clients out, SIGQUIT also leaves recovery for the next start."""
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait(timeout=WAIT_S)

    def psql(self, database: str, sql: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run SQL by the server's own client."""
        words = [
            f"{PROGRAMS}/psql",
            "-X",
            "-q",
            "-A",
            "-t",
            "-v",
            "ON_ERROR_STOP=1",
            "-h",
            str(self.folder),
            "-U",
            "poolmeter",
            "-d",
            database,
        ]
        done = subprocess.run([*words, "-c", sql], capture_output=True, text=True, timeout=WAIT_S, check=False, cwd="/")
        assert not check or done.returncode == 0, done.stderr
        return done

    def place(self) -> str:
        """The URL of books that are empty: a user of its own with its own schema, which costs far less than a database."""
        import psycopg

        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(self.url("postgres", "poolmeter"), autocommit=True)
        self._numbers += 1
        name = f"books{self._numbers}"
        self._connection.execute(f"CREATE ROLE {name} LOGIN")
        self._connection.execute(f"CREATE SCHEMA AUTHORIZATION {name}")
        return self.url("postgres", name)

    def url(self, database: str, user: str) -> str:
        """The URL of a database for a user."""
        return f"postgresql://{user}@/{database}?host={self.folder}"


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """One that runs; its folder is short, since a socket's path is limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="pm-", dir="/tmp", ignore_cleanup_errors=True) as name:
        found = Server(Path(name))
        found.make()
        found.start()
        try:
            yield found
        finally:
            if found.process is not None and found.process.poll() is None:
                found.stop(signal.SIGQUIT)


class Places:
    """New places for books of one kind, as many as wanted."""

    def __init__(self, kind: type[Backend], folder: Path, running: Callable[[], Server]) -> None:
        self.kind = kind
        self._folder = folder
        self._running = running
        self._numbers = itertools.count()
        self._blank: Path | None = None

    def new(self) -> Path | str:
        """A place where nothing is."""
        if self.kind is Sqlite:
            return self._folder / f"books-{next(self._numbers)}.sqlite"
        assert self.kind is Postgres
        return self._running().place()

    def ready(self) -> Path | str:
        """Books with tables and nothing in them."""
        place = self.new()
        if self._blank is not None:
            shutil.copyfile(self._blank, place)
            return place
        upgrade(place)
        if isinstance(place, Path):
            self._blank = place.with_suffix(".blank")
            shutil.copyfile(place, self._blank)
        return place
