"""Attribution by Kubernetes: cgroup path to pod and container, pod to namespace, namespace to tenant."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from poolmeter.exporter.attribution.devices import DeviceNames
from poolmeter.exporter.attribution.kubelet import Given, Named, Names, list_given, read_names
from poolmeter.exporter.attribution.naming import TenantRule
from poolmeter.exporter.attribution.process import Facts
from poolmeter.exporter.attribution.sockets import Door, Use
from poolmeter.exporter.attribution.source import ProcessKey
from poolmeter.exporter.attribution.worker import Worker
from poolmeter.model.naming import printable
from poolmeter.model.snapshot import AttributionFault, Claim, SourceHealth


@dataclass(frozen=True)
class KubernetesSettings:
    """Where to look and how to name tenants."""

    use: Use
    socket: Path
    logs: Path
    resources: Sequence[str]
    rule: TenantRule
    interval_s: float = 10.0
    timeout_s: float = 2.0


class Kubernetes:
    """Pods and containers of this node."""

    name = "kubernetes"

    def __init__(self, settings: KubernetesSettings) -> None:
        self._settings = settings
        self._door = Door(settings.use, settings.socket)
        self._names = Names()
        self.worker: Worker[tuple[Given, ...]] = Worker("kubelet", self._look, settings.interval_s, 3 * settings.timeout_s)
        self._devices = DeviceNames()
        self._resolved: dict[str, Named] = {}  # by container id, or pod uid: neither is ever given to another
        self._asked: dict[str, int] = {}
        self._runs = 0  # looks that `_given` comes from
        self._given: dict[Named, tuple[str, ...]] = {}
        self._given_from: tuple[object, ...] = ()
        self._unclear: set[Named] = set()  # containers with a device whose name means none here
        self._unknown = 0
        self._in_use = False
        self._trouble: str | None = None

    def version(self) -> object:
        return self.worker.result.runs, self._in_use, self._trouble is None, self._given_from

    def _look(self) -> tuple[Given, ...]:
        self._names = read_names(self._settings.logs)
        in_use, trouble = self._door.look()
        if not in_use or trouble is not None:
            return ()  # said by `refresh`, which looks itself
        return list_given(self._settings.socket, self._settings.resources, self._settings.timeout_s)

    def refresh(self, processes: Mapping[ProcessKey, Facts], devices: DeviceNames) -> None:
        self._devices = devices
        if self._settings.use is Use.OFF:
            return
        in_use, self._trouble = self._door.look()
        ids = {_identity(facts) for facts in processes.values()} - {None}
        self._in_use = in_use or bool(ids and os.path.isdir(self._settings.logs / "pods"))
        if not self._in_use:
            return
        result = self.worker.result
        self._runs, names = result.runs, self._names
        self._take(result.value or () if result.trouble is None and self._trouble is None else ())
        for facts in processes.values():
            self._resolve(facts, names)
        present = {key for facts in processes.values() for key in _keys(facts)}
        self._resolved = {key: named for key, named in self._resolved.items() if key in present}
        begun = self.worker.begun
        if present - self._asked.keys() or begun == 0:
            self.worker.wake()
        self._asked = {key: self._asked.get(key, begun) for key in present}

    def _take(self, given: tuple[Given, ...]) -> None:
        # The same answer and the same devices give the same map; most ticks have both.
        if self._given_from and self._given_from[0] is given and self._given_from[1] == self._devices:
            return
        self._given_from = (given, self._devices)
        self._given, self._unclear, self._unknown = {}, set(), 0
        for item in given:
            told = item.named
            shown = Named(printable(told.namespace), printable(told.pod), printable(told.container) if told.container else None)
            uuids: dict[str, None] = {}
            for name in item.devices:
                found = self._devices.resolve(name)
                if not found:
                    self._unknown += 1
                    self._unclear.add(shown)
                uuids.update(dict.fromkeys(found or (printable(name),)))
            self._given[shown] = tuple(uuids)

    def _resolve(self, facts: Facts, names: Names) -> None:
        place = facts.place
        if place is None:
            return
        if place.container and place.container.id not in self._resolved and (named := names.containers.get(place.container.id)):
            self._resolved[place.container.id] = named
        if place.pod_uid and place.pod_uid not in self._resolved and (named := names.pods.get(place.pod_uid)):
            self._resolved[place.pod_uid] = named

    def claim(self, facts: Facts) -> Claim | None:
        place = facts.place
        if place is None or place.pod_uid is None or not self._in_use:
            return None
        container_id = place.container.id if place.container else None
        named = self._resolved.get(container_id or "") or self._resolved.get(place.pod_uid)
        if place.nested and named is None:
            return None  # a pod inside a container is that container's own tale, until this node's kubelet knows it too
        namespace, pod, container = (named.namespace, named.pod, named.container) if named else (None, None, None)
        if named is None:
            # Without names: whom the kubelet gave the devices that the process is on.
            holders = [key for key, uuids in self._given.items() if facts.devices & set(uuids)]
            if len({key.namespace for key in holders}) == 1:
                namespace = holders[0].namespace
                if len({key.pod for key in holders}) == 1:
                    pod = holders[0].pod
                    container = holders[0].container if len(holders) == 1 else None
        tenant, _ = self._tenant(namespace, pod, container)
        # A look that began before the pod or container was seen may be older than what it was given.
        looked = all(self._asked.get(key, self._runs) < self._runs for key in _keys(facts))
        return Claim(
            source=self.name,
            tenant=tenant,
            namespace=namespace,
            pod=pod,
            pod_uid=place.pod_uid,
            container=container,
            container_id=container_id,
            device_uuids=self._devices_of(namespace, pod, container) if looked else None,
        )

    def _tenant(self, namespace: str | None, pod: str | None, container: str | None) -> tuple[str | None, bool]:
        return self._settings.rule.tenant(namespace, namespace=namespace, pod=pod, container=container)

    def _devices_of(self, namespace: str | None, pod: str | None, container: str | None) -> tuple[str, ...] | None:
        if not self._given or pod is None:
            return None
        found: dict[str, None] = {}
        for named, uuids in self._given.items():
            if (named.namespace, named.pod) == (namespace, pod) and container in (None, named.container):
                if named in self._unclear:
                    return None
                found.update(dict.fromkeys(uuids))
        return tuple(found)

    def pending(self, facts: Facts) -> bool:
        if not self._in_use or _identity(facts) is None or any(key in self._resolved for key in _keys(facts)[:1]):
            return False
        return any(self.worker.result.runs <= self._asked.get(key, 0) for key in _keys(facts))

    def assigned(self) -> tuple[Claim, ...]:
        out = []
        for named, uuids in self._given.items():
            tenant, _ = self._tenant(named.namespace, named.pod, named.container)
            out.append(
                Claim(
                    source=self.name,
                    tenant=tenant,
                    namespace=named.namespace,
                    pod=named.pod,
                    container=named.container,
                    device_uuids=uuids,
                )
            )
        return tuple(out)

    def health(self) -> SourceHealth | None:
        if not self._in_use:
            return None
        result = self.worker.result
        trouble = self._trouble or result.trouble
        if trouble is None and self._resolved == {} and self._asked and result.runs:
            trouble = self._names.trouble  # pods are there, and what they are called may not be read
        return SourceHealth(source=self.name, ok=trouble is None, at_us=result.at_us, duration_us=result.duration_us, reason=trouble)

    def faults(self) -> tuple[AttributionFault, ...]:
        return (AttributionFault(source=self.name, kind="unknown-device", count=self._unknown),) if self._in_use else ()

    def close(self) -> None:
        self.worker.close()


def _identity(facts: Facts) -> str | None:
    return facts.place.pod_uid if facts.place else None


def _keys(facts: Facts) -> tuple[str, ...]:
    """Container id, if there is one, and pod uid."""
    place = facts.place
    if place is None or place.pod_uid is None:
        return ()
    return (place.container.id, place.pod_uid) if place.container else (place.pod_uid,)
