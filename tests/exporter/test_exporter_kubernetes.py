"""Kubernetes: a kubelet that speaks gRPC, its log folders, device names of every plug-in, and what happens when it is down."""

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from attribution_fakes import CID, CID2, OTHER_UID, POD_UID, FakeDocker, FakeKubelet, FakeProc, log_names, pod, short_folder, until
from exporter_fakes import CARD, OTHER, device
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.errors import Unavailable
from poolmeter.exporter.attribution.devices import DeviceNames, names_of
from poolmeter.exporter.attribution.kubelet import Given, Named, list_given, parse_folder, parse_link
from poolmeter.exporter.attribution.kubernetes import Kubernetes, KubernetesSettings
from poolmeter.exporter.attribution.naming import TenantRule
from poolmeter.exporter.attribution.process import Facts, Processes
from poolmeter.exporter.attribution.sockets import Use
from poolmeter.exporter.attribution.source import ProcessKey
from poolmeter.exporter.attribution.who import disagreements
from poolmeter.model.hardware import Hardware, MigInstance
from poolmeter.model.snapshot import Claim

MIG = "MIG-11111111-0000-0000-0000-000000000001"
NAMES = names_of([device(CARD, 0), device(OTHER, 1)])
UNDER = POD_UID.replace("-", "_")
PATH = f"/kubepods.slice/kubepods-pod{UNDER}.slice/cri-containerd-{CID}.scope"


class Cluster:
    """A node of a cluster: a kubelet, log folders and a /proc."""

    def __init__(self, root: Path, sockets: Path) -> None:
        self.kubelet = FakeKubelet(sockets / "kubelet.sock")
        self.logs = root / "log"
        self.logs.mkdir()
        self.proc = FakeProc(root / "proc")
        self.settings = KubernetesSettings(
            Use.AUTO,
            self.kubelet.path,
            self.logs,
            ("nvidia.com/*", "gpu.nvidia.com"),
            TenantRule((("team-a-*", "team-a"),), "{namespace}"),
            interval_s=0.05,
            timeout_s=1.0,
        )
        self.processes = Processes(self.proc.root)
        self.source = Kubernetes(self.settings)
        self.now_us = 0

    def change(self, **values: object) -> None:
        """Another source with other settings."""
        self.source.close()
        self.source = Kubernetes(dataclasses.replace(self.settings, **values))  # type: ignore[arg-type]

    def refresh(self, *seen: tuple[ProcessKey, str]) -> dict[ProcessKey, Facts]:
        """A tick with these processes on these devices."""
        self.now_us += 1_000_000
        facts = self.processes.refresh([(key, frozenset([uuid])) for key, uuid in seen], self.now_us)
        self.source.refresh(facts, NAMES)
        return facts

    def claim(self, key: ProcessKey, uuid: str = CARD) -> Claim | None:
        """What is said of a process once the source has said all it will."""
        facts = self.refresh((key, uuid))[key]
        until(lambda: not self.source.pending(facts))
        self.refresh((key, uuid))
        return self.source.claim(facts)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with short_folder() as sockets:
        made = Cluster(tmp_path, sockets)
        yield made
        made.source.close()
        made.kubelet.stop()


def test_from_a_cgroup_to_a_tenant(cluster: Cluster) -> None:
    cluster.kubelet.pods = [pod("team-a-prod", "train-0", "main", CARD), pod("other", "web", "main", OTHER)]
    cluster.kubelet.start()
    log_names(cluster.logs, "team-a-prod", "train-0", POD_UID, {"main": CID})
    key = cluster.proc.add(10, cgroup=PATH)
    claim = cluster.claim(key)
    assert claim == Claim(
        source="kubernetes",
        tenant="team-a",
        namespace="team-a-prod",
        pod="train-0",
        pod_uid=POD_UID,
        container="main",
        container_id=CID,
        device_uuids=(CARD,),
    )
    health = cluster.source.health()
    assert health is not None and health.ok and health.at_us is not None
    assert {(item.pod, item.device_uuids) for item in cluster.source.assigned()} == {("train-0", (CARD,)), ("web", (OTHER,))}
    # The form, where no pattern fits.
    assert {item.tenant for item in cluster.source.assigned()} == {"team-a", "other"}


def test_without_log_folders_the_device_tells(cluster: Cluster) -> None:
    cluster.kubelet.pods = [pod("ml", "one", "main", CARD)]
    cluster.kubelet.start()
    key = cluster.proc.add(10, cgroup=PATH)
    claim = cluster.claim(key)
    assert claim is not None and (claim.tenant, claim.pod, claim.container) == ("ml", "one", "main")
    # Two pods on replicas of one card: it is known which tenant, and not which pod.
    cluster.kubelet.pods = [pod("ml", "one", "main", f"{CARD}::0"), pod("ml", "two", "main", f"{CARD}::1")]
    until(lambda: len(cluster.source.worker.result.value or ()) == 2)
    claim = cluster.claim(key)
    assert claim is not None and (claim.tenant, claim.namespace, claim.pod, claim.device_uuids) == ("ml", "ml", None, None)
    cluster.kubelet.pods = [pod("ml", "one", "main", f"{CARD}::0"), pod("web", "two", "main", f"{CARD}::1")]
    until(lambda: {item.named.namespace for item in cluster.source.worker.result.value or ()} == {"ml", "web"})
    claim = cluster.claim(key)
    assert claim is not None and claim.tenant is None and claim.pod_uid == POD_UID
    health = cluster.source.health()
    assert health is not None and not health.ok and "pods cannot be listed" in (health.reason or "")


def test_log_folders_alone_are_enough_for_a_name(cluster: Cluster) -> None:
    log_names(cluster.logs, "ml", "train", POD_UID, {"main": CID2})
    claim = cluster.claim(cluster.proc.add(10, cgroup=PATH))
    assert claim is not None and (claim.namespace, claim.pod, claim.container) == ("ml", "train", None)  # by uid: another container's id
    assert claim.device_uuids is None  # no kubelet was asked, so nobody knows


def test_what_is_asked_during_a_look_waits_for_the_next(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, go = [0], threading.Semaphore(0)

    def slow(*_: object) -> tuple[object, ...]:
        looks[0] += 1
        assert go.acquire(timeout=10)
        return ()

    monkeypatch.setattr("poolmeter.exporter.attribution.kubernetes.list_given", slow)
    cluster.kubelet.start()
    first, second = cluster.proc.add(10, cgroup=PATH), cluster.proc.add(11, cgroup=PATH.replace(POD_UID, OTHER_UID).replace(CID, CID2))
    cluster.refresh((first, CARD))
    until(lambda: looks[0] == 1)
    log_names(cluster.logs, "ml", "late", OTHER_UID, {"main": CID2})  # this look has read the names already
    facts = cluster.refresh((first, CARD), (second, CARD))
    go.release()
    until(lambda: looks[0] == 2)
    assert cluster.source.worker.result.runs == 1 and cluster.source.pending(facts[second]) and not cluster.source.pending(facts[first])
    go.release(9)
    until(lambda: not cluster.source.pending(facts[second]))
    cluster.refresh((first, CARD), (second, CARD))
    claim = cluster.source.claim(facts[second])
    assert claim is not None and claim.pod == "late"


def test_devices_of_a_pod_are_told_by_a_look_that_began_after_it_was_seen(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[Given]] = [[Given(Named("ml", "early", "main"), (CARD,))]]
    go = threading.Semaphore(0)

    def slow(*_: object) -> tuple[Given, ...]:
        found = tuple(given[0])
        assert go.acquire(timeout=10)
        return found

    monkeypatch.setattr("poolmeter.exporter.attribution.kubernetes.list_given", slow)
    cluster.kubelet.start()
    log_names(cluster.logs, "ml", "early", POD_UID, {"main": CID})
    log_names(cluster.logs, "ml", "late", OTHER_UID, {"main": CID2})
    first, second = cluster.proc.add(10, cgroup=PATH), cluster.proc.add(11, cgroup=f"/kubepods/pod{OTHER_UID}/{CID2}")
    cluster.refresh((first, CARD))
    until(lambda: cluster.source.worker.begun == 1 and cluster.source._names.containers)
    given[0] = [*given[0], Given(Named("ml", "late", "main"), (OTHER,))]  # too late for this look
    cluster.refresh((first, CARD), (second, OTHER))
    go.release()
    until(lambda: cluster.source.worker.result.runs == 1)
    facts = cluster.refresh((first, CARD), (second, OTHER))
    claims = [cluster.source.claim(facts[key]) for key in (first, second)]
    assert [claim and (claim.pod, claim.device_uuids) for claim in claims] == [("early", (CARD,)), ("late", None)]
    version = cluster.source.version()
    go.release(99)
    until(lambda: cluster.source.worker.result.runs >= 2)
    facts = cluster.refresh((first, CARD), (second, OTHER))
    claim = cluster.source.claim(facts[second])
    assert claim is not None and claim.device_uuids == (OTHER,) and cluster.source.version() != version


@pytest.mark.parametrize(
    ("name", "uuids"),
    [
        ("nvidia0", (CARD,)),
        ("nvidia1/gi1", (OTHER,)),
        ("nvidia0/vgpu3", (CARD,)),
        ("nvidia0/gi2/vgpu0", (CARD,)),
        ("nvidia9", None),
        ("some-card", None),
    ],
)
def test_devices_are_compared_where_their_names_mean_one(cluster: Cluster, name: str, uuids: tuple[str, ...] | None) -> None:
    cluster.kubelet.pods = [pod("ml", "train", "main", name)]
    cluster.kubelet.start()
    log_names(cluster.logs, "ml", "train", POD_UID, {"main": CID})
    claim = cluster.claim(cluster.proc.add(10, cgroup=PATH))
    assert claim is not None and claim.pod == "train" and claim.device_uuids == uuids
    for uuid in (CARD, OTHER):
        assert [item.field for item in disagreements([claim], frozenset([uuid]))] == (["device"] if uuids not in (None, (uuid,)) else [])


def test_names_of_device_files_go_by_minor_number() -> None:
    swapped = names_of([dataclasses.replace(device(CARD, 0), minor=1), dataclasses.replace(device(OTHER, 1), minor=0)])
    assert swapped.resolve("nvidia0") == (OTHER,) and swapped.resolve("nvidia1/gi0") == (CARD,)
    unknown = names_of([dataclasses.replace(device(CARD, 0), minor=None)])
    assert unknown.resolve("nvidia0") == ()


def test_a_node_without_kubernetes_has_no_such_source(cluster: Cluster) -> None:
    key = cluster.proc.add(10, cgroup="/system.slice/x.service")
    assert cluster.claim(key) is None and cluster.source.health() is None and cluster.source.worker.result.runs == 0
    cluster.change(use=Use.OFF)
    assert cluster.claim(cluster.proc.add(11, cgroup=PATH)) is None and cluster.source.health() is None


def test_configured_and_not_there(cluster: Cluster) -> None:
    cluster.change(use=Use.ON)
    cluster.refresh()
    health = cluster.source.health()
    assert health is not None and not health.ok
    assert str(cluster.kubelet.path) in (health.reason or "") and "not there" in (health.reason or "")


def test_down_and_back(cluster: Cluster) -> None:
    cluster.kubelet.pods = [pod("ml", "train", "main", CARD)]
    cluster.kubelet.start()
    log_names(cluster.logs, "ml", "train", POD_UID, {"main": CID})
    key = cluster.proc.add(10, cgroup=PATH)
    assert cluster.claim(key) is not None and cluster.source.assigned()
    cluster.kubelet.stop()
    cluster.refresh((key, CARD))
    health = cluster.source.health()
    assert health is not None and not health.ok  # in auto too: it was there
    # What a container is called does not change while it lives; what it was given is not said of a kubelet that does not answer.
    claim = cluster.source.claim(cluster.refresh((key, CARD))[key])
    assert claim is not None and claim.pod == "train" and claim.device_uuids is None and cluster.source.assigned() == ()
    cluster.kubelet.start()

    def well() -> bool:
        cluster.refresh((key, CARD))
        health = cluster.source.health()
        return health is not None and health.ok and bool(cluster.source.assigned())

    until(well)


def test_a_kubelet_that_refuses_or_hangs_is_a_source_down(cluster: Cluster) -> None:
    cluster.kubelet.failure = grpc.StatusCode.RESOURCE_EXHAUSTED
    cluster.kubelet.start()
    cluster.refresh()
    until(lambda: cluster.source.worker.result.runs > 0)
    cluster.refresh()
    health = cluster.source.health()
    assert health is not None and not health.ok and "resource exhausted: the kubelet says no" in (health.reason or "")
    cluster.kubelet.failure, cluster.kubelet.delay_s = None, 0.6
    cluster.change(timeout_s=0.1)
    cluster.refresh()
    until(lambda: cluster.source.worker.result.runs > 0)
    health = cluster.source.health()
    assert health is not None and not health.ok and "deadline" in (health.reason or "")


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"\x00" * 100, b"\x00\x00\x06\x04\x00\x00\x00\x00\x00" + b"\xff" * 60])
def test_a_socket_that_speaks_something_else(tmp_path: Path, raw: bytes) -> None:
    with short_folder() as sockets:
        server = FakeDocker(sockets / "kubelet.sock")
        server.raw = raw
        with pytest.raises(Unavailable, match="gives no pod resources: "):
            list_given(server.path, ("*",), 0.5)
        server.stop()
        with pytest.raises(Unavailable, match="gives no pod resources: "):
            list_given(server.path, ("*",), 0.5)


def test_a_pod_inside_a_container_needs_the_kubelets_word(cluster: Cluster) -> None:
    cluster.kubelet.start()
    path = f"/docker/{CID2}{PATH}"
    (cluster.logs / "pods").mkdir()
    (cluster.logs / "containers").mkdir()
    assert cluster.claim(cluster.proc.add(10, cgroup=path)) is None
    log_names(cluster.logs, "ml", "train", POD_UID, {"main": CID})
    key = cluster.proc.add(11, cgroup=path)

    def named() -> bool:
        claim = cluster.claim(key)
        return claim is not None and claim.pod == "train"

    until(named)


def test_a_pod_made_anew_under_its_old_name_is_another(cluster: Cluster) -> None:
    cluster.kubelet.start()
    log_names(cluster.logs, "ml", "train-0", POD_UID, {"main": CID})
    log_names(cluster.logs, "ml", "train-0", OTHER_UID, {"main": CID2})
    first = cluster.claim(cluster.proc.add(10, cgroup=PATH))
    second = cluster.claim(cluster.proc.add(11, cgroup=PATH.replace(UNDER, OTHER_UID.replace("-", "_")).replace(CID, CID2)))
    assert first is not None and second is not None
    assert first.pod == second.pod and first.pod_uid != second.pod_uid and first.container_id != second.container_id


def test_what_was_resolved_is_forgotten_with_its_processes(cluster: Cluster) -> None:
    cluster.kubelet.start()
    for number in range(50):
        uid, identity = f"{number:08x}{POD_UID[8:]}", f"{number:064x}"
        log_names(cluster.logs, "ml", f"p-{number}", uid, {"main": identity})
        cluster.claim(cluster.proc.add(100 + number, cgroup=f"/kubepods/pod{uid}/{identity}"))
    assert len(cluster.source._resolved) <= 2 and len(cluster.source._asked) <= 2


def test_claims_of_dynamic_resource_allocation(cluster: Cluster) -> None:
    by_pool = {
        "driver_name": "gpu.nvidia.com",
        "pool_name": "node-1",
        "device_name": "gpu-1",
        "cdi_devices": [{"name": "k8s.gpu.nvidia.com/claim=xyz"}],
    }
    by_cdi = {"cdi_devices": [{"name": "nvidia.com/gpu=0"}]}
    foreign = {"driver_name": "nic.example.com", "device_name": "gpu-0"}
    claims = [{"claim_name": "c", "claim_namespace": "ml", "claim_resources": [resource]} for resource in (by_pool, by_cdi, foreign)]
    cluster.kubelet.pods = [
        pod("ml", "a", "main", dynamic_resources=claims[:1]),
        pod("ml", "b", "main", dynamic_resources=claims[1:2]),
        pod("ml", "c", "main", dynamic_resources=claims[2:]),
        pod("ml", "d", "main", "x", resource="example.com/nic"),
    ]
    cluster.kubelet.start()
    given = list_given(cluster.kubelet.path, cluster.settings.resources, 2.0)
    assert {item.named.pod: item.devices for item in given} == {"a": ("gpu-1",), "b": ("nvidia.com/gpu=0",)}
    cluster.refresh()
    until(lambda: cluster.source.worker.result.runs > 0)
    cluster.refresh()
    assert {item.pod: item.device_uuids for item in cluster.source.assigned()} == {"a": (OTHER,), "b": (CARD,)}


def test_a_device_that_nobody_here_has_is_counted(cluster: Cluster) -> None:
    cluster.kubelet.pods = [pod("ml", "a", "main", "\x1b[31mevil", CARD)]
    cluster.kubelet.start()
    cluster.refresh()
    until(lambda: cluster.source.worker.result.runs > 0)
    cluster.refresh()
    (fault,) = cluster.source.faults()
    assert (fault.kind, fault.count) == ("unknown-device", 1)
    assert cluster.source.assigned()[0].device_uuids == ("\\x1b[31mevil", CARD)


@pytest.mark.parametrize(
    ("name", "uuids"),
    [
        (CARD, (CARD,)),
        (f"{CARD}::3", (CARD,)),
        (f"{CARD}-7", (CARD,)),
        (f"{CARD}_12", (CARD,)),
        (MIG, (MIG,)),
        (f"{MIG}::1", (MIG,)),
        (f"MIG-{CARD}/3/0", (CARD,)),
        ("0", (CARD,)),
        ("1", (OTHER,)),
        ("0:2", (CARD,)),
        ("1.0", (OTHER,)),
        ("1::4", (OTHER,)),
        ("nvidia.com/gpu=1", (OTHER,)),
        (f"nvidia.com/gpu={OTHER}", (OTHER,)),
        ("nvidia.com/gpu=0:1", (CARD,)),
        ("nvidia.com/gpu=all", (CARD, OTHER)),
        ("gpu-1", (OTHER,)),
        ("gpu-0-mig-1g.10gb-0", (CARD,)),
        ("9", ()),
        ("gpu-9", ()),
        ("", ()),
        ("nvidia.com/gpu=", ()),
        (f"{CARD}x", ()),
    ],
)
def test_device_names(name: str, uuids: tuple[str, ...]) -> None:
    assert NAMES.resolve(name) == uuids


def test_an_instance_is_its_cards() -> None:
    names = dataclasses.replace(NAMES, by_instance=((MIG, OTHER),))
    assert names.resolve(f"{MIG}::1") == (OTHER,) and names.resolve(CARD) == (CARD,)
    listed = dataclasses.replace(names, uuids=NAMES.uuids | {MIG})
    assert listed.resolve(MIG) == (MIG,)


@given(st.text(max_size=80))
def test_any_device_name_has_an_answer(name: str) -> None:
    assert all(isinstance(uuid, str) for uuid in NAMES.resolve(name)) and DeviceNames().resolve(name) in ((), NAMES.resolve(name))


@given(st.text(max_size=120))
def test_any_log_name_has_an_answer(name: str) -> None:
    link, folder = parse_link(name), parse_folder(name)
    assert link is None or len(link[0]) == 64
    assert folder is None or folder[1].container is None


def test_log_names() -> None:
    assert parse_link(f"train-0.x_ml_main-{CID}.log") is not None
    assert parse_link(f"train_ml_main-{CID[:-1]}.log") is None and parse_link("a\n_b_c") is None
    assert parse_folder(f"ml_train_{POD_UID}") is not None and parse_folder("ml_train") is None


def test_an_instance_is_known_by_its_own_uuid_as_its_card() -> None:
    parted = dataclasses.replace(
        device(CARD, 0),
        hardware=Hardware(
            instances=(MigInstance(uuid="MIG-00000000-0000-0000-0000-0000000000aa", gpu_instance_id=1, compute_instance_id=0),)
        ),
    )
    assert names_of([parted]).resolve("MIG-00000000-0000-0000-0000-0000000000aa") == (CARD,)
