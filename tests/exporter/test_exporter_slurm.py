"""Slurm: job mapping files in every state a prolog can leave them in, and jobs of either cgroup version."""

import os
import threading
from pathlib import Path

import pytest
from attribution_fakes import FakeProc, until
from exporter_fakes import CARD, OTHER, device
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.exporter.attribution.devices import names_of
from poolmeter.exporter.attribution.naming import TenantRule
from poolmeter.exporter.attribution.process import Facts, Processes
from poolmeter.exporter.attribution.slurm import Slurm, parse_mapping
from poolmeter.exporter.attribution.sockets import Use
from poolmeter.exporter.attribution.source import ProcessKey
from poolmeter.exporter.attribution.users import UserNames
from poolmeter.model.snapshot import Claim

NAMES = names_of([device(CARD, 0), device(OTHER, 1)])
PEOPLE = {1000: "alice", 1001: "bob"}


class Time:
    now = 0.0


def slurm(folder: Path | None, form: str = "{user}", use: Use = Use.AUTO) -> Slurm:
    rule = TenantRule((("alice", "vision"),), form)
    return Slurm(use, folder, rule, UserNames(PEOPLE.get), interval_s=3600, monotonic=lambda: Time.now)


def look(source: Slurm, facts: dict[ProcessKey, Facts] | None = None) -> None:
    """A tick, a look at the files, and another tick."""
    source.refresh(facts or {}, NAMES)
    runs = source.worker.result.runs
    source.worker.wake()
    until(lambda: source.worker.result.runs > runs)
    source.refresh(facts or {}, NAMES)


def counts(source: Slurm) -> dict[str, int]:
    return {fault.kind: fault.count for fault in source.faults() if fault.count}


def test_jobs_of_devices(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("42\n43\n")
    (tmp_path / OTHER).write_text("44_7\n")
    (tmp_path / ".swap").write_text("99\n")
    source = slurm(tmp_path)
    look(source)
    assert {(claim.job, claim.device_uuids) for claim in source.assigned()} == {("42", (CARD,)), ("43", (CARD,)), ("44_7", (OTHER,))}
    assert counts(source) == {}
    health = source.health()
    assert health is not None and health.ok
    (tmp_path / "0").unlink()
    look(source)
    assert {claim.job for claim in source.assigned()} == {"44_7"}  # a job that has ended holds nothing
    source.close()


def test_duplicate_half_written_and_senseless_lines_are_counted_and_survived(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(b"42\n42\nrm -rf\n\n \x00\n123")
    (tmp_path / "7").write_text("1\n")
    os.mkfifo(tmp_path / "1")
    (tmp_path / "folder").mkdir()
    source = slurm(tmp_path)
    look(source)
    assert {claim.job for claim in source.assigned()} == {"42"}  # 123 may be the first half of 12345
    assert counts(source) == {"duplicate": 1, "half-written": 1, "unreadable": 4, "unknown-device": 1}
    (tmp_path / "0").write_bytes(b"42\n12345\n")
    look(source)
    assert {claim.job for claim in source.assigned()} == {"42", "12345"}
    (tmp_path / "0").write_bytes(b"42")  # written whole, by a prolog that ends no lines
    look(source)
    assert {claim.job for claim in source.assigned()} == set() and counts(source)["half-written"] == 1
    Time.now += 1
    look(source)
    assert {claim.job for claim in source.assigned()} == set()
    Time.now += 1
    look(source)
    assert {claim.job for claim in source.assigned()} == {"42"} and "half-written" not in counts(source)
    source.close()


def test_a_folder_that_is_configured_and_not_there(tmp_path: Path) -> None:
    source = slurm(tmp_path / "absent")
    look(source)
    health = source.health()
    assert health is not None and not health.ok and "cannot be listed" in (health.reason or "")
    (tmp_path / "absent").mkdir()
    look(source)
    health = source.health()
    assert health is not None and health.ok
    source.close()
    assert slurm(None).health() is None and slurm(tmp_path, use=Use.OFF).health() is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_folder(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir(mode=0)
    source = slurm(folder)
    look(source)
    health = source.health()
    assert health is not None and not health.ok and "Permission denied" in (health.reason or "")
    folder.chmod(0o700)
    source.close()


@pytest.mark.parametrize(
    ("cgroup", "uid", "user", "tenant"),
    [
        ("/slurm/uid_1000/job_42/step_0/task_0", 0, "alice", "vision"),
        ("/system.slice/slurmstepd.scope/job_42/step_0/user/task_0", 1001, "bob", "bob"),
        ("/system.slice/slurmstepd.scope/job_42/step_0/user/task_0", 5, "uid-5", "uid-5"),
    ],
)
def test_a_process_of_a_job(tmp_path: Path, cgroup: str, uid: int, user: str, tenant: str) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "0").write_text("42\n")
    key = FakeProc(tmp_path / "proc").add(9, cgroup=cgroup, uid=uid)
    facts = Processes(tmp_path / "proc").refresh([(key, frozenset([CARD]))], 0)
    source = slurm(jobs)
    look(source, facts)
    until(lambda: not source.pending(facts[key]))
    assert source.claim(facts[key]) == Claim(source="slurm", tenant=tenant, job="42", user=user, device_uuids=(CARD,))
    source.close()


def test_devices_of_a_job_are_told_by_a_look_that_began_after_it_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, reads, go = tmp_path / "jobs", [0], threading.Semaphore(0)
    jobs.mkdir()
    (jobs / "0").write_text("42\n")

    def slow(path: Path) -> bytes | None:
        reads[0] += 1
        assert go.acquire(timeout=10)
        return path.read_bytes()

    monkeypatch.setattr("poolmeter.exporter.attribution.slurm._read", slow)
    proc = FakeProc(tmp_path / "proc")
    keys = [proc.add(pid, cgroup=f"/slurm/uid_1000/job_{job}/step_0/task_0") for pid, job in ((9, 42), (10, 43))]
    facts = Processes(tmp_path / "proc").refresh([(keys[0], frozenset([CARD])), (keys[1], frozenset([OTHER]))], 0)
    source = slurm(jobs)
    source.refresh({keys[0]: facts[keys[0]]}, NAMES)
    until(lambda: reads[0] == 1)
    (jobs / "1").write_text("43\n")  # too late for this look
    source.refresh(facts, NAMES)
    go.release()
    until(lambda: source.worker.result.runs == 1)
    until(lambda: not source._users.pending(1000))
    source.refresh(facts, NAMES)
    first, second = (source.claim(facts[key]) for key in keys)
    assert first is not None and first.device_uuids == (CARD,) and not source.pending(facts[keys[0]])
    assert second is not None and second.device_uuids is None and source.pending(facts[keys[1]])
    version = source.version()
    go.release(9)
    until(lambda: source.worker.result.runs == 2)
    source.refresh(facts, NAMES)
    second = source.claim(facts[keys[1]])
    assert second is not None and second.device_uuids == (OTHER,) and not source.pending(facts[keys[1]])
    assert source.version() != version  # a process that had settled is joined again
    source.close()


@pytest.mark.parametrize(
    ("body", "uuids"),
    [(b"42\n", (OTHER,)), (b"42\n4", None), (b"4", None), (None, None), (b"42\n43\n", (CARD, OTHER)), (b"42\nx\n", (OTHER,))],
)
def test_a_device_whose_file_is_not_whole_is_not_said_to_be_anothers(
    tmp_path: Path, body: bytes | None, uuids: tuple[str, ...] | None
) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "1").write_text("43\n44\n")
    if body is None:
        os.mkfifo(jobs / "0")
    else:
        (jobs / "0").write_bytes(body)
    proc = FakeProc(tmp_path / "proc")
    here, there = (proc.add(pid, cgroup=f"/slurm/uid_1000/job_{job}") for pid, job in ((9, 43), (10, 44)))
    facts = Processes(tmp_path / "proc").refresh([(here, frozenset([CARD])), (there, frozenset([OTHER]))], 0)
    source = slurm(jobs)
    look(source, facts)
    claims = [source.claim(facts[key]) for key in (here, there)]
    assert [claim.device_uuids for claim in claims if claim] == [uuids, (OTHER,)]
    source.close()


def test_without_mapping_files_no_device_is_claimed(tmp_path: Path) -> None:
    key = FakeProc(tmp_path / "proc").add(9, cgroup="/slurm/uid_1000/job_42", uid=0)
    facts = Processes(tmp_path / "proc").refresh([(key, frozenset([CARD]))], 0)
    source = slurm(None)
    source.refresh(facts, NAMES)
    until(lambda: not source.pending(facts[key]))
    claim = source.claim(facts[key])
    assert claim is not None and claim.device_uuids is None and claim.job == "42"


@given(st.binary(max_size=300), st.binary(max_size=10) | st.none())
def test_any_bytes_are_a_mapping(body: bytes, before: bytes | None) -> None:
    jobs, tail, faults = parse_mapping(body, before)
    assert len(set(jobs)) == len(jobs) and all(part.isdigit() and part.isascii() for job in jobs for part in job.split("_"))
    assert tail == body.rsplit(b"\n", 1)[-1] and sum(faults.values()) + len(jobs) <= body.count(b"\n") + 1


@given(st.lists(st.integers(0, 9_999_999_999).map(str), max_size=20))
def test_every_line_is_a_job_or_a_duplicate(lines: list[str]) -> None:
    jobs, _, faults = parse_mapping("".join(f"{line}\n" for line in lines).encode())
    assert set(jobs) == set(lines) and faults["duplicate"] == len(lines) - len(set(lines)) and faults["unreadable"] == 0
