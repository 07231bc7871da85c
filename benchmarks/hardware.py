"""`make hardware`: what only a card can show, measured on this machine's first card.

Sections (--only a,b): busy (busy time against the kernels' own spans, alone), sharers (two tenants), unchanged (PyTorch's allocators and
graphs), memory (the limit to a granule), nvml (our library and the real one agree), loop (two PyTorch tenants through the daemons to a
bill). Figures go to --output (benchmarks/results) as JSON lines and a Markdown table. No setting of the card is changed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))

import launches  # noqa: E402
from cards import Card, Results, Share, build_native, card, finish, left, share, spin_program, start  # noqa: E402

WORKLOADS = ROOT / "benchmarks" / "workloads"
GIB = 1 << 30


def spin(*words: str) -> list[str]:
    return [str(spin_program()), *words]


def busy(results: Results, found: Card, seconds: float) -> None:
    """Busy time against truth, alone on the card; also after the same kernel was run with other lengths (calibrating)."""
    cells = [(us, pattern, blocks) for us in ("50", "200", "1000", "5000", "20000") for pattern, blocks in (("stream", "1"), ("sync", "1"))]
    cells += [("50", "graph", "1"), ("50", "stream", "16"), ("1000", "stream", "16"), ("200", "streams", "4"), ("5", "stream", "1")]
    rounds: dict[tuple[str, str], str] = {}
    # What a launch costs after the same function and grid had other lengths is one question: one pattern answers it.
    runs = [(cell, False) for cell in cells] + [(cell, True) for cell in cells if cell[1] == "sync"]
    for (kernel_us, pattern, blocks), calibrating in runs:
        words = spin("--kernel-us", kernel_us, "--pattern", pattern, "--blocks-per-sm", blocks, "--seconds", str(seconds))
        if not calibrating:
            if (kernel_us, blocks) not in rounds:
                rounds[kernel_us, blocks] = str(finish(start([*words, "--seconds", "0.1"], os.environ))["rounds"])
            words += ["--rounds", rounds[kernel_us, blocks]]
        with share(found.uuid) as mine:
            out = finish(start(words, mine.environment()), seconds * 4 + 60)
            counted = mine.counters()
        row = {"kernel_us": kernel_us, "pattern": pattern, "blocks_per_sm": blocks, "calibrating": calibrating}
        if "failed" in out or not out.get("truth_ns"):
            results.add("busy time alone", **row, failed=str(out))
            continue
        results.add(
            "busy time alone",
            **row,
            kernels=out["kernels"],
            truth_s=out["truth_ns"] / 1e9,
            busy_s=counted.busy_ns / 1e9,
            error_percent=100 * (counted.busy_ns / out["truth_ns"] - 1),
            launch_ns=out["launch_ns"],
            timed=counted.timed_samples,
            bursts=counted.burst_samples,
            dropped=counted.dropped_samples,
            faults=counted.internal_faults,
        )


def launch(results: Results, found: Card, seconds: float) -> None:
    """Host cost of a launch that does not wait for room in the queue, hooked and not."""
    launches.measure(results, found.uuid, time.monotonic() + 60)


def sharers(results: Results, found: Card, seconds: float) -> None:
    """Two tenants that both saturate the card: truth is kernels x their lone time."""
    for kernel_us in ("50", "1000", "20000"):
        words = spin("--kernel-us", kernel_us, "--seconds", str(seconds))
        lone = finish(start(words, os.environ))
        if "failed" in lone:
            results.add("two sharers", kernel_us=kernel_us, failed=str(lone))
            continue
        known = [*words, "--rounds", str(lone["rounds"])]  # timed alone: beside another tenant a kernel takes longer
        lone = finish(start(known, os.environ))
        each = lone["truth_ns"] / lone["kernels"]
        with share(found.uuid, name="a-first") as first, share(found.uuid, name="a-second") as second:
            # Both allocations of one node share its folder, as an enforcer lays them out.
            moved = first.folder.parent / "a-second"
            second.folder.rename(moved)
            pair = [Share(first.folder, found.uuid), Share(moved, found.uuid)]
            running = [start(known, item.environment()) for item in pair]
            outs = [finish(process) for process in running]
            for number, (item, out) in enumerate(zip(pair, outs, strict=True)):
                if "failed" in out:
                    results.add("two sharers", kernel_us=kernel_us, tenant=number, failed=str(out))
                    continue
                counted = item.counters()
                truth = out["kernels"] * each
                results.add(
                    "two sharers",
                    kernel_us=kernel_us,
                    tenant=number,
                    kernels=out["kernels"],
                    truth_s=truth / 1e9,
                    busy_s=counted.busy_ns / 1e9,
                    error_percent=100 * (counted.busy_ns / truth - 1),
                    wall_s=out["wall_ns"] / 1e9,
                    share_percent=100 * truth / out["wall_ns"],
                )


def unchanged(results: Results, found: Card, seconds: float) -> None:
    """PyTorch with each allocator and with CUDA graphs: the same numbers out, hooked and not, and at what speed."""
    train = [sys.executable, str(WORKLOADS / "train.py"), "--steps", "60"]
    infer = [sys.executable, str(WORKLOADS / "infer.py"), "--requests", "6000"]
    cases = [
        ("train, default allocator", train, ""),
        ("train, cudaMallocAsync", train, "backend:cudaMallocAsync"),
        ("train, expandable segments", train, "expandable_segments:True"),
        ("inference, small kernels", infer, ""),
        ("inference, CUDA graph", [*infer, "--graph"], ""),
    ]
    for name, words, allocator in cases:
        extra = {"PYTORCH_CUDA_ALLOC_CONF": allocator, "PYTORCH_ALLOC_CONF": allocator} if allocator else {}
        speeds = []
        for _ in range(3 if words[:2] == infer[:2] else 1):  # small kernels: a pair alone is as noisy as what it is to show
            plain = finish(start(words, {**os.environ, **extra}))
            with share(found.uuid, memory_bytes=40 * GIB) as mine:
                hooked = finish(start(words, {**mine.environment(), **extra}))
                counted = mine.counters()
            if "failed" in plain or "failed" in hooked:
                break
            rate = "steps_per_s" if "loss" in plain else "requests_per_s"
            speeds.append(100 * hooked[rate] / plain[rate])
        if "failed" in plain or "failed" in hooked:
            results.add("PyTorch unchanged", case=name, failed=str([plain, hooked]))
            continue
        value = "loss" if "loss" in plain else "sum"
        results.add(
            "PyTorch unchanged",
            case=name,
            same_result=plain[value] == hooked[value],
            speed_of_plain_percent=statistics.median(speeds),
            of_pairs=" ".join(f"{speed:.1f}" for speed in speeds),
            busy_s=counted.busy_ns / 1e9,
            wall_s=hooked["wall_s"],
            launches=counted.launches,
            graph_launches=counted.graph_launches,
            memory_peak_mib=counted.memory_peak >> 20,
            torch_peak_mib=plain.get("peak_bytes", 0) >> 20,
            faults=counted.internal_faults,
        )


def memory(results: Results, found: Card, seconds: float) -> None:
    """How many pieces fit under a limit, by each way to allocate, and what the program is shown."""
    limit, piece = 3 * GIB, 2 << 20
    for via in ("alloc", "async", "vmm", "managed"):
        words = [sys.executable, str(WORKLOADS / "fill.py"), "--piece", str(piece), "--via", via]
        with share(found.uuid, memory_bytes=limit) as mine:
            out = finish(start(words, mine.environment()))
            counted = mine.counters()
        results.add(
            "memory limit",
            via=via,
            limit_mib=limit >> 20,
            got_mib=out.get("bytes", 0) >> 20,
            short_by_mib=(limit - out.get("bytes", 0)) / (1 << 20),
            status=out.get("status"),
            shown_total_mib=out.get("device_total", 0) >> 20,
            shown_free_before_mib=out.get("free_before", 0) >> 20,
            shown_free_after_mib=out.get("free_after", 0) >> 20,
            denied=counted.denied_limit,
            failed=out.get("stderr") or out.get("failed"),
        )


def nvml(results: Results, found: Card, seconds: float) -> None:
    """Every NVML call the exporter makes: type and code of the real library beside ours."""
    script = ROOT / "benchmarks" / "nvml_calls.py"
    real = finish(start([sys.executable, str(script)], os.environ))
    with tempfile.TemporaryDirectory() as folder:
        from poolmeter.simulator.machine import Machine

        machine = Machine.create("h200x4", Path(folder) / "machine.sim")
        fake = finish(start([sys.executable, str(script)], {**os.environ, **machine.environment()}))
        machine.close()
    if "failed" in real or "failed" in fake:
        results.add("NVML", failed=str([real, fake]))
        return
    differing = sorted(name for name in real if real[name] != fake.get(name))
    results.add("NVML", calls=len(real), agree=len(real) - len(differing))
    for name in differing:
        results.add("NVML calls that differ", call=name, real=real[name], simulated=fake.get(name))


def loop(results: Results, found: Card, seconds: float) -> None:
    """Two PyTorch tenants through exporter, collector and accounting to a bill."""
    from poolmeter.pool import NodePlan, Pool

    with tempfile.TemporaryDirectory(prefix="pm-") as folder:
        data = Path(folder)
        pool = Pool(data, (NodePlan("card", data / "run", data / "node"),))
        pool.nodes[0].run.mkdir()
        pool.nodes[0].data.mkdir()
        plan = data / "plan.toml"
        plan.write_text((ROOT / "deploy" / "plan.example.toml").read_text())
        environment = pool.environment(pool.nodes[0])
        run = [sys.executable, "-m", "poolmeter.cli", "run", "--data", str(data), "--node", "card"]
        jobs = {
            "training": [
                *run,
                "--tenant",
                "training",
                "--memory",
                "40G",
                "--",
                sys.executable,
                str(WORKLOADS / "train.py"),
                "--seconds",
                "75",
            ],
            "inference": [
                *run,
                "--tenant",
                "inference",
                "--memory",
                "20G",
                "--",
                sys.executable,
                str(WORKLOADS / "infer.py"),
                "--seconds",
                "75",
            ],
        }
        try:
            pool.start()
            running = {name: start(words, environment) for name, words in jobs.items()}
            outs = {name: finish(process) for name, process in running.items()}
            for name, out in outs.items():
                results.add("loop: tenants", tenant=name, **out)
        finally:
            pool.stop()
        base = [sys.executable, "-m", "poolmeter.cli"]
        for verb in (["usage"], ["chargeback", "--plan", str(plan)]):
            words = [*base, *verb, "--data", str(data), "--by", "tenant", "--format", "json"]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                results.add(f"loop: {verb[0]}", failed=done.stderr[-400:])
                continue
            body = json.loads(done.stdout)
            for row in body["rows"]:
                results.add(f"loop: {verb[0]}", **row)
            results.add(f"loop: {verb[0]} totals", **body["totals"])


SECTIONS = {"busy": busy, "launch": launch, "sharers": sharers, "memory": memory, "nvml": nvml, "unchanged": unchanged, "loop": loop}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--seconds", type=float, default=3.0, help="of one cell")
    parser.add_argument("--budget", type=float, default=520.0, help="seconds after which no section is begun")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    unknown = [name for name in args.only.split(",") if name not in SECTIONS]
    if unknown:
        parser.error(f"--only is {unknown[0]!r}, expected some of {', '.join(SECTIONS)}")
    began = time.monotonic()
    build_native()
    results = Results(args.output, "loop-" + "-".join(args.only.split(",")) if args.only != ",".join(SECTIONS) else "loop", card())
    for name in args.only.split(","):
        if left(began, args.budget) < 0:
            results.add("not run", name=name, reason="the call's time was up")
            continue
        try:
            SECTIONS[name](results, results.card, args.seconds)
        except Exception as error:
            results.add("failed sections", name=name, reason=f"{type(error).__name__}: {error}"[:400])
    results.table()
    return 1 if any(row["section"] == "failed sections" for row in results.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
