"""The store dies at random moments: what was acknowledged is there once, after kill -9 and after a loss of power."""

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from collector_fakes import stored
from power_loss import Disk, PowerLoss
from store_writer import work, writer

from poolmeter.collector.audit import audit
from poolmeter.collector.catalog import query
from poolmeter.collector.store import Store


def told(root: Path, through: int, more: int) -> None:
    """Every row up to `through` once: live, in quarantine, or told by the hours or days that its minutes were let go for; and nothing more."""
    found = [sequence for _, _, sequence in stored(root)]
    assert len(found) == len(set(found)), "stored twice"
    quarantined = set(query(root, "SELECT sequence FROM quarantine").column(0).to_pylist())
    rolled = {
        view: int(query(root, f"SELECT coalesce(sum(records), 0) FROM {view}").column(0)[0].as_py())
        for view in ("slice_days", "device_days")
    }
    known = query(root, "SELECT first_sequence, last_sequence FROM sequences").to_pylist()
    assert [row["first_sequence"] for row in known] == ([1] if known else [])
    last = known[0]["last_sequence"] if known else 0
    assert through <= last <= through + more
    for kind, view in ((0, "device_days"), (1, "slice_days")):
        # Sequences are of all kinds in turn: device 0, slice 1, process 2, event 3 modulo 4; a bad row stands where its number is.
        wanted = len([n for n in range(1, last + 1) if n % 4 == kind and n not in quarantined])
        assert rolled[view] == wanted, view
    rest = {n for n in range(1, last + 1) if n % 4 == 2 and n not in quarantined}
    assert rest <= set(found)


@pytest.mark.timeout(7200)
def test_no_loss_of_power_takes_an_acknowledged_row_or_doubles_one(
    tmp_path: Path, rng: random.Random, rounds: Callable[[int, int], Iterator[int]]
) -> None:
    """The audit of fsync: at a random call the power goes, and what is left is only what the store had made durable."""
    root = tmp_path / "0"
    Store(root).close()
    through = losses = syncs = 0
    for number in rounds(14, 1000):
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(root, rng, rng.randint(1, 60))
            disk.watch(patch)
            done = [through]
            lost = False
            try:
                with Store(root, grace_s=0.0) as store:
                    work(store, rng, through + 1, lambda last, done=done: done.append(last))  # type: ignore[misc]
            except PowerLoss:
                lost = True
        through, syncs = done[-1], syncs + disk.syncs
        if lost:
            losses += 1
            after = tmp_path / str(number + 1)
            disk.leave(after)
            shutil.rmtree(root)
            root = after
        Store(root).close()
        told(root, through, 9)
        assert audit(root).problems == []
        through = int(query(root, "SELECT coalesce(max(last_sequence), 0) FROM sequences").column(0)[0].as_py())
        if through > 400:
            shutil.rmtree(root)
            Store(root).close()
            through = 0
    assert losses > 3 and syncs > 60


@pytest.mark.timeout(7200)
def test_kill_9_at_random_loses_and_doubles_nothing(
    tmp_path: Path, rng: random.Random, rounds: Callable[[int, int], Iterator[int]]
) -> None:
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(
        ["poolmeter.collector.store", "poolmeter.collector.maintenance", "collector_fakes", "duckdb", "pyarrow.parquet"]
    )
    root = tmp_path / "store"
    through = killed = 0
    for _ in rounds(5, 1000):
        mine, theirs = start.Pipe(duplex=False)
        process = start.Process(target=writer, args=(str(root), rng.randint(0, 1 << 30), through + 1, theirs))
        process.start()
        theirs.close()
        assert mine.poll(60), "the store did not open"
        time.sleep(rng.uniform(0, 0.4))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        killed += 1
        try:
            while True:
                through = max(through, mine.recv())
        except EOFError:
            pass
        Store(root).close()
        told(root, through, 9)
        through = int(query(root, "SELECT coalesce(max(last_sequence), 0) FROM sequences").column(0)[0].as_py())
        if through > 2000:
            assert audit(root).problems == []
            shutil.rmtree(root)
            through = 0
    assert audit(root).problems == [] if root.exists() else True
    assert killed >= 5
