"""Cgroup paths: every driver and version in use, nested ones, forged ones, and any text at all."""

import re

import pytest
from attribution_fakes import CID, CID2, OTHER_UID, POD_UID
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.exporter.attribution.cgroup import Place, parse_cgroup, parse_path, place_of

UNDER = POD_UID.replace("-", "_")


@pytest.mark.parametrize(
    ("path", "qos", "runtime"),
    [
        (f"/kubepods/burstable/pod{POD_UID}/{CID}", "burstable", None),
        (f"/kubepods/pod{POD_UID}/{CID}", "guaranteed", None),
        (
            f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDER}.slice/cri-containerd-{CID}.scope",
            "burstable",
            "containerd",
        ),
        (f"/kubepods.slice/kubepods-pod{UNDER}.slice/cri-containerd-{CID}.scope", "guaranteed", "containerd"),
        (
            f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UNDER}.slice/crio-{CID}.scope/container",
            "besteffort",
            "crio",
        ),
        (f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDER}.slice/docker-{CID}.scope", "burstable", "docker"),
        (f"/system.slice/containerd.service/kubepods-burstable-pod{UNDER}.slice:cri-containerd:{CID}", "burstable", "containerd"),
        (
            f"/k3s.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{UNDER}.slice/cri-containerd-{CID}.scope",
            "besteffort",
            "containerd",
        ),
        (f"/kubelet/kubepods/besteffort/pod{POD_UID}/{CID}", "besteffort", None),
        (f"/../../kubepods.slice/kubepods-pod{UNDER}.slice/cri-containerd-{CID}.scope", "guaranteed", "containerd"),
        (f"/../../pod{POD_UID}/{CID}", "guaranteed", None),
        (f"/../../../besteffort/pod{POD_UID}/{CID}", "besteffort", None),
        (f"/../../kubepods-burstable-pod{UNDER}.slice/crio-{CID}.scope", "burstable", "crio"),
        (f"/kubepods/burstable/pod{POD_UID}/{CID}/inner/{CID2}", "burstable", None),
    ],
)
def test_pods(path: str, qos: str, runtime: str | None) -> None:
    place = parse_path(path)
    assert (place.pod_uid, place.qos) == (POD_UID, qos) and place.container is not None and not place.nested
    assert (place.container.id, place.container.runtime, place.container.rootless_uid) == (CID, runtime, None)


def test_a_pod_without_a_container_and_a_static_pod() -> None:
    assert parse_path(f"/kubepods/burstable/pod{POD_UID}").pod_uid == POD_UID
    static = parse_path(f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{'0f' * 16}.slice/crio-{CID}.scope")
    assert static.pod_uid == "0f" * 16


@pytest.mark.parametrize(
    ("path", "runtime", "rootless"),
    [
        (f"/docker/{CID}", "docker", None),
        (f"/system.slice/docker-{CID}.scope", "docker", None),
        (f"/machine.slice/libpod-{CID}.scope/container", "podman", None),
        (f"/libpod_parent/libpod-{CID}", "podman", None),
        (f"/machine.slice/machine-libpod_pod_{CID2}.slice/libpod-{CID}.scope", "podman", None),
        (f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{CID}.scope/container", "podman", 1000),
        (f"/user.slice/user-1000.slice/user@1000.service/app.slice/docker.service/docker-{CID}.scope", "docker", 1000),
        (f"/user.slice/user-1000.slice/user@1000.service/app.slice/train.service/libpod-payload-{CID}", "podman", 1000),
        (f"/machine.slice/libpod-payload-{CID}", "podman", None),
        (f"/user.slice/user-1000.slice/user@1000.service/tenant-a/{CID}", None, 1000),
        (f"/user.slice/user-1000.slice/user@1000.service/app.slice/hidden-{CID}.scope", None, 1000),
        (f"/default/{CID}", "containerd", None),
        (f"/system.slice/nerdctl-{CID}.scope", "containerd", None),
    ],
)
def test_containers(path: str, runtime: str | None, rootless: int | None) -> None:
    place = parse_path(path)
    assert place.container is not None and place.pod_uid is None
    assert (place.container.id, place.container.runtime, place.container.rootless_uid) == (CID, runtime, rootless)
    assert not place.enclosed


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        (f"/tenant-a/{CID}", None),
        (f"/tenant-a/{CID}/inner", None),
        (f"/ecs/{'0f' * 16}/{CID}", None),
        (f"/tenant.slice/some-runtime-{CID}.scope", None),
        (f"/system.slice/train.service/libpod-payload-{CID}", "train.service"),
        (f"/system.slice/tenant.service/docker-{CID}.scope", "tenant.service"),
        (f"/system.slice/tenant.service/x/{CID}", "tenant.service"),
    ],
)
def test_a_container_that_is_not_believed_still_encloses(path: str, unit: str | None) -> None:
    place = parse_path(path)
    assert place.enclosed and place.container is None and (unit is None or place.unit == unit)
    # In whichever hierarchy that shows.
    hybrid = place_of(parse_cgroup(f"4:memory:{path}\n1:name=systemd:/system.slice/a.service\n0::/\n".encode()))
    assert hybrid is not None and hybrid.enclosed
    unified = place_of(parse_cgroup(f"4:memory:/\n0::{path}\n".encode()))
    assert unified is not None and unified.enclosed


@pytest.mark.parametrize(
    ("path", "job", "step", "uid"),
    [
        ("/slurm/uid_1000/job_42/step_0/task_0", "42", "0", 1000),
        ("/slurm_node-1/uid_1001/job_43/step_batch/task_0", "43", "batch", 1001),
        ("/slurm/uid_1000/job_42/step_extern", "42", "extern", 1000),
        ("/system.slice/slurmstepd.scope/job_42/step_0/user/task_0", "42", "0", None),
        ("/system.slice/node1_slurmstepd.scope/job_42/step_interactive/user/task_special", "42", "interactive", None),
        ("/slurm/uid_7/job_9", "9", None, 7),
    ],
)
def test_jobs(path: str, job: str, step: str | None, uid: int | None) -> None:
    place = parse_path(path)
    assert (place.job, place.step, place.job_uid) == (job, step, uid) and place.container is None


def test_units_and_logins() -> None:
    assert parse_path("/system.slice/jupyterhub.service") == Place(path="/system.slice/jupyterhub.service", unit="jupyterhub.service")
    session = parse_path("/user.slice/user-1000.slice/session-3.scope")
    assert (session.unit, session.login_uid, session.user_unit) == ("session-3.scope", 1000, None)
    own = parse_path("/user.slice/user-1000.slice/user@1000.service/app.slice/train.service")
    assert (own.unit, own.user_unit, own.login_uid) == ("user@1000.service", "train.service", 1000)


@pytest.mark.parametrize(
    "path",
    [
        f"/user.slice/user-1000.slice/user@1000.service/kubepods/pod{POD_UID}",
        "/user.slice/user-1000.slice/user@1000.service/slurm/uid_0/job_1",
        "/user.slice/user-1000.slice/user@1000.service/app.slice/slurmstepd.scope/job_1",
        f"/system.slice/tenant.service/kubepods-pod{UNDER}.slice/crio-{CID}.scope",
        f"/system.slice/tenant.service/docker-{CID}.scope",
        "/system.slice/tenant.service/slurm/uid_0/job_1",
        f"/machine.slice/machine-x.scope/kubepods/pod{POD_UID}/{CID}",
        f"/lxc.payload.web/docker/{CID}",
        f"/docker/{CID[:-1]}",
        f"/docker/{CID.upper()}",
        f"/kubepods/pod{POD_UID}x",
        f"/system.slice/crio-conmon-{CID}.scope",
        "/slurm/uid_1000/job_٤٢",
    ],
)
def test_what_a_user_may_have_made_is_nobodys_word(path: str) -> None:
    place = parse_path(path)
    assert place.container is None and place.pod_uid is None and place.job is None


def test_a_reader_in_a_container_sees_its_neighbours() -> None:
    neighbour, sibling = parse_path(f"/../{CID}"), parse_path(f"/../cri-containerd-{CID}.scope")
    assert neighbour.container is not None and neighbour.container.runtime is None and neighbour.container.id == CID
    assert sibling.container is not None and sibling.container.runtime == "containerd"
    assert parse_path(f"/{CID}").container is None and parse_path(f"/pod{POD_UID}/{CID}").pod_uid is None
    assert parse_path(f"/../../tenant.service/pod{POD_UID}/{CID}") == Place(
        path=f"/../../tenant.service/pod{POD_UID}/{CID}", unit="tenant.service", enclosed=True
    )


def test_the_outermost_owner_decides() -> None:
    inside_job = parse_path(f"/slurm/uid_1/job_2/step_0/task_0/docker/{CID}")
    assert inside_job.job == "2"
    inside_pod = parse_path(f"/kubepods/pod{POD_UID}/{CID}/kubepods/pod{OTHER_UID}/{CID2}")
    assert inside_pod.pod_uid == POD_UID and inside_pod.container is not None and inside_pod.container.id == CID
    forged_job = parse_path(f"/docker/{CID}/slurm/uid_0/job_1")
    assert forged_job.job is None and forged_job.container is not None
    twice = parse_path(f"/docker/{CID}/docker/{CID2}")
    assert twice.container is not None and twice.container.id == CID and twice.outer is None


def test_a_pod_of_a_node_that_is_a_container_is_marked() -> None:
    inner = f"kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod{UNDER}.slice/cri-containerd-{CID2}.scope"
    place = parse_path(f"/docker/{CID}/{inner}")
    assert place.nested and place.outer is not None and place.outer.id == CID
    assert place.pod_uid == POD_UID and place.container is not None and place.container.id == CID2


def test_hierarchies_of_version_1_and_hybrids() -> None:
    body = (
        b"13:name=systemd:/user.slice/user-0.slice/session-1.scope\n12:pids:/x\n"
        + f"4:memory:/kubepods/pod{POD_UID}/{CID}\n".encode()
        + b"0::/\n"
    )
    place = place_of(parse_cgroup(body))
    assert place is not None and place.pod_uid == POD_UID
    assert place_of(parse_cgroup(b"")) is None
    assert place_of(parse_cgroup(b"0::/\n")) == Place(path="/")
    gone = place_of(parse_cgroup(f"0::/docker/{CID} (deleted)\n".encode()))
    assert gone is not None and gone.container is not None and gone.container.id == CID
    logged_in = place_of(parse_cgroup(b"5:cpu:/\n1:name=systemd:/user.slice/user-7.slice/session-1.scope\n"))
    assert logged_in is not None and logged_in.login_uid == 7


PARTS = st.sampled_from(
    [
        "kubepods", "kubepods.slice", f"pod{POD_UID}", f"kubepods-pod{UNDER}.slice", CID, CID2, f"docker-{CID}.scope", f"libpod-{CID2}.scope",
        f"libpod-payload-{CID}", f"x-{CID2}.scope", "docker", "slurm", "uid_5", "job_7", "step_0", "slurmstepd.scope", "user.slice", "user-9.slice", "user@9.service", "a.service", "..", "",
    ]
)  # fmt: skip


@given(st.one_of(st.text(max_size=300), st.lists(st.one_of(PARTS, st.text(max_size=12)), max_size=12).map("/".join)))
def test_any_path_has_an_answer(path: str) -> None:
    place = parse_path(path)
    for container in (place.container, place.outer):
        assert container is None or re.fullmatch("[0-9a-f]{64}", container.id)
    assert place.pod_uid is None or re.fullmatch("[0-9a-f-]{32,36}", place.pod_uid)
    assert place.job is None or re.fullmatch("[0-9]{1,10}", place.job)
    # Who is in there has ids of his own, or, in a user's own tree, is that user.
    assert place.enclosed <= (place.container is None and place.pod_uid is None)
    # A user's own tree gives no pod and no job, whatever is in it.
    if path.lstrip("/").startswith("user@9.service/"):
        assert place.pod_uid is None and place.job is None and not place.enclosed
    # What is appended below a container changes nothing of the container.
    if place.container is not None and not place.nested and place.pod_uid is None and place.job is None:
        below = parse_path(f"{path}/docker/{CID2}")
        assert below.container == place.container


@given(st.binary(max_size=500))
def test_any_bytes_have_an_answer(body: bytes) -> None:
    place_of(parse_cgroup(body))
