"""One framework on the card: the same rounds of work, their rate in a steady loop, and what it says when memory runs out. One JSON line.

`--name` is one of NAMES. `--wait` imports the framework, which takes the card's time of nobody, and begins at a line on stdin. `--fill` then
takes memory in pieces until it is refused, and works on. rounds_per_s counts rounds that ended, after --warm-up, with the card never idle.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

SIDE = 4096
PIECE = 512 << 20
CHECKED = 20  # rounds before the number that two runs are compared by


class Work:
    """What a framework does. `step` starts a round and returns; `sync` waits for all; `value` is a number of the state."""

    def __init__(
        self,
        step: Callable[[], object],
        sync: Callable[[], object],
        value: Callable[[], float],
        take: Callable[[int], object],
        total: Callable[[], int],
        version: str,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self.step, self.sync, self.value, self.take, self.total, self.version = step, sync, value, take, total, version
        self.prepare = prepare  # anew when memory ran out: PyTorch then takes cuBLAS' workspace from the graphs that use it


def _torch(name: str) -> Callable[[], Work]:
    import torch

    if name == "triton":
        import triton
        import triton_rounds

    def begin() -> Work:
        torch.manual_seed(7)
        weights = torch.randn(SIDE, SIDE, device="cuda") / SIDE**0.5
        state = torch.randn(SIDE, SIDE, device="cuda")
        version: str = torch.__version__

        def round_of(weights: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            return torch.tanh(weights @ state) * 0.9 + state * 0.1

        prepare: Callable[[], None] | None = None
        if name == "torch.cuda.graph":
            graphs: list[torch.cuda.CUDAGraph] = []

            def capture() -> None:
                graph = torch.cuda.CUDAGraph()
                aside = torch.cuda.Stream()
                aside.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(aside):  # cuBLAS makes its workspace before the capture
                    round_of(weights, state)
                torch.cuda.current_stream().wait_stream(aside)
                with torch.cuda.graph(graph):
                    for _ in range(2):
                        state.copy_(round_of(weights, state))
                graphs[:] = [graph]

            capture()
            prepare = capture

            def step() -> None:
                graphs[0].replay()

        elif name == "triton":
            version = triton.__version__

            def step() -> None:
                triton_rounds.launch(state, 2000)
        else:
            function = torch.compile(round_of) if name == "torch.compile" else round_of

            def step() -> None:
                state.copy_(function(weights, state))

        return Work(
            step,
            torch.cuda.synchronize,
            lambda: float(state.double().square().sum()),
            lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"),
            lambda: int(torch.cuda.mem_get_info()[1]),
            version,
            prepare,
        )

    return begin


def _cupy(name: str) -> Callable[[], Work]:
    import cupy

    def begin() -> Work:
        pool = cupy.cuda.MemoryAsyncPool() if name == "cupy async" else cupy.cuda.MemoryPool()
        cupy.cuda.set_allocator(pool.malloc)
        random = cupy.random.RandomState(7)
        weights = random.standard_normal((SIDE, SIDE), dtype=cupy.float32) / cupy.float32(SIDE**0.5)
        state = random.standard_normal((SIDE, SIDE), dtype=cupy.float32)

        def step() -> None:
            state[...] = cupy.tanh(weights @ state) * cupy.float32(0.9) + state * cupy.float32(0.1)

        return Work(
            step,
            cupy.cuda.Device().synchronize,
            lambda: float(cupy.square(state).sum(dtype=cupy.float64)),
            lambda size: cupy.empty(size, dtype=cupy.uint8),
            lambda: int(cupy.cuda.Device().mem_info[1]),
            cupy.__version__,
        )

    return begin


def _jax(_name: str) -> Callable[[], Work]:
    import jax
    import jax.numpy as jnp

    def begin() -> Work:
        first, second = jax.random.split(jax.random.PRNGKey(7))
        weights = jax.random.normal(first, (SIDE, SIDE), jnp.float32) / SIDE**0.5
        held = [jax.random.normal(second, (SIDE, SIDE), jnp.float32)]

        @jax.jit
        def round_of(weights: Any, state: Any) -> Any:
            return jnp.tanh(jnp.matmul(weights, state, precision="highest")) * 0.9 + state * 0.1

        def step() -> None:
            held[0] = round_of(weights, held[0])

        return Work(
            step,
            lambda: held[0].block_until_ready(),
            lambda: float(jnp.sum(jnp.square(held[0]))),
            lambda size: jnp.ones(size // 4, jnp.float32).block_until_ready(),
            lambda: int((jax.devices()[0].memory_stats() or {})["bytes_limit"]),
            jax.__version__,
        )

    return begin


NAMES: dict[str, Callable[[str], Callable[[], Work]]] = {
    "torch eager": _torch,
    "torch.compile": _torch,
    "torch.cuda.graph": _torch,
    "triton": _torch,
    "cupy": _cupy,
    "cupy async": _cupy,
    "jax": _jax,
}


def fill(work: Work) -> dict[str, Any]:
    """Take pieces until one is refused, give all back, and go on working."""
    kept: list[object] = []
    found: dict[str, Any] = {"out_of_memory": None}
    try:
        while len(kept) < 512:
            kept.append(work.take(PIECE))
        work.sync()
    except Exception as error:  # which one is the question
        found["out_of_memory"] = f"{type(error).__module__}.{type(error).__qualname__}"
        found["said"] = str(error).splitlines()[0][:160] if str(error) else ""
    found["taken_bytes"] = len(kept) * PIECE
    kept.clear()
    if work.prepare:
        work.prepare()
    work.step()
    work.sync()
    found["works_on"] = work.value() == work.value()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", choices=list(NAMES), required=True)
    parser.add_argument("--warm-up", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--fill", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")
    begin = NAMES[args.name](args.name)
    if args.wait:
        sys.stdin.readline()
    began = time.monotonic()
    work = begin()
    for _ in range(CHECKED):
        work.step()
    work.sync()
    out: dict[str, Any] = {"version": work.version, "value": work.value(), "total_bytes": work.total()}
    at = time.monotonic()
    for _ in range(10):
        work.step()
    work.sync()
    batch = max(2, int(0.05 / ((time.monotonic() - at) / 10)))  # enough in flight that the wait for its end costs nothing
    out["began_s"] = time.monotonic() - began

    def loop(seconds: float) -> tuple[int, float]:
        at, rounds = time.monotonic(), 0
        while time.monotonic() - at < seconds:
            for _ in range(batch):
                work.step()
            work.sync()
            rounds += batch
        return rounds, time.monotonic() - at

    loop(args.warm_up)
    rounds, seconds = loop(args.seconds)
    out |= {"rounds": rounds, "wall_s": seconds, "rounds_per_s": rounds / seconds}
    if args.fill:
        out |= fill(work)
    print(json.dumps(out), flush=True)


if __name__ == "__main__":
    main()
