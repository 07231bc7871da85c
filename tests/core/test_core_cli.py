"""The command line: every verb answers, errors are one sentence with the right exit code, help is fast to build."""

import subprocess
import sys

import pytest

from poolmeter import cli
from poolmeter.errors import BadInput


def poolmeter(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "poolmeter.cli", *words], capture_output=True, text=True, timeout=60)


def test_contract_names_every_command() -> None:
    roots = {entry.words.split()[0] for entry in cli.COMMANDS}
    assert roots == {
        "up",
        "books",
        "demo",
        "init",
        "doctor",
        "config",
        "token",
        "top",
        "exporter",
        "collector",
        "enforcer",
        "dashboard",
        "device-plugin",
        "simulate",
        "run",
        "allocation",
        "usage",
        "chargeback",
        "idle",
        "statement",
        "budget",
        "period",
        "plan",
        "assets",
        "focus",
        "fragmentation",
        "recommend",
        "approve",
        "reject",
        "apply",
        "history",
        "rightsize",
        "alerts",
        "import",
        "store",
        "spark",
    }


@pytest.mark.parametrize("entry", [entry for entry in cli.COMMANDS if entry.target is None], ids=lambda entry: entry.words)
def test_verbs_not_built_say_so(entry: cli.Entry, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*entry.words.split(), "--any", "thing"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"poolmeter: poolmeter {entry.words} is not built in version {cli.__version__}\n"


@pytest.mark.parametrize("entry", [entry for entry in cli.COMMANDS if entry.target is not None], ids=lambda entry: entry.words)
def test_verbs_that_are_built_load_and_explain_themselves(entry: cli.Entry, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main([*entry.words.split(), "--help"])
    assert done.value.code == 0
    out, _ = capsys.readouterr()
    assert "--data" in out
    assert len(cli.load(entry).__doc__ or "") > 20


@pytest.mark.parametrize(
    "words", [["frob"], ["allocation", "frob"], ["usage", "--frob"], ["usage", "--format", "xml"], ["config", "check", "/nowhere.toml"]]
)
def test_bad_usage_is_one_sentence_and_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("poolmeter: ") and err.count("\n") == 1


def test_run_fails_with_125(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--compute", "0", "--", "true"]) == 125
    assert capsys.readouterr().err.count("\n") == 1


def test_debug_after_the_double_dash_belongs_to_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--compute", "0", "--", "true", "--debug"]) == 125


def test_help_of_the_tree_imports_nothing_heavy() -> None:
    code = "import sys; from poolmeter import cli; cli.main(['--help']); print(sorted({'pandas','pyarrow','duckdb','streamlit','pydantic','sqlalchemy','aiohttp'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "[]"


def test_a_closed_pipe_is_no_error() -> None:
    result = subprocess.run(f"{sys.executable} -m poolmeter.cli --help | head -n 1", shell=True, capture_output=True, text=True, timeout=60)
    assert result.stderr == ""


def test_debug_raises(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput):
        cli.main(["config", "check", "/nowhere.toml", "--debug"])


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("--help >/dev/full", 3, 1),
        ("--help >&-", 3, 1),
        ("frob 2>/dev/full", 2, 0),
        ("frob 2>&-", 2, 0),
        ("config check /nowhere.toml 0<&- 1>&- 2>&-", 2, 0),
        ("usage --data '' ", 2, 1),
        ("usage --from ''", 2, 1),
        ("usage --time-zone ''", 2, 1),
        ("usage --from 0001-01-01 --time-zone Asia/Tokyo", 2, 1),
        ("usage --to 9999-12-31T23:59:59 --time-zone America/New_York", 2, 1),
    ],
)
def test_the_exit_code_stands_whatever_the_streams_are(line: str, code: int, said: int) -> None:
    result = subprocess.run(f"{sys.executable} -m poolmeter.cli {line}", shell=True, capture_output=True, text=True, timeout=60)
    assert result.returncode == code
    assert result.stderr.count("\n") == said
    assert "internal error" not in result.stderr


def test_a_file_never_lands_on_a_closed_stream() -> None:
    """A file opened by a process without a stderr would get its number, and every warning."""
    code = "from poolmeter import cli; cli.main(['--version']); import os; print(os.open('/dev/null', os.O_RDONLY) > 2)"
    result = subprocess.run(f'{sys.executable} -c "{code}" 0<&- 2>&-', shell=True, capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "True"
