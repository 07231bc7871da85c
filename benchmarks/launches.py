"""What the hook adds to a launch that waits for nothing: `python benchmarks/launches.py [--simulated]`.

All cases live at the same time, each in a process of its own whose launching thread is pinned to the same core, and take short turns, one
after another, the order moved on by one each round: a pair is a hooked turn and the plain turn of the same round, some 20 ms apart. A turn
is a few batches of launches of an empty kernel, one clock reading before and one after a batch, the queue emptied between batches. Fresh
processes are made several times, because where the loader put things is part of a process' speed. The figure is the median of the pairs'
differences of turn medians, with quartiles, their number, and the median of each set of processes; `of_means` also holds what is rare, such
as launches that the hook times. The second plain case shows what the method makes out of nothing. With --simulated the driver is the
simulated one and no card is needed: the difference is then the hook's own host time, without what it does on a real driver.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from cards import Card, Results, Share, build_native, card, share  # noqa: E402

CASES: dict[str, int | None] = {"hooked": None, "limit 100": 1_000_000, "limit 95": 950_000}
PLAIN, AGAIN = "plain", "plain again"


def program() -> Path:
    """The program that launches, built by the C compiler when it is not there."""
    target, source = ROOT / "build" / "launches", ROOT / "benchmarks" / "native" / "launches.c"
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        target.parent.mkdir(exist_ok=True)
        compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
        subprocess.run([compiler, "-O2", "-std=gnu11", "-o", str(target), str(source), "-ldl"], check=True)
    return target


class Launcher:
    """A process that takes turns."""

    def __init__(self, words: list[str], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(words, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        """What it says next."""
        assert self.process.stdout is not None
        found = self.process.stdout.readline()
        if not found:
            raise RuntimeError(f"{' '.join(self.process.args)} ended with status {self.process.wait()}")  # type: ignore[arg-type]
        return found

    def turn(self) -> dict[str, float]:
        """What it says of its turn."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: dict[str, float] = json.loads(self.line())
        return found

    def end(self) -> None:
        """Let it end, and see that it does."""
        try:
            self.process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def one_set(
    uuid: str, rounds: int, words: list[str], environment: Mapping[str, str], parts: dict[str, float]
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, int]]:
    """The turns of a fresh set of processes, round by round, and how often a launch of each case waited. Fills `parts`."""
    turns: dict[str, list[tuple[float, float]]] = {PLAIN: [], AGAIN: [], **{name: [] for name in CASES}}
    shares: dict[str, Share] = {}
    with ExitStack() as stack:
        launchers: dict[str, Launcher] = {}
        for name in turns:
            own = dict(environment)
            if name in CASES:
                shares[name] = stack.enter_context(share(uuid, CASES[name]))
                hooked = shares[name].environment()
                own |= {key: hooked[key] for key in ("LD_PRELOAD", "POOLMETER_ALLOCATION_DIR")}
            launchers[name] = Launcher(words, own)
            stack.callback(launchers[name].end)
        for name, launcher in launchers.items():
            said = json.loads(launcher.line())
            if name == PLAIN:
                parts.update(said)
        order = list(launchers)
        for number in range(rounds):
            for name in order[number % len(order) :] + order[: number % len(order)]:
                said = launchers[name].turn()
                turns[name].append((said["median_ns"], said["mean_ns"]))
        waits = {name: each.counters().throttle_waits for name, each in shares.items()}
    return turns, waits


def measure(
    results: Results,
    uuid: str,
    until: float,
    *,
    sets: int = 4,
    rounds: int = 60,
    more: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """One row for each case. `until`: no further set is begun after that, by CLOCK_MONOTONIC."""
    cores = sorted(os.sched_getaffinity(0))
    words = [str(program()), "--core", str(cores[-1]), *more]
    found: dict[str, list[list[tuple[float, float]]]] = {}
    waits = dict.fromkeys(CASES, 0)
    parts: dict[str, float] = {}
    try:
        if len(cores) > 1:
            os.sched_setaffinity(0, cores[:-1])  # of us, and of the threads that libraries make
        for number in range(sets):
            if number and time.monotonic() > until:
                break
            turns, waited = one_set(uuid, rounds, words, os.environ if environment is None else environment, parts)
            waits = {name: count + waited[name] for name, count in waits.items()}
            for name, values in turns.items():
                found.setdefault(name, []).append(values)
    finally:
        os.sched_setaffinity(0, cores)
    results.add("launch: parts without the hook", **parts)
    for name, of_sets in found.items():
        pairs = [
            [(a[0] - b[0], a[1] - b[1]) for a, b in zip(mine, plain, strict=True)]
            for mine, plain in zip(of_sets, found[PLAIN], strict=True)
        ]
        added = [difference for each in pairs for difference, _ in each]
        first, middle, third = statistics.quantiles(added, n=4)
        results.add(
            "launch",
            case=name,
            launch_ns=statistics.median(turn for each in of_sets for turn, _ in each),
            pairs=None if name == PLAIN else len(added),
            added_ns=None if name == PLAIN else middle,
            quartiles=None if name == PLAIN else f"{first:.0f} to {third:.0f}",
            of_sets=None if name == PLAIN else " ".join(f"{statistics.median(d for d, _ in each):.0f}" for each in pairs),
            of_means_ns=None if name == PLAIN else statistics.median(mean for each in pairs for _, mean in each),
            waits=waits.get(name),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", action="store_true", help="through the simulated driver, on this machine")
    parser.add_argument("--sets", type=int, default=4, help="fresh processes so many times")
    parser.add_argument("--rounds", type=int, default=60, help="turns of each process")
    parser.add_argument("--batch", type=int, default=256, help="launches between two waits for the stream")
    parser.add_argument(
        "--cold", type=int, default=0, metavar="KIB", help="write to so much memory before each launch, which is timed alone"
    )
    parser.add_argument("--budget", type=float, default=60.0, help="seconds after which no set is begun")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    until = time.monotonic() + args.budget
    more = ("--batch", str(args.batch), "--cold", str(args.cold))
    if not args.simulated:
        build_native()
        results = Results(args.output, "launches", card())
        measure(results, results.card.uuid, until, sets=args.sets, rounds=args.rounds, more=more)
    else:
        from poolmeter.simulator.driver import SPIN_IMAGE
        from poolmeter.simulator.machine import Machine

        with tempfile.TemporaryDirectory() as name, Machine.create("single", Path(name) / "machine") as machine:
            image = Path(name) / "image"
            image.write_bytes(SPIN_IMAGE)
            found = Card(machine.uuid(0), "simulated", "simulated", 0)
            results = Results(args.output, "launches", found)
            environment = machine.environment(dict(os.environ))
            words = (*more, "--image", str(image))
            measure(results, found.uuid, until, sets=args.sets, rounds=args.rounds, more=words, environment=environment)
    results.table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
