"""Compute limits side by side on a real card: `python benchmarks/peers.py --peers DIR`. Every hook runs the same programs in one call.

DIR holds the preload libraries of other hooks, built from their public sources and kept out of this repository: `hami-core/libvgpu.so` and
`vgpu-manager/libvgpu-control.so`, and beside each a file `commit` with the revision it was built from. What is not there is left out.

Each cell is a fresh process with a fresh state of the hook: kernels x limits x hooks, then two tenants at 30 and 70 %. The obtained share is
the union of the kernels' own spans over time, as in limits.py, and for two tenants kernels x their lone span. A peer's cell counts only when
its own log shows its limiter on at that limit; otherwise the row says what happened and has no figure. The peers' buckets start full and
limit only once they are empty: `--warm-up 20` shows what they hold later. HAMi-core runs with the policy FORCE. vgpu-manager runs as it does
in a container, with its folder in /etc on a file system of its own in a private mount namespace, which needs root, and finds its own
processes by its cgroup v2 rule; `-aimd` is its other controller. No setting of the card is changed.
"""

import argparse
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import limits  # noqa: E402
from cards import Results, build_native, card, finish, left, start  # noqa: E402
from limits import Kernel, grant, lone, share_percent, tenants  # noqa: E402

KERNELS = {"1ms": Kernel(1000), "50us": Kernel(50), "graph": Kernel(50, "graph")}
TENANTS = (30, 70)
MEMORY = "40g"

# As in a container: the hook's folder is its own, the library is where it looks for itself, and its processes are those of its cgroup.
_CONTAINER = """set -e
mkdir -p /etc/vgpu-manager
mount -t tmpfs tmpfs /etc/vgpu-manager
mkdir -p /etc/vgpu-manager/driver /etc/vgpu-manager/.host_proc/$$
cp "$1" /etc/vgpu-manager/driver/libvgpu-control.so
echo 0::/ > /etc/vgpu-manager/.host_proc/$$/cgroup
shift
LD_PRELOAD=/etc/vgpu-manager/driver/libvgpu-control.so exec "$@"
"""


@dataclass(frozen=True)
class Run:
    """How to start a program under a hook: what comes before its words, its environment, and what to look for afterwards.

    `proof(log)` is what the hook itself says of its limiter, None when it does not say that it limits.
    """

    before: tuple[str, ...]
    environment: dict[str, str]
    proof: Callable[[str], str | None]


def _hami(library: Path, uuid: str, limit: int, folder: Path) -> Run:
    Path("/tmp/vgpulock").mkdir(exist_ok=True)
    environment = {
        "LD_PRELOAD": str(library),
        "CUDA_DEVICE_SM_LIMIT": str(limit),
        "CUDA_DEVICE_MEMORY_LIMIT": MEMORY,
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(folder / "region.cache"),
        "GPU_CORE_UTILIZATION_POLICY": "FORCE",
        "LIBCUDA_LOG_LEVEL": "3",
    }

    def proof(log: str) -> str | None:
        ticks = re.findall(rf"device 0: userutil=(-?\d+) currentcores=(-?\d+) total=\d+ limit={limit} ", log)
        if not ticks or "util_switch=1" not in log:
            return None
        return f"limit {limit}, {len(ticks)} ticks, use seen up to {max(int(use) for use, _ in ticks)} %, tokens at the end {ticks[-1][1]}"

    return Run((), environment, proof)


def _vgpu(library: Path, uuid: str, limit: int, folder: Path, controller: str = "delta") -> Run:
    environment = {
        "MANAGER_VISIBLE_DEVICES": uuid,
        "MANAGER_COMPATIBILITY_MODE": "2",
        "CUDA_CORE_LIMIT": str(limit),
        "CUDA_MEM_LIMIT": MEMORY,
        "CUDA_SM_CONTROLLER": controller,
        "LOGGER_LEVEL": "4",
    }

    def proof(log: str) -> str | None:
        on = re.search(r"Cores  Limit     : enabled", log) and re.search(rf"HardCoreSize   : {limit}$", log, re.MULTILINE)
        if not on or f"controller={controller} " not in log or "start utilization_watcher" not in log:
            return None
        uses = [int(use) for use in re.findall(r"user util: (\d+)", log)]
        hits = [int(total) for total in re.findall(r"metric=kernel_rate_limit_hit .*total=(\d+)", log)]
        gaps = [int(total) for total in re.findall(r"metric=gap_throttle .*count=(\d+)", log)]
        seen = f"use {uses[-1]} % at the last of {len(uses)} sparse notes, " if len(uses) > 1 else ""
        return f"limit {limit}, {seen}waits at least {max(hits, default=0)}, gaps {max(gaps, default=0)}"

    before = ("unshare", "--mount", "--propagation", "private", "sh", "-c", _CONTAINER, "sh", str(library))
    return Run(before, environment, proof)


def _vgpu_aimd(library: Path, uuid: str, limit: int, folder: Path) -> Run:
    return _vgpu(library, uuid, limit, folder, "aimd")


PEERS: dict[str, tuple[str, Callable[[Path, str, int, Path], Run]]] = {
    "HAMi-core": ("hami-core/libvgpu.so", _hami),
    "vgpu-manager": ("vgpu-manager/libvgpu-control.so", _vgpu),
    "vgpu-manager-aimd": ("vgpu-manager/libvgpu-control.so", _vgpu_aimd),
}
OURS, NONE = "poolmeter", "no hook"


def _unlimited(_log: str) -> str:
    return "none"


@contextmanager
def runs(hook: str, peers: Path, uuid: str, wanted: Sequence[int]) -> Iterator[list[Run]]:
    """One way to run a program for each limit of `wanted`, as tenants of one card; their state is gone afterwards."""
    if hook == NONE:
        yield [Run((), {}, _unlimited) for _ in wanted]
    elif hook == OURS:
        with tenants(uuid, *(grant(uuid, f"a-tenant-{number}", limit) for number, limit in enumerate(wanted))) as shares:

            def watched(number: int) -> Callable[[str], str | None]:
                def proof(log: str) -> str | None:
                    counted = shares[number].counters()
                    if not counted.launches + counted.graph_launches:
                        return None
                    return f"limit {wanted[number]}, waits {counted.throttle_waits}, charged {counted.busy_ns / 1e9:.3f} s"

                return proof

            yield [Run((), each.environment(), watched(number)) for number, each in enumerate(shares)]
    else:
        name, make = PEERS[hook]
        root = Path(tempfile.mkdtemp(prefix="poolmeter-peer-"))
        try:
            folders = [root / str(number) for number in range(len(wanted))]
            for folder in folders:
                folder.mkdir()
            yield [make((peers / name).resolve(), uuid, limit, folder) for limit, folder in zip(wanted, folders, strict=True)]
        finally:
            shutil.rmtree(root, ignore_errors=True)


def words(kernel: Kernel, warm_up: float, seconds: float, *more: str) -> list[str]:
    """The program: `seconds` are measured after `warm_up`."""
    found = limits.spin(kernel, warm_up + seconds, "--rounds", str(lone(kernel)["rounds"]), "--window-ms", "100", *more)
    found[found.index("--warm-up") + 1] = str(warm_up)
    return found


def go(items: Sequence[Run], programs: Sequence[list[str]], timeout_s: float, apart_s: float = 0.0) -> list[dict[str, Any]]:
    """Run the programs side by side, started `apart_s` from each other. Adds `limiter`; a run without one has `failed` instead of figures."""
    with tempfile.TemporaryDirectory(prefix="poolmeter-peers-") as name:
        logs = [Path(name) / f"{number}.log" for number in range(len(items))]
        running = []
        for item, program, log in zip(items, programs, logs, strict=True):
            running.append(start([*item.before, *program], {**os.environ, **item.environment}, log))
            time.sleep(apart_s)
        outs = [finish(process, timeout_s) for process in running]
        for item, out, log in zip(items, outs, logs, strict=True):
            said = log.read_text(errors="replace")
            if "failed" in out or not out.get("measured_kernels"):
                out["failed"] = f"{out.get('failed', 'no kernels')}: {out.get('error') or ''} {out.get('stdout', '')} {said[-300:]}"
                continue
            out["limiter"] = item.proof(said)
            if out["limiter"] is None:
                out["failed"] = f"its log does not show its limiter on: {said[-300:]}"
    return outs


def alone(results: Results, args: argparse.Namespace, hook: str, name: str, limit: int | None) -> float | None:
    """One cell; its obtained share in percent."""
    kernel = KERNELS[name]
    row = {"kernel": kernel.name, "limit": limit, "hook": hook}
    with runs(hook, args.peers, results.card.uuid, [limit or 100]) as items:
        (out,) = go(items, [words(kernel, args.warm_up, args.seconds)], 30 + 3 * (args.warm_up + args.seconds))
    if "failed" in out:
        results.add("peers", **row, failed=out["failed"])
        return None
    obtained = float(100 * out["measured_truth_ns"] / out["measured_ns"])
    steady = out["windows"][int(args.warm_up * 10) :]
    results.add(
        "peers",
        **row,
        share_percent=obtained,
        error_points=None if limit is None else obtained - limit,
        window_sd=statistics.pstdev(steady) if steady else None,
        limiter=out["limiter"],
    )
    return obtained


def together(results: Results, args: argparse.Namespace, hook: str, name: str, free: float | None) -> float | None:
    """Two tenants that both saturate the card; the sum of their shares in percent. `free` is that sum without a hook."""
    kernel = KERNELS[name]
    apart = 1.5 if hook in PEERS else 0.0  # a peer tells its own process from others by who is new on the card
    begin = ["--start-at", str(time.monotonic_ns() + int((2.5 + len(TENANTS) * apart) * 1e9))]
    programs = [words(kernel, args.warm_up, args.seconds, *begin)] * len(TENANTS)
    with runs(hook, args.peers, results.card.uuid, TENANTS) as items:
        outs = go(items, programs, 60 + 3 * (args.warm_up + args.seconds), apart)
    total = 0.0
    for limit, out in zip(TENANTS, outs, strict=True):
        row = {"kernel": kernel.name, "limit": limit, "hook": hook}
        if "failed" in out:
            results.add("peers: two tenants", **row, failed=out["failed"])
            total = float("nan")
            continue
        obtained, scaled = share_percent(kernel, out), None if free is None else limit * free / 100
        total += obtained
        error = None if scaled is None or hook == NONE else obtained - scaled
        results.add("peers: two tenants", **row, share_percent=obtained, scaled_limit=scaled, error_points=error, limiter=out["limiter"])
    return None if total != total else total


def summary(results: Results, hooks: Sequence[str]) -> None:
    """The cells side by side, and each hook's error over its cells; a cell without a figure is empty, and counted."""
    rows = [row for row in results.rows if row["section"] == "peers"]
    cells = list(dict.fromkeys((row["kernel"], row["limit"]) for row in rows if row["limit"] is not None))
    for kernel, limit in cells:
        found = {row["hook"]: row.get("share_percent") for row in rows if row["kernel"] == kernel and row["limit"] in (limit, None)}
        results.add("side by side", kernel=kernel, limit=limit, **{hook: found.get(hook) for hook in hooks})
    for hook in hooks:
        of = [row for row in rows if row["hook"] == hook and row["limit"] is not None]
        errors = [abs(row["error_points"]) for row in of if row.get("error_points") is not None]
        if errors:
            mean, largest = statistics.mean(errors), max(errors)
            results.add("error in points", hook=hook, cells=len(errors), without_figure=len(of) - len(errors), mean=mean, max=largest)


def measure(results: Results, args: argparse.Namespace, began: float) -> None:
    """All cells, the later ones left out and named when the time is up."""
    first = [hook for hook in args.hooks if hook != "vgpu-manager-aimd"]
    late = [hook for hook in args.hooks if hook not in first]
    for batch in (first, late):
        for name in args.kernels:
            if NONE in batch and left(began, args.budget) > 0:
                alone(results, args, NONE, name, None)
            for limit in args.limits:
                for hook in batch:
                    if hook == NONE:
                        continue
                    if left(began, args.budget) < 0:
                        results.add("not run", kernel=name, limit=limit, hook=hook)
                        continue
                    alone(results, args, hook, name, limit)
        if batch and "1ms" in args.kernels and args.tenants:
            free = together(results, args, NONE, "1ms", None) if batch is first and left(began, args.budget) > 0 else args.free
            args.free = free
            for hook in batch:
                if hook == NONE:
                    continue
                if left(began, args.budget) < 0:
                    results.add("not run", kernel="1ms, two tenants", hook=hook)
                    continue
                together(results, args, hook, "1ms", free)


def chosen(parser: argparse.ArgumentParser, flag: str, text: str, known: Sequence[str]) -> list[str]:
    """The words of a comma-separated flag, each one of `known`."""
    found = text.split(",")
    for word in found:
        if word not in known:
            parser.error(f"{flag} is {word!r}, expected some of {', '.join(known)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="the folder of the peers' libraries")
    parser.add_argument("--hooks", default=",".join([NONE, OURS, *PEERS]))
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--limits", default="10,50,90", help="percent")
    parser.add_argument("--no-tenants", dest="tenants", action="store_false", help="leave out the two tenants")
    parser.add_argument("--warm-up", type=float, default=limits.WARM_UP_S, help="seconds before what is measured")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured of each cell")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which nothing more is begun")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    args.hooks = chosen(parser, "--hooks", args.hooks, [NONE, OURS, *PEERS])
    args.kernels = chosen(parser, "--kernels", args.kernels, list(KERNELS))
    args.limits = [int(each) for each in chosen(parser, "--limits", args.limits, [str(number) for number in range(1, 101)])]
    args.free = None
    began = time.monotonic()
    build_native()
    results = Results(args.output, "peers" if args.warm_up == limits.WARM_UP_S else f"peers-after-{args.warm_up:.0f}-s", card())
    for hook in [hook for hook in args.hooks if hook in PEERS]:
        library = args.peers / PEERS[hook][0]
        commit = library.with_name("commit")
        if library.exists():
            results.add("peers measured", hook=hook, commit=commit.read_text().strip() if commit.exists() else None)
        else:
            results.add("not run", hook=hook, reason=f"{library} is not there")
            args.hooks.remove(hook)
    measure(results, args, began)
    summary(results, args.hooks)
    results.table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
