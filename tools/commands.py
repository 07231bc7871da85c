"""Writes docs/reference/commands.md from the command line's own parsers: `.venv/bin/python tools/commands.py`.

What a flag means is said once, in the code. Only the examples are kept here, one for each built command; the tests parse them.
"""

import argparse
import inspect
import sys
from pathlib import Path

from poolmeter import cli

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "commands.md"

EXAMPLES = {
    "up": "poolmeter up --data ./data",
    "demo": "poolmeter demo --seconds 130",
    "doctor": "poolmeter doctor --all",
    "config check": "poolmeter config check ./config.toml",
    "config show": "poolmeter config show --config ./config.toml",
    "top": "poolmeter top --collector http://127.0.0.1:9878",
    "exporter": "poolmeter exporter --once",
    "exporter release": "poolmeter exporter release --for 300",
    "collector": "poolmeter collector --nodes http://gpu-01:9877,http://gpu-02:9877",
    "enforcer": "poolmeter enforcer --collector http://127.0.0.1:9878",
    "dashboard": "poolmeter dashboard --port 8502",
    "simulate tenant": "poolmeter simulate tenant --kernel-us 500 --seconds 5 --allocate 2G",
    "run": "poolmeter run --tenant vision --compute 30 --memory 8G -- python train.py",
    "allocation create": "poolmeter allocation create --tenant vision --memory 20G --class notebook",
    "allocation list": "poolmeter allocation list --node gpu-01 --format json",
    "allocation show": "poolmeter allocation show a-honajilohg-78a1c330bcda",
    "allocation resize": "poolmeter allocation resize a-honajilohg-78a1c330bcda --memory 12G",
    "allocation suspend": "poolmeter allocation suspend a-honajilohg-78a1c330bcda",
    "allocation resume": "poolmeter allocation resume a-honajilohg-78a1c330bcda",
    "allocation release": "poolmeter allocation release a-honajilohg-78a1c330bcda",
    "usage": "poolmeter usage --from 7d --by tenant,day",
    "chargeback": "poolmeter chargeback --from last-month --plan plan.toml --format csv --output bill.csv",
    "focus export": "poolmeter focus export --from last-month --issuer 'Example Computing' --output costs.csv",
    "plan check": "poolmeter plan check plan.toml --from 2026-12-21 --model 'NVIDIA H200'",
    "assets list": "poolmeter assets list --without-owner",
    "assets show": "poolmeter assets show GPU-5f2c9a1b-e07d-4c38-9a10-0d2e4b6f8a01 --format json",
    "assets import": "poolmeter assets import cards.csv --reason 'invoice 4711' --dry-run",
    "assets depreciation": "poolmeter assets depreciation --from last-month --by owner",
    "assets matrix": "poolmeter assets matrix --from last-month --plan plan.toml",
    "recommend": "poolmeter recommend --why",
    "approve": "poolmeter approve d-5f2c9a1be07d4c38",
    "reject": "poolmeter reject d-5f2c9a1be07d4c38 --reason 'needed again on Monday'",
    "apply": "poolmeter apply --all --dry-run",
    "history": "poolmeter history --state applied",
    "token create": "poolmeter token create --name vision-dashboard --role tenant --tenant vision --days 90",
    "token list": "poolmeter token list --format json",
    "token revoke": "poolmeter token revoke 3f9c1d20ab77 --reason 'laptop lost'",
    "books log": "poolmeter books log --subject decisions --from 7d",
    "store check": "poolmeter store check --data ./data",
    "store compact": "poolmeter store compact --data ./data",
    "store backup": "poolmeter store backup /backups/2026-12-01 --since /backups/2026-11-30",
    "store restore": "poolmeter store restore /backups/2026-12-01 --data ./restored",
    "store migrate": "poolmeter store migrate --data ./data",
}

HEAD = """# Commands

Every command that is built, in the order of `poolmeter --help`; that also names the verbs that are planned (they exit with 3). This page is
written by `tools/commands.py` from the commands' own parsers.

Exit codes: 0 done, 1 refused or found something, 2 bad input, 3 unavailable (no store, no card, no collector, a port that is taken, a
verb that is not built). `poolmeter run` exits with its program's status, 125 when poolmeter itself failed. Results go to stdout, all else
to stderr.

Where things are: `--data`, else `$POOLMETER_DATA`, else `/var/lib/poolmeter` for root and `~/.local/share/poolmeter` for others. Nodes with
an enforcer have a run folder too: `--run`, else `$POOLMETER_RUN`, else `/run/poolmeter` for root and `$XDG_RUNTIME_DIR/poolmeter` for others.

The JSON of `up`, `demo`, `allocation …`, `usage`, `chargeback`, `focus export`, `plan check`, `recommend` and the other verbs of decisions, `doctor`, `top --once`, `store …`, `token …`, `books log`, and `simulate tenant` is
described by the `*.schema.json` files beside this page.

A size is `512M`, `40GiB`, `1.5G` (1G = 1 GiB). A time is RFC 3339 (`2026-01-31T12:00:00Z`), a date, `today`, `7d`, or `last-month`.
"""


def invocation(action: argparse.Action) -> str:
    """How an option or argument is written: `--from TIME`, `ID`."""
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices and action.metavar is None:
        value = "|".join(str(choice) for choice in action.choices)
    if not action.option_strings:
        return f"[{value}]" if action.nargs == "?" else value
    return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")


def table(actions: list[argparse.Action]) -> list[str]:
    """A Markdown table of options and arguments."""
    lines = ["| option | meaning |", "|---|---|"]
    for action in actions:
        meaning = (action.help or "") % {"default": action.default, "prog": "poolmeter"}
        needed = " (required)" if action.option_strings and action.required else ""
        cells = [text.replace("|", "\\|") for text in (f"`{invocation(action)}`", meaning + needed)]
        lines.append(f"| {cells[0]} | {cells[1]} |")
    return lines


def described(command: object) -> list[str]:
    """A command's docstring as Markdown; its indented lines are examples."""
    out = []
    for paragraph in inspect.cleandoc(command.__doc__ or "").split("\n\n"):
        out += ["```console", *[line.strip() for line in paragraph.splitlines()], "```"] if paragraph.startswith(" ") else [paragraph]
        out.append("")
    return out


def own_actions(parser: argparse.ArgumentParser, shared: set[str]) -> list[argparse.Action]:
    """What a command takes beside the shared options and --help."""
    return [action for action in parser._actions if action.dest not in shared and action.dest != "help"]


def page() -> str:
    """The whole page."""
    common = [action for action in cli.shared_options()._actions if action.dest != "help"]
    shared = {action.dest for action in common}
    out = [HEAD, "## Options of every command", "", *table(common), ""]
    for entry in cli.COMMANDS:
        if entry.target is None:
            continue
        command = cli.load(entry)
        actions = own_actions(cli.parser_of(entry, command), shared)
        out += [f"## poolmeter {entry.words}", "", *described(command), "```console", f"$ {EXAMPLES[entry.words]}", "```", ""]
        out += [*table(actions), ""] if actions else ["No options of its own.", ""]
    return "\n".join(out).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
