"""Joining the sources: order of trust, disagreements, holders that end with what they name, and nothing that stops a tick."""

import dataclasses
import json
import shutil
import subprocess
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from attribution_fakes import CID, CID2, MAP, PATH, POD_UID, FakeDocker, FakeKubelet, FakeProc, log_names, pod, short_folder, until
from exporter_fakes import CARD, GIB, OTHER, Node, process
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.config import AttributionSection
from poolmeter.exporter.attribution import Allocations, OwnAllocations, Who
from poolmeter.exporter.attribution.build import build
from poolmeter.exporter.attribution.cgroup import parse_path
from poolmeter.exporter.attribution.devices import DeviceNames
from poolmeter.exporter.attribution.naming import TenantRule
from poolmeter.exporter.attribution.process import KEPT_US, Facts
from poolmeter.exporter.attribution.source import ProcessKey, Quiet
from poolmeter.exporter.attribution.users import KEEP_S, UserNames, Users
from poolmeter.exporter.attribution.who import SETTLE_US, disagreements, holder_of, merge
from poolmeter.exporter.render import Renderer
from poolmeter.exporter.server import Face
from poolmeter.model.naming import LIMIT, printable
from poolmeter.model.plain import from_plain, to_plain
from poolmeter.model.snapshot import Claim, HolderSnapshot, Snapshot, SourceHealth
from poolmeter.model.usage import DeviceRecord, ProcessRecord

SECOND = 1_000_000


class Says(Quiet):
    """A source that says what the test sets, by pid."""

    def __init__(self, name: str, claims: Mapping[int, Claim] | None = None) -> None:
        self.name = name
        self.claims = dict(claims or {})
        self.wait = False
        self.given: tuple[Claim, ...] = ()
        self.down: str | None = None
        self.breaks: str | None = None

    def version(self) -> object:
        return None

    def _at(self, place: str) -> None:
        if self.breaks == place:
            raise RuntimeError(f"broken at {place}")

    def refresh(self, processes: Mapping[ProcessKey, Facts], devices: DeviceNames) -> None:
        self._at("refresh")

    def claim(self, facts: Facts) -> Claim | None:
        self._at("claim")
        return self.claims.get(facts.key.pid)

    def pending(self, facts: Facts) -> bool:
        self._at("pending")
        return self.wait

    def assigned(self) -> tuple[Claim, ...]:
        self._at("assigned")
        return self.given

    def health(self) -> SourceHealth | None:
        self._at("health")
        return SourceHealth(source=self.name, ok=False, at_us=None, duration_us=None, reason=self.down) if self.down else None


def page_of(node: Node) -> str:
    page = node.agent.page()
    assert page is not None
    return Renderer().render(page).decode()


def snapshot_of(node: Node) -> Snapshot:
    page = node.agent.page()
    assert page is not None
    return page.snapshot


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[tuple[Node, Says]]:
    """A node with two cards and one source that knows two pods."""
    claims = {
        70: Claim(source="kubernetes", tenant="ml", namespace="ml", pod="train-0", container="main", pod_uid=POD_UID, container_id=CID),
        71: Claim(source="kubernetes", tenant="web", namespace="web", pod="serve", container="main", container_id=CID2),
    }
    source = Says("kubernetes", claims)
    node = Node(tmp_path, CARD, OTHER, who=lambda: Who([source], FakeProc(tmp_path / "proc").root))
    yield node, source
    node.close()


def test_use_without_the_hook_goes_to_the_pods_tenant(pods: tuple[Node, Says]) -> None:
    node, _ = pods
    for second in range(1, 61):
        running = (process(70, 9, second * 300_000, 2 * GIB), process(71, 9, second * 100_000, 3 * GIB), process(72, 9, 0, GIB))
        node.sampler.change(CARD, busy_us_total=second * 400_000, processes=running)
        node.tick()
    records = {item.pid: item for item in node.records() if isinstance(item, ProcessRecord)}
    assert {pid: (item.tenant, item.hooked) for pid, item in records.items()} == {70: ("ml", False), 71: ("web", False), 72: (None, False)}
    card = next(item for item in node.records() if isinstance(item, DeviceRecord) and item.device_uuid == CARD)
    assert sum(item.used_us or 0 for item in records.values()) == card.unaccounted_us  # divided, never copied
    holders = {item.id: item for item in snapshot_of(node).holders}
    assert holders.keys() == {"pod/ml/train-0/main", "pod/web/serve/main"}
    assert holders["pod/ml/train-0/main"].unaccounted_us_total == records[70].used_us
    assert holders["pod/web/serve/main"].unaccounted_memory_bytes == 3 * GIB
    page = page_of(node)
    assert (
        'poolmeter_holder_info{container="main",holder="pod/ml/train-0/main",job="",namespace="ml",pod="train-0",source="kubernetes",tenant="ml"'
        in page
    )
    assert f'poolmeter_holder_unaccounted_busy_seconds_total{{holder="pod/web/serve/main",uuid="{CARD}"}} 6.0' in page
    assert 'poolmeter_attributed_processes{source="none"} 1.0' in page
    for line in page.splitlines():
        if line.startswith("poolmeter_") and not line.startswith(("poolmeter_holder_info", "poolmeter_slice_info")):
            assert "tenant=" not in line and "pod=" not in line


def test_sources_change_while_it_runs_and_what_is_not_known_yet_is_waited_for(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc").root
    before, after = Says("kubernetes", {70: Claim(source="kubernetes", tenant="ml", namespace="ml", pod="train-0")}), Says("slurm")
    who = Who([before], proc)
    node = Node(tmp_path, CARD, who=lambda: who)

    def tick(second: int) -> None:
        node.sampler.change(CARD, busy_us_total=second * 400_000, processes=(process(70, 9, second * 400_000, 2 * GIB),))
        node.tick()

    for second in range(1, 21):
        tick(second)
    assert {item.tenant for item in snapshot_of(node).attributions} == {"ml"}
    after.wait = True
    closed: list[str] = []
    before.close = lambda: closed.append("before")  # type: ignore[method-assign]
    who.take(Who([after], proc))
    assert closed == ["before"]
    tick(21)
    assert {item.tenant for item in snapshot_of(node).attributions} == {"ml"}  # until the new one has answered
    after.claims[70] = Claim(source="slurm", tenant="physics", job="7")
    after.wait = False
    for second in range(22, 61):
        tick(second)
    (record,) = [item for item in node.records() if isinstance(item, ProcessRecord)]
    assert record.tenant == "physics"
    held = {item.id: item.unaccounted_us_total for item in snapshot_of(node).holders}
    card = next(item for item in node.records() if isinstance(item, DeviceRecord) and item.device_uuid == CARD)
    # What was used while it had not said yet is the old holder's, and no second is lost or twice.
    assert held == {"job/7": 39 * 400_000} and node.agent.ledger.holders[f"{CARD}|pod/ml/train-0"].unaccounted_us_total == 21 * 400_000
    assert card.unaccounted_us == 60 * 400_000
    node.close()


def counted(node: Node) -> tuple[dict[str, int], int]:
    """Device time on the card by holder, and of nobody; together with what waits it is all that programs used."""
    ledger = node.agent.ledger
    held = {key.split("|", 1)[1]: holder.unaccounted_us_total for key, holder in ledger.holders.items()}
    nobodys, card = ledger.devices[CARD].unattributed_us_total, ledger.devices[CARD].unaccounted_us_total
    assert sum(held.values()) + nobodys + sum(item.waiting_us for item in ledger.processes.values()) == card
    return held, nobodys


def test_what_a_program_used_that_ends_during_a_reload_is_not_lost(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc").root
    before, after = Says("kubernetes", {70: Claim(source="kubernetes", tenant="ml", namespace="ml", pod="train-0")}), Says("slurm")
    who = Who([before], proc)
    node = Node(tmp_path, CARD, who=lambda: who)
    node.sampler.change(CARD, processes=(process(70, 9, 0, GIB),))
    node.tick()
    after.wait = True  # slow to answer
    who.take(Who([after], proc))
    node.sampler.change(CARD, busy_us_total=300_000, processes=(process(70, 9, 300_000, GIB),))
    node.tick()
    assert counted(node) == ({"pod/ml/train-0": 300_000}, 0)
    node.sampler.change(CARD, processes=())
    node.tick()
    assert counted(node) == ({"pod/ml/train-0": 300_000}, 0)
    # One that stays has the old answer as long as a source may take, and not longer.
    after.wait, after.claims[70] = False, before.claims[70]
    node.sampler.change(CARD, processes=(process(70, 9, 300_000, GIB),))
    node.tick()
    silent = Says("docker")
    silent.wait = True
    who.take(Who([silent], proc))
    tenants = []
    for _ in range(SETTLE_US // SECOND + 3):
        node.tick()
        tenants.append(snapshot_of(node).attributions[0].tenant)
    assert tenants == ["ml"] * (SETTLE_US // SECOND) + [None] * 3
    node.close()


def test_what_devices_were_given_to_stands_until_the_new_source_has_answered(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc").root
    sources = [Says("kubernetes") for _ in range(3)]
    sources[0].given = (Claim(source="kubernetes", tenant="ml", namespace="ml", pod="train-0", container="main", device_uuids=(CARD,)),)
    who = Who(sources[:1], proc)
    node = Node(tmp_path, CARD, who=lambda: who)

    def shown() -> int:
        node.tick()
        return len(snapshot_of(node).holders)

    assert shown() == 1
    for source in sources[1:]:
        source.down = "has not answered yet"
        who.take(Who([source], proc))
        assert [shown() for _ in range(3)] == [1] * 3
    sources[2].down = None  # not in use
    assert shown() == 0
    sources[2].given, sources[1].given = sources[0].given, ()
    assert shown() == 1
    sources[1].down = "never answers"
    who.take(Who([sources[1]], proc))
    assert [shown() for _ in range(SETTLE_US // SECOND + 2)] == [1] * (SETTLE_US // SECOND) + [0] * 2
    node.close()


def test_what_a_program_used_that_ends_before_it_is_known_whose_it_is(pods: tuple[Node, Says]) -> None:
    node, source = pods
    source.wait = True
    node.sampler.change(CARD, busy_us_total=700_000, processes=(process(70, 9, 500_000, GIB), process(72, 9, 200_000, GIB)))
    node.tick(turns=3)
    node.sampler.change(CARD, processes=())
    node.tick(turns=3)
    assert counted(node) == ({}, 0) and sum(item.waiting_us for item in node.agent.ledger.processes.values()) == 700_000
    source.wait = False
    node.tick()
    assert counted(node) == ({"pod/ml/train-0/main": 500_000}, 200_000)  # of the other nobody says anything
    assert f'poolmeter_device_unattributed_busy_seconds_total{{uuid="{CARD}"}} 0.2' in page_of(node)
    assert f'poolmeter_device_unattributed_busy_seconds_total{{uuid="{OTHER}"}} 0.0' in page_of(node)
    source.wait = True
    node.sampler.change(CARD, busy_us_total=900_000, processes=(process(71, 9, 300_000, GIB),))
    node.tick()
    node.sampler.change(CARD, processes=())
    node.tick(turns=SETTLE_US // SECOND + 1)  # no answer in time: what is known by then
    assert counted(node) == ({"pod/ml/train-0/main": 500_000, "pod/web/serve/main": 300_000}, 200_000)
    node.tick(turns=60)
    assert node.agent.ledger.processes == {}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["tick", "reload", "restart"]), st.booleans(), st.lists(st.integers(70, 73), unique=True), st.integers(0, 3)
        ),
        max_size=15,
    )
)
def test_nothing_that_programs_use_vanishes(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, bool, list[int], int]]
) -> None:
    folder = tmp_path_factory.mktemp("node")
    claims = {
        70: Claim(source="x", tenant="a", job="1"), 71: Claim(source="x", tenant="b", job="2"), 72: Claim(source="x", container_id=CID),
    }  # fmt: skip
    made: list[tuple[Who, Says]] = []

    def who() -> Who:
        source = Says("x", claims)
        made.append((Who([source], folder), source))
        return made[-1][0]

    node = Node(folder, CARD, who=who)
    used: dict[int, int] = {}
    for what, wait, there, much in steps:
        if what == "reload":
            other = Says("x", claims)
            made[-1][0].take(Who([other], folder))
            made[-1] = (made[-1][0], other)
        elif what == "restart":
            node.tick(turns=2)
            node.kill()
            node.start()
        made[-1][1].wait = wait
        for pid in there:
            used[pid] = used.get(pid, 0) + much * 50_000
        node.sampler.change(
            CARD, busy_us_total=sum(used.values()), processes=tuple(process(pid, 9, used[pid], GIB) for pid in sorted(there))
        )
        node.tick()
        counted(node)
    node.close()


def test_a_pods_series_end_with_the_pod(pods: tuple[Node, Says]) -> None:
    node, source = pods
    source.given = (Claim(source="kubernetes", tenant="ml", namespace="ml", pod="train-0", container="main", device_uuids=(CARD, OTHER)),)
    node.sampler.change(CARD, busy_us_total=100_000, processes=(process(70, 9, 100_000, 2 * GIB),))
    node.tick(turns=2)
    assert page_of(node).count("poolmeter_holder_info{") == 2  # on the card it uses, and on the one it was given and does not use
    idle = next(item for item in snapshot_of(node).holders if item.device_uuid == OTHER)
    assert idle.assigned and idle.processes == 0 and idle.unaccounted_us_total is None and idle.tenant == "ml"
    node.sampler.change(CARD, processes=())
    source.given = source.given[:0]
    node.tick()
    assert "poolmeter_holder_" not in page_of(node) and snapshot_of(node).attributions == ()
    node.tick(turns=130)
    assert node.agent.ledger.holders == {} and node.agent._who._processes._known == {}


def test_a_process_that_ended_keeps_no_series(pods: tuple[Node, Says]) -> None:
    node, _ = pods
    node.sampler.change(CARD, processes=(process(70, 9, 100_000, GIB),))
    node.tick(turns=2)
    # Its last samples come after it is gone.
    node.sampler.change(CARD, processes=(process(70, 9, 150_000, None, listed=False),))
    node.tick()
    assert "train-0" not in page_of(node)


def test_a_holders_counter_goes_on_over_a_restart_and_a_short_absence(pods: tuple[Node, Says]) -> None:
    node, _ = pods

    def total() -> int | None:
        return next(item.unaccounted_us_total for item in snapshot_of(node).holders)

    node.sampler.change(CARD, processes=(process(70, 9, 500_000, GIB),))
    node.tick(turns=3)
    assert total() == 500_000
    node.kill()
    node.clock.advance(3 * SECOND)
    node.start()
    node.tick()
    assert total() == 500_000
    node.sampler.change(CARD, processes=())
    node.tick(turns=5)
    node.sampler.change(CARD, processes=(process(70, 10, 200_000, GIB),))  # the next program in the same container
    node.tick()
    assert total() == 700_000


def test_who_it_is_waits_for_slow_sources_and_not_for_ever(pods: tuple[Node, Says]) -> None:
    node, source = pods
    source.wait = True
    node.sampler.change(CARD, processes=(process(70, 9, 500_000, GIB),))
    node.tick(turns=5)
    assert snapshot_of(node).holders == ()  # its labels might still change
    node.tick(turns=SETTLE_US // SECOND)
    (holder,) = snapshot_of(node).holders
    assert holder.unaccounted_us_total == 500_000  # what was used meanwhile is not lost


def test_unknown_memory_is_not_zero(pods: tuple[Node, Says]) -> None:
    node, source = pods
    source.claims[72] = source.claims[70]
    node.sampler.change(CARD, processes=(process(70, 9, 0, GIB), process(72, 9, 0, None)))
    node.tick()
    (holder,) = snapshot_of(node).holders
    assert holder.processes == 2 and holder.unaccounted_memory_bytes is None
    assert "poolmeter_holder_unaccounted_memory_bytes" not in page_of(node)


def test_trust_goes_in_order_and_nothing_is_dropped() -> None:
    strong = Claim(source="allocations", tenant="vision", allocation_id="a-1")
    pod_claim = Claim(source="kubernetes", tenant="ml", namespace="ml", pod="p", container_id=CID, device_uuids=(CARD,))
    box = Claim(source="docker", container="box", container_id=CID2, image="other")
    user = Claim(source="user", tenant="root", firm=False, user="root")
    claims = [strong, pod_claim, box, user]
    merged = merge(claims)
    assert (merged.tenant, merged.allocation_id, merged.pod, merged.user) == ("vision", "a-1", "p", "root")
    assert merged.container_id == CID and merged.container is None and merged.image is None  # another container's name is not ours
    found = disagreements(claims, frozenset([CARD, OTHER]))
    assert {(d.field, d.source, d.value, d.other, d.other_value) for d in found} == {
        ("tenant", "allocations", "vision", "kubernetes", "ml"),
        ("container_id", "kubernetes", CID, "docker", CID2),
        ("device", "nvml", OTHER, "kubernetes", CARD),
    }
    assert disagreements([pod_claim, user], frozenset([CARD])) == () and disagreements([], frozenset([CARD])) == ()
    unknown = dataclasses.replace(pod_claim, device_uuids=("MIG-11111111-0000-0000-0000-000000000001",))
    assert disagreements([unknown], frozenset([CARD])) == ()
    assert all(d.field != "container_id" for d in disagreements(claims, frozenset(), nested=True))


FIELDS = st.none() | st.sampled_from(["a", "b"])
CLAIMS = st.lists(
    st.builds(
        Claim,
        source=st.sampled_from(["x", "y", "z"]), tenant=FIELDS, firm=st.booleans(), namespace=FIELDS, pod=FIELDS, container_id=FIELDS,
        job=FIELDS, user=FIELDS, unit=FIELDS, device_uuids=st.none() | st.lists(st.sampled_from([CARD, OTHER]), max_size=2).map(tuple),
    ),
    max_size=5,
)  # fmt: skip


@given(CLAIMS, st.frozensets(st.sampled_from([CARD, OTHER])))
def test_any_claims_join(claims: list[Claim], devices: frozenset[str]) -> None:
    merged, found = merge(claims), disagreements(claims, devices)
    assert merged.tenant == next((claim.tenant for claim in claims if claim.tenant), None)
    for kind in ("namespace", "pod", "job", "user"):
        values = {getattr(claim, kind) for claim in claims} - {None}
        # Whatever is not told of a field is told as a disagreement.
        assert (getattr(merged, kind) in values) if values else getattr(merged, kind) is None
        assert (len(values) > 1) == any(d.field == kind for d in found)
    known = any((claim.pod and claim.namespace) or claim.job or claim.container_id or claim.unit or claim.user for claim in claims)
    assert holder_of(merged) is not None or not known or (merged.pod is not None) != (merged.namespace is not None)


def test_a_users_own_container_is_another_holder_than_one_of_the_same_id() -> None:
    place = parse_path(f"/user.slice/user-1000.slice/user@1000.service/x/docker-{CID}.scope")
    docker = Claim(source="docker", container_id=CID)
    user = Users(TenantRule(), UserNames(lambda _: "ann"))
    user._users.want(1000)
    user._users.worker.run()
    said = user.claim(Facts(ProcessKey(8, 9), place=place, uid=1000))
    assert said is not None and said.user == "ann"
    assert holder_of(merge([docker])) == f"container/{CID[:12]}" != holder_of(merge([docker, said]))
    user.close()


@pytest.mark.parametrize(
    ("path", "user"),
    [
        ("/user.slice/user-1000.slice/session-3.scope", "user-7"),
        ("/system.slice/train.service", "user-7"),
        (f"/tenant-a/{CID}", None),
        (f"/ecs/{'0f' * 16}/{CID}", None),
        (f"/system.slice/train.service/libpod-payload-{CID}", None),
        (f"/docker/{CID}", None),
        (PATH, None),
        (f"/user.slice/user-1000.slice/user@1000.service/app.slice/libpod-payload-{CID}", "user-1000"),
        (f"/user.slice/user-1000.slice/user@1000.service/tenant-a/{CID}", "user-1000"),
        (f"/user.slice/user-1000.slice/user@1000.service/app.slice/hidden-{CID}.scope", "user-1000"),
    ],
)
def test_a_user_id_inside_a_container_is_never_taken_for_the_hosts(path: str, user: str | None) -> None:
    source = Users(TenantRule(), UserNames(lambda uid: f"user-{uid}"))
    facts = Facts(ProcessKey(8, 9), place=parse_path(path), uid=7)
    source._users.close()  # no thread: the test looks itself
    source.refresh({facts.key: facts}, DeviceNames())
    source._users.worker.run()
    said = source.claim(facts)
    assert (said.user if said else None) == user and not source.pending(facts)


def test_disagreements_are_on_the_page_and_in_the_snapshot(pods: tuple[Node, Says]) -> None:
    node, source = pods
    source.claims[70] = dataclasses.replace(source.claims[70], device_uuids=(OTHER,))
    node.sampler.change(CARD, processes=(process(70, 9, 0, GIB),))
    node.tick()
    assert 'poolmeter_attribution_disagreements{field="device",other="kubernetes",source="nvml"} 1.0' in page_of(node)
    (item,) = snapshot_of(node).attributions
    assert item.claims == (source.claims[70],) and item.disagreements[0].other_value == OTHER
    plain = json.loads(json.dumps(to_plain(snapshot_of(node))))
    assert from_plain(Snapshot, plain) == snapshot_of(node)


@pytest.mark.parametrize("place", ["refresh", "claim", "pending", "assigned", "health"])
def test_a_source_that_breaks_stops_nothing_and_is_told(pods: tuple[Node, Says], place: str) -> None:
    node, source = pods
    node.sampler.change(CARD, processes=(process(70, 9, 0, GIB),))
    node.tick()
    before = node.clock.wall
    source.breaks = place
    node.sampler.change(CARD, processes=(process(70, 9, 0, GIB), process(71, 9, 0, GIB)))
    node.tick()
    assert snapshot_of(node).taken_us > before and len(snapshot_of(node).devices) == 2
    health = {item.source: item for item in snapshot_of(node).sources}
    if place != "assigned":  # asked for when the snapshot is made, after the health is
        assert not health["kubernetes"].ok and f"broken at {place}" in (health["kubernetes"].reason or "")
        assert 'poolmeter_collect_success{source="kubernetes"} 0.0' in page_of(node)
    source.breaks = None
    node.tick()
    assert [item.tenant for item in snapshot_of(node).attributions] == ["ml", "web"]
    assert "kubernetes" not in {item.source for item in snapshot_of(node).sources}


def test_a_source_that_is_down_is_on_readyz(pods: tuple[Node, Says]) -> None:
    node, source = pods
    source.down = "socket /x is not there: No such file or directory"
    node.tick()
    answer = Face(node.agent, None).readyz(None)  # type: ignore[arg-type]
    body = json.loads(bytes(answer.body))
    assert answer.status_code == 503 and "kubernetes" in body["failing"]
    assert [item["reason"] for item in body["sources"] if item["source"] == "kubernetes"] == [source.down]


def test_what_an_allocations_program_starts_without_the_hook_is_the_allocations(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    proc.add(40, start=50)
    own = OwnAllocations(proc.root)
    child = proc.add(60, start=70, parent=40)
    node = Node(tmp_path / "node", who=lambda: Who([Allocations(own)], proc.root))
    allocation = node.create("a", meter=False, owner_pid=40, owner_start_ticks=50)
    node.sampler.change(CARD, processes=(process(child.pid, child.start_ticks, 100_000, GIB),))
    node.agent._attribution = own
    node.tick(turns=60)
    (record,) = [item for item in node.records() if isinstance(item, ProcessRecord)]
    assert (record.allocation_id, record.tenant, record.hooked) == ("a", "tenant-a", False)
    node.release(allocation)
    proc.end(40)
    node.close()


@given(st.lists(st.tuples(st.sampled_from([None, "ann", "bob"]), st.sampled_from([1.0, 60.0, KEEP_S])), max_size=12))
def test_a_directory_that_is_down_takes_no_name_away_and_is_asked_again_soon(looks: list[tuple[str | None, float]]) -> None:
    now, answer, found, asked_at = 0.0, None, None, -KEEP_S
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("poolmeter.exporter.attribution.users.time", types.SimpleNamespace(monotonic=lambda: now))
        users = UserNames(lambda _: answer, interval_s=60.0)
        users.close()  # no thread: the test looks itself
        users.want(5)
        told = False
        for answer, pause in looks:
            now += pause
            if now - asked_at >= (KEEP_S if told else 60.0):
                asked_at, told, found = now, answer is not None, answer or found
            users.worker.run()
            assert users.name_of(5) == (found or "uid-5")


def test_churn_leaves_nothing_behind(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path / "proc")
    users = UserNames(lambda uid: f"user-{uid}")
    who = build(AttributionSection(), OwnAllocations(proc.root), proc.root)
    for tick in range(300):
        keys = [proc.add(1000 + (tick * 5 + number) % 3000, start=tick, cgroup=f"/docker/{tick * 5 + number:064x}") for number in range(5)]
        who.refresh(None, keys, tick * SECOND)
        for key in keys:
            proc.end(key.pid)
    bound = 5 * (KEPT_US // SECOND + 2)
    assert len(who._processes._known) <= bound and len(who.all()) == 5 and len(who._joined) == 5
    assert len(who._processes._seen_us) <= bound and len(who._processes._read_us) <= bound
    who.close()
    users.close()


def test_the_whole_of_it_with_real_sockets(tmp_path: Path) -> None:
    """A kubelet and a Docker; a pod, a container, a job and a user on one card."""
    with short_folder() as sockets:
        kubelet, docker = FakeKubelet(sockets / "kubelet.sock"), FakeDocker(sockets / "docker.sock")
        kubelet.pods = [pod("ml", "train-0", "main", f"{CARD}::0")]
        kubelet.start()
        docker.add(CID2, "box", poolmeter__tenant="vision")
        log_names(tmp_path / "log", "ml", "train-0", POD_UID, {"main": CID})
        proc = FakeProc(tmp_path / "proc")
        proc.add(70, 9, PATH, maps=MAP % b"/usr/lib/libcuda.so.1", inner=(3,))
        proc.add(71, 9, f"/system.slice/docker-{CID2}.scope")
        proc.add(72, 9, "/slurm/uid_0/job_42/step_0/task_0", uid=0)
        proc.add(73, 9, "/user.slice/user-0.slice/session-1.scope", uid=0)
        settings = AttributionSection(
            kubelet_socket=kubelet.path,
            kubernetes_logs=tmp_path / "log",
            docker_socket=docker.path,
            podman_socket=sockets / "podman.sock",
            containerd_socket=sockets / "containerd.sock",
            users=("root=operations",),
            interval_s=0.2,
        )
        made: list[Who] = []

        def who() -> Who:
            made.append(build(settings, OwnAllocations(proc.root), proc.root))
            return made[-1]

        node = Node(tmp_path / "node", who=who)
        node.sampler.change(CARD, processes=tuple(process(pid, 9, 1000 * pid, GIB) for pid in (70, 71, 72, 73)))

        def settled() -> bool:
            node.tick(10_000)
            return len(snapshot_of(node).holders) == 4 and any(item.assigned for item in snapshot_of(node).holders)

        until(settled)
        holders: dict[str, HolderSnapshot] = {item.id: item for item in snapshot_of(node).holders}
        assert {name: item.tenant for name, item in holders.items()} == {
            "pod/ml/train-0/main": "ml",
            f"container/{CID2[:12]}": "vision",
            "job/42": "root",
            "unit/session-1.scope": "operations",
        }
        assert holders["pod/ml/train-0/main"].assigned and holders[f"container/{CID2[:12]}"].container == "box"
        first = next(item for item in snapshot_of(node).attributions if item.pid == 70)
        assert first.framework == "cuda" and first.namespace_pid == 3 and first.disagreements == ()
        assert {item.source for item in snapshot_of(node).sources if item.ok} >= {"kubernetes", "docker"}
        assert f'poolmeter_framework_processes{{framework="cuda",uuid="{CARD}"}} 1.0' in page_of(node)
        made[-1].close()
        node.close()
        kubelet.stop()
        docker.stop()


@given(st.text(max_size=400) | st.binary(max_size=400))
def test_what_is_printed_is_harmless_and_short(value: str | bytes) -> None:
    shown = printable(value)
    assert len(shown) <= LIMIT and shown.isprintable() and printable(shown) == shown
    shown.encode()


def test_what_is_cut_is_marked_and_stays_apart() -> None:
    one, two = printable("a" * 10_000 + "1"), printable("a" * 10_000 + "2")
    assert len(one) == len(two) == LIMIT and one != two and "…" in one
    assert printable("plain-name_1") == "plain-name_1" and printable(b"\xff\xfea\n") == "\\xff\\xfea\\x0a"


def test_rules() -> None:
    rule = TenantRule((("team-a-*", "a"), ("*", "rest")), "{namespace}")
    assert rule.tenant("team-a-prod", namespace="team-a-prod") == ("a", True) and rule.tenant("x", namespace="x") == ("rest", True)
    assert TenantRule((), "{namespace}/{pod}").tenant("n", namespace="n", pod="p") == ("n/p", False)
    assert TenantRule((), "{namespace}/{pod}").tenant("n", namespace="n", pod=None) == (None, False)
    assert TenantRule().tenant("n", namespace="n") == (None, False)


def test_the_join_that_the_reference_shows(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    page = (Path(__file__).parents[2] / "docs" / "reference" / "attribution.md").read_text()
    series = [
        ('poolmeter_slice_busy_seconds_total{allocation="a",uuid="u"}', 7),
        ('poolmeter_holder_allocation_info{allocation="a",holder="pod/n/p/c",uuid="u"}', 1),
        ('poolmeter_holder_allocation_info{allocation="a",holder="pod/n/q/c",uuid="u"}', 1),
        ('poolmeter_holder_info{container="c",holder="pod/n/p/c",namespace="n",pod="p",tenant="t",uuid="u"}', 1),
        ('poolmeter_holder_info{container="c",holder="pod/n/q/c",namespace="n",pod="q",tenant="t",uuid="u"}', 1),
    ]
    expected = [
        {"labels": f'{{allocation="a",holder="pod/n/{pod}/c",namespace="n",pod="{pod}",uuid="u"}}', "value": 7} for pod in ("p", "q")
    ]
    case = {
        "rule_files": [],
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": f"{value}x5"} for name, value in series],
                "promql_expr_test": [
                    {"expr": page.split("```promql\n")[1].split("```")[0], "eval_time": "1m", "exp_samples": expected},
                ],
            }
        ],
    }
    (tmp_path / "join.yaml").write_text(json.dumps(case))
    ran = subprocess.run(["promtool", "test", "rules", str(tmp_path / "join.yaml")], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
