"""Kubernetes on this node: which container was given which device (kubelet's pod-resources socket), and what its ids are called (log folders).

The pod-resources service says namespace, pod, container and devices, but neither the pod's uid nor the container's id, which are what
a cgroup path has. Both are in the names under /var/log/pods and /var/log/containers that the kubelet keeps for every runtime; a
listing of those folders is all that is read there.
"""

import fnmatch
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from poolmeter.errors import Unavailable
from poolmeter.exporter.attribution import grpc_messages

_LINK = re.compile(r"^([a-z0-9.-]{1,253})_([a-z0-9-]{1,63})_([a-z0-9-]{1,63})-([0-9a-f]{64})\.log$")
_FOLDER = re.compile(r"^([a-z0-9-]{1,63})_([a-z0-9.-]{1,253})_([0-9a-f-]{32,36})$")
MAX_NAMES = 20_000


@dataclass(frozen=True)
class Named:
    """A container, or a pod (`container` None), by name."""

    namespace: str
    pod: str
    container: str | None = None


@dataclass(frozen=True)
class Given:
    """The names of the devices that a container was given, by a device plug-in or by resource claims."""

    named: Named
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Names:
    """Names by container id and by pod uid; `trouble`: a folder that could not be listed."""

    containers: dict[str, Named] = field(default_factory=dict)
    pods: dict[str, Named] = field(default_factory=dict)
    trouble: str | None = None


def parse_link(name: str) -> tuple[str, Named] | None:
    """(container id, name) of a link in /var/log/containers: POD_NAMESPACE_CONTAINER-ID.log."""
    match = _LINK.fullmatch(name)
    return (match[4], Named(match[2], match[1], match[3])) if match else None


def parse_folder(name: str) -> tuple[str, Named] | None:
    """(pod uid, name) of a folder in /var/log/pods: NAMESPACE_POD_UID."""
    match = _FOLDER.fullmatch(name)
    return (match[3], Named(match[1], match[2])) if match else None


def read_names(logs: Path) -> Names:
    """What the log folders say."""
    found = Names()
    trouble = None
    for folder, parse, into in (("containers", parse_link, found.containers), ("pods", parse_folder, found.pods)):
        try:
            with os.scandir(logs / folder) as entries:
                for number, entry in enumerate(entries):
                    if number >= MAX_NAMES:
                        trouble = f"folder {logs / folder} has more than {MAX_NAMES} names"
                        break
                    if pair := parse(entry.name):
                        into[pair[0]] = pair[1]
        except OSError as error:
            trouble = f"folder {logs / folder} cannot be listed: {error.strerror}"
    return Names(found.containers, found.pods, trouble)


def list_given(socket: Path, resources: Sequence[str], timeout_s: float) -> tuple[Given, ...]:
    """Every container that was given a device of these resources or drivers (globs). Raises Unavailable."""
    import grpc

    channel = grpc_messages.channel(str(socket))
    try:
        answer = grpc_messages.call(
            channel, "v1", "PodResourcesLister", "List", "ListPodResourcesRequest", "ListPodResourcesResponse", timeout_s
        )
    except grpc.RpcError as error:
        raise Unavailable(f"kubelet at {socket} gives no pod resources: {grpc_messages.reason_of(error)}") from None
    finally:
        channel.close()
    found = []
    for pod in answer.pod_resources:
        for container in pod.containers:
            devices = dict.fromkeys(
                name for group in container.devices if _wanted(group.resource_name, resources) for name in group.device_ids
            )
            for dynamic in container.dynamic_resources:
                for claim in dynamic.claim_resources:
                    kinds = [device.name.partition("=")[0] for device in claim.cdi_devices]
                    if claim.driver_name and not _wanted(claim.driver_name, resources):
                        continue
                    if not claim.driver_name and not any(_wanted(kind, resources) for kind in kinds):
                        continue
                    # A DRA driver's CDI names are its own, made for one claim; the device's name in its pool is the card's.
                    names = [claim.device_name] if claim.device_name else [device.name for device in claim.cdi_devices]
                    devices.update(dict.fromkeys(names))
            if devices:
                found.append(Given(Named(pod.namespace, pod.name, container.name), tuple(devices)))
    return tuple(found)


def _wanted(resource: str, resources: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(resource, pattern) for pattern in resources)
