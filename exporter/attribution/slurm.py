"""Attribution by Slurm: job and user from the cgroup path, and the files that map devices to jobs where a prolog writes them."""

import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from poolmeter.errors import Unavailable
from poolmeter.exporter.attribution.devices import DeviceNames
from poolmeter.exporter.attribution.naming import TenantRule
from poolmeter.exporter.attribution.process import Facts
from poolmeter.exporter.attribution.sockets import Use
from poolmeter.exporter.attribution.source import ProcessKey
from poolmeter.exporter.attribution.users import UserNames
from poolmeter.exporter.attribution.worker import Worker
from poolmeter.model.snapshot import AttributionFault, Claim, SourceHealth

FILE_BYTES = 65_536
MAX_FILES = 1024
STEADY_S = 2.0
_JOB = re.compile(rb"^[0-9]{1,10}(?:_[0-9]{1,10})?$")


@dataclass(frozen=True)
class Mapped:
    """Job ids by the name of the file that lists them, and how many lines could not be used, by kind; `unclear` files may list more."""

    jobs: Mapping[str, tuple[str, ...]]
    faults: Mapping[str, int]
    unclear: frozenset[str] = frozenset()


def parse_mapping(body: bytes, steady_tail: bytes | None = None) -> tuple[tuple[str, ...], bytes, Counter[str]]:
    """Job ids of a file, its last line if it has no end, and faults by kind.

    A last line without an end may be the first half of a number: it counts when it has been the same for a while (`steady_tail`).
    """
    faults: Counter[str] = Counter()
    *lines, tail = body.split(b"\n")
    if tail:
        if tail == steady_tail:
            lines.append(tail)
        else:
            faults["half-written"] += 1
    jobs: dict[str, None] = {}
    for line in lines:
        word = line.strip()
        if not word:
            continue
        if not _JOB.match(word):
            faults["unreadable"] += 1
        elif (job := word.decode()) in jobs:
            faults["duplicate"] += 1
        else:
            jobs[job] = None
    return tuple(jobs), tail, faults


class Slurm:
    """Jobs of this node."""

    name = "slurm"

    def __init__(
        self,
        use: Use,
        folder: Path | None,
        rule: TenantRule,
        users: UserNames,
        interval_s: float = 10.0,
        timeout_s: float = 2.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._use, self._folder, self._rule, self._users = use, folder, rule, users
        self._monotonic = monotonic
        self._tails: dict[str, tuple[bytes, float]] = {}  # an unended last line, and since when it has been the same
        self.worker: Worker[Mapped] = Worker("job mapping", self._look, interval_s, 3 * timeout_s)
        self._jobs_on: dict[str, tuple[str, ...]] = {}  # device -> jobs
        self._unclear: frozenset[str] = frozenset()  # devices that may have more jobs than are known
        self._taken: tuple[object, ...] = ()
        self._unknown = 0
        self._asked: dict[str, int] = {}
        self._runs = 0  # looks that `_jobs_on` comes from
        self._good = False

    def version(self) -> object:
        return self._users.version(), self._good, self._taken, self._runs

    def _look(self) -> Mapped:
        assert self._folder is not None
        jobs: dict[str, tuple[str, ...]] = {}
        faults: Counter[str] = Counter()
        tails: dict[str, tuple[bytes, float]] = {}
        unclear: set[str] = set()
        now = self._monotonic()
        try:
            names = sorted(name for name in os.listdir(self._folder) if not name.startswith("."))
        except OSError as error:
            raise Unavailable(f"job mapping folder {self._folder} cannot be listed: {error.strerror}") from None
        if len(names) > MAX_FILES:
            faults["unreadable"] += len(names) - MAX_FILES
        for name in names[:MAX_FILES]:
            body = _read(self._folder / name)
            if body is None:
                faults["unreadable"] += 1
                unclear.add(name)
                continue
            before, since = self._tails.get(name, (b"", now))
            jobs[name], tail, wrong = parse_mapping(body, before if now - since >= STEADY_S else None)
            tails[name] = (tail, since if tail == before else now)
            faults.update(wrong)
            if wrong["half-written"]:
                unclear.add(name)
        self._tails = tails
        return Mapped(jobs, dict(faults), frozenset(unclear))

    def refresh(self, processes: Mapping[ProcessKey, Facts], devices: DeviceNames) -> None:
        if self._use is Use.OFF:
            return
        jobs = {facts.place.job for facts in processes.values() if facts.place and facts.place.job}
        if self._folder is not None:
            result, begun = self.worker.result, self.worker.begun
            if begun == 0 or jobs - self._asked.keys():
                self.worker.wake()
            self._asked = {job: self._asked.get(job, begun) for job in jobs}
            self._good, self._runs = result.trouble is None and result.value is not None, result.runs
            self._take(result.value if self._good else None, devices)
        for facts in processes.values():
            if facts.place and facts.place.job:
                self._users.want(_uid(facts))

    def _take(self, mapped: Mapped | None, devices: DeviceNames) -> None:
        if self._taken and self._taken[0] is mapped and self._taken[1] == devices:
            return
        self._taken = (mapped, devices)
        self._jobs_on, self._unknown = {}, 0
        self._unclear = frozenset(uuid for name in (mapped.unclear if mapped else ()) for uuid in devices.resolve(name))
        for name, jobs in (mapped.jobs if mapped else {}).items():
            found = devices.resolve(name)
            self._unknown += not found
            for uuid in found:
                self._jobs_on[uuid] = tuple(dict.fromkeys((*self._jobs_on.get(uuid, ()), *jobs)))

    def claim(self, facts: Facts) -> Claim | None:
        job = facts.place.job if facts.place else None
        if job is None or self._use is Use.OFF:
            return None
        user = self._users.name_of(_uid(facts))
        tenant, _ = self._rule.tenant(user, user=user, job=job)
        devices = None
        if self._good and not self._unlooked(job):
            found = tuple(uuid for uuid, jobs in self._jobs_on.items() if job in jobs)
            devices = None if (facts.devices - set(found)) & self._unclear else found
        return Claim(source=self.name, tenant=tenant, job=job, user=user, device_uuids=devices)

    def pending(self, facts: Facts) -> bool:
        job = facts.place.job if facts.place else None
        return job is not None and (self._users.pending(_uid(facts)) or self._unlooked(job))

    def _unlooked(self, job: str) -> bool:
        """Whether no look that began after the job was seen has come to its end: its files may be newer than what is known."""
        return self._runs <= self._asked.get(job, -1)

    def assigned(self) -> tuple[Claim, ...]:
        devices: dict[str, list[str]] = {}
        for uuid, jobs in self._jobs_on.items():
            for job in jobs:
                devices.setdefault(job, []).append(uuid)
        return tuple(Claim(source=self.name, job=job, device_uuids=tuple(uuids)) for job, uuids in devices.items())

    def health(self) -> SourceHealth | None:
        if self._use is Use.OFF or self._folder is None:
            return None
        result = self.worker.result
        return SourceHealth(
            source=self.name, ok=result.trouble is None, at_us=result.at_us, duration_us=result.duration_us, reason=result.trouble
        )

    def faults(self) -> tuple[AttributionFault, ...]:
        if self._folder is None or self._use is Use.OFF:
            return ()
        value = self.worker.result.value
        counts = {"duplicate": 0, "half-written": 0, "unreadable": 0, **(value.faults if value else {}), "unknown-device": self._unknown}
        return tuple(AttributionFault(source=self.name, kind=kind, count=count) for kind, count in counts.items())

    def close(self) -> None:
        self.worker.close()


def _uid(facts: Facts) -> int | None:
    """The job's user: slurmd's own word in a v1 path, else whose the process is."""
    place = facts.place
    return place.job_uid if place is not None and place.job_uid is not None else facts.uid


def _read(path: Path) -> bytes | None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return os.read(handle, FILE_BYTES) if stat.S_ISREG(os.fstat(handle).st_mode) else None
    except OSError:
        return None
    finally:
        os.close(handle)
