"""A collector's store at work: what tests kill, some of it in a process of its own (which must be able to import it by name)."""

import random
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from collector_fakes import DAY, EPOCH, NOW, batch, records, slice_

from poolmeter.collector.maintenance import maintain
from poolmeter.collector.retention import Retention
from poolmeter.collector.store import Store
from poolmeter.model.units import DAY_US

KEEP = Retention(process_days=400, minute_days=2, hour_days=2)


def work(store: Store, rng: random.Random, first: int, acknowledged: Callable[[int], None]) -> None:
    """Publications, merges, rollups and retention, from sequence `first` on; each publication is acknowledged as a collector would."""
    for _ in range(rng.randint(1, 4)):
        made = records("n1", EPOCH, first, rng.choice([2, 8]), DAY)
        if rng.random() < 0.2:
            made.append(slice_("n1", EPOCH, made[-1].sequence + 1, DAY, tenant=""))
        store.publish([batch(made)], now_us=NOW)
        first = made[-1].sequence + 1
        acknowledged(first - 1)
        if rng.random() < 0.4:
            maintain(store, rng.choice([NOW, DAY + 2 * DAY_US, DAY + 9 * DAY_US]), KEEP, at_once=True)


def writer(root: str, seed: int, first: int, pipe: Connection) -> None:
    """A collector's store in a process of its own, until it is killed."""
    rng = random.Random(seed)
    with Store(Path(root), grace_s=0.05) as store:
        pipe.send(first - 1)
        last = [first - 1]

        def acknowledged(sequence: int) -> None:
            pipe.send(sequence)
            last[0] = sequence

        while True:
            work(store, rng, last[0] + 1, acknowledged)
