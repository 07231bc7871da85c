"""Where things are on a node: data folder, run folder, configuration file.

`$POOLMETER_DATA`, else /var/lib/poolmeter as root, else the XDG data folder; `$POOLMETER_RUN`, else /run/poolmeter as root, else
$XDG_RUNTIME_DIR/poolmeter.
"""

import os
from dataclasses import dataclass
from pathlib import Path


def data_folder(option: str | None = None) -> Path:
    """The data folder: `option` (the value of --data), the environment, or the default. Not created."""
    chosen = option or os.environ.get("POOLMETER_DATA")
    if chosen:
        return Path(chosen).absolute()
    if os.geteuid() == 0:
        return Path("/var/lib/poolmeter")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "poolmeter"


def run_folder(option: str | None = None) -> Path:
    """The run folder of this node. Not created."""
    chosen = option or os.environ.get("POOLMETER_RUN")
    if chosen:
        return Path(chosen).absolute()
    if os.geteuid() == 0:
        return Path("/run/poolmeter")
    return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/poolmeter-{os.geteuid()}") / "poolmeter"


@dataclass(frozen=True)
class NodeRun:
    """The files of one node under its run folder (contract: Files of a node)."""

    root: Path

    @property
    def allocations(self) -> Path:
        """A folder per allocation: grant, meter, allocation.json."""
        return self.root / "allocations"

    @property
    def retired(self) -> Path:
        """Ended allocations, until their last usage is acknowledged."""
        return self.root / "retired"

    @property
    def devices(self) -> Path:
        """What the hooks of one device share with each other."""
        return self.root / "devices"

    @property
    def socket(self) -> Path:
        """The enforcer's Unix socket."""
        return self.root / "enforcer.sock"

    @property
    def exporter_socket(self) -> Path:
        """The exporter's Unix socket, which its cards are released by."""
        return self.root / "exporter.sock"


@dataclass(frozen=True)
class NodeData:
    """The files of one node under its data folder."""

    root: Path

    @property
    def spool(self) -> Path:
        """The exporter's spool of records not yet acknowledged."""
        return self.root / "spool.sqlite"

    @property
    def journal(self) -> Path:
        """The enforcer's event journal: JSON lines of `JournalEvent`, appended with fsync."""
        return self.root / "events.jsonl"


@dataclass(frozen=True)
class CollectorData:
    """The files of one collector under its data folder."""

    root: Path

    @property
    def store(self) -> Path:
        """The usage store: segments, catalog-<n>.duckdb, CURRENT."""
        return self.root / "store"

    @property
    def books(self) -> Path:
        """The books (SQLite)."""
        return self.root / "books.sqlite"
