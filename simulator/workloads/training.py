"""A small training loop: batches go to the card, forward and backward kernels run on two streams, an optimiser graph ends each step.

Run as `python -m poolmeter.simulator.workloads.training --steps N`, with the simulated driver on the library path. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys

from poolmeter.errors import PoolmeterError
from poolmeter.simulator.driver import Driver, DriverError, copy_in, copy_out

IMAGE = b"""poolmeter-sim-module 1
kernel forward fixed 300000
kernel backward fixed 600000
kernel optimiser fixed 20000
kernel reduce fixed 40000 width 250000
"""
FORWARD_NS, BACKWARD_NS, OPTIMISER_NS, REDUCE_NS = 300_000, 600_000, 20_000, 40_000
OPTIMISER_KERNELS = 10


def step_ns() -> int:
    """Device time of one step when it runs alone: the reduction overlaps the backward pass and takes a quarter of the card from it."""
    # The two run together: backward needs the whole card, so the pair lasts as long as their areas together.
    return FORWARD_NS + BACKWARD_NS + REDUCE_NS // 4 + OPTIMISER_NS * OPTIMISER_KERNELS


def train(driver: Driver, steps: int, batch_bytes: int, device: int) -> dict[str, object]:
    """Runs the loop; returns steps, the checksum of the data that went through the card, and the memory used."""
    driver.open(device)
    module = ctypes.c_void_p()
    driver("cuModuleLoadData", ctypes.byref(module), IMAGE)
    kernels: dict[str, ctypes.c_void_p] = {}
    for name in ("forward", "backward", "optimiser", "reduce"):
        kernels[name] = ctypes.c_void_p()
        driver("cuModuleGetFunction", ctypes.byref(kernels[name]), module, name.encode())
    compute, side = driver.stream(), driver.stream()
    ready, reduced = driver.event(2), driver.event(2)
    batch = driver.allocate(batch_bytes)
    with driver.capture(compute) as made:
        for _ in range(OPTIMISER_KERNELS):
            driver.launch(kernels["optimiser"], 0, compute)
    optimiser = made[0]
    intact = True
    for number in range(steps):
        data = bytes([number % 251]) * batch_bytes
        copy_in(driver, batch, data, compute)
        driver.launch(kernels["forward"], 0, compute)
        driver("cuEventRecord", ready, compute)
        driver("cuStreamWaitEvent", side, ready, 0)
        driver.launch(kernels["reduce"], 0, side)
        driver.launch(kernels["backward"], 0, compute)
        driver("cuEventRecord", reduced, side)
        driver("cuStreamWaitEvent", compute, reduced, 0)
        driver("cuGraphLaunch", optimiser, compute)
        driver("cuStreamSynchronize", compute)
        intact = intact and copy_out(driver, batch, 64) == data[:64]
    return {"pid": os.getpid(), "steps": steps, "data_intact": intact, "allocated_bytes": batch_bytes}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-bytes", type=int, default=1 << 20)
    parser.add_argument("--device", type=int, default=0)
    args = parser.parse_args()
    try:
        print(json.dumps(train(Driver(), args.steps, args.batch_bytes, args.device)))
    except (DriverError, PoolmeterError) as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
