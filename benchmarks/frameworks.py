"""Frameworks under the hook on a real card: `python benchmarks/frameworks.py [--only jax,…]`. A row for each.

Each runs in a process of its own, once without and once with the hook, at --limit percent of the card and --memory GiB: the same number
after the same rounds, the obtained share (rounds per second over those without a hook, with the card never idle in either), which error the
framework raises when its memory runs out and that it works on, and what the meter counted. What a framework imports, it imports while
others are measured. No setting of the card is changed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from cards import Card, Results, Share, build_native, card, finish, left, share  # noqa: E402

WORKLOAD = ROOT / "benchmarks" / "workloads" / "framework.py"
NAMES = ("torch eager", "torch.cuda.graph", "torch.compile", "triton", "cupy", "cupy async", "jax")
AHEAD = 4  # processes that import while one is measured
GIB = 1 << 30


@dataclass
class Attempt:
    """One process: started early, begun by a line on its stdin."""

    name: str
    process: "subprocess.Popen[str]"
    log: Path
    mine: Share | None
    kinds: dict[str, int] = field(default_factory=dict)

    def watch(self, ended: threading.Event) -> None:
        """Keep the most memory of each kind that the meter showed."""
        while self.mine is not None and not ended.wait(0.05):
            for kind, size in self.mine.counters().memory.items():
                self.kinds[kind] = max(size, self.kinds.get(kind, 0))

    def go(self, timeout_s: float) -> dict[str, Any]:
        """What it found; `failed` with the end of what it said when it ended otherwise or took longer."""
        ended = threading.Event()
        watcher = threading.Thread(target=self.watch, args=(ended,))
        watcher.start()
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended while it imported: finish says how
        out = finish(self.process, timeout_s)
        ended.set()
        watcher.join()
        if "failed" in out:
            out["failed"] = f"{out['failed']}: {self.log.read_text(errors='replace')[-300:].strip()}"
        return out


def begin(stack: ExitStack, name: str, hooked: bool, args: argparse.Namespace, found: Card, logs: Path) -> Attempt:
    """Start a process that imports its framework and waits."""
    words = [sys.executable, str(WORKLOAD), "--name", name, "--wait", "--seconds", str(args.seconds), *(["--fill"] if hooked else [])]
    mine = None
    environment = dict(os.environ)
    if hooked:
        mine = stack.enter_context(share(found.uuid, round(args.limit * 10_000), int(args.memory * GIB)))
        environment = mine.environment()
    log = logs / f"{name.replace(' ', '-')}-{'hook' if hooked else 'plain'}.log"
    with log.open("w") as file:
        process = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True)
    return Attempt(name, process, log, mine)


def compare(results: Results, args: argparse.Namespace, attempt: Attempt, plain: dict[str, Any], out: dict[str, Any]) -> None:
    """The row of a framework."""
    if "failed" in plain or "failed" in out:
        said = {"without the hook": plain.get("failed"), "with the hook": out.get("failed")}
        results.add("frameworks", framework=attempt.name, **{key: value for key, value in said.items() if value})
        return
    assert attempt.mine is not None
    counted = attempt.mine.counters()
    obtained = 100 * out["rounds_per_s"] / plain["rounds_per_s"]
    results.add(
        "frameworks",
        framework=attempt.name,
        version=out["version"],
        same_result=out["value"] == plain["value"],
        relative_difference=abs(out["value"] - plain["value"]) / max(abs(plain["value"]), 1e-30),
        share_percent=obtained,
        error_points=obtained - args.limit,
        out_of_memory=out["out_of_memory"],
        said=out.get("said"),
        taken_mib=out["taken_bytes"] >> 20,
        works_on=out["works_on"],
        shown_total_mib=out["total_bytes"] >> 20,
        peak_mib=counted.memory_peak >> 20,
        memory_mib=" ".join(f"{kind} {size >> 20}" for kind, size in attempt.kinds.items() if size),
        launches=counted.launches,
        graph_launches=counted.graph_launches,
        busy_s=counted.busy_ns / 1e9,
        waits=counted.throttle_waits,
        denied=counted.denied_limit,
        faults=counted.internal_faults,
        began_s=out["began_s"],
    )


def measure(results: Results, args: argparse.Namespace, began: float) -> None:
    """One process at a time is on the card; the next ones import meanwhile."""
    coming = deque((name, hooked) for name in args.only for hooked in (False, True))
    logs = Path(tempfile.mkdtemp(prefix="poolmeter-frameworks-"))
    waiting: deque[Attempt] = deque()
    plain: dict[str, Any] = {}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, logs, ignore_errors=True)
        try:
            while coming or waiting:
                while coming and len(waiting) <= AHEAD:
                    waiting.append(begin(stack, *coming.popleft(), args, results.card, logs))
                attempt = waiting.popleft()
                if left(began, args.budget) < 5:
                    attempt.process.kill()
                    results.add("not run", framework=attempt.name, hook=attempt.mine is not None)
                    plain = {"failed": "not run"}
                    continue
                out = attempt.go(min(args.timeout, left(began, args.budget)))
                if attempt.mine is None:
                    plain = out
                else:
                    compare(results, args, attempt, plain, out)
        finally:
            for attempt in waiting:
                attempt.process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(NAMES))
    parser.add_argument("--limit", type=float, default=50.0, help="percent of the card")
    parser.add_argument("--memory", type=float, default=8.0, help="GiB")
    parser.add_argument("--seconds", type=float, default=1.5, help="measured of each process, after a second of warm-up")
    parser.add_argument("--timeout", type=float, default=45.0, help="seconds of one process")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds after which nothing more is begun")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    args.only = args.only.split(",")
    unknown = [name for name in args.only if name not in NAMES]
    if unknown:
        parser.error(f"--only is {unknown[0]!r}, expected some of {', '.join(NAMES)}")
    began = time.monotonic()
    build_native()
    results = Results(args.output, "frameworks", card())
    measure(results, args, began)
    results.table()
    return 1 if not any("share_percent" in row for row in results.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
