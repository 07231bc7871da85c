"""MPS as its control daemon tells it: servers, clients, active thread percentages. Asked only, never told.

The daemon speaks a protocol of its own on a pipe; NVIDIA's program `nvidia-cuda-mps-control` is the way to it. It is run only where the
pipe exists: run without a daemon it would say so, and with a wrong option it would start one. Its default folder is below /tmp, where
anybody may be first, so only a pipe of root's or of this process's own user is believed.

What a client limits itself to the daemon does not tell: that is in the client's environment alone.
"""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from poolmeter.vendors.proc import PROC

PIPE_FOLDER = Path("/tmp/nvidia-mps")  # the program's own default
PROGRAM = "nvidia-cuda-mps-control"
TIMEOUT_S = 2.0
ENVIRON_BYTES = 65_536
_SERVER = "nvidia-cuda-mps"  # as the kernel keeps it: 15 bytes
_LIMIT = b"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="


@dataclass(frozen=True, kw_only=True)
class MpsClient:
    """A client process, the pid of its server, and its active thread percentage in parts per million (None: not told)."""

    pid: int
    server: int
    active_thread_ppm: int | None = None


Say = Callable[[str], str | None]


def is_server(command: str | None) -> bool:
    """Whether a process's name is that of the MPS server (the control daemon has no context, so it is on no card's list)."""
    return command is not None and command.rsplit("/", 1)[-1].startswith(_SERVER)


class MpsControl:
    """Asks a control daemon. `say` sends one command and gives the answer, None when there is no daemon or it does not answer."""

    def __init__(self, say: Say | None = None, pipe_folder: Path | None = None, proc: Path = PROC) -> None:
        self._folder = pipe_folder or Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or PIPE_FOLDER)
        self._say = say or self._run
        self._proc = proc

    def _run(self, command: str) -> str | None:
        if not self._trusted():
            return None
        environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(self._folder)}
        try:
            done = subprocess.run(
                [PROGRAM], input=command + "\n", env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
            return None
        return done.stdout if done.returncode == 0 else None

    def _trusted(self) -> bool:
        pipe = self._folder / "control"
        try:
            # The folder also as a link: whoever owns that may point it elsewhere at any time.
            owners = {os.lstat(self._folder).st_uid, os.stat(self._folder).st_uid, os.stat(pipe).st_uid}
        except OSError:
            return False
        return owners <= {0, os.geteuid()}

    def read(self) -> tuple[MpsClient, ...] | None:
        """Clients now; None when no daemon answers."""
        listing = self._say("get_server_list")
        if listing is None:
            return None
        servers = dict.fromkeys(int(word) for word in listing.split() if word.isdigit())
        limits = {pid: _percentage(self._say(f"get_active_thread_percentage {pid}")) for pid in servers}
        clients = []
        for client in parse_clients(self._say("ps") or ""):
            own, server = self._own_limit(client.pid), limits.get(client.server)
            known = [limit for limit in (own, server) if limit is not None]
            clients.append(replace(client, active_thread_ppm=min(known, default=None)))
        return tuple(clients)

    def _own_limit(self, pid: int) -> int | None:
        """What the client asked for itself, which can only be less than the server's; readable with privilege alone.

        Nothing else of its environment is kept, and only the first ENVIRON_BYTES are read; the last variable of these may be cut off.
        """
        try:
            with (self._proc / str(pid) / "environ").open("rb") as environ:
                variables = environ.read(ENVIRON_BYTES).split(b"\0")[:-1]
        except OSError:
            return None
        found = next((item.removeprefix(_LIMIT) for item in variables if item.startswith(_LIMIT)), None)
        return None if found is None else _percentage(found.decode("ascii", "replace"))


def _percentage(answer: str | None) -> int | None:
    try:
        value = float((answer or "").split()[-1])
    except (IndexError, ValueError):
        return None
    return round(value * 10_000) if 0 < value <= 100 else None


def parse_clients(table: str) -> list[MpsClient]:
    """Rows of `ps`, by the names in its head; rows that do not read as a client are left out."""
    lines = table.splitlines()
    head = next((index for index, line in enumerate(lines) if line.split()[:1] == ["PID"]), None)
    if head is None:
        return []
    columns = {name: place for place, name in enumerate(lines[head].split())}
    found = []
    for line in lines[head + 1 :]:
        words = line.split()
        server = columns.get("SERVER", len(words))
        if len(words) <= server or not (words[0].isdigit() and words[server].isdigit()):
            continue
        found.append(MpsClient(pid=int(words[0]), server=int(words[server])))
    return found
