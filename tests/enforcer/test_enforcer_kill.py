"""kill -9 of a real enforcer at random: what it acknowledged is there, what it did not is whole or not at all, nothing leaks."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from poolmeter.enforcer.book import Book
from poolmeter.enforcer.journal import Journal
from poolmeter.enforcer.request import AllocationRequest, ResizeRequest
from poolmeter.errors import PoolmeterError, Unavailable
from poolmeter.model.allocation import Allocation, Labels

GIB = 1 << 30


class Tenants:
    """Threads that create, resize and release through the socket and remember what was acknowledged."""

    def __init__(self, node, seed: int) -> None:
        self.node = node
        self.held: dict[str, Allocation] = {}
        self.unsure: set[str] = set()  # a change of these was not answered
        self.acknowledged = 0
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._work, args=(random.Random(f"{seed}-{number}"),)) for number in range(3)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _work(self, rng: random.Random) -> None:
        mine: list[str] = []
        while not self.stop.is_set():
            try:
                self._step(rng, mine)
            except Unavailable:
                time.sleep(0.01)  # it is down just now
            except PoolmeterError:
                continue

    def _step(self, rng: random.Random, mine: list[str]) -> None:
        client = self.node.client
        if not mine or (len(mine) < 4 and rng.random() < 0.4):
            made = client.create(AllocationRequest(Labels("acme"), compute_ppm=rng.randint(1, 80_000), device_count=rng.randint(1, 2)))
            with self._lock:
                self.held[made.id] = made
                self.acknowledged += 1
            mine.append(made.id)
            return
        name = rng.choice(mine)
        self.unsure.add(name)  # until it is answered; set and dict operations are atomic
        if rng.random() < 0.5:
            changed, _ = client.resize(ResizeRequest(name, compute_ppm=rng.randint(1, 80_000), memory_bytes=rng.randint(GIB, 4 * GIB)))
            self.held[name] = changed
        else:
            mine.remove(name)
            client.release(name)
            self.held.pop(name)
        with self._lock:
            self.acknowledged += 1
        self.unsure.discard(name)


def test_killed_at_random_it_keeps_what_it_acknowledged(
    make_node, cards, agree, rng: random.Random, rounds: Callable[[int, int], Iterator[int]]
) -> None:
    node = make_node("alpha")
    listed = cards().listed[0]
    acknowledged = 0
    for number in rounds(12, 1000):
        tenants = Tenants(node, rng.randrange(1 << 30))
        time.sleep(rng.uniform(0.02, 0.25))
        node.kill()
        tenants.end()
        inventory = cards()
        inventory.listed = tuple(replace(listed, uuid=f"GPU-alpha-{index}", index=index) for index in range(4))
        book = Book(node.run, Journal(node.journal), inventory)
        book.open()
        agree(book)
        after = {allocation.id: allocation for allocation in book.entries()}
        for name, allocation in tenants.held.items():
            if name not in tenants.unsure:
                assert after.get(name) == allocation, f"round {number}"
        # What nobody was told of may be there, but then it is whole (agree), listed, and can be released.
        for name in list(after):
            book.release(name)
        assert book.entries() == ()
        agree(book)
        book.close()
        acknowledged += tenants.acknowledged
        node.start()
    assert node.client.list() == ()
    assert acknowledged > 0
    print(f"acknowledged: {acknowledged}")


def test_runs_and_enforcer_killed_at_random_leave_no_promise(
    make_node, rng: random.Random, rounds: Callable[[int, int], Iterator[int]]
) -> None:
    node = make_node("alpha")
    for _ in rounds(4, 300):
        words = [sys.executable, "-m", "poolmeter.cli", "run", "--quiet", "--compute", "10", "--", "sleep", str(rng.choice([0, 0.2, 600]))]
        environment = {**node.environment, "POOLMETER_RUN": str(node.run.root)}
        running = [subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL, start_new_session=True) for _ in range(3)]
        time.sleep(rng.uniform(0.1, 0.8))
        victims: list[Callable[[], object]] = [node.kill]
        victims += [lambda one=one: os.killpg(one.pid, signal.SIGKILL) for one in running]
        rng.shuffle(victims)
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                victim()
        for one in running:
            one.wait(30)
        node.start()
        deadline = time.monotonic() + 20
        while node.client.list():
            assert time.monotonic() < deadline, node.client.list()
            time.sleep(0.05)
