"""Docker, Podman and containerd by their sockets: names and labels, and every way in which a socket can fail."""

import dataclasses
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attribution_fakes import CID, CID2, POD_UID, FakeContainerd, FakeDocker, FakeProc, short_folder, until
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.errors import Unavailable
from poolmeter.exporter.attribution.devices import DeviceNames
from poolmeter.exporter.attribution.naming import TenantRule
from poolmeter.exporter.attribution.process import Facts, Processes
from poolmeter.exporter.attribution.runtimes import Described, Runtime, RuntimeSettings, parse_docker
from poolmeter.exporter.attribution.sockets import Use, connect, get_json
from poolmeter.exporter.attribution.source import ProcessKey
from poolmeter.model.snapshot import Claim

UID = os.getuid()


class Host:
    """A host with a /proc and a folder for sockets."""

    def __init__(self, root: Path, sockets: Path) -> None:
        self.sockets = sockets
        self.proc = FakeProc(root / "proc")
        self.processes = Processes(self.proc.root)
        self.sources: list[Runtime] = []
        self.now_us = 0

    def settings(self, name: str) -> RuntimeSettings:
        return RuntimeSettings(
            name,
            Use.AUTO,
            self.sockets / f"{name}.sock",
            "poolmeter.tenant",
            TenantRule((), "{namespace}"),
            user_folder=self.sockets / "user",
            interval_s=0.05,
            timeout_s=0.5,
        )

    def source(self, name: str = "docker", **values: Any) -> Runtime:
        self.sources.append(Runtime(dataclasses.replace(self.settings(name), **values)))
        return self.sources[-1]

    def facts(self, *keys: ProcessKey) -> dict[ProcessKey, Facts]:
        self.now_us += 1_000_000
        return self.processes.refresh([(key, frozenset()) for key in keys], self.now_us)

    def claim(self, source: Runtime, key: ProcessKey) -> Claim | None:
        facts = self.facts(key)
        source.refresh(facts, DeviceNames())
        until(lambda: not source.pending(facts[key]))
        return source.claim(facts[key])


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with short_folder() as sockets:
        made = Host(tmp_path, sockets)
        yield made
        for source in made.sources:
            source.close()


@pytest.mark.parametrize(
    ("name", "path"), [("docker", f"/system.slice/docker-{CID}.scope"), ("podman", f"/machine.slice/libpod-{CID}.scope/container")]
)
def test_name_image_and_tenant(host: Host, name: str, path: str) -> None:
    server = FakeDocker(host.sockets / f"{name}.sock")
    server.add(CID, "trainer", "team/train:1", poolmeter__tenant="vision")
    source = host.source(name)
    claim = host.claim(source, host.proc.add(7, cgroup=path))
    assert claim == Claim(source=name, tenant="vision", container="trainer", container_id=CID, image="team/train:1")
    host.claim(source, host.proc.add(8, cgroup=path))
    assert server.asked == [f"/containers/{CID}/json"]  # once a container
    health = source.health()
    assert health is not None and health.ok
    server.stop()


def test_containerd_by_namespace(host: Host) -> None:
    kubernetes = {"io.kubernetes.pod.namespace": "ml", "io.kubernetes.pod.name": "train-0", "io.kubernetes.container.name": "main"}
    server = FakeContainerd(
        host.sockets / "containerd.sock",
        {
            ("default", CID2): {"image": "cuda:13", "labels": {"nerdctl/name": "box", "poolmeter.tenant": "vision"}},
            ("k8s.io", CID): {"image": "train:2", "labels": kubernetes},
        },
    )
    source = host.source("containerd")
    claim = host.claim(source, host.proc.add(7, cgroup=f"/kubepods/pod{POD_UID}/{CID}"))
    assert claim is not None and (claim.namespace, claim.pod, claim.container, claim.image) == ("ml", "train-0", "main", "train:2")
    assert claim.tenant == "ml" and ("default", CID) in server.asked and ("k8s.io", CID) in server.asked
    claim = host.claim(source, host.proc.add(8, cgroup=f"/default/{CID2}"))
    assert claim is not None and (claim.container, claim.tenant, claim.pod) == ("box", "vision", None)
    # A container that says it is a pod, and is not in the kubelet's part of the tree.
    server.containers = {("default", "c" * 64): {"image": "x", "labels": kubernetes}}
    claim = host.claim(source, host.proc.add(9, cgroup=f"/default/{'c' * 64}"))
    assert claim is not None and claim.pod is None and claim.namespace is None and claim.tenant is None
    server.stop()


def test_a_container_that_the_runtime_does_not_know(host: Host) -> None:
    server = FakeDocker(host.sockets / "docker.sock")
    source = host.source()
    claim = host.claim(source, host.proc.add(7, cgroup=f"/docker/{CID}"))
    assert claim == Claim(source="docker", container_id=CID)
    health = source.health()
    assert health is not None and health.ok  # it answered
    server.stop()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 500 Oops\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nno json !",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 50_000,
        b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500 + b"\r\n{}",
    ],
)
def test_answers_that_are_none(host: Host, raw: bytes) -> None:
    server = FakeDocker(host.sockets / "docker.sock")
    server.raw = raw
    source = host.source()
    claim = host.claim(source, host.proc.add(7, cgroup=f"/docker/{CID}"))
    assert claim == Claim(source="docker", container_id=CID)
    health = source.health()
    assert health is not None and not health.ok and "docker.sock" in (health.reason or "")
    # It comes right by itself.
    server.raw = None
    server.add(CID, "box")
    facts = host.facts(ProcessKey(7, 100))

    def named() -> bool:
        claim = source.claim(facts[ProcessKey(7, 100)])
        return claim is not None and claim.container == "box"

    until(named)
    server.stop()


def test_a_socket_that_drips_is_given_up(host: Host) -> None:
    server = FakeDocker(host.sockets / "docker.sock")
    for raw in (b"HTTP/1.1 200 OK\r\n\r\n{", b"HTTP/1.1 200 OK\r\nX-Slow: "):  # in its body, in its head
        server.raw, server.silence_s = raw, 20.0
        with pytest.raises(Unavailable, match="did not finish its answer"):
            get_json(server.path, "/containers/x/json", 0.2)
    server.stop()


def test_an_answer_without_end_is_cut(host: Host) -> None:
    server = FakeDocker(host.sockets / "docker.sock")
    server.raw = b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (5 << 20)
    with pytest.raises(Unavailable, match="more than"):
        get_json(server.path, "/containers/x/json", 5.0)
    server.stop()


def test_down_configured_absent_and_off(host: Host) -> None:
    key = host.proc.add(7, cgroup=f"/docker/{CID}")
    auto = host.source()
    assert host.claim(auto, key) == Claim(source="docker", container_id=CID) and auto.health() is None
    on = host.source(use=Use.ON)
    on.refresh(host.facts(key), DeviceNames())
    health = on.health()
    assert health is not None and not health.ok and "not there" in (health.reason or "")
    off = host.source(use=Use.OFF)
    assert host.claim(off, key) is None and off.health() is None
    server = FakeDocker(host.sockets / "docker.sock")
    server.add(CID, "box")
    claim = host.claim(auto, key)
    until(lambda: (claim := auto.claim(host.facts(key)[key])) is not None and claim.container == "box")
    server.stop()
    auto.refresh(host.facts(key), DeviceNames())
    health = auto.health()
    assert health is not None and not health.ok  # it was there
    claim = auto.claim(host.facts(key)[key])
    assert claim is not None and claim.container == "box"  # what a container is called does not change
    (host.sockets / "docker.sock").write_text("a file")
    auto.refresh(host.facts(key), DeviceNames())
    health = auto.health()
    assert health is not None and "no socket" in (health.reason or "")


def test_a_socket_that_nobody_listens_on_is_noticed_without_containers(host: Host) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(host.sockets / "docker.sock"))
    source = host.source()
    source.refresh({}, DeviceNames())
    until(lambda: source.worker.result.runs > 0)
    health = source.health()
    assert health is not None and not health.ok and "gives no answer" in (health.reason or "")


def test_a_users_own_container(host: Host) -> None:
    path = f"/user.slice/user-{UID}.slice/user@{UID}.service/user.slice/libpod-{CID}.scope"
    server = FakeDocker(host.sockets / "user" / str(UID) / "podman" / "podman.sock")
    server.add(CID, "mine", poolmeter__tenant="somebody-else")
    key = host.proc.add(7, cgroup=path, uid=UID)
    claim = host.claim(host.source("podman"), key)
    assert claim is not None and claim.container == "mine" and claim.tenant is None  # his own labels are his own word
    claim = host.claim(host.source("podman", rootless="labels"), key)
    assert claim is not None and claim.tenant == "somebody-else"
    claim = host.claim(host.source("podman", rootless="off"), key)
    assert claim is not None and claim.container is None and claim.container_id == CID
    server.stop()


@pytest.mark.parametrize("first", ["real", "feigned", "both"])
@pytest.mark.parametrize("rootless", ["off", "names", "labels"])
def test_a_users_folder_named_like_anothers_container_says_nothing_of_that(host: Host, first: str, rootless: str) -> None:
    root, own = FakeDocker(host.sockets / "docker.sock"), FakeDocker(host.sockets / "user" / str(UID) / "docker.sock")
    root.add(CID, "real", poolmeter__tenant="vision")
    own.add(CID, "feigned", poolmeter__tenant="somebody-else")
    source = host.source(rootless=rootless)
    keys = {
        "real": host.proc.add(7, cgroup=f"/system.slice/docker-{CID}.scope"),
        "feigned": host.proc.add(8, cgroup=f"/user.slice/user-{UID}.slice/user@{UID}.service/x/docker-{CID}.scope", uid=UID),
    }
    if first != "both":
        host.claim(source, keys[first])
    facts = host.facts(*keys.values())
    source.refresh(facts, DeviceNames())
    until(lambda: not any(source.pending(item) for item in facts.values()))
    real, feigned = (source.claim(facts[keys[name]]) for name in ("real", "feigned"))
    assert real == Claim(source="docker", tenant="vision", container="real", container_id=CID, image="cuda:13")
    assert feigned is not None and feigned.container == (None if rootless == "off" else "feigned")
    assert feigned.tenant == ("somebody-else" if rootless == "labels" else None)
    root.stop()
    own.stop()


def test_what_is_asked_during_a_look_waits_for_the_next(host: Host) -> None:
    asked: list[str] = []
    go = threading.Semaphore(0)

    def inspect(socket: Path, container_id: str, timeout_s: float, peer_uid: int | None) -> Described:
        asked.append(container_id)
        assert go.acquire(timeout=10)
        return Described(container_id[:1])

    server = FakeDocker(host.sockets / "docker.sock")
    source = Runtime(host.settings("docker"), inspect)
    host.sources.append(source)
    first, second = host.proc.add(7, cgroup=f"/docker/{CID}"), host.proc.add(8, cgroup=f"/docker/{CID2}")
    source.refresh(host.facts(first), DeviceNames())
    until(lambda: asked == [CID])
    facts = host.facts(first, second)
    source.refresh(facts, DeviceNames())
    go.release()
    until(lambda: asked == [CID, CID2])
    assert source.worker.result.runs == 1 and source.pending(facts[second]) and not source.pending(facts[first])
    go.release()
    until(lambda: not source.pending(facts[second]))
    claim = source.claim(facts[second])
    assert claim is not None and claim.container == "b"
    server.stop()


def test_a_users_socket_must_be_served_by_that_user(host: Host) -> None:
    stranger = UID + 1
    server = FakeDocker(host.sockets / "user" / str(stranger) / "podman" / "podman.sock")
    server.add(CID, "mine")
    key = host.proc.add(7, cgroup=f"/user.slice/user-{stranger}.slice/user@{stranger}.service/user.slice/libpod-{CID}.scope")
    claim = host.claim(host.source("podman"), key)
    assert claim is not None and claim.container is None and server.asked == []
    with pytest.raises(Unavailable, match=f"is served by user {UID}, expected user {stranger}"):
        connect(server.path, 1.0, stranger)
    server.stop()


def test_one_silent_socket_holds_up_no_other_source(host: Host) -> None:
    server = FakeDocker(host.sockets / "docker.sock")
    server.raw, server.silence_s = b"HTTP/1.1 200 OK\r\n\r\n{", 3.0
    source = host.source(timeout_s=2.0)
    key = host.proc.add(7, cgroup=f"/docker/{CID}")
    facts = host.facts(key)
    source.refresh(facts, DeviceNames())
    until(lambda: server.asked)
    # The worker waits; ticks go on.
    for _ in range(100):
        source.refresh(facts, DeviceNames())
        assert source.claim(facts[key]) == Claim(source="docker", container_id=CID)
    assert source.worker.result.runs == 0 and source.pending(facts[key])
    server.stop()


def test_hostile_names_come_out_harmless(host: Host) -> None:
    server = FakeDocker(host.sockets / "docker.sock")
    server.add(CID, "x\x1b[2J\n\u202egnp", "i" * 10_000, poolmeter__tenant="a\nb\x00")
    claim = host.claim(host.source(), host.proc.add(7, cgroup=f"/docker/{CID}"))
    assert claim is not None and claim.container == "x\\x1b[2J\\x0a\\u202egnp" and claim.tenant == "a\\x0ab\\x00"
    assert claim.image is not None and len(claim.image) == 128 and "…" in claim.image
    server.stop()


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda s: st.lists(s, max_size=3) | st.dictionaries(st.sampled_from(["Name", "Config", "Labels", "Image", "ImageName", "x"]), s, max_size=4), max_leaves=12)  # fmt: skip


@given(JSON)
def test_any_json_is_a_description(answer: Any) -> None:
    found = parse_docker(answer)
    assert all(value is None or isinstance(value, str) for value in (found.name, found.image))
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in found.labels.items())
