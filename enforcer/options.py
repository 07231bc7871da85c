"""The allocation options, one set for `run` and `allocation create`, and the request they stand for."""

import argparse
import os
import pwd

from poolmeter.enforcer.request import AllocationRequest, check_request
from poolmeter.errors import BadInput
from poolmeter.model.allocation import Environment, Labels, Mode, WorkloadClass
from poolmeter.model.units import parse_percent, parse_size


def add_allocation_options(parser: argparse.ArgumentParser) -> None:
    """The options of contract and reference page docs/reference/allocation-options.md."""
    who = parser.add_argument_group("who it is for")
    who.add_argument("--tenant", metavar="T", help="who is billed (the user name)")
    who.add_argument("--project", metavar="P", help="project, a label")
    who.add_argument("--user", metavar="U", help="user, a label")
    who.add_argument("--workload", metavar="W", help="workload, a label")
    who.add_argument("--class", dest="workload_class", choices=[item.value for item in WorkloadClass], help="kind of work")
    who.add_argument("--environment", choices=[item.value for item in Environment], help="where in its life the work stands")
    who.add_argument("--pool", metavar="P", help="pool, a label")
    who.add_argument("--group", metavar="G", help="collective that this allocation belongs to, a label")
    what = parser.add_argument_group("what it gets (neither --compute nor --memory: whole cards)")
    which = what.add_mutually_exclusive_group()
    which.add_argument("--device", action="append", default=[], metavar="UUID|INDEX", help="this card; repeatable")
    which.add_argument("--devices", type=int, metavar="N", help="this many cards, the fullest that have room (1)")
    what.add_argument(
        "--compute",
        metavar="PCT",
        help="device time of each card, in percent (the fraction that --memory is; then promised and not enforced)",
    )
    what.add_argument("--memory", metavar="SIZE", help="memory of each card (the fraction that --compute is)")
    what.add_argument("--soft", action="store_true", help="may use device time that others leave")
    what.add_argument("--weight", type=int, default=100, metavar="W", help="weight of a soft share (100)")
    what.add_argument("--mode", choices=[item.value for item in Mode], default=Mode.HOOK.value, help="how the cards are shared (hook)")
    what.add_argument("--on-fault", choices=("run", "refuse"), default="refuse", help="what a hook that cannot work does (refuse)")
    what.add_argument("--charge-copies", action="store_true", help="copies are charged as device time, and limited like it")
    what.add_argument("--cpu", type=int, metavar="MILLI", help="thousandths of a processor it needs, for placing only")
    what.add_argument("--host-memory", metavar="SIZE", help="host memory it needs, for placing only")
    what.add_argument("--pinned", action="store_true", help="never moved to another card")
    what.add_argument("--node", metavar="N", help="node to place it on (the first that has room)")
    add_run_folder(parser)


def add_run_folder(parser: argparse.ArgumentParser) -> None:
    """--run of whatever talks to an enforcer."""
    parser.add_argument("--run", dest="run_folder", metavar="DIR", help="run folder of the node's enforcer ($POOLMETER_RUN)")


def request_of(args: argparse.Namespace, *, owned: bool, uid: int) -> AllocationRequest:
    """The request behind parsed options, for this user where no tenant is named. Raises BadInput."""
    return check_request(
        AllocationRequest(
            labels=Labels(
                tenant=args.tenant if args.tenant is not None else user_name(uid),
                project=args.project,
                user=args.user,
                workload=args.workload,
                workload_class=args.workload_class,
                environment=args.environment,
                pool=args.pool,
                group=args.group,
            ),
            mode=Mode(args.mode),
            devices=tuple(args.device),
            device_count=1 if args.devices is None else args.devices,
            compute_ppm=None if args.compute is None else parse_percent(args.compute, "compute share"),
            memory_bytes=None if args.memory is None else parse_size(args.memory, "memory"),
            soft=args.soft,
            weight=args.weight,
            pinned=args.pinned,
            cpu_milli=args.cpu,
            host_memory_bytes=None if args.host_memory is None else parse_size(args.host_memory, "host memory"),
            on_fault=args.on_fault,
            charge_copies=args.charge_copies,
            owned=owned,
        )
    )


def caller_uid() -> int:
    """The person's uid: under sudo the one who called it."""
    sudo = os.environ.get("SUDO_UID", "")
    return int(sudo) if os.geteuid() == 0 and sudo.isdecimal() else os.geteuid()


def user_name(uid: int) -> str:
    """The account's name, or `uid-N` where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid-{uid}"


def parse_user(text: str) -> int:
    """The uid of `1000` or `alice`. Raises BadInput."""
    if text.isdecimal() and int(text) < 1 << 32:
        return int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except KeyError:
        raise BadInput(f"run-as is {text!r:.60}, expected a uid or the name of an account") from None
