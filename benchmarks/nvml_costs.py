"""What a reading of a card costs, call by call: `python benchmarks/nvml_costs.py [--seconds 20]`, on this machine's cards.

CPU time of the thread that makes the call, in us a turn of a second, and how often it is made; the most costly first. One JSON line each.
"""

import argparse
import json
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

from poolmeter.vendors import VENDORS  # noqa: E402
from poolmeter.vendors.nvml import Nvml  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=20)
    args = parser.parse_args()
    spent: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    lock, real = threading.Lock(), Nvml.call

    def timed(self: Nvml, name: str, *arguments: Any, **options: Any) -> Any:
        began = time.thread_time_ns()
        try:
            return real(self, name, *arguments, **options)
        finally:
            with lock:
                spent[name][0] += time.thread_time_ns() - began
                spent[name][1] += 1

    Nvml.call = timed  # type: ignore[method-assign]
    vendor = VENDORS["nvidia"](10.0)
    for _ in range(3):
        vendor.read()
        time.sleep(1)
    spent.clear()
    began = time.process_time()
    for _ in range(args.seconds):
        vendor.read()
        time.sleep(1)
    whole = time.process_time() - began
    print(json.dumps({"call": "everything", "us_a_turn": 1e6 * whole / args.seconds}))
    for name, (ns, count) in sorted(spent.items(), key=lambda item: -item[1][0]):
        print(
            json.dumps({"call": name, "us_a_turn": ns / 1000 / args.seconds, "calls_a_turn": count / args.seconds, "us": ns / 1000 / count})
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
