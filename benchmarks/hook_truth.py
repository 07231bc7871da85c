"""Busy time that the hook reports against the kernels' own clock, on a real card: `python benchmarks/hook_truth.py [--seconds 2]`.

Needs a card, its driver and the built native parts (POOLMETER_NATIVE or an installed poolmeter). Prints a JSON line per case: alone, two
sharers, launch cost in alternating pairs. Exit status 1 when a case alone is off by more than --tolerance percent.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from poolmeter.native import native_path
from poolmeter.pages.grant import DeviceGrant, Grant, write_grant
from poolmeter.pages.meter import create_meter, read_meter

CASES = (
    ("queue", 50), ("queue", 200), ("queue", 1000), ("queue", 20000), ("sync", 50), ("sync", 1000), ("sync", 20000),
    ("gaps", 50), ("gaps", 1000), ("graph", 50), ("streams", 50), ("streams", 1000), ("mixed", 50), ("mixed", 1000), ("queue", 5),
)  # fmt: skip


def device_uuid(index: int) -> str:
    """UUID of the card as nvidia-smi names it."""
    answer = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader", f"--id={index}"], check=True, capture_output=True, text=True
    )
    return answer.stdout.strip()


def allocation(root: Path, name: str, uuid: str, compute_ppm: int | None = None) -> Path:
    """A folder with the pages of a new allocation."""
    folder = root / "allocations" / name
    folder.mkdir(parents=True)
    (root / "devices").mkdir(exist_ok=True)
    write_grant(folder / "grant", Grant(name, (DeviceGrant(uuid, compute_ppm),)))
    create_meter(folder / "meter", [uuid])
    return folder


def start(probe: str, folder: Path, hook: Path | None, *arguments: str) -> subprocess.Popen[str]:
    """The probe as a tenant of `folder`, under the hook when one is given."""
    environment = dict(os.environ, POOLMETER_ALLOCATION_DIR=str(folder))
    if hook:
        environment["LD_PRELOAD"] = str(hook)
    return subprocess.Popen([probe, "0", *arguments], env=environment, stdout=subprocess.PIPE, text=True)


def main() -> int:
    """Runs the cases alone, then two sharers, then the launch cost in alternating pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", default="2")
    parser.add_argument("--tolerance", type=float, default=2.0)
    arguments = parser.parse_args()
    hook = native_path("libpoolmeter_hook.so")
    probe = str(native_path("bin/poolmeter-exercise-probe"))
    uuid = device_uuid(0)
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for number, (pattern, us) in enumerate(CASES):
            folder = allocation(root, f"alone-{number}", uuid)
            answer = json.loads(start(probe, folder, hook, pattern, str(us), arguments.seconds).communicate()[0])
            counters = read_meter(folder / "meter").total(uuid)
            answer["error_percent"] = round(100 * (counters.busy_ns / answer["device_ns"] - 1), 2)
            answer["counters"] = {
                name: getattr(counters, name)
                for name in ("launches", "graph_launches", "timed_samples", "burst_samples", "dropped_samples", "internal_faults")
            }
            failed |= us >= 50 and abs(answer["error_percent"]) > arguments.tolerance
            print(json.dumps(answer), flush=True)
        for number, pair in enumerate(((50, 50), (1000, 1000), (50, 1000), (20000, 20000), (1000, 20000))):
            lone = {}
            for us in set(pair):
                folder = allocation(root, f"lone-{number}-{us}", uuid)
                answer = json.loads(start(probe, folder, hook, "queue", str(us), "1").communicate()[0])
                lone[us] = answer["device_ns"] / answer["kernels"]
            folders = [allocation(root, f"pair-{number}-{i}", uuid) for i in range(2)]
            running = [start(probe, folder, hook, "queue", str(us), "4") for folder, us in zip(folders, pair, strict=True)]
            for folder, process, us in zip(folders, running, pair, strict=True):
                answer = json.loads(process.communicate()[0])
                truth = answer["kernels"] * lone[us]
                counters = read_meter(folder / "meter").total(uuid)
                print(
                    json.dumps(
                        {
                            "sharing": pair,
                            "kernel_us": us,
                            "share_percent": round(100 * truth / answer["wall_ns"], 1),
                            "error_percent": round(100 * (counters.busy_ns / truth - 1), 2),
                            "dropped": counters.dropped_samples,
                            "timed": counters.timed_samples,
                        }
                    ),
                    flush=True,
                )
        costs: dict[bool, list[float]] = {True: [], False: []}
        folder = allocation(root, "cost", uuid)
        for _ in range(5):
            for hooked in (False, True):
                answer = json.loads(start(probe, folder, hook if hooked else None, "empty", "0", "0").communicate()[0])
                costs[hooked].append(answer["launch_ns"])
        added = sorted(a - b for a, b in zip(costs[True], costs[False], strict=True))[2]
        print(json.dumps({"launch_ns_plain": costs[False], "launch_ns_hooked": costs[True], "added_ns_median": round(added, 1)}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
