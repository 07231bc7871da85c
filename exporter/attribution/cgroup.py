"""Cgroup paths of a process, and what they say of its container, pod, job, unit and login: pure, from the text of /proc/PID/cgroup.

A path is read from its root on, and the outermost thing that owns a part of the tree decides: what is below belongs to whoever is in
there, who may make folders of any name. So below a user's own service manager (`user@1000.service`) no pod and no job is believed,
and no second container below a container, with one exception that is marked: a pod in a container (a Kubernetes node that is itself
a container), which only the kubelet's own word makes good.
"""

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

MAX_BYTES = 65_536
MAX_PARTS = 64  # of a path; the kernel has no limit, a hostile tree might be deep

_ID = r"[0-9a-f]{64}"
_UID = r"[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32}"  # static pods: a hash
_POD_SLICE = re.compile(rf"^(?:[A-Za-z0-9._-]*-)?kubepods(?:-(burstable|besteffort))?-pod({_UID})\.slice$")
_POD_FOLDER = re.compile(rf"^pod({_UID})$")
_SCOPE = re.compile(rf"^(cri-containerd|crio|docker|libpod|nerdctl|containerd|cri-o|libpod-payload)-({_ID})(?:\.scope)?$")
_COLON = re.compile(rf"^(?:.*-pod({_UID})\.slice|[^:]*):(cri-containerd|crio|docker|nerdctl|containerd|libpod):({_ID})$")
_BARE = re.compile(rf"^{_ID}$")
_ANY = re.compile(rf"(?:^|[^0-9a-f])({_ID})(?:\.scope)?$")  # as every runtime names them, known or not
_JOB = re.compile(r"^job_([0-9]{1,10})$")
_STEP = re.compile(r"^step_([0-9]{1,10}|batch|extern|interactive)$")
_SLURM_UID = re.compile(r"^uid_([0-9]{1,10})$")
_SLURM_ROOT = re.compile(r"^(slurm|slurm_[A-Za-z0-9._-]+)$")
_SLURM_SCOPE = re.compile(r"^(?:[A-Za-z0-9._-]+_)?slurmstepd\.scope$")
_TASK = re.compile(r"^task_([0-9]{1,10}|special)$")
_MANAGER = re.compile(r"^user@([0-9]{1,10})\.service$")
# Units whose trees are made by a runtime that runs as root; below any other unit everybody who was given it may have made the folders.
_RUNTIME_UNIT = re.compile(
    r"^(?:docker|containerd|crio|kubelet|k3s|k3s-agent|rke2-server|rke2-agent|podman|slurmd|snap\.microk8s[a-z0-9.-]*)\.service$"
)
_UNITS = (".service", ".scope", ".socket", ".mount")
_USER_SLICE = re.compile(r"^user-([0-9]{1,10})\.slice$")

_RUNTIMES = {
    "cri-containerd": "containerd",
    "containerd": "containerd",
    "nerdctl": "containerd",
    "crio": "crio",
    "cri-o": "crio",
    "docker": "docker",
    "libpod": "podman",
    "libpod-payload": "podman",  # --cgroups=split, as Quadlet does
}
# Folders in which a runtime without a systemd driver puts its containers: containerd's are named for its namespaces.
_PARENTS: dict[str, str | None] = {
    "..": None,
    "docker": "docker",
    "moby": "docker",
    "nerdctl": "containerd",
    "default": "containerd",
    "k8s.io": "containerd",
}
# v1: the hierarchies that say most of whose a process is, before those that a login manager moves about.
_V1_ORDER = ("devices", "memory", "cpuset", "cpu", "cpuacct", "pids", "freezer", "name=systemd")


class Line(NamedTuple):
    """A hierarchy of /proc/PID/cgroup: v1 controllers (empty for v2) and the path."""

    controllers: tuple[str, ...]
    path: str


@dataclass(frozen=True)
class Container:
    """A container: `runtime` is containerd, crio, docker or podman, None where a bare id does not say. `rootless_uid`: under that user's own manager."""

    id: str
    runtime: str | None
    rootless_uid: int | None = None


@dataclass(frozen=True)
class Place:
    """What a process's cgroup path says. `nested` is True when the pod lies inside `outer`, a container.

    `enclosed`: it lies in what looks like a container and is none that is known, so that its user ids may be its own.
    """

    path: str
    container: Container | None = None
    pod_uid: str | None = None
    qos: str | None = None
    outer: Container | None = None
    job: str | None = None
    step: str | None = None
    job_uid: int | None = None
    unit: str | None = None
    user_unit: str | None = None
    login_uid: int | None = None
    enclosed: bool = False

    @property
    def nested(self) -> bool:
        """Whether pod and container are only what a container says of itself."""
        return self.outer is not None


def parse_cgroup(body: bytes) -> tuple[Line, ...]:
    """The hierarchies of /proc/PID/cgroup, in file order; lines that are none are left out."""
    lines = []
    for raw in body[:MAX_BYTES].split(b"\n"):
        parts = raw.split(b":", 2)
        if len(parts) != 3 or not parts[0].isdigit() or not parts[2].startswith(b"/"):
            continue
        path = parts[2].decode("utf-8", "surrogateescape").removesuffix(" (deleted)")
        lines.append(Line(tuple(name.decode("ascii", "replace") for name in parts[1].split(b",") if name), path))
    return tuple(lines)


def place_of(lines: tuple[Line, ...]) -> Place | None:
    """What the hierarchies say together: the first that names a job, pod or container, else the first that names a unit or login."""
    ranked = sorted(lines, key=_rank)
    places = [parse_path(line.path) for line in ranked]
    if not places:
        return None
    for place in places:
        if place.container or place.pod_uid or place.job:
            return place
    enclosed = any(place.enclosed for place in places)
    for place in places:
        if place.unit or place.login_uid is not None:
            return replace(place, enclosed=enclosed)
    return replace(places[0], enclosed=enclosed)


def _rank(line: Line) -> int:
    if not line.controllers:
        return -1
    return min((_V1_ORDER.index(name) for name in line.controllers if name in _V1_ORDER), default=len(_V1_ORDER))


def parse_path(path: str) -> Place:
    """What one path says. Any text is a path: what is not understood is left out."""
    # A reader in a cgroup namespace (an exporter in a container) sees what lies outside it below "..", from the last folder on that both are in.
    parts = [part for part in path.split("/") if part and part not in ("..", ".")][:MAX_PARTS]
    found = _Reader(path)
    for index, part in enumerate(parts):
        found.step(part, parts[index - 1] if index else ".." if path.startswith("/..") else "")
    return found.place()


class _Reader:
    """Walks one path from its root."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.containers: list[Container] = []
        self.pods: list[tuple[str, str | None, int]] = []  # uid, class, how many containers lie outside it
        self.job: str | None = None
        self.job_step: str | None = None
        self.job_uid: int | None = None
        self.unit: str | None = None
        self.user_unit: str | None = None
        self.login: int | None = None
        self.manager: int | None = None
        self.closed = False  # nothing of what follows is root's word
        self.enclosed = False
        self._slurm = False
        self._kube = path.startswith("/..")  # the folder of all pods may be among those that are not shown
        self._slurm_uid: int | None = None
        self._qos: str | None = None

    def step(self, part: str, before: str) -> None:
        if self._slurm_job(part) or self._pod(part) or self._container(part, before):
            return
        if self.containers or self.pods or self.job:
            return  # units in there are another system's
        if part.startswith("lxc.payload"):
            self.unit, self.closed = self.unit or part, True
        if match := _USER_SLICE.match(part):
            self.login = _number(match[1]) if self.login is None else self.login
        elif match := _MANAGER.match(part):
            if self.manager is None and self.unit is None:
                self.manager = self.login = _number(match[1])
                self.unit, self.closed = part, True
        elif part.endswith(_UNITS):
            if self.manager is not None:
                self.user_unit = part
            elif self.unit is None:
                self.unit = part
                self.closed = not _RUNTIME_UNIT.match(part)

    def _slurm_job(self, part: str) -> bool:
        if self.closed or self.containers or self.pods:
            return False
        if self.job is not None:
            if self.job_step is None and (match := _STEP.match(part)):
                self.job_step = match[1]
            return bool(_STEP.match(part) or _TASK.match(part) or part in ("user", "slurm"))
        if self._slurm and (match := _JOB.match(part)):
            self.job, self.job_uid = match[1], self._slurm_uid
            return True
        if self._slurm and (match := _SLURM_UID.match(part)):
            self._slurm_uid = _number(match[1])
            return True
        if _SLURM_SCOPE.match(part):
            self._slurm = True
            self.unit = self.unit or part
            return True
        if _SLURM_ROOT.match(part) and not self.unit:
            self._slurm = True
            return True
        return False

    def _pod(self, part: str) -> bool:
        if self.closed or self.job is not None or (self.pods and self.pods[-1][2] == len(self.containers)):
            return False
        if match := _POD_SLICE.match(part):
            self.pods.append((match[2].replace("_", "-"), match[1] or "guaranteed", len(self.containers)))
            return True
        if part == "kubepods" or part.endswith(("-kubepods", "kubepods.slice")):
            self._kube, self._qos = True, None
            return True
        if self._kube and part in ("burstable", "besteffort"):
            self._qos = part
            return True
        if self._kube and (match := _POD_FOLDER.match(part)):
            self.pods.append((match[1], self._qos or "guaranteed", len(self.containers)))
            return True
        return False

    def _container(self, part: str, before: str) -> bool:
        named = _ANY.search(part)
        if self.closed and self.manager is None:
            self.enclosed = self.enclosed or named is not None
            return False
        runtime, identity, uid = None, None, None
        if match := _SCOPE.match(part):
            runtime, identity = _RUNTIMES[match[1]], match[2]
        elif match := _COLON.match(part):
            runtime, identity, uid = _RUNTIMES[match[2]], match[3], match[1]
        elif _BARE.match(part) and (before in _PARENTS or _POD_FOLDER.match(before) or _POD_SLICE.match(before)):
            runtime, identity = _PARENTS.get(before), part
        elif named and self.manager is not None:
            identity = named[1]  # a user hides nobody: whatever he calls it, it is his
        if identity is None:
            self.enclosed = self.enclosed or named is not None
            return False
        if uid is not None and not self.pods and not self.closed and self.job is None:
            qos = next((name for name in ("burstable", "besteffort") if name in part), "guaranteed")
            self.pods.append((uid.replace("_", "-"), qos, len(self.containers)))
        self.containers.append(Container(identity, runtime, self.manager))
        return True

    def place(self) -> Place:
        container = outer = None
        pod_uid = qos = None
        if self.pods and self.pods[0][2] == 0:
            pod_uid, qos, _ = self.pods[0]
            container = self.containers[0] if self.containers else None
        elif self.pods:
            pod_uid, qos, outside = self.pods[0]
            outer = self.containers[0]
            container = self.containers[outside] if len(self.containers) > outside else None
        elif self.containers:
            container = self.containers[0]
        enclosed = self.enclosed and not self.containers and not self.pods
        return Place(
            self.path,
            container,
            pod_uid,
            qos,
            outer,
            self.job,
            self.job_step,
            self.job_uid,
            self.unit,
            self.user_unit,
            self.login,
            enclosed,
        )


def _number(text: str) -> int | None:
    number = int(text)
    return number if number < 1 << 32 else None
