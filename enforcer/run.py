"""`poolmeter run`: a program on a share of a card, under the hook, from its promise to its release."""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from poolmeter.enforcer import namespace
from poolmeter.enforcer.allocations import folder_of
from poolmeter.enforcer.book import Book
from poolmeter.enforcer.changes import Owner
from poolmeter.enforcer.client import answers
from poolmeter.enforcer.inventory import NvmlInventory
from poolmeter.enforcer.journal import Journal
from poolmeter.enforcer.launch import Ended, Prepared, hooked_environment, launch
from poolmeter.enforcer.nodes import KnownNode, choose, first, known_nodes
from poolmeter.enforcer.options import add_allocation_options, caller_uid, parse_user, request_of
from poolmeter.enforcer.request import AllocationRequest
from poolmeter.errors import BadInput, PoolmeterError, Refused, Unavailable
from poolmeter.model.allocation import Allocation
from poolmeter.native import native_path
from poolmeter.pages.native import HOOK_LIBRARY
from poolmeter.places import NodeRun
from poolmeter.report import write_whole


@dataclass(frozen=True)
class Placed:
    """An allocation and where it lies; `simulated` is what a simulated card adds to the program's environment."""

    allocation: Allocation
    folder: Path
    simulated: Mapping[str, str]


@dataclass(frozen=True)
class Desk:
    """Who gives allocations out and takes them back: the enforcers of some nodes, or a book of our own.

    `place` runs in the program's process, `take_back` in ours.
    """

    place: Callable[[AllocationRequest], Placed]
    take_back: Callable[[Allocation], None]


class Run:
    """Run a program on a share of a card.

    An enforcer promises the share, the hook meters the program and holds it to its limits, and the share is given back when the
    program has ended. The exit status is the program's (128 + signal), 125 when poolmeter fails, 126 and 127 as in a shell.

      poolmeter run --compute 30 --memory 8G -- python train.py
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        add_allocation_options(parser)
        parser.add_argument("--run-as", metavar="UID", help="as root: the program's user ($SUDO_UID; without either it stays root)")
        parser.add_argument("--id-file", metavar="FILE", help="write the allocation's id to FILE before the program starts")
        parser.add_argument("--simulate", action="store_true", help="without a pool: on a simulated card of its own")
        parser.add_argument("--quiet", action="store_true", help="do not print the allocation's id on stderr")
        parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD", help="the program and its arguments")

    def run(self, args: argparse.Namespace) -> int:
        command = args.command[1:] if args.command[:1] == ["--"] else args.command
        if not command:
            raise BadInput("command is empty, expected poolmeter run [OPTIONS] -- CMD …")
        uid = _target_uid(args.run_as)
        request = request_of(args, owned=True, uid=uid)
        hook = native_path(HOOK_LIBRARY)
        with _desk(args) as desk:

            def started(allocation: Allocation) -> None:
                if args.id_file is not None:
                    write_whole(Path(args.id_file), f"{allocation.id}\n".encode())
                if not args.quiet:
                    _note(f"allocation {allocation.id} ({allocation.enforcement})")

            try:
                status, allocation = launch(command, lambda: _prepare(desk, request, uid, hook), started)
            except Ended as ended:
                return ended.status
            _give_back(desk, allocation)
            return status


def _target_uid(option: str | None) -> int:
    if option is None:
        return caller_uid()
    uid = parse_user(option)
    if os.geteuid() not in (0, uid):
        raise Unavailable(f"run-as is {option}, expected the own uid {os.geteuid()}: only root can run a program as somebody else")
    return uid


def _prepare(desk: Desk, request: AllocationRequest, uid: int, hook: Path) -> Prepared:
    """The child's part: a promise and, as root for another user, mounts that a program cannot undo."""
    private = False
    if os.geteuid() == 0 and uid != 0:
        # Tried before anything is promised, so that a container without the right gets the cooperative mode and says so.
        with contextlib.suppress(OSError):
            namespace.enter()
            private = True
    placed = desk.place(replace(request, enforcement="root" if private else "cooperative"))
    if private:
        namespace.bind(placed.folder, hook)
        environment = hooked_environment(os.environ, placed.allocation, namespace.SELF, None, placed.simulated)
    else:
        environment = hooked_environment(os.environ, placed.allocation, placed.folder, hook, placed.simulated)
    if os.geteuid() == 0 and uid != 0:
        environment.update(namespace.become(uid))
    return Prepared(placed.allocation, environment)


def _give_back(desk: Desk, allocation: Allocation) -> None:
    try:
        desk.take_back(allocation)
    except Refused as refusal:
        _note(f"{refusal}; it is released when they have ended")
    except PoolmeterError as error:
        # The enforcer releases what has lost its owner as soon as it is there again.
        _note(f"allocation {allocation.id} is not released yet: {error}")


def _note(text: str) -> None:
    # For whoever reads along: that nobody does is no reason to give the program up.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"poolmeter: {text}\n")
        sys.stderr.flush()


@contextlib.contextmanager
def _desk(args: argparse.Namespace) -> Iterator[Desk]:
    nodes = known_nodes(args.run_folder, args.data)
    if args.simulate and not any(answers(node.run.socket) for node in nodes):
        with _private_card() as desk:
            yield desk
        return
    yield _pool_desk(choose(nodes, args.node))


def _pool_desk(nodes: tuple[KnownNode, ...]) -> Desk:
    def place(request: AllocationRequest) -> Placed:
        node, allocation = first(nodes, lambda node, last: node.client.create(replace(request, record_refusal=last)))
        machine = node.client.ping().get("simulated_machine")
        return Placed(allocation, folder_of(node.run, allocation.id), simulated_environment(Path(machine)) if machine else {})

    def take_back(allocation: Allocation) -> None:
        first(nodes, lambda node, _: node.client.release(allocation.id))

    return Desk(place, take_back)


@contextlib.contextmanager
def _private_card() -> Iterator[Desk]:
    """A simulated card and a book that last as long as the program."""
    from poolmeter.simulator.machine import Machine

    with tempfile.TemporaryDirectory(prefix="poolmeter-run-") as name:
        root = Path(name)
        with Machine.create("single", root / "machine") as machine:
            simulated = machine.environment({})
        run = NodeRun(root / "run")
        book = Book(run, Journal(root / "events.jsonl"), NvmlInventory(simulated))
        book.open()
        try:
            os.chmod(root, 0o755)  # the program may run as another user

            def place(request: AllocationRequest) -> Placed:
                allocation = book.create(request, Owner(uid=os.geteuid()))
                return Placed(allocation, folder_of(run, allocation.id), simulated)

            yield Desk(place, lambda _: None)
        finally:
            book.close()
            namespace.leave_no_preload(run.root)


def simulated_environment(machine: Path) -> dict[str, str]:
    """What puts a program on a simulated machine: LD_LIBRARY_PATH and the machine's file. Raises Unavailable when there is none."""
    from poolmeter.simulator.machine import Machine

    with Machine.open(machine) as opened:
        return dict(opened.environment({}))
