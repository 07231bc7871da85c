"""What measuring costs: `python benchmarks/exporter.py [--simulated] [--seconds 60] [--beside nvitop-exporter]`.

One card, `--processes` programs under the hook (an allocation each), an exporter at its default interval of a second, and a reader of
`/metrics` every `--scrape` seconds. Figures: CPU time of agent and sampler over the window as a part of one core, their resident memory at
its end, and turns. The window begins after `--warm-up` seconds, when libraries are loaded. With --beside another exporter runs in the same
window on the same card and is read as often (the program must be installed; it is started with --port): its CPU and memory are a row of
their own. `--profile FILE` takes no window: it turns an agent in this process for as long, and writes where its time went (pstats).
"""

import argparse
import contextlib
import cProfile
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))

from cards import Card, Results, build_native, card, spin_program  # noqa: E402
from processes import cpu_seconds, resident_mib  # noqa: E402

from poolmeter.clock import SystemClock  # noqa: E402
from poolmeter.exporter.agent import Agent, Settings  # noqa: E402
from poolmeter.exporter.sampling import SamplerProcess  # noqa: E402
from poolmeter.exporter.spool import Spool  # noqa: E402
from poolmeter.model.allocation import Allocation, AllocationState, Labels, Mode, SlicePromise  # noqa: E402
from poolmeter.model.plain import canonical_json  # noqa: E402
from poolmeter.native import native_path  # noqa: E402
from poolmeter.pages.grant import DeviceGrant, Grant, write_grant  # noqa: E402
from poolmeter.pages.meter import create_meter  # noqa: E402
from poolmeter.places import NodeData, NodeRun  # noqa: E402

MEMORY = 1 << 30


def allocate(run: NodeRun, uuid: str, name: str, ppm: int) -> Path:
    """A folder as the enforcer makes it."""
    now = SystemClock().wall_us()
    promise = SlicePromise(uuid, ppm, MEMORY)
    allocation = Allocation(name, Labels(f"tenant-{name}"), Mode.HOOK, (promise,), AllocationState.ACTIVE, 1, now, now)
    hidden, folder = run.root / f".{name}", run.allocations / name
    hidden.mkdir()
    (hidden / "allocation.json").write_text(canonical_json(allocation))
    write_grant(hidden / "grant", Grant(name, (DeviceGrant(uuid, None, MEMORY),)))
    create_meter(hidden / "meter", [uuid], allocation_id=name)
    hidden.rename(folder)
    return folder


@contextlib.contextmanager
def started(words: Sequence[str], environment: Mapping[str, str], log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """A program that is told to end, and made to."""
    with log.open("wb") as file:
        process = subprocess.Popen(list(words), env=dict(environment), stdout=file, stderr=file, start_new_session=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()


def family(pid: int) -> list[int]:
    """The process and its children, grandchildren and so on."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(word) for word in task.read_text().split()]
    return found


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(url: str) -> int:
    """Bytes of the page."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return len(answer.read())


def wait_for(url: str, seconds: float, log: Path) -> None:
    """Until the page is served."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            scrape(url)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"{url} did not answer within {seconds:.0f} s: {error}\n{log.read_text()[-2000:]}") from None
            time.sleep(0.2)


def tenant(uuid: str, seconds: float, simulated: bool) -> list[str]:
    """A program that launches kernels of a millisecond and rests in between."""
    if simulated:
        words = [str(native_path("bin/poolmeter-sim-tenant")), "--kernel-us", "1000", "--gap-us", "20000", "--resolve", "gpa"]
        return [*words, "--allocate", str(MEMORY // 4), "--processes", "1", "--seconds", str(seconds)]
    return [str(spin_program()), "--kernel-us", "1000", "--pattern", "duty", "--allocate", str(MEMORY // 4), "--seconds", str(seconds)]


@contextlib.contextmanager
def tenants(run: NodeRun, uuid: str, count: int, seconds: float, simulated: bool, base: Mapping[str, str], root: Path) -> Iterator[None]:
    """Programs under the hook, each in an allocation of its own."""
    with contextlib.ExitStack() as stack:
        for number in range(count):
            folder = allocate(run, uuid, f"a-{number}", 1_000_000 // count)
            hook = {"LD_PRELOAD": str(native_path("libpoolmeter_hook.so")), "POOLMETER_ALLOCATION_DIR": str(folder)}
            environment = {**base, **hook, "CUDA_VISIBLE_DEVICES": uuid}
            stack.enter_context(started(tenant(uuid, seconds, simulated), environment, root / f"tenant-{number}.log"))
        yield


def profile(args: argparse.Namespace, run: NodeRun, data: NodeData, environment: Mapping[str, str]) -> None:
    """Turn an agent here, under the profiler."""
    spool = Spool(data.spool, "bench", ("collector",))
    sampler = SamplerProcess("nvidia", 10.0, environment)
    agent = Agent(Settings(node="bench", pool="bench"), run, data, spool, sampler, SystemClock())
    for _ in range(3):
        agent.turn(5.0)
        time.sleep(0.5)
    profiler, began, turns = cProfile.Profile(), time.monotonic(), 0
    cpu, used = time.process_time(), 0.0
    while time.monotonic() - began < args.seconds:
        time.sleep(1.0)
        before = time.process_time()
        profiler.enable()
        agent.turn(0.5)
        profiler.disable()
        used += time.process_time() - before
        turns += 1
    profiler.dump_stats(args.profile)
    print(json.dumps({"turns": turns, "cpu_ms_per_turn": used / turns * 1000, "cpu_s": time.process_time() - cpu}))
    sampler.close()
    spool.close()


def measure(args: argparse.Namespace, results: Results, run: NodeRun, data: NodeData, environment: Mapping[str, str], root: Path) -> None:
    """One window."""
    ready = root / "ready.json"
    words = [sys.executable, "-m", "poolmeter.cli", "exporter", "--run", str(run.root), "--data", str(data.root), "--name", "bench"]
    words += ["--port", "0", "--ready-file", str(ready)]
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(started(words, environment, root / "exporter.log"))
        deadline = time.monotonic() + 60
        while not ready.exists():
            if time.monotonic() > deadline or ours.poll() is not None:
                raise SystemExit(f"the exporter did not start:\n{(root / 'exporter.log').read_text()[-2000:]}")
            time.sleep(0.1)
        pages = {"poolmeter": json.loads(ready.read_text())["url"].rstrip("/") + "/metrics"}
        groups = {"poolmeter": ours.pid}
        if args.beside:
            port = free_port()
            other = stack.enter_context(started([*args.beside.split(), "--port", str(port)], environment, root / "other.log"))
            pages[Path(args.beside.split()[0]).name] = f"http://127.0.0.1:{port}/metrics"
            groups[Path(args.beside.split()[0]).name] = other.pid
            wait_for(list(pages.values())[-1], 60, root / "other.log")
        time.sleep(args.warm_up)
        sizes = {name: scrape(url) for name, url in pages.items()}
        members = {name: family(pid) for name, pid in groups.items()}
        before = {pid: cpu_seconds(pid) for pids in members.values() for pid in pids}
        began = time.monotonic()
        while time.monotonic() - began < args.seconds:
            time.sleep(min(args.scrape, max(0.0, began + args.seconds - time.monotonic())))
            for name, url in pages.items():
                sizes[name] = scrape(url)
        wall = time.monotonic() - began
        for name, pids in members.items():
            used = {pid: cpu_seconds(pid) - before[pid] for pid in pids}
            memory = {pid: resident_mib(pid) for pid in pids}
            row = {"exporter": name, "processes": args.processes, "wall_s": round(wall, 1)}
            row |= {"cpu_percent_of_a_core": 100 * sum(used.values()) / wall, "rss_mib": round(sum(memory.values()), 1)}
            if name == "poolmeter":
                agent, sampler = groups[name], [pid for pid in pids if pid != groups[name]]
                row |= {"agent_cpu_percent": 100 * used[agent] / wall, "agent_rss_mib": round(memory[agent], 1)}
                row |= {"sampler_cpu_percent": 100 * sum(used[p] for p in sampler) / wall}
                row |= {"sampler_rss_mib": round(sum(memory[p] for p in sampler), 1)}
            results.add("exporter", **row, page_bytes=sizes[name])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", action="store_true", help="a simulated card, no card needed")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the window")
    parser.add_argument("--warm-up", type=float, default=8.0, help="seconds before the window")
    parser.add_argument("--processes", type=int, default=8, help="programs under the hook")
    parser.add_argument("--scrape", type=float, default=15.0, help="seconds between two readings of /metrics")
    parser.add_argument("--beside", metavar="PROGRAM", help="another exporter in the same window, such as nvitop-exporter")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="profile the agent's turns instead")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    if args.beside and shutil.which(args.beside.split()[0]) is None:
        parser.error(f"--beside is {args.beside!r}, and there is no program of this name, expected one that is installed")
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="poolmeter-bench-")))
        environment = dict(os.environ)
        if args.simulated:
            from poolmeter.simulator.machine import Machine

            machine = stack.enter_context(contextlib.closing(Machine.create("single", root / "machine.sim")))
            environment = machine.environment(environment)
            found = Card(machine.uuid(0), "simulated", "simulated", 0)
        else:
            build_native()
            environment = dict(os.environ)
            found = card()
        run, data = NodeRun(root / "run"), NodeData(root / "data")
        for folder in (run.allocations, run.retired, run.devices, data.root):
            folder.mkdir(parents=True, exist_ok=True)
        whole = args.seconds + args.warm_up + 180
        stack.enter_context(tenants(run, found.uuid, args.processes, whole, args.simulated, environment, root))
        if args.profile:
            profile(args, run, data, environment)
            return 0
        results = Results(args.output, "exporter", found)
        measure(args, results, run, data, environment, root)
        results.table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
