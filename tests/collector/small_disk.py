"""A store on a disk of 6 MiB that fills up, is freed, and becomes read-only; run by test_collector_disk.py in a mount namespace of its own.

Prints one JSON object of what it saw.
"""

import asyncio
import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import httpx
from collector_fakes import DAY, EPOCH, NOW, batch, event, stored

from poolmeter.books.writer import Books
from poolmeter.collector.api import ApiState, create_app
from poolmeter.collector.audit import audit
from poolmeter.collector.catalog import query
from poolmeter.collector.maintenance import maintain
from poolmeter.collector.retention import Retention
from poolmeter.collector.store import Store
from poolmeter.errors import Unavailable


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def read_only(disk: Path) -> None:
    """The same disk over itself, for reading alone: it cannot be made so below the open lock."""
    mount("--bind", str(disk), str(disk))
    mount("-o", "remount,bind,ro", str(disk))


def read_write(disk: Path) -> None:
    subprocess.run(["umount", str(disk)], check=True)


def health(state: ApiState) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(state)), base_url="http://collector") as http:
            ready, whole = await http.get("/readyz"), await http.get("/v1/health")
            body = whole.json()
            return {
                "ready": ready.status_code,
                "said": ready.text.strip(),
                "status": body["status"],
                "writable": body["store"]["writable"],
                "warnings": body["warnings"],
                "free": body["store"]["disk_free_bytes"],
            }

    return asyncio.run(ask())


def main(disk: Path, elsewhere: Path) -> dict[str, Any]:
    root = disk / "store"
    seen: dict[str, Any] = {}
    made = [event("n1", EPOCH, n + 1, DAY, detail=str(uuid.uuid4()) * 40) for n in range(300)]
    with Books(elsewhere / "books.sqlite") as books, Store(root, grace_s=0.0) as store:
        state = ApiState(store, books, "secret", tuple, reads_need_token=False)
        through = 0

        def publish() -> str | None:
            nonlocal through
            piece = made[through : through + 10]
            try:
                store.publish([batch(piece)], now_us=NOW)
            except Unavailable as error:
                return str(error)
            through += len(piece)
            store.sweep()
            return None

        publish()
        seen["at first"] = health(state)
        # All but 100 KB taken by somebody else: the next publication ends in the middle of a file.
        ballast = disk / "ballast"
        with ballast.open("wb") as file:
            file.write(b"\0" * (health(state)["free"] - 100_000))
        while (failure := publish()) is None:
            pass
        acknowledged = through
        seen["full"] = health(state) | {"failure": failure}
        again = publish()
        seen["full still"] = [again is not None, acknowledged == through, len(stored(root)) == acknowledged, audit(root).problems == []]
        try:
            maintain(store, NOW, Retention(), at_once=True)
            seen["upkeep"] = None
        except Unavailable as error:
            seen["upkeep"] = str(error)
        seen["leftovers"] = audit(root).leftovers
        ballast.unlink()
        seen["freed"] = [publish(), health(state), len(stored(root)) == through]
        read_only(disk)
        failure = publish()
        seen["read-only"] = health(state) | {"failure": failure}
        seen["read"] = len(stored(root)) == through and audit(root).problems == []
        store.sweep()
        read_write(disk)
        seen["writable again"] = [publish(), health(state)]
    read_only(disk)
    try:
        Store(root).close()
    except Unavailable as error:
        seen["start"] = str(error)
    seen["reader"] = query(root, "SELECT count(*) FROM event_log").column(0)[0].as_py() == through
    read_write(disk)
    with Store(root) as store:
        seen["known"] = store.publish([batch(made[:through])], now_us=NOW).known == through
        sequences = [sequence for *_, sequence in stored(root)]
        seen["once"] = sequences == list(range(1, through + 1))
    return seen


if __name__ == "__main__":
    mount("-t", "tmpfs", "-o", "size=6m", "none", sys.argv[1])
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
