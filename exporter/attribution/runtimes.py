"""Attribution by container runtimes: the container's id from the cgroup path, its name, image and labels from the runtime's socket."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poolmeter.errors import Unavailable
from poolmeter.exporter.attribution import grpc_messages
from poolmeter.exporter.attribution.cgroup import Container
from poolmeter.exporter.attribution.devices import DeviceNames
from poolmeter.exporter.attribution.naming import TenantRule
from poolmeter.exporter.attribution.process import Facts
from poolmeter.exporter.attribution.sockets import Door, Use, connect, get_json
from poolmeter.exporter.attribution.source import ProcessKey, Quiet
from poolmeter.exporter.attribution.worker import Worker
from poolmeter.model.naming import printable
from poolmeter.model.snapshot import Claim, SourceHealth

AGAIN_S = 30.0  # until a container that the runtime did not know is asked for again
MAX_NAMESPACES = 32
_KUBERNETES = ("io.kubernetes.pod.namespace", "io.kubernetes.pod.name", "io.kubernetes.container.name")


@dataclass(frozen=True)
class RuntimeSettings:
    """One runtime. `rootless`: off, names (of users' own containers, but no tenant from their labels) or labels."""

    name: str
    use: Use
    socket: Path
    tenant_label: str
    namespace_rule: TenantRule
    rootless: str = "names"
    user_folder: Path = Path("/run/user")
    interval_s: float = 10.0
    timeout_s: float = 2.0


@dataclass(frozen=True)
class Described:
    """A container as its runtime describes it."""

    name: str | None = None
    image: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


Inspect = Callable[[Path, str, float, int | None], Described | None]  # socket, container id, seconds, the server's user


@dataclass(frozen=True)
class _Kind:
    runtimes: tuple[str | None, ...]  # of the cgroup path; None: a path that does not say
    rootless: str | None  # the socket's place in a user's run folder
    inspect: Inspect


def inspect_docker(socket: Path, container_id: str, timeout_s: float, peer_uid: int | None) -> Described | None:
    """A container by the Docker Engine API, which Podman has too; None for one it does not know. Raises Unavailable."""
    answer = get_json(socket, f"/containers/{container_id}/json", timeout_s, peer_uid)
    return None if answer is None else parse_docker(answer)


def parse_docker(answer: Any) -> Described:
    """What `GET /containers/ID/json` says; anything that is not as expected is left out."""
    config = answer.get("Config") if isinstance(answer, dict) else None
    config = config if isinstance(config, dict) else {}
    labels = config.get("Labels")
    name = answer.get("Name") if isinstance(answer, dict) else None
    image = config.get("Image") or (answer.get("ImageName") if isinstance(answer, dict) else None)
    return Described(
        name.removeprefix("/") if isinstance(name, str) else None,
        image if isinstance(image, str) else None,
        {key: value for key, value in labels.items() if isinstance(key, str) and isinstance(value, str)}
        if isinstance(labels, dict)
        else {},
    )


def inspect_containerd(socket: Path, container_id: str, timeout_s: float, peer_uid: int | None) -> Described | None:
    """A container of any of containerd's namespaces; None for one it does not know. Raises Unavailable."""
    import grpc

    channel = grpc_messages.channel(str(socket))
    try:
        package = "containerd.services.namespaces.v1"
        spaces = grpc_messages.call(channel, package, "Namespaces", "List", "ListNamespacesRequest", "ListNamespacesResponse", timeout_s)
        for space in [item.name for item in spaces.namespaces][:MAX_NAMESPACES]:
            try:
                answer = grpc_messages.call(
                    channel,
                    "containerd.services.containers.v1",
                    "Containers",
                    "Get",
                    "GetContainerRequest",
                    "GetContainerResponse",
                    timeout_s,
                    fields={"id": container_id},
                    metadata=(("containerd-namespace", space),),
                )
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    continue
                raise
            labels = {label.key: label.value for label in answer.container.labels}
            return Described(labels.get("nerdctl/name"), answer.container.image or None, labels)
    except grpc.RpcError as error:
        raise Unavailable(f"containerd at {socket} gives no answer: {grpc_messages.reason_of(error)}") from None
    finally:
        channel.close()
    return None


KINDS: dict[str, _Kind] = {
    "docker": _Kind(("docker", None), "docker.sock", inspect_docker),
    "podman": _Kind(("podman", None), "podman/podman.sock", inspect_docker),
    # Users' own containerd listens inside their own namespaces, where nobody else comes in.
    "containerd": _Kind(("containerd", None), None, inspect_containerd),
}


class Runtime(Quiet):
    """Containers of one runtime."""

    def __init__(self, settings: RuntimeSettings, inspect: Inspect | None = None) -> None:
        self.name = settings.name
        self._settings = settings
        self._kind = KINDS[settings.name]
        self._inspect = inspect or self._kind.inspect
        self._door = Door(settings.use, settings.socket)
        # Each container may take its time.
        self.worker: Worker[dict[Container, Described]] = Worker(settings.name, self._look, settings.interval_s, 10 * settings.timeout_s)
        # By the container with its owner: below his own manager a user may give a folder any id, and his own runtime answers for that.
        self._wanted: tuple[Container, ...] = ()
        self._answers: dict[Container, Described] = {}
        self._missing: dict[Container, float] = {}
        self._asked: dict[Container, int] = {}
        self._in_use = False
        self._trouble: str | None = None

    def version(self) -> object:
        return self.worker.result.runs

    def _look(self) -> dict[Container, Described]:
        """Ask for every container that is not known yet; one socket that fails keeps no other from being asked."""
        # A user's own runtime may be slow on purpose: it comes last, and what is known before that is used at once.
        wanted = sorted(self._wanted, key=lambda container: container.rootless_uid is not None)
        answers = self._answers = {key: value for key, value in self._answers.items() if key in wanted}
        troubles: dict[Path, str] = {}
        now = time.monotonic()
        self._missing = {key: at for key, at in self._missing.items() if key in wanted and now - at < AGAIN_S}
        in_use, trouble = self._door.look()
        if in_use and trouble is None and not wanted:
            try:
                connect(self._settings.socket, self._settings.timeout_s).close()
            except OSError as error:
                troubles[self._settings.socket] = f"socket {self._settings.socket} gives no answer: {error.strerror or error}"
        for container in wanted:
            if container in answers or container in self._missing:
                continue
            socket, peer = self._socket_of(container)
            if socket is None or socket in troubles or (peer is None and (not in_use or trouble is not None)):
                continue
            try:
                found = self._inspect(socket, container.id, self._settings.timeout_s, peer)
            except Unavailable as error:
                troubles[socket] = str(error)
                continue
            if found is None:
                self._missing[container] = now
            else:
                answers = self._answers = {**answers, container: found}
        # A user's own runtime that does not answer is that user's affair.
        if self._settings.socket in troubles:
            raise Unavailable(troubles[self._settings.socket])
        return answers

    def _socket_of(self, container: Container) -> tuple[Path | None, int | None]:
        uid = container.rootless_uid
        if uid is None:
            return self._settings.socket, None
        if self._settings.rootless == "off" or self._kind.rootless is None or self._settings.use is Use.OFF:
            return None, None
        return self._settings.user_folder / str(uid) / self._kind.rootless, uid

    def refresh(self, processes: Mapping[ProcessKey, Facts], devices: DeviceNames) -> None:
        if self._settings.use is Use.OFF:
            return
        wanted = dict.fromkeys(container for facts in processes.values() if (container := self._container(facts)) is not None)
        self._in_use, self._trouble = self._door.look()
        self._wanted = tuple(wanted)
        begun = self.worker.begun
        rootless = any(self._socket_of(container)[1] is not None for container in wanted)
        if (self._in_use or rootless) and (wanted.keys() - self._asked.keys() or (begun == 0 and self._in_use)):
            self.worker.wake()
        self._asked = {container: self._asked.get(container, begun) for container in wanted}

    def _container(self, facts: Facts) -> Container | None:
        place = facts.place
        container = (place.outer or place.container) if place else None
        return container if container is not None and container.runtime in self._kind.runtimes else None

    def claim(self, facts: Facts) -> Claim | None:
        container = self._container(facts)
        if container is None or facts.place is None or self._settings.use is Use.OFF:
            return None
        found = self._answers.get(container)
        if found is None:
            return Claim(source=self.name, container_id=container.id) if container.runtime is not None else None
        tenant = namespace = pod = name = None
        if container.rootless_uid is None or self._settings.rootless == "labels":
            tenant = found.labels.get(self._settings.tenant_label) or None
        if facts.place.pod_uid and not facts.place.nested:
            # The kubelet's labels, believed where the kubelet's own tree holds the process.
            namespace, pod, name = (found.labels.get(label) or None for label in _KUBERNETES)
            if tenant is None:
                tenant, _ = self._settings.namespace_rule.tenant(namespace, namespace=namespace, pod=pod, container=name)
        name = name or found.name
        return Claim(
            source=self.name,
            tenant=printable(tenant) if tenant else None,
            namespace=printable(namespace) if namespace else None,
            pod=printable(pod) if pod else None,
            container=printable(name) if name else None,
            container_id=container.id,
            image=printable(found.image) if found.image else None,
        )

    def pending(self, facts: Facts) -> bool:
        container = self._container(facts)
        if container is None or container in self._answers or container not in self._asked:
            return False
        if not self._in_use and self._socket_of(container)[1] is None:
            return False
        return self.worker.result.runs <= self._asked[container]

    def health(self) -> SourceHealth | None:
        if not self._in_use:
            return None
        result = self.worker.result
        trouble = self._trouble or result.trouble
        return SourceHealth(source=self.name, ok=trouble is None, at_us=result.at_us, duration_us=result.duration_us, reason=trouble)

    def close(self) -> None:
        self.worker.close()
