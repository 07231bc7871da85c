"""`make bench`: what the host side costs, on this machine, without a card. Medians of several rounds; figures go to --output as well.

start-up of `poolmeter --help`; encoding and decoding a node's minute; publishing a tick of 30,000 rows durably; a launch through the
simulated driver, with and without the hook, in alternating pairs.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cards import share

from poolmeter import arrow
from poolmeter.collector.segments import publish_records
from poolmeter.model.units import MINUTE_US
from poolmeter.model.usage import SliceRecord
from poolmeter.simulator.machine import Machine


def median_ms(call: Callable[[], object], rounds: int) -> float:
    """Median wall time of a call in ms, after one that does not count."""
    call()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def slices(count: int, node: str, minute: int) -> list[SliceRecord]:
    """Slice records of one node and minute."""
    return [
        SliceRecord(
            node=node,
            epoch="00000000-0000-4000-8000-000000000000",
            sequence=minute * count + number + 1,
            minute_us=minute * MINUTE_US,
            start_us=minute * MINUTE_US,
            span_us=MINUTE_US,
            device_uuid=f"GPU-{number % 8}",
            device_model="NVIDIA H200",
            allocation_id=f"a-{number}",
            tenant=f"tenant-{number % 64}",
            mode="hook",
            state="active",
            used_basis="hook",
            generation=2,
            promised_us=900_000,
            allocated_us=900_000,
            suspended_us=0,
            memory_allocated_kib_us=1 << 40,
            used_us=900_000 - number,
            memory_used_kib_us=1 << 39,
            launches=number,
        )
        for number in range(count)
    ]


def launch_ns(hooked: bool, machine: Machine) -> float:
    """Host time of a launch through the simulated driver, in ns."""
    words = [sys.executable, "-m", "poolmeter.simulator.workloads.launches"]
    with share(machine.uuid(0)) as mine:
        environment = machine.environment(mine.environment() if hooked else dict(os.environ))
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["launch_ns"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the figures here, as JSON")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    command = [sys.executable, "-m", "poolmeter.cli", "--help"]
    figures["help_ms"] = median_ms(lambda: subprocess.run(command, capture_output=True, check=True), 9)
    minute = slices(512, "node", 1)
    body = arrow.to_bytes(arrow.to_table(minute))
    figures["encode_512_rows_ms"] = median_ms(lambda: arrow.to_bytes(arrow.to_table(minute)), 20)
    figures["decode_512_rows_ms"] = median_ms(lambda: arrow.from_bytes(body), 20)
    with tempfile.TemporaryDirectory() as folder:
        ticks = iter([slices(30_000, "node", number) for number in range(1, 10)])
        figures["publish_30000_records_ms"] = median_ms(lambda: publish_records(Path(folder), next(ticks)), 7)
        with Machine.create("single", Path(folder) / "machine") as machine:
            pairs = [(launch_ns(False, machine), launch_ns(True, machine)) for _ in range(5)]
    figures["launch_ns"] = statistics.median(plain for plain, _ in pairs)
    figures["launch_added_by_hook_ns"] = statistics.median(hooked - plain for plain, hooked in pairs)
    head = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
    }
    for name, value in figures.items():
        print(f"{name:32} {value:12.2f}")
    if args.output:
        args.output.write_text(json.dumps({**head, "cores": os.cpu_count(), **figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
