"""poolmeter run: exit statuses, signals, environment, and that a promise never outlives its program."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from poolmeter.enforcer.journal import read_events
from poolmeter.enforcer.launch import hooked_environment
from poolmeter.errors import Unavailable
from poolmeter.model.allocation import Allocation, AllocationState, Labels, Mode


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def node(make_shared_node):
    return make_shared_node("alpha")


@pytest.fixture
def events(node):
    """`events()`: what was journalled since the test began."""
    before = len(tuple(read_events(node.journal)))
    return lambda: list(read_events(node.journal))[before:]


def test_run_passes_the_exit_status_output_and_arguments_through(node, events) -> None:
    done = node.poolmeter(
        "run",
        "--tenant",
        "acme",
        "--compute",
        "30",
        "--",
        sys.executable,
        "-c",
        "import sys; print(sys.argv[1:]); sys.exit(7)",
        "--debug",
        "--",
    )
    assert done.returncode == 7
    assert done.stdout == "['--debug', '--']\n"
    assert done.stderr.startswith("poolmeter: allocation a-") and done.stderr.count("\n") == 1
    assert [event.kind for event in events()] == ["created", "released"]
    assert node.client.list() == ()


def test_quiet_prints_nothing_of_its_own(node) -> None:
    done = node.poolmeter("run", "--quiet", "--", "sh", "-c", "echo err >&2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "err\n")


@pytest.mark.parametrize(
    ("command", "status", "told"),
    [
        (["no-such-program-at-all"], 127, "there is none"),
        (["/etc/passwd"], 126, "Permission denied"),
        (["sh", "-c", "kill -9 $$"], 137, ""),
        (["sh", "-c", "kill -TERM $$"], 143, ""),
    ],
)
def test_exit_statuses_are_those_of_a_shell(node, command: list[str], status: int, told: str) -> None:
    done = node.poolmeter("run", "--", *command)
    assert done.returncode == status
    assert told in done.stderr
    assert node.client.list() == ()


@pytest.mark.parametrize("streams", ["2>/dev/full", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_stderr_that_takes_nothing_is_no_reason_not_to_run(node, streams: str) -> None:
    done = node.poolmeter("run", "--", "sh", "-c", "exit 7", streams=streams)
    assert done.returncode == 7
    assert node.client.list() == ()


def test_a_refusal_is_125_and_journalled_with_its_demand(node, events) -> None:
    done = node.poolmeter("run", "--memory", "90G", "--tenant", "acme", "--", "true")
    assert done.returncode == 125
    assert "90.0 GiB is asked, the card has 80.0 GiB" in done.stderr
    (event,) = events()
    assert (event.kind, event.tenant, event.outcome) == ("refused", "acme", "refused")
    assert event.demand == {"devices": 1, "memory_bytes": 90 << 30, "mode": "hook", "models": [], "promise_ppm": 1_000_000}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--compute", "0", "--", "true"], "percentage above 0"),
        (["--compute", "101", "--", "true"], "at most 100"),
        (["--mode", "mig", "--", "true"], "expected hook or whole"),
        (["--device", "GPU-none", "--", "true"], "expected one of this node"),
        (["--tenant", "a\nb", "--", "true"], "printable"),
        ([], "command is empty"),
        (["--run-as", "nobody-of-that-name", "--", "true"], "expected a uid"),
    ],
)
def test_what_poolmeter_cannot_do_is_125_with_one_sentence(node, words: list[str], told: str) -> None:
    done = node.poolmeter("run", *words)
    assert done.returncode == 125
    assert told in done.stderr and done.stderr.count("\n") == 1


def test_without_an_enforcer_it_says_how_to_start_one(make_node) -> None:
    done = make_node("none", start=False).poolmeter("run", "--", "true")
    assert done.returncode == 125
    assert "start one with poolmeter enforcer or poolmeter up" in done.stderr


PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


def test_the_program_gets_its_allocation_its_devices_and_the_hook(node) -> None:
    done = node.poolmeter("run", "--devices", "2", "--", sys.executable, "-c", PRINT_ENVIRONMENT, LD_PRELOAD="libm.so.6")
    assert done.returncode == 0, done.stderr
    environment = json.loads(done.stdout)
    folder = Path(environment["POOLMETER_ALLOCATION_DIR"])
    assert folder.parent == node.run.allocations
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-alpha-0,GPU-alpha-1"
    first, *others = environment["LD_PRELOAD"].split(":")
    assert first.endswith("libpoolmeter_hook.so") and others == ["libm.so.6"]
    assert (node.run.retired / folder.name / "meter").is_file()


def test_an_own_device_list_stays(node) -> None:
    done = node.poolmeter("run", "--", sys.executable, "-c", PRINT_ENVIRONMENT, CUDA_VISIBLE_DEVICES="1")
    assert json.loads(done.stdout)["CUDA_VISIBLE_DEVICES"] == "1"


def test_the_id_file_is_there_before_the_program_runs(node, tmp_path: Path) -> None:
    done = node.poolmeter("run", "--quiet", "--id-file", str(tmp_path / "id"), "--", "cat", str(tmp_path / "id"))
    assert done.stdout.startswith("a-") and done.stdout.endswith("\n")


def test_an_id_file_that_cannot_be_written_starts_nothing(node, tmp_path: Path) -> None:
    done = node.poolmeter("run", "--id-file", str(tmp_path / "no" / "id"), "--", "touch", str(tmp_path / "ran"))
    assert done.returncode == 125
    assert not (tmp_path / "ran").exists()
    wait_for(lambda: node.client.list() == ())


def test_a_hook_that_cannot_be_preloaded_is_an_error_and_no_silence() -> None:
    allocation = Allocation("a-1", Labels("acme"), Mode.HOOK, (), AllocationState.ACTIVE, 2, 1, 1)
    with pytest.raises(Unavailable, match="without spaces and colons"):
        hooked_environment({}, allocation, Path("/x"), Path("/a b/hook.so"), {})
    environment = hooked_environment({"LD_LIBRARY_PATH": "/old"}, allocation, Path("/x"), None, {"LD_LIBRARY_PATH": "/sim"})
    assert environment["LD_LIBRARY_PATH"] == "/sim:/old"
    assert "LD_PRELOAD" not in environment


def start(node, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "poolmeter.cli", "run", *words],
        env={**node.environment, "POOLMETER_RUN": str(node.run.root), "POOLMETER_DATA": str(node.root / "data")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


TRAP = """
import signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, _: (print("got", int(number), flush=True), number == signal.SIGTERM and sys.exit(3)))
print("ready", flush=True)
while True:
    time.sleep(60)
"""


def test_signals_go_on_to_the_program(node) -> None:
    running = start(node, "--quiet", "--", sys.executable, "-c", TRAP)
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        running.send_signal(number)
        assert running.stdout.readline() == f"got {int(number)}\n"
    assert running.wait(30) == 3
    assert node.client.list() == ()


def test_an_interrupt_of_the_terminal_reaches_the_program_once(node) -> None:
    program = (
        "import signal\n"
        "signal.signal(signal.SIGINT, lambda *_: print('interrupted', flush=True))\n"
        "signal.signal(signal.SIGUSR1, lambda *_: exit(5))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update({**node.environment, "POOLMETER_RUN": str(node.run.root)})
        os.execv(sys.executable, [sys.executable, "-m", "poolmeter.cli", "run", "--quiet", "--", sys.executable, "-c", program])

    def read_until(word: bytes) -> bytes:
        told = b""
        while word not in told:
            told += os.read(terminal, 4096)
        return told

    read_until(b"ready")
    os.kill(pid, signal.SIGSTOP)  # two signals at the same instant would be one
    os.write(terminal, b"\x03")
    read_until(b"interrupted")
    os.kill(pid, signal.SIGUSR1)  # passed on after what was waiting before it
    os.kill(pid, signal.SIGCONT)
    rest = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while part := os.read(terminal, 4096):
            rest += part
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    assert b"interrupted" not in rest


def test_a_killed_run_holds_its_promise_until_the_program_ends_and_no_longer(node) -> None:
    running = start(node, "--", "sh", "-c", "echo $$; exec sleep 600")
    assert running.stdout is not None
    program = int(running.stdout.readline())
    (allocation,) = node.client.list()
    assert allocation.owner_pid == program
    running.kill()
    running.wait(30)
    time.sleep(1.2)  # a tending has passed: the program lives, so its promise stands
    assert len(node.client.list()) == 1
    os.kill(program, signal.SIGKILL)
    wait_for(lambda: node.client.list() == ())
    (*_, last) = read_events(node.journal)
    assert (last.kind, last.reason) == ("released", "its owner has ended")


def test_a_run_whose_enforcer_dies_ends_well_and_is_released_at_the_next_start(make_node) -> None:
    node = make_node("beta")
    running = start(node, "--", "sh", "-c", "echo up; exec sleep 600")
    assert running.stdout is not None
    running.stdout.readline()
    node.kill()
    running.send_signal(signal.SIGTERM)
    status = running.wait(30)
    assert running.stderr is not None
    assert "is not released yet" in running.stderr.read()
    assert status == 143
    node.start()
    wait_for(lambda: node.client.list() == ())
