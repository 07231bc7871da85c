"""Ticks without end, with programs that come and go: what is kept is what is there."""

import functools
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from amounts_fakes import Hooked, Pool
from exporter_fakes import CARD, GIB, SECOND, Node, process

from poolmeter.exporter.collectors.family import Page
from poolmeter.exporter.render import Renderer
from poolmeter.model.allocation import Mode

PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


def resident_kib() -> int:
    """What the kernel says this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_KIB


def cached() -> int:
    """How many answers the caches of this project's functions hold."""
    caches = (held for held in gc.get_objects() if isinstance(held, functools._lru_cache_wrapper))
    return sum(cache.cache_info().currsize for cache in caches if cache.__module__.startswith("poolmeter."))


@pytest.mark.timeout(1800)
def test_ten_thousand_ticks_with_churn_hold_no_more_memory(node: Node, rounds: Callable[[int, int], Iterator[int]]) -> None:
    """A tick a second on a virtual clock, through agent, spool and page; at every tick an allocation with a program, or a stranger, comes or goes."""
    renderer = Renderer()
    objects: list[int] = []
    memory: list[int] = []
    answers: list[int] = []
    living: list[str] = []
    for turn in rounds(240, 10_000):
        allocation = node.create(f"churn-{turn}", ppm=100_000)
        node.meters[allocation.id].attach()
        node.meters[allocation.id].count(CARD, busy_ns=50_000_000, launches=3, memory=GIB)
        living.append(allocation.id)
        strangers = tuple(process(5_000_000 + turn - back, turn - back + 1, 10_000 * (back + 1), GIB) for back in range(3) if turn >= back)
        node.sampler.change(CARD, processes=strangers, busy_us_total=turn * 200_000, energy_uj_total=turn * 300 * SECOND)
        node.tick()
        page = node.agent.page()
        assert page is not None and len(page.snapshot.processes) <= 16 and len(page.snapshot.slices) <= 5
        renderer.render(page)
        if len(living) > 3:
            old = living.pop(0)
            node.meters[old].die()
            node.release(node.agent.ledger.timeline.standing[old])
            node.meters.pop(old).close()
        node.spool.acknowledge("collector", node.spool.epoch, node.spool.last_sequence)
        if turn % 60 == 59:
            gc.collect()
            objects.append(len(gc.get_objects()))
            memory.append(resident_kib())
            answers.append(cached())
            kept = node.agent.ledger
            # What a minute has seen stays until it is closed, and a retired folder until its last record is acknowledged.
            assert max(len(kept.slices), len(kept.known), len(kept.processes) // 2, len(kept.settled)) <= 140
    assert max(answers) == answers[0]  # a cache that is bounded fills up all the same
    half = len(objects) // 2
    assert max(objects[half:]) <= 1.05 * max(objects[:half]) + 2000
    assert max(memory[half:]) <= max(memory[:half]) + 6 * 1024


def test_ledger_and_snapshot_forget_what_ended(rounds: Callable[[int, int], Iterator[int]]) -> None:
    """The same without files, with every basis and mode, and many programs at a time."""
    pool = Pool()
    pool.allocate("w", Mode.TIMESLICE, meter=False)
    pool.allocate("h")
    sizes = []
    renderer = Renderer()
    for turn in rounds(400, 10_000):
        pool.slots["h"] = {0: Hooked(2_000_000 + turn, busy_us=50_000)}
        pool.retired["h"] = turn * 50_000
        pids = range(1_000_000 + turn, 1_000_000 + turn + 20)
        pool.owners.clear()
        pool.owners.update({pid: "w" for pid in pids if pid % 2})
        pool.processes(*(process(pid, pid, (1_000_000 + turn + 20 - pid) * 2_000, GIB // 8) for pid in pids))
        pool.step()
        renderer.render(Page(pool.snapshot(), 0, "1"))
        if turn % 60 == 59:
            pool.records.clear()
            sizes.append(len(pool.ledger.to_json()))
    assert max(sizes[len(sizes) // 2 :]) <= 1.1 * max(sizes[: len(sizes) // 2]) and not pool.tampered
