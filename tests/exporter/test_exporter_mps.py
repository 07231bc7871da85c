"""MPS: what its control daemon tells, and how a server's device time is divided among its clients."""

import os
from pathlib import Path

import pytest
from exporter_binding import Say, holder, only, sample, say, use, vendor_of
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.vendors.mps import ENVIRON_BYTES, MpsClient, MpsControl, parse_clients
from poolmeter.vendors.nvidia_use import divide

__all__ = ["say"]

TABLE = """PID       ID        SERVER    DEVICE             NAMESPACE COMMAND
4711      0         1000      GPU-cb213c89       4026531836 ./train --lr 1
4712      1         1000      GPU-cb213c89       4026531836 ./serve
half a line
"""
LIMIT = b"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="


def fake_proc(root: Path, processes: dict[int, str], environ: dict[int, bytes] | None = None) -> Path:
    for pid, comm in processes.items():
        (root / str(pid)).mkdir(parents=True)
        (root / str(pid) / "stat").write_bytes(b"%d (x) S " % pid + b" ".join(b"%d" % n for n in range(4, 60)))
        (root / str(pid) / "comm").write_text(comm + "\n")
        (root / str(pid) / "environ").write_bytes((environ or {}).get(pid, b""))
    return root


def test_the_control_pipe_tells_servers_clients_and_percentages(tmp_path: Path) -> None:
    answers = {"get_server_list": "1000\n", "get_active_thread_percentage 1000": "60.0\n", "ps": TABLE}
    proc = fake_proc(tmp_path, {4711: "train", 4712: "serve"}, {4711: b"A=1\0CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25\0"})
    assert MpsControl(answers.get, proc=proc).read() == (
        MpsClient(pid=4711, server=1000, active_thread_ppm=250_000),
        MpsClient(pid=4712, server=1000, active_thread_ppm=600_000),
    )


def test_no_daemon_a_refusal_and_rubbish_are_nothing(tmp_path: Path) -> None:
    assert MpsControl(pipe_folder=tmp_path / "none").read() is None
    assert MpsControl(lambda _: None).read() is None
    assert MpsControl(lambda _: "Failed to connect").read() == ()
    assert parse_clients("") == [] and parse_clients("PID SERVER\nx y\n1\n") == []


def test_a_daemon_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "control").touch()
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nread line\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("poolmeter.vendors.mps.TIMEOUT_S", 0.3)
    assert MpsControl(pipe_folder=tmp_path).read() is None
    program.write_text(
        '#!/bin/sh\nread line\n[ "$line" = get_server_list ] && echo 77\n[ "$line" = ps ] && echo "PID SERVER\n4711 77"\nexit 0\n'
    )
    assert MpsControl(pipe_folder=tmp_path).read() == (MpsClient(pid=4711, server=77),)


@pytest.mark.parametrize("answering", ["own", "another's folder", "another's pipe", "another's link"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_only_a_daemon_of_root_or_of_the_same_user_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answering: str) -> None:
    folder, link = tmp_path / "mps", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    (folder / "control").touch()
    given = {"another's folder": folder, "another's pipe": folder / "control", "another's link": link}.get(answering)
    if given is not None:
        os.lchown(given, 4711, 4711)
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nread line\necho $line >> {tmp_path}/asked\necho 77\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    clients = MpsControl(pipe_folder=link).read()
    assert (tmp_path / "asked").exists() == (clients is not None) == (answering == "own")


@pytest.mark.parametrize(
    ("environ", "ppm"),
    [
        (LIMIT + b"25\0", 250_000),
        (b"A=1\0" + LIMIT + b"25\0B=2\0", 250_000),
        (LIMIT + b"25", 600_000),  # no end: it may be cut off
        (LIMIT + b"90\0", 600_000),
        (LIMIT + b"x\0", 600_000),
        (b"SECRET=" + b"x" * (1 << 20) + b"\0" + LIMIT + b"25\0", 600_000),
        (b"A=" + b"x" * (ENVIRON_BYTES - 3 - len(LIMIT) - 1) + b"\0" + LIMIT + b"25\0", 600_000),  # the bound is within the number
    ],
)
def test_of_a_clients_environment_its_limit_is_taken_from_a_bounded_part(tmp_path: Path, environ: bytes, ppm: int) -> None:
    answers = {"get_server_list": "1000\n", "get_active_thread_percentage 1000": "60.0\n", "ps": TABLE}
    clients = MpsControl(answers.get, proc=fake_proc(tmp_path, {4711: "train"}, {4711: environ})).read()
    assert clients is not None and clients[0].active_thread_ppm == ppm


def test_one_device_value_copied_to_all_sharers(say: Say, tmp_path: Path) -> None:
    """Under MPS the server has the sum: clients get parts that add up to it, marked, and nobody gets the whole."""
    proc = fake_proc(tmp_path / "proc", {10: "nvidia-cuda-mps", 11: "train", 12: "serve"})
    clients = [holder(11, 100), holder(12, 200)]
    say(
        nvmlDeviceGetComputeRunningProcesses_v3=[holder(10, 30), *clients],
        nvmlDeviceGetMPSComputeRunningProcesses_v3=clients,
        nvmlDeviceGetSamples=(1, [sample(1_000_000, 0)]),
        nvmlDeviceGetProcessUtilization=[use(1_000_000, 10, 90)],
    )
    vendor = vendor_of(tmp_path, proc=proc)
    first = only(vendor)
    assert first.hardware.mps_server_pid == 10 and [p.pid for p in first.processes] == [10, 11, 12]  # once each, though in both lists
    say(nvmlDeviceGetSamples=(1, [sample(2_000_001, 90)]), nvmlDeviceGetProcessUtilization=[use(2_000_001, 10, 90)])
    server, *parts = only(vendor).processes
    assert server.busy_us_total == 0 and server.mps == "server" and not server.divided
    assert [p.busy_us_total for p in parts] == [450_000, 450_000] and all(p.divided and p.mps == "client" for p in parts)
    assert [p.memory_bytes for p in parts] == [100, 200]


def test_clients_share_by_their_active_thread_percentages(say: Say, tmp_path: Path) -> None:
    proc = fake_proc(tmp_path / "proc", {10: "nvidia-cuda-mps", 4711: "train", 4712: "serve"})
    clients = [holder(4711, 1), holder(4712, 1)]
    say(
        nvmlDeviceGetComputeRunningProcesses_v3=[holder(10, 1), *clients],
        nvmlDeviceGetMPSComputeRunningProcesses_v3=clients,
        nvmlDeviceGetSamples=(1, [sample(1_000_000, 0)]),
    )
    answers = {"get_server_list": "10\n", "get_active_thread_percentage 10": "100.0\n", "ps": TABLE.replace("1000 ", "10   ")}
    (proc / "4711" / "environ").write_bytes(b"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25\0")
    vendor = vendor_of(tmp_path, proc=proc, mps=MpsControl(answers.get, proc=proc))
    only(vendor)
    only(vendor)  # a server was seen: the daemon is asked
    assert vendor._mps_worker.wait(10)
    say(nvmlDeviceGetSamples=(1, [sample(2_000_000, 100)]), nvmlDeviceGetProcessUtilization=[use(2_000_000, 10, 100)])
    _, first, second = only(vendor).processes
    assert (first.busy_us_total, second.busy_us_total) == (200_000, 800_000) and first.active_thread_ppm == 250_000


@given(st.integers(0, 10**12), st.dictionaries(st.integers(1, 100), st.integers(0, 10**6), min_size=1, max_size=9))
def test_shares_above_100_percent(amount: int, weights: dict[int, int]) -> None:
    parts = divide(amount, weights)
    assert sum(parts.values()) == amount and parts.keys() == weights.keys() and min(parts.values()) >= 0
