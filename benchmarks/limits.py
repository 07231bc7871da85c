"""The compute limit on a real card: `python benchmarks/limits.py [--only shares,pairs,…]`, measured on this machine's first card.

Sections: shares (obtained share for limits x kernels x blocks, and the spread of 100 ms windows), windows (the windows themselves), pairs
(two and three tenants that saturate the card), change (30 -> 70 -> 30 % while running), four (processes of one allocation), antman (a
guaranteed job at half duty beside a soft one), launch (host cost per launch), pytorch. A section that does not fit in one call's --budget
leaves out what is left and says so. Figures go to --output as JSON lines and a Markdown table. No setting of the card is changed.

The obtained share is device time over time, the device time of a kernel being its span on its own clock: measured as it runs where the
program is alone, and as kernels times the span they have alone (without the hook) beside neighbours, whose turns a span then contains.
`rate_percent` is work per second over what the same program does alone and unlimited: it also counts the gaps between short kernels as
used, and is therefore a little higher.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))

import launches  # noqa: E402
import loops  # noqa: E402
from cards import Card, Results, Share, build_native, card, finish, left, spin_program, start  # noqa: E402

from poolmeter.pages.grant import DeviceGrant, Grant, write_grant  # noqa: E402
from poolmeter.pages.meter import create_meter  # noqa: E402

WORKLOADS = ROOT / "benchmarks" / "workloads"
WARM_UP_S = 1.0
LIMITS = (10, 25, 50, 75, 90)


@dataclass(frozen=True)
class Kernel:
    """What a tenant launches."""

    us: int
    pattern: str = "stream"
    blocks: int = 1

    @property
    def name(self) -> str:
        return f"{self.us} us {self.pattern}"


KERNELS = (Kernel(50), Kernel(1000), Kernel(20000, "sync"), Kernel(50, "graph"))


def spin(kernel: Kernel, seconds: float, *words: str) -> list[str]:
    head = [str(spin_program()), "--kernel-us", str(kernel.us), "--pattern", kernel.pattern, "--blocks-per-sm", str(kernel.blocks)]
    return [*head, "--seconds", str(seconds), "--warm-up", str(WARM_UP_S), *words]


@cache
def lone(kernel: Kernel) -> dict[str, Any]:
    """The same program alone and without the hook: `rounds` of a kernel, its span `each_ns`, and `period_ns` from one to the next.

    Kept in build/ for the next call: they belong to the card and the program.
    """
    store = ROOT / "build" / "lone.json"
    key = f"{card().uuid} {spin_program().stat().st_mtime_ns} {kernel}"
    known: dict[str, Any] = json.loads(store.read_text()) if store.exists() else {}
    if key not in known:
        out = finish(start(spin(kernel, 0.2), os.environ))
        if "rounds" not in out:
            raise RuntimeError(f"{kernel.name} did not run alone: {out}")
        out = finish(start(spin(kernel, WARM_UP_S + 1, "--rounds", str(out["rounds"])), os.environ))
        count = out["measured_kernels"]
        known[key] = {"rounds": out["rounds"], "each_ns": out["measured_truth_ns"] / count, "period_ns": out["measured_ns"] / count}
        store.parent.mkdir(exist_ok=True)
        store.write_text(json.dumps(known))
    found: dict[str, Any] = known[key]
    return found


def share_percent(kernel: Kernel, out: dict[str, Any]) -> float:
    """Beside neighbours, or the work of several processes."""
    return float(100 * out["measured_kernels"] * lone(kernel)["each_ns"] / out["measured_ns"])


def grant(uuid: str, name: str, percent: float | None, *, soft: bool = False, weight: int = 100) -> Grant:
    compute = None if percent is None else round(percent * 10_000)
    return Grant(allocation_id=name, devices=(DeviceGrant(uuid=uuid, compute_ppm=compute, soft=soft, weight=weight),))


@contextmanager
def tenants(uuid: str, *grants: Grant) -> Iterator[list[Share]]:
    """Allocations of one node, as an enforcer lays them out."""
    root = Path(tempfile.mkdtemp(prefix="poolmeter-limits-"))
    (root / "devices").mkdir()
    shares = []
    for item in grants:
        folder = root / "allocations" / item.allocation_id
        folder.mkdir(parents=True)
        write_grant(folder / "grant", item)
        create_meter(folder / "meter", [uuid], allocation_id=item.allocation_id)
        shares.append(Share(folder, uuid))
    try:
        yield shares
    finally:
        shutil.rmtree(root, ignore_errors=True)


def together(words: Sequence[Sequence[str]], environments: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """Run the programs side by side; their kernels begin at the same instant."""
    begin = ["--start-at", str(time.monotonic_ns() + 2_500_000_000)]
    running = [start([*each, *begin], environment) for each, environment in zip(words, environments, strict=True)]
    return [finish(process, 90) for process in running]


def spread(windows: Sequence[float]) -> float:
    """Standard deviation of the 100 ms windows after the warm-up, in points."""
    steady = windows[int(WARM_UP_S * 10) :]
    return statistics.pstdev(steady) if steady else float("nan")


def shares(results: Results, found: Card, seconds: float, until: float) -> None:
    errors = []
    for blocks in (1, 64):
        for kernel in (Kernel(each.us, each.pattern, blocks) for each in KERNELS):
            for limit in LIMITS:
                if time.monotonic() > until:
                    results.add("shares: not run", kernel=kernel.name, blocks_per_sm=blocks, limit=limit)
                    continue
                calibrating = kernel == Kernel(1000) and limit == 25
                for own in (False, True) if calibrating else (False,):
                    fixed = [] if own else ["--rounds", str(lone(kernel)["rounds"])]
                    words = spin(kernel, WARM_UP_S + seconds, "--window-ms", "100", *fixed)
                    with tenants(found.uuid, grant(found.uuid, "a-share", limit)) as (mine,):
                        out = finish(start(words, mine.environment()), 90)
                        counted = mine.counters()
                    row = {"kernel": kernel.name, "blocks_per_sm": blocks, "limit": limit, "calibrating": own}
                    if "failed" in out or not out.get("measured_kernels"):
                        results.add("shares", **row, failed=str(out))
                        continue
                    obtained = 100 * out["measured_truth_ns"] / out["measured_ns"]
                    errors.append(abs(obtained - limit))
                    results.add(
                        "shares",
                        **row,
                        share_percent=obtained,
                        error_points=obtained - limit,
                        rate_percent=None if own else 100 * out["measured_kernels"] * lone(kernel)["period_ns"] / out["measured_ns"],
                        window_sd=spread(out["windows"]),
                        charged_of_truth=counted.busy_ns / out["truth_ns"],
                        waits=counted.throttle_waits,
                        throttled_s=counted.throttled_ns / 1e9,
                        timed=counted.timed_samples,
                        faults=counted.internal_faults,
                    )
    if errors:
        results.add("shares: error in points", cells=len(errors), mean=statistics.mean(errors), max=max(errors))


def windows(results: Results, found: Card, seconds: float, until: float) -> None:
    for kernel in (Kernel(50), Kernel(1000), Kernel(50, "graph")):
        for limit in (10, 30, 50, 90):
            words = spin(kernel, WARM_UP_S + seconds, "--window-ms", "100", "--rounds", str(lone(kernel)["rounds"]))
            with tenants(found.uuid, grant(found.uuid, "a-share", limit)) as (mine,):
                out = finish(start(words, mine.environment()), 90)
            if "failed" in out:
                results.add("windows", kernel=kernel.name, limit=limit, failed=str(out))
            else:
                results.add("windows", kernel=kernel.name, limit=limit, sd=spread(out["windows"]), percent=json.dumps(out["windows"]))


def pairs(results: Results, found: Card, seconds: float, until: float) -> None:
    for limits in ((30, 70), (20, 30, 50)):
        for kernel in (Kernel(50), Kernel(1000)):
            words = [spin(kernel, WARM_UP_S + seconds, "--rounds", str(lone(kernel)["rounds"]))] * len(limits)
            free = together(words, [dict(os.environ)] * len(limits))
            if any("failed" in out for out in free):
                results.add("pairs", kernel=kernel.name, failed=str(free))
                continue
            card_gives = sum(share_percent(kernel, out) for out in free)
            grants = [grant(found.uuid, f"a-tenant-{number}", limit) for number, limit in enumerate(limits)]
            with tenants(found.uuid, *grants) as sharing:
                outs = together(words, [item.environment() for item in sharing])
                counted = [item.counters() for item in sharing]
            for limit, out, counters in zip(limits, outs, counted, strict=True):
                row = {"tenants": "/".join(map(str, limits)), "kernel": kernel.name, "limit": limit}
                if "failed" in out:
                    results.add("pairs", **row, failed=str(out))
                    continue
                obtained, scaled = share_percent(kernel, out), limit * card_gives / 100
                results.add(
                    "pairs",
                    **row,
                    share_percent=obtained,
                    scaled_limit=scaled,
                    error_points=obtained - scaled,
                    card_gives_percent=card_gives,
                    charged_of_truth=counters.busy_ns / (out["kernels"] * lone(kernel)["each_ns"]),
                    waits=counters.throttle_waits,
                    throttled_s=counters.throttled_ns / 1e9,
                )


def change(results: Results, found: Card, seconds: float, until: float) -> None:
    phases = ((30, 0.0), (70, 3.0), (30, 6.0))
    for kernel in (Kernel(50), Kernel(1000), Kernel(50, "graph")):
        words = spin(kernel, 9.0, "--window-ms", "100", "--rounds", str(lone(kernel)["rounds"]))
        with tenants(found.uuid, grant(found.uuid, "a-share", 30)) as (mine,):
            begin = time.monotonic_ns() + 2_500_000_000
            process = start([*words, "--start-at", str(begin)], mine.environment())

            def resize(folder: Path = mine.folder, begin: int = begin) -> None:
                for limit, at_s in phases[1:]:
                    time.sleep(max(0.0, begin / 1e9 + at_s - time.monotonic()))
                    write_grant(folder / "grant", grant(found.uuid, "a-share", limit))

            resizer = threading.Thread(target=resize)
            resizer.start()
            out = finish(process, 90)
            resizer.join()
        if "failed" in out:
            results.add("change", kernel=kernel.name, failed=str(out))
            continue
        for limit, at_s in phases:
            part = out["windows"][int(at_s * 10) : int(at_s * 10) + 30]
            settled = next((n for n in range(len(part)) if abs(statistics.mean(part[n:]) - limit) <= 3 and abs(part[n] - limit) <= 6), None)
            results.add(
                "change",
                kernel=kernel.name,
                limit=limit,
                settled_after_s=None if settled is None else settled / 10,
                mean_after_1_s=statistics.mean(part[10:]),
                percent=json.dumps(part),
            )


def four(results: Results, found: Card, seconds: float, until: float) -> None:
    for kernel in (Kernel(50), Kernel(1000)):
        words = [spin(kernel, WARM_UP_S + seconds, "--rounds", str(lone(kernel)["rounds"]))] * 4
        with tenants(found.uuid, grant(found.uuid, "a-share", 40)) as (mine,):
            outs = together(words, [mine.environment()] * 4)
            counted = mine.counters()
        if any("failed" in out for out in outs):
            results.add("four", kernel=kernel.name, failed=str(outs))
            continue
        each = [share_percent(kernel, out) for out in outs]
        charged = counted.busy_ns / sum(out["kernels"] * lone(kernel)["each_ns"] for out in outs)
        results.add("four", kernel=kernel.name, limit=40, sum_percent=sum(each), each=json.dumps(each), charged_of_truth=charged)


def antman(results: Results, found: Card, seconds: float, until: float) -> None:
    job, length = Kernel(500, "duty"), ["--rounds", str(lone(Kernel(500))["rounds"])]
    words = spin(job, WARM_UP_S + seconds, *length)
    guarantee = grant(found.uuid, "a-guaranteed", 90)
    alone = finish(start(words, os.environ))
    with tenants(found.uuid, guarantee) as (mine,):
        hooked = finish(start(words, mine.environment()))
    own = 100 * alone["measured_truth_ns"] / alone["measured_ns"]
    speed = alone["cycles"] / alone["wall_ns"]
    results.add(
        "antman: alone", busy_percent=own, cycles=alone["cycles"], hooked_speed_percent=100 * hooked["cycles"] / hooked["wall_ns"] / speed
    )
    for kernel in (Kernel(50), Kernel(1000)):
        beside = spin(kernel, WARM_UP_S + seconds, "--rounds", str(lone(kernel)["rounds"]))
        for name, hooks in (("no hook", None), ("hook", grant(found.uuid, "a-soft", 5, soft=True, weight=10))):
            with tenants(found.uuid, guarantee, *([hooks] if hooks else [])) as sharing:
                environments = [item.environment() for item in sharing] if hooks else [dict(os.environ)] * 2
                outs = together([words, beside], environments)
            if any("failed" in out for out in outs):
                results.add("antman", beside=kernel.name, case=name, failed=str(outs))
                continue
            soft = share_percent(kernel, outs[1])
            results.add(
                "antman",
                beside=kernel.name,
                case=name,
                guaranteed_speed_percent=100 * outs[0]["cycles"] / outs[0]["wall_ns"] / speed,
                soft_percent=soft,
                soft_of_idle_percent=100 * soft / (100 - own),
            )


def launch(results: Results, found: Card, seconds: float, until: float) -> None:
    launches.measure(results, found.uuid, until)


def pytorch(results: Results, found: Card, seconds: float, until: float) -> None:
    words = [sys.executable, str(WORKLOADS / "train.py"), "--warm-up", str(WARM_UP_S), "--seconds", str(seconds), "--profile", "20"]
    plain = finish(start(words, os.environ))
    for limit in (None, *LIMITS):
        if time.monotonic() > until:
            results.add("pytorch: not run", limit=limit)
            continue
        with tenants(found.uuid, grant(found.uuid, "a-share", limit)) as (mine,):
            out = finish(start(words, mine.environment()))
            counted = mine.counters()
        if "failed" in plain or "failed" in out:
            results.add("pytorch", limit=limit, failed=str([plain, out]))
            continue
        # The kernels' own time is CUPTI's, of steps right after those that are counted: a card that rests now and then runs faster.
        results.add(
            "pytorch",
            limit=limit,
            obtained_percent=100 * out["steps_per_s"] * out["kernels_s_per_step"],
            speed_of_plain_percent=100 * out["steps_per_s"] / plain["steps_per_s"],
            kernels_ms_per_step=1000 * out["kernels_s_per_step"],
            kernels_ms_per_step_plain=1000 * plain["kernels_s_per_step"],
            waits=counted.throttle_waits,
            faults=counted.internal_faults,
        )
    loops.measure(results, found.uuid, until)


SECTIONS = {
    "shares": shares,
    "windows": windows,
    "pairs": pairs,
    "change": change,
    "four": four,
    "antman": antman,
    "launch": launch,
    "pytorch": pytorch,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--seconds", type=float, default=3.0, help="measured of each cell, after a second of warm-up")
    parser.add_argument("--budget", type=float, default=500.0, help="seconds after which nothing more is begun")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    names = args.only.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        parser.error(f"--only is {unknown[0]!r}, expected some of {', '.join(SECTIONS)}")
    began = time.monotonic()
    build_native()
    results = Results(args.output, "limits" if len(names) == len(SECTIONS) else "limits-" + "-".join(names), card())
    for name in names:
        if left(began, args.budget) < 0:
            results.add("not run", name=name, reason="the call's time was up")
            continue
        try:
            SECTIONS[name](results, results.card, args.seconds, began + args.budget)
        except Exception as error:
            results.add("failed sections", name=name, reason=f"{type(error).__name__}: {error}"[:400])
    results.table()
    return 1 if any(row["section"] == "failed sections" for row in results.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
