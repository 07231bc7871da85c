"""PyTorch loops beside no hook: `python benchmarks/loops.py`, on this machine's first card.

As in launches.py all cases live at the same time and take short turns on the same cores, so that a pair is a hooked turn and the plain
turn of the same round; fresh processes are made several times. The figure is the median of the pairs' plain seconds over hooked ones; the
second plain case shows what the method makes out of nothing.
"""

import argparse
import os
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))

from cards import Results, build_native, card, share  # noqa: E402
from launches import Launcher  # noqa: E402

CASES: dict[str, int | None] = {"hooked": None, "limit 100": 1_000_000}
PLAIN, AGAIN = "plain", "plain again"
LOOPS = ("train", "infer", "matmul")


def one_set(uuid: str, loop: str, rounds: int, cores: str) -> dict[str, list[float]]:
    """Seconds of the turns of a fresh set of processes, round by round."""
    turns: dict[str, list[float]] = {PLAIN: [], AGAIN: [], **{name: [] for name in CASES}}
    words = [sys.executable, str(ROOT / "benchmarks" / "workloads" / "loops.py"), "--loop", loop, "--cores", cores]
    with ExitStack() as stack:
        launchers: dict[str, Launcher] = {}
        for name in turns:
            own = dict(os.environ)
            if name in CASES:
                own = stack.enter_context(share(uuid, CASES[name])).environment()
            launchers[name] = Launcher(words, own)
            stack.callback(launchers[name].end)
        for launcher in launchers.values():
            launcher.line()
        order = list(launchers)
        for number in range(rounds):
            for name in order[number % len(order) :] + order[: number % len(order)]:
                turns[name].append(launchers[name].turn()["seconds"])
    return turns


def measure(results: Results, uuid: str, until: float, *, sets: int = 3, rounds: int = 40) -> None:
    """A row for each loop and case. `until`: no further set is begun after that, by CLOCK_MONOTONIC."""
    cores = sorted(os.sched_getaffinity(0))
    for loop in LOOPS:
        found: dict[str, list[list[float]]] = {}
        for _ in range(sets):
            if time.monotonic() > until:
                break
            for name, values in one_set(uuid, loop, rounds, ",".join(map(str, cores[-2:]))).items():
                found.setdefault(name, []).append(values)
        if not found:
            results.add("loops: not run", loop=loop, reason="the call's time was up")
        for name, of_sets in found.items():
            pairs = [[100 * b / a for a, b in zip(mine, plain, strict=True)] for mine, plain in zip(of_sets, found[PLAIN], strict=True)]
            speeds = [speed for each in pairs for speed in each]
            first, middle, third = statistics.quantiles(speeds, n=4)
            results.add(
                "loops",
                loop=loop,
                case=name,
                turn_ms=1000 * statistics.median(turn for each in of_sets for turn in each),
                pairs=None if name == PLAIN else len(speeds),
                speed_of_plain_percent=None if name == PLAIN else middle,
                quartiles=None if name == PLAIN else f"{first:.1f} to {third:.1f}",
                of_sets=None if name == PLAIN else " ".join(f"{statistics.median(each):.1f}" for each in pairs),
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=3, help="fresh processes so many times")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each process")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds after which no set is begun")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    until = time.monotonic() + args.budget
    build_native()
    results = Results(args.output, "loops", card())
    measure(results, results.card.uuid, until, sets=args.sets, rounds=args.rounds)
    results.table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
