"""The command line: the one list of commands, the options all of them share, and the one place that prints errors.

A command is a class named in `COMMANDS`; only the chosen one's module is imported, which keeps `poolmeter --help` fast.
"""

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from poolmeter import __version__
from poolmeter.errors import BadInput, NotBuilt, PoolmeterError, Unavailable


class Command(Protocol):
    """What a command class provides; its docstring is its help text."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's own flags."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do the work; the exit code. Errors are raised, never printed."""
        ...


@dataclass(frozen=True)
class Entry:
    """One line of the command tree: the words, `module:Class` (None: not built yet), and the one-line help."""

    words: str
    target: str | None
    help: str


COMMANDS: tuple[Entry, ...] = (
    Entry("up", "poolmeter.serve:Up", "start all daemons on loopback and print their URLs"),
    Entry("demo", "poolmeter.demo:Demo", "the main job once on a simulated pool, to the bill"),
    Entry("init", None, "write a configuration for this node"),
    Entry("doctor", "poolmeter.exporter.doctor.commands:Doctor", "say what is missing and how to fix it"),
    Entry("config check", "poolmeter.commands:ConfigCheck", "check a configuration file"),
    Entry("config show", "poolmeter.commands:ConfigShow", "show the configuration in force"),
    Entry("top", "poolmeter.exporter.top.commands:Top", "a live view of cards, slices, tenants and processes"),
    Entry("exporter", "poolmeter.exporter.commands:Exporter", "the node daemon that reads cards and meters"),
    Entry("exporter release", "poolmeter.exporter.commands:ExporterRelease", "let go of the cards, so that they can be reset"),
    Entry("collector", "poolmeter.serve:Served", "the daemon that pulls exporters and keeps usage"),
    Entry("enforcer", "poolmeter.enforcer.commands:Enforcer", "the node daemon that grants and changes limits"),
    Entry("dashboard", "poolmeter.dashboards.commands:Dashboard", "the Streamlit dashboard"),
    Entry("device-plugin", None, "the Kubernetes device plugin"),
    Entry("simulate tenant", "poolmeter.simulator.commands:SimulateTenant", "a workload on the simulated card"),
    Entry("run", "poolmeter.enforcer.run:Run", "a program on a share of a card, under the hook"),
    Entry("allocation create", "poolmeter.enforcer.commands:AllocationCreate", "promise a share of one or more cards"),
    Entry("allocation list", "poolmeter.enforcer.commands:AllocationList", "list allocations"),
    Entry("allocation show", "poolmeter.enforcer.commands:AllocationShow", "show one allocation"),
    Entry("allocation resize", "poolmeter.enforcer.commands:AllocationResize", "change the limits of an allocation while it runs"),
    Entry("allocation suspend", "poolmeter.enforcer.commands:AllocationSuspend", "give an allocation's cards back for a while"),
    Entry("allocation resume", "poolmeter.enforcer.commands:AllocationResume", "take a suspended allocation up again"),
    Entry("allocation migrate", None, "move an allocation to another card"),
    Entry("allocation release", "poolmeter.enforcer.commands:AllocationRelease", "end an allocation"),
    Entry("usage", "poolmeter.accounting.commands:Usage", "who used what"),
    Entry("chargeback", "poolmeter.accounting.commands:Chargeback", "what it cost, and whose it is"),
    Entry("idle", None, "what stands idle, and what that costs"),
    Entry("statement", None, "a tenant's statement of a month"),
    Entry("statement explain", None, "walk from a line's cents to its minutes"),
    Entry("budget", None, "budgets and forecasts"),
    Entry("period", None, "open and close billing periods"),
    Entry("plan check", "poolmeter.accounting.commands:PlanCheck", "check a price plan and show its calendar"),
    Entry("assets list", "poolmeter.accounting.assets.commands:AssetsList", "the register of devices"),
    Entry("assets show", "poolmeter.accounting.assets.commands:AssetsShow", "one device of the register"),
    Entry("assets import", "poolmeter.accounting.assets.commands:AssetsImport", "fill the register from a file"),
    Entry("assets depreciation", "poolmeter.accounting.assets.commands:AssetsDepreciation", "what devices lost in worth"),
    Entry("assets matrix", "poolmeter.accounting.assets.commands:AssetsMatrix", "who used whose devices, and who owes whom"),
    Entry("focus export", "poolmeter.accounting.commands:FocusExport", "FOCUS Cost and Usage export"),
    Entry("fragmentation score", None, "what is free and still of no use"),
    Entry("fragmentation whatif", None, "what would fit under another policy or layout"),
    Entry("fragmentation plan", None, "moves that free whole cards"),
    Entry("recommend", "poolmeter.accounting.commands:Recommend", "propose resizing decisions"),
    Entry("approve", "poolmeter.accounting.commands:Approve", "approve a decision"),
    Entry("reject", "poolmeter.accounting.commands:Reject", "reject a decision"),
    Entry("apply", "poolmeter.accounting.commands:Apply", "have the enforcer carry out decisions"),
    Entry("history", "poolmeter.accounting.commands:History", "what became of each decision"),
    Entry("rightsize replay", None, "replay a right-sizing policy over a trace"),
    Entry("alerts rules", None, "write Prometheus alert rules"),
    Entry("alerts check", None, "evaluate the alerts once"),
    Entry("alerts list", None, "alerts that fire now"),
    Entry("alerts snooze", None, "silence an alert until a time, with a reason"),
    Entry("alerts test", None, "send a test alert"),
    Entry("import prometheus", None, "import usage from Prometheus"),
    Entry("import sacct", None, "import usage from Slurm accounting"),
    Entry("import openb", None, "import a cluster trace"),
    Entry("store check", "poolmeter.collector.store_commands:StoreCheck", "check the store"),
    Entry("store compact", "poolmeter.collector.store_commands:StoreCompact", "compact the store"),
    Entry("store backup", "poolmeter.collector.store_commands:StoreBackup", "back the store up"),
    Entry("store restore", "poolmeter.collector.store_commands:StoreRestore", "restore a backup"),
    Entry("store migrate", "poolmeter.collector.store_commands:StoreMigrate", "bring a store to this version"),
    Entry("spark usage", None, "usage over many stores"),
    Entry("spark chargeback", None, "chargeback over many stores"),
    Entry("spark fragmentation", None, "fragmentation over many stores"),
    Entry("token create", "poolmeter.books.commands:TokenCreate", "make a token of the collector's API"),
    Entry("token list", "poolmeter.books.commands:TokenList", "list the tokens of the API"),
    Entry("token revoke", "poolmeter.books.commands:TokenRevoke", "end a token of the API"),
    Entry("books log", "poolmeter.books.commands:BooksLog", "who changed what in the books, when and why"),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> "None":  # type: ignore[override]
        raise BadInput(f"{self.prog}: {message}; see {self.prog} --help")


def shared_options() -> argparse.ArgumentParser:
    """Options that every command takes."""
    shared = argparse.ArgumentParser(add_help=False)
    group = shared.add_argument_group("everywhere")
    group.add_argument("--data", metavar="DIR", type=_name, help="data folder ($POOLMETER_DATA)")
    group.add_argument("--config", metavar="FILE", type=_name, help="configuration file ($POOLMETER_CONFIG)")
    group.add_argument(
        "--format", choices=("table", "json", "csv", "parquet", "arrow"), default="table", help="format of the result (table)"
    )
    group.add_argument("--output", metavar="FILE", type=_name, help="write the result to FILE instead of stdout")
    group.add_argument("--debug", action="store_true", help="log more, and print a traceback on an error")
    return shared


def _name(text: str) -> str:
    # `--data "$UNSET"` must not quietly mean the default place.
    if not text:
        raise argparse.ArgumentTypeError("it is '', expected a path")
    return text


def find(words: Sequence[str]) -> tuple[Entry | None, int]:
    """The command that the first words name, the longest match, and how many words it took."""
    for count in (2, 1):
        name = " ".join(words[:count])
        for entry in COMMANDS:
            if len(words) >= count and entry.words == name:
                return entry, count
    return None, 0


def help_text() -> str:
    """The command tree."""
    width = max(len(entry.words) for entry in COMMANDS)
    lines = [
        "usage: poolmeter COMMAND [OPTIONS]",
        "",
        "Who used which GPU, what it cost, what stands idle, what should change.",
        "",
        "commands (poolmeter COMMAND --help tells more):",
    ]
    lines += [f"  {entry.words.ljust(width)}  {entry.help}{'' if entry.target else ' (not built yet)'}" for entry in COMMANDS]
    return "\n".join(lines) + "\n"


def load(entry: Entry) -> Command:
    """The command object behind an entry; NotBuilt for a verb that this version does not have."""
    if entry.target is None:
        raise NotBuilt(f"poolmeter {entry.words} is not built in version {__version__}")
    module, name = entry.target.split(":")
    command: Command = getattr(importlib.import_module(module), name)()
    return command


def parser_of(entry: Entry, command: Command) -> argparse.ArgumentParser:
    """The parser of a built command: its own flags and the shared ones."""
    parser = _Parser(
        prog=f"poolmeter {entry.words}",
        description=command.__doc__ or entry.help,
        parents=[shared_options()],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.configure(parser)
    return parser


def dispatch(argv: Sequence[str]) -> int:
    """Run one command line; raises PoolmeterError."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        sys.stdout.write(help_text())
        return 0 if argv else 2
    if argv[0] in ("--version", "-V"):
        sys.stdout.write(f"poolmeter {__version__}\n")
        return 0
    entry, count = find(argv)
    if entry is None:
        group = [known.words for known in COMMANDS if known.words.startswith(argv[0] + " ")]
        if group and (len(argv) == 1 or argv[1] in ("-h", "--help")):
            sys.stdout.write("\n".join(f"poolmeter {words}" for words in group) + "\n")
            return 0 if len(argv) > 1 else 2
        expected = f"one of {', '.join(group)}" if group else "a command that poolmeter --help lists"
        raise BadInput(f"command is {' '.join(argv[: 2 if group else 1])!r}, expected {expected}")
    command = load(entry)
    parser = parser_of(entry, command)
    args = parser.parse_args(argv[count:])
    logging.basicConfig(
        stream=sys.stderr, level=logging.DEBUG if args.debug else logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    return command.run(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `poolmeter` script: 0 done, 1 refused, 2 bad input, 3 unavailable; `run` alone exits with its program's."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in (words[: words.index("--")] if "--" in words else words)
    failed = 125 if words[:1] == ["run"] else None
    _complete_streams()
    try:
        code = dispatch(words)
        sys.stdout.flush()
        _quiet_end()
        return code
    except PoolmeterError as error:
        if debug:
            raise
        _complain(str(error))
        return failed or error.exit_code
    except BrokenPipeError:
        # The reader went away (`| head`): nothing to say, and nothing more to flush.
        _mute(1)
        return failed or 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # A disk that is full, a folder that is closed to us: the machine's word, not a fault in here.
        if debug:
            raise
        _complain(f"{error.filename or 'a stream'} cannot be used: {error.strerror or error}")
        _mute(1)
        return failed or Unavailable.exit_code
    except Exception as error:
        if debug:
            raise
        _complain(f"internal error: {type(error).__name__}: {error} (--debug shows where)")
        return failed or 1


def _complete_streams() -> None:
    """Fill the standard descriptors that whoever started us left closed, so that no file we open is taken for one of them.

    A result written to a closed stdout is still an error.
    """
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def _complain(text: str) -> None:
    """One sentence on stderr; that it cannot be written changes no exit code."""
    try:
        sys.stderr.write(f"poolmeter: {' '.join(text.split())}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        _mute(2)


def _quiet_end() -> None:
    try:
        sys.stderr.flush()
    except OSError:
        _mute(2)


def _mute(descriptor: int) -> None:
    """Let what is still buffered for a dead stream go nowhere, so that the interpreter's own last flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


if __name__ == "__main__":
    sys.exit(main())
