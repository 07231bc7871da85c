"""PyTorch loops that take turns: for each line of input a fixed amount of work, answered by its seconds as JSON. The first line says it is ready."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

import torch


def matmul() -> Callable[[], object]:
    """Large products, one after another: the card is never idle."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    return lambda: a @ b


def train() -> Callable[[], object]:
    """Training steps of a deep narrow network: kernels of a few microseconds, so the host sets the pace."""
    blocks = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.LayerNorm(256)) for _ in range(16)]
    model = torch.nn.Sequential(*blocks).cuda()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    data = torch.randn(8, 256, device="cuda")

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        (model(data) - data).square().mean().backward()
        optimiser.step()

    return step


def infer() -> Callable[[], object]:
    """One small request at a time, each waited for."""
    blocks = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.LayerNorm(512)) for _ in range(24)]
    model = torch.nn.Sequential(*blocks).cuda().eval()
    data = torch.randn(8, 512, device="cuda")

    def request() -> None:
        with torch.inference_mode():
            model(data)
        torch.cuda.synchronize()

    return request


LOOPS = {"matmul": (matmul, 600), "train": (train, 20), "infer": (infer, 60)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loop", choices=LOOPS, required=True)
    parser.add_argument("--cores", required=True, help="which cores to run on, as 3,4")
    args = parser.parse_args()
    os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
    torch.set_num_threads(1)
    torch.manual_seed(7)
    make, units = LOOPS[args.loop]
    unit = make()
    for _ in range(units):
        unit()
    torch.cuda.synchronize()
    print(json.dumps({"units": units}), flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        for _ in range(units):
            unit()
        torch.cuda.synchronize()
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)


main()
