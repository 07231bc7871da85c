"""The simulator's commands."""

from __future__ import annotations

import argparse
import json

from poolmeter.errors import BadInput
from poolmeter.model.units import parse_size


class SimulateTenant:
    """Run a workload on the simulated card: kernels of a given length for a given time. One JSON line on stdout says what it used."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """The workload's flags; the defaults saturate card 0 with 1 ms kernels for one second."""
        parser.add_argument("--kernel-us", type=int, default=1000, metavar="N", help="length of a kernel in microseconds (1000)")
        parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="how long to launch; 0: until SIGTERM (1)")
        parser.add_argument("--kernels", type=int, metavar="N", help="launch exactly so many; 0: none, only hold the memory")
        parser.add_argument("--graph", type=int, default=0, metavar="N", help="launch graphs of N kernels instead of kernels")
        parser.add_argument("--allocate", default="0", metavar="SIZE", help="device memory to take first (512M, 40GiB)")
        parser.add_argument("--processes", type=int, default=1, metavar="N", help="so many processes at once, each with all of this (1)")
        parser.add_argument("--streams", type=int, default=1, metavar="N", help="streams that take turns (1)")
        parser.add_argument("--gap-us", type=int, default=0, metavar="N", help="idle time between launches (0)")
        parser.add_argument("--sync-every", type=int, default=0, metavar="N", help="synchronise after every N launches (0: never)")
        parser.add_argument("--device", type=int, default=0, metavar="I", help="visible card to work on (0)")
        parser.add_argument("--blocks", type=int, default=0, metavar="N", help="blocks of a launch (0: one for each SM)")
        parser.add_argument(
            "--resolve", choices=("gpa", "dlsym", "link"), default="gpa", help="how the program finds the driver's functions"
        )
        parser.add_argument("--machine", metavar="FILE", help="the machine file ($POOLMETER_SIM_MACHINE)")

    def run(self, args: argparse.Namespace) -> int:
        """Runs it; exit code 0 when it ran, a refused allocation included (it stands in cuda_error)."""
        from poolmeter.simulator.tenant import TenantPlan, run_tenant

        limits = {"kernel_us": (0, 10**9), "graph": (0, 100_000), "processes": (1, 256), "streams": (1, 64), "gap_us": (0, 10**9)}
        limits |= {"sync_every": (0, 10**9), "device": (0, 15), "blocks": (0, 2**31 - 1), "kernels": (0, 10**12)}
        for name, (least, most) in limits.items():
            value = getattr(args, name)
            if value is not None and not least <= value <= most:
                raise BadInput(f"--{name.replace('_', '-')} is {value}, expected {least} to {most}")
        if not 0 <= args.seconds < 10**9:
            raise BadInput(f"--seconds is {args.seconds}, expected 0 or more")
        plan = TenantPlan(
            kernel_us=args.kernel_us,
            seconds=args.seconds,
            kernels=args.kernels,
            graph=args.graph,
            allocate=parse_size(args.allocate, "--allocate"),
            processes=args.processes,
            streams=args.streams,
            gap_us=args.gap_us,
            sync_every=args.sync_every,
            device=args.device,
            blocks=args.blocks,
            resolve=args.resolve,
        )
        print(json.dumps(run_tenant(plan, args.machine)), flush=True)
        return 0
