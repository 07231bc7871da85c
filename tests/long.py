"""`make long`: the same tests at full counts, with new seeds; bounded when --minutes is given.

Bounded, it goes round the test files until the time is up: a file that is still running then is stopped and counted as unfinished,
never as passed. Exits 1 when a test failed, 0 otherwise, and ends with one line of counts.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("POOLMETER_SEED", time.time_ns() % 2**31)))
    args = parser.parse_args()
    deadline = time.time() + args.minutes * 60 if args.minutes else float("inf")
    # Browser tests and documents gain nothing from repetition.
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "browser" not in path.name and "docs" not in path.name]
    passed = failed = unfinished = 0
    seed = args.seed
    while True:
        order = random.Random(seed)
        order.shuffle(files)
        for position, path in enumerate(files):
            left = deadline - time.time()
            if left < 5:
                break
            # A fair part of the time for each file that is still to come, but at least a minute.
            part = deadline if args.minutes is None else time.time() + max(60.0, left / (len(files) - position) * 3)
            verdict = run(path, seed, min(part, deadline), deadline)
            passed, failed, unfinished = passed + (verdict == 0), failed + (verdict == 1), unfinished + (verdict == 2)
        seed += 1
        if deadline - time.time() < 5 or args.minutes is None:
            break
    print(f"long: files: {passed} passed, {failed} failed, {unfinished} stopped when the time was up (first seed {args.seed})")
    return 1 if failed else 0


def run(path: Path, seed: int, soft: float, hard: float) -> int:
    """0 passed, 1 failed, 2 stopped. `soft` is when loops inside stop by themselves, `hard` when the process is ended."""
    name = path.relative_to(ROOT)
    environment = {**os.environ, "POOLMETER_LONG": "1", "POOLMETER_SEED": str(seed), "POOLMETER_DEADLINE": str(soft)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--timeout=3600",
        "-p",
        "no:cacheprovider",
        f"--hypothesis-seed={seed}",
        str(name),
    ]
    began = time.time()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        # A test that ignores the soft end gets some grace, then the whole process group goes.
        output, _ = process.communicate(timeout=None if hard == float("inf") else max(1.0, min(soft + 240, hard + 60) - began))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        print(f"{name}: stopped after {time.time() - began:.0f} s (seed {seed})", flush=True)
        return 2
    if process.returncode in (0, 5):
        print(f"{name}: passed in {time.time() - began:.0f} s (seed {seed})", flush=True)
        return 0
    print(output, flush=True)
    print(f"{name}: FAILED (POOLMETER_LONG=1 POOLMETER_SEED={seed} pytest --hypothesis-seed={seed} {name})", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
