"""What /proc says of a process: its namespaces, ancestors, framework and name, also where much of it is closed."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from attribution_fakes import MAP, PATH, POD_UID, FakeProc, until

from poolmeter.exporter.attribution.process import KEPT_US, Facts, Processes, parse_framework
from poolmeter.exporter.attribution.source import ProcessKey
from poolmeter.vendors.proc import command_of

SECOND = 1_000_000


def test_a_reused_pid_is_another_process(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    first = proc.add(50, start=100, cgroup=PATH, uid=7)
    processes = Processes(proc.root)
    facts = processes.refresh([(first, frozenset())], 0)[first]
    assert facts.place is not None and facts.place.pod_uid == POD_UID
    proc.end(50)
    second = proc.add(50, start=200, cgroup="/system.slice/sshd.service", uid=0)
    seen = processes.refresh([(first, frozenset()), (second, frozenset())], 40 * SECOND)  # past the time for a second look
    assert seen[first].place is not None and seen[first].place.pod_uid == POD_UID and seen[first].uid == 7
    assert seen[second].place is not None and seen[second].place.unit == "sshd.service"
    # A process that was never seen alive: nothing of its successor is taken for it.
    late = ProcessKey(50, 150)
    assert processes.refresh([(late, frozenset())], 41 * SECOND)[late] == Facts(late, first_us=41 * SECOND)


def test_a_process_that_moves_is_looked_at_again(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    key = proc.add(50, cgroup="/system.slice/slurmd.service")
    processes = Processes(proc.root)
    processes.refresh([(key, frozenset())], 0)
    proc.add(50, cgroup="/slurm/uid_5/job_6")
    assert processes.refresh([(key, frozenset())], 10 * SECOND)[key].place == processes.refresh([(key, frozenset())], 0)[key].place
    moved = processes.refresh([(key, frozenset())], 31 * SECOND)[key].place
    assert moved is not None and moved.job == "6"


def test_pids_of_namespaces_and_ancestors(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    proc.add(1, start=1, parent=0)
    proc.add(40, start=50, parent=1)
    proc.add(45, start=999, parent=1)  # took the pid of a parent that is gone
    key = proc.add(50, start=100, parent=40, inner=(12,))
    orphan = proc.add(51, start=100, parent=45)
    facts = Processes(proc.root).refresh([(key, frozenset()), (orphan, frozenset())], 0)
    assert facts[key].namespace_pid == 12 and facts[key].ancestors == (ProcessKey(40, 50), ProcessKey(1, 1))
    assert facts[orphan].namespace_pid is None and facts[orphan].ancestors == ()


@pytest.mark.parametrize(
    ("paths", "framework"),
    [
        ([b"/usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06", b"/usr/lib/libc.so.6"], "cuda"),
        ([b"/usr/lib/libcuda.so.1 (deleted)"], "cuda"),
        ([b"/usr/local/Ascend/lib64/libascendcl.so"], "cann"),
        ([b"/opt/rocm-6.2/lib/libamdhip64.so.6", b"/opt/rocm-6.2/lib/libhsa-runtime64.so.1"], "rocm"),
        ([b"/opt/dtk-24.04/hip/lib/libamdhip64.so.5"], "dtk"),
        ([b"/opt/dtk/lib/libgalaxyhip.so.5"], "dtk"),
        ([b"/usr/lib/libcuda.so.1", b"/opt/rocm/lib/libamdhip64.so"], "rocm"),
        ([b"/usr/lib/libcudart.so.13", b"/home/libcuda.so-notes.txt", b"/x/mylibcuda.so.1"], None),
        ([], None),
    ],
)
def test_frameworks(paths: list[bytes], framework: str | None) -> None:
    assert parse_framework(b"".join(MAP % path for path in paths)) == framework


def test_maps_are_read_once_and_may_be_closed_to_us(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    key, closed = proc.add(50, maps=MAP % b"/usr/lib/libcuda.so.1"), proc.add(51)
    processes = Processes(proc.root)
    until(lambda: processes.refresh([(key, frozenset()), (closed, frozenset())], 0)[key].framework == "cuda")
    (proc.root / "50" / "maps").write_bytes(MAP % b"/usr/local/Ascend/lib64/libascendcl.so")
    later = processes.refresh([(key, frozenset()), (closed, frozenset())], 100 * SECOND)
    assert later[key].framework == "cuda" and later[closed].framework is None
    processes.close()


def test_maps_that_hang_hold_up_no_tick_and_are_taken_for_no_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, stuck, go = FakeProc(tmp_path / "proc"), threading.Event(), threading.Event()

    def slow(path: Path, limit: int) -> bytes | None:
        if path.name == "maps" and path.parent.name == "50":
            stuck.set()
            assert go.wait(10)
        return path.read_bytes() if path.exists() else None

    monkeypatch.setattr("poolmeter.exporter.attribution.process._head", slow)
    cuda = MAP % b"/usr/lib/libcuda.so.1"
    key, reused, after = proc.add(49, maps=cuda), proc.add(50, start=100, maps=cuda), proc.add(51, maps=cuda)
    processes = Processes(proc.root)
    seen = [(each, frozenset[str]()) for each in (key, reused, after)]
    processes.refresh(seen, 0)
    assert stuck.wait(10)  # the tick came back, and the thread is in there
    until(lambda: processes.refresh(seen, 0)[key].framework == "cuda")
    assert all(processes.refresh(seen, 0)[each].framework is None for each in (reused, after))
    proc.add(50, start=200)
    go.set()
    until(lambda: processes.refresh(seen, 0)[after].framework == "cuda")
    assert processes.refresh(seen, 0)[reused].framework is None
    processes.refresh([], KEPT_US + 1)
    assert processes.of(key) is None and not processes._unread and not processes._told
    processes.close()
    late = [(proc.add(52, maps=cuda), frozenset[str]())]  # as after a reload of the sources
    until(lambda: processes.refresh(late, KEPT_US + 2)[late[0][0]].framework == "cuda")
    processes.close()


def test_a_program_may_call_itself_anything(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    proc.add(50)
    (proc.root / "50" / "comm").write_bytes(b"\x1b]0;pwned\x07\xff\n\n")
    assert command_of(50, proc.root) == "\\x1b]0;pwned\\x07\\xff\\x0a"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_what_an_exporter_without_rights_still_knows() -> None:
    """Another user's process: its cgroup and user are open to everybody, its maps are not."""
    program = (
        "import os, sys; from poolmeter.exporter.attribution.process import Processes; from poolmeter.vendors.proc import start_ticks_of;"
        "from poolmeter.exporter.attribution.source import ProcessKey; os.setgroups([]); os.setgid(65534); os.setuid(65534);"
        "pid = int(sys.argv[1]); key = ProcessKey(pid, start_ticks_of(pid)); facts = Processes().refresh([(key, frozenset())], 0)[key];"
        "print(facts.place is not None, facts.uid, facts.framework)"
    )
    ran = subprocess.run([sys.executable, "-c", program, str(os.getpid())], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == ["True", "0", "None"]
