"""A tenant sees its own rows and no byte that tells of another, whatever the store holds and whatever it asks."""

import asyncio
import io
import itertools
import json
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from collector_fakes import CARD, DAY, NOW, batch, device, event, process, slice_
from collector_served import client, collector, token_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from poolmeter.accounting.routes import routes as report_routes
from poolmeter.collector import decisions as decisions_module
from poolmeter.collector.api import ApiState, create_app
from poolmeter.collector.auth import Role
from poolmeter.collector.now import newest
from poolmeter.collector.state import NodeRow
from poolmeter.collector.usage import ARROW, parse_cursor
from poolmeter.config import AccountingSection
from poolmeter.model.decision import Decision, DecisionState
from poolmeter.model.snapshot import DeviceSnapshot, ProcessSnapshot, SliceSnapshot, Snapshot, SourceHealth
from poolmeter.model.units import HOUR_US, MINUTE_US
from poolmeter.model.usage import UsageRecord
from poolmeter.serve import asking_tenant

TENANTS = ("aa-ten", "bb-ten", "cc-ten")
HUSH = "what others hold"  # stands in every text that is not for tenants
WINDOW = {"window": "2027-01-15,2027-01-17", "includeIdle": "true"}
FIELDS = ("tenant", "node,device", "hour,pool,model", "project,user,mode", "part,day")
REPORTS: tuple[tuple[str, list[dict[str, str]]], ...] = (
    ("/v1/reports/usage", [{"by": by} for by in FIELDS[:-1]]),
    ("/v1/reports/chargeback", [{"by": by, "basis": basis} for by in FIELDS for basis in ("allocated", "used")]),
    ("/v1/reports/focus", [{}, {"basis": "used", "format": "csv"}]),
    *(
        (path, [{**WINDOW, "aggregate": by} for by in ("", "all", "namespace", "node,label:device", "pod,label:project")])
        for path in ("/allocation/compute", "/allocation")
    ),
)
PLAN = """
schema = "poolmeter.plan/1"
name = "shares"
version = 1
currency = "EUR"
[policy]
idle = "by-use"
unallocated = "even"
overhead = "by-allocation"
[[prices]]
from = 2026-01-01
device_hour = { "H200" = "3600" }
"""
PERIOD = {"from": "2027-01-15", "to": "2027-01-17"}


def secret(tenant: str, what: str) -> str:
    """A text of one tenant alone, that is found wherever it goes."""
    return f"{tenant}-{what}"


class Pool:
    """What a generated pool holds: per node its tenants, some of which share a card; each with slices, processes, events and decisions."""

    def __init__(self, nodes: list[frozenset[str]]) -> None:
        self.nodes = nodes

    def fill(self, state: ApiState) -> None:
        batches, snapshots, rows = [], [], []
        for number, tenants in enumerate(self.nodes):
            name, epoch = f"node-{number}-", str(uuid.UUID(int=number + 1))
            sequence = itertools.count(1)
            made: list[UsageRecord] = []
            for minute in range(3):
                at = DAY + minute * MINUTE_US
                for card in {self.card(number, tenant) for tenant in tenants}:
                    made.append(device(name, epoch, next(sequence), at, card))
                for tenant in sorted(tenants):
                    made += self.records(name, epoch, sequence, at, number, tenant)
            batches.append(batch(made, name, epoch))
            snapshots.append(newest(self.snapshot(name, epoch, number, tenants)))
            rows.append(NodeRow(f"http://{name}", name, epoch, NOW, "up"))
        state.store.publish(batches, snapshots, rows, now_us=NOW)
        decisions = [
            Decision(
                secret(tenant, f"decision-{number}"), f"node-{number}-", secret(tenant, "alloc"),
                self.card(number, tenant), 1, 0, NOW, NOW + HOUR_US, "rule", secret(tenant, "why"), "00", memory_bytes=5,
            )
            for number, tenants in enumerate(self.nodes)
            for tenant in sorted(tenants)
        ]  # fmt: skip
        state.books.add_decisions(decisions)
        for decision in decisions:
            state.books.transition(decision.id, DecisionState.REJECTED, "ann", HUSH)

    @staticmethod
    def card(number: int, tenant: str) -> str:
        # The first two tenants of a node share its first card, the third has one of its own.
        return f"GPU-{number}-shared" if tenant != TENANTS[2] else f"GPU-{number}-{tenant}"

    def records(self, name: str, epoch: str, sequence: "itertools.count[int]", at: int, number: int, tenant: str) -> list[UsageRecord]:
        card, allocation = self.card(number, tenant), secret(tenant, "alloc")
        quarter: dict[str, Any] = {"promised_us": 15_000_000, "allocated_us": 15_000_000, "device_uuid": card, "allocation_id": allocation}
        return [
            slice_(name, epoch, next(sequence), at, tenant, project=secret(tenant, "project"), user=secret(tenant, "user"), **quarter),
            process(
                name, epoch, next(sequence), at, pid=700_000 + 1000 * TENANTS.index(tenant), command=secret(tenant, "cmd"), tenant=tenant,
                allocation_id=allocation, device_uuid=card,
            ),
            event(
                name, epoch, next(sequence), at, tenant=tenant, allocation_id=allocation, device_uuid=card, outcome="refused",
                reason=HUSH, detail=json.dumps({"free": HUSH}),
            ),
        ]  # fmt: skip

    def snapshot(self, name: str, epoch: str, number: int, tenants: frozenset[str]) -> Snapshot:
        cards = sorted({self.card(number, tenant) for tenant in tenants})
        return Snapshot(
            node=name, epoch=epoch, sequence=99, taken_us=NOW, simulated=True, pool="p",
            devices=tuple(
                DeviceSnapshot(uuid=card, index=n, model="H200", vendor="nvidia", up=True, memory_total_bytes=CARD, origin="b", serial=HUSH)
                for n, card in enumerate(cards)
            ),
            slices=tuple(
                SliceSnapshot(
                    allocation_id=secret(tenant, "alloc"), device_uuid=self.card(number, tenant), tenant=tenant, mode="hook", state="active",
                    used_basis="hook", generation=1, enforcement="hook", promise_ppm=250_000, memory_promise_bytes=1, created_us=1, origin="o",
                )
                for tenant in sorted(tenants)
            ),
            processes=tuple(
                ProcessSnapshot(pid=700_000 + 1000 * TENANTS.index(tenant), start_ticks=1, device_uuid=self.card(number, tenant), hooked=True,
                                command=secret(tenant, "cmd"), tenant=tenant)
                for tenant in sorted(tenants)
            ),
            sources=(SourceHealth(source="nvml", ok=False, at_us=NOW, duration_us=1, reason=HUSH),),
        )  # fmt: skip

    def forbidden(self, tenant: str) -> set[str]:
        """Texts that no answer to a tenant may hold: others' names, pids, nodes and cards where it has nothing, and all epochs."""
        texts = {HUSH}
        for number, tenants in enumerate(self.nodes):
            texts.add(str(uuid.UUID(int=number + 1)))
            if tenant not in tenants:
                texts |= {f"node-{number}-", f"GPU-{number}-"}
            elif tenant == TENANTS[2]:
                texts.add(f"GPU-{number}-shared")
            else:
                texts.add(f"GPU-{number}-{TENANTS[2]}")
        for other in TENANTS:
            if other != tenant:
                texts |= {secret(other, what) for what in ("alloc", "project", "user", "cmd", "decision", "why")}
                texts.add(str(700_000 + 1000 * TENANTS.index(other)))
        return texts


async def everything(state: ApiState, http: httpx.AsyncClient, names: list[str]) -> dict[str, bytes]:
    """The bodies of all endpoints, asked in every way there is, others' names as filters included."""
    found = {}
    app = create_app(state)
    for route in app.routes:
        if isinstance(route, Route):
            for method in sorted((route.methods or set()) - {"HEAD"}):
                answer = await http.request(method, route.path.replace("{id}", names[0]), json={} if method == "POST" else None)
                found[f"{method} {route.path}"] = answer.content + str(answer.headers).encode()
    words = [{}, *({name: value} for name in ("tenant", "node", "pool") for value in (*names, "nobody"))]
    for path, more in REPORTS:
        for asked in [*({**one, **more[0]} for one in words), *more[1:]]:
            answer = await http.get(path, params={**(PERIOD if path.startswith("/v1") else {}), **asked})
            assert answer.status_code in (200, 400), answer.text
            found[f"{path} {asked}"] = answer.content
    # A period that cannot be reported says nothing of why.
    found["missing price"] = (await http.get("/v1/reports/chargeback", params={"from": "2020-01-01", "to": "2020-01-02"})).content
    filters = [{}, *({name: value} for name in ("node", "tenant", "allocation", "device") for value in names)]
    for kind, tier in (
        ("slice", "minute"),
        ("slice", "day"),
        ("process", "minute"),
        ("event", "minute"),
        ("device", "minute"),
        ("device", "day"),
    ):
        for asked in filters:
            params = {**PERIOD, "kind": kind, "tier": tier, **asked}
            answer = await http.get("/v1/usage", params=params)
            found[f"usage {params}"] = answer.content
            arrow = await http.get("/v1/usage", params=params, headers={"Accept": ARROW})
            if arrow.status_code == 200:
                found[f"arrow {params}"] = str(pa.ipc.open_stream(io.BytesIO(arrow.content)).read_all().to_pylist()).encode()
    for node in names:
        found[f"decisions {node}"] = (await http.get("/v1/decisions", params={"node": node})).content
    for column in ("sequence", "epoch", "busy_us"):
        found[f"column {column}"] = (await http.get("/v1/usage", params={**PERIOD, "columns": column})).content
    return found


POOLS = st.lists(st.frozensets(st.sampled_from(TENANTS)).filter(bool), min_size=1, max_size=3).map(Pool)


@example(Pool([frozenset(TENANTS), frozenset(TENANTS[:1])]), TENANTS[1])
@settings(max_examples=max(3, settings().max_examples // 40))  # each is a store, and some two hundred requests
@given(pool=POOLS, tenant=st.sampled_from(TENANTS))
def test_no_byte_of_another_tenant_is_ever_answered(pool: Pool, tenant: str) -> None:
    with tempfile.TemporaryDirectory() as folder, collector(Path(folder)) as state:
        pool.fill(state)
        nodes = [f"node-{number}-" for number in range(len(pool.nodes))]
        # A filter that is refused may be said back: the names asked for are those of nodes and cards that the tenant does not see.
        names = [secret(other, "alloc") for other in TENANTS if other != tenant] + nodes + ["GPU-0-shared"]

        async def ask() -> tuple[dict[str, bytes], list[dict[str, Any]]]:
            (Path(folder) / "plan.toml").write_text(PLAN)
            reports = report_routes(state.store.root, AccountingSection(plan=Path(folder) / "plan.toml"), state.clock, asking_tenant)
            async with client(state, token_of(state, Role.TENANT, tenant), reports) as http:
                rows = (await http.get("/v1/usage", params={**PERIOD, "limit": "100"})).json()["rows"]
                return await everything(state, http, names), rows

        found, rows = asyncio.run(ask())
    for what, body in found.items():
        for text in pool.forbidden(tenant):
            assert text.encode() not in body, (what, text, body[:500])
    # And it does see what is its own.
    assert len(rows) == 3 * sum(tenant in tenants for tenants in pool.nodes)
    assert all(row["tenant"] == tenant for row in rows)


@pytest.fixture
def shared(tmp_path: Path):  # type: ignore[no-untyped-def]
    with collector(tmp_path) as state:
        Pool([frozenset(TENANTS), frozenset(TENANTS[:1])]).fill(state)
        yield state


async def test_a_tenant_sees_its_slices_its_card_by_name_and_its_decisions(shared: ApiState) -> None:
    async with client(shared, token_of(shared, Role.TENANT, TENANTS[1])) as http:
        nodes = (await http.get("/v1/snapshot")).json()["rows"]
        assert [part["tenant"] for node in nodes for part in node["slices"]] == [TENANTS[1]]
        assert [node["devices"] for node in nodes] == [[{"uuid": "GPU-0-shared", "model": "H200"}]]
        assert nodes[0]["sources"] == [] and "sequence" not in nodes[0]
        rows = (await http.get("/v1/decisions")).json()["rows"]
        assert [row["id"] for row in rows] == [secret(TENANTS[1], "decision-0")]
        assert rows[0]["state"] == "rejected" and not {"sequence", "state_reason", "decided_by"} & set(rows[0])
        assert (await http.get("/v1/usage", params={"kind": "device"})).status_code == 403


async def test_a_tenants_reports_are_its_part_of_everybodys(shared: ApiState, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    reports = report_routes(shared.store.root, AccountingSection(plan=tmp_path / "plan.toml"), shared.clock, asking_tenant)
    async with client(shared, extra=reports) as admin, client(shared, token_of(shared, Role.TENANT, TENANTS[1]), reports) as own:
        for path, more in REPORTS[:2]:
            for asked in more:
                if path.endswith("chargeback") and not {"node", "hour", "part"}.isdisjoint(asked["by"].replace(",", " ").split()):
                    continue  # shared cost has no device there
                params = {**PERIOD, **asked}
                every = (await admin.get(path, params={**params, "tenant": TENANTS[1]})).json()
                mine = (await own.get(path, params=params)).json()
                assert mine["rows"] == every["rows"] != []
                assert mine["totals"] == {name: value for name, value in every["totals"].items() if name in mine["totals"]}
                assert not {"idle", "unallocated", "overhead", "capacity_us"} & set(mine["totals"])
        bill = (await own.get("/v1/reports/chargeback", params={**PERIOD, "by": "tenant"})).json()
        assert [row["tenant"] for row in bill["rows"]] == [TENANTS[1]] and float(bill["rows"][0]["shared_cost"]) > 0
        others = (await own.get("/v1/reports/chargeback", params={**PERIOD, "tenant": TENANTS[0]})).json()
        assert others["rows"] == [] and others["totals"]["cost"] == "0.00"
    # Where nobody says who asks, a tenant is not answered at all.
    unsaid = report_routes(shared.store.root, AccountingSection(), shared.clock)
    async with client(shared, token_of(shared, Role.TENANT, TENANTS[2]), unsaid) as http:
        for path, _ in REPORTS:
            assert (await http.get(path, params=PERIOD)).status_code == 403


async def test_another_tenants_name_and_no_name_at_all_find_the_same(shared: ApiState) -> None:
    async with client(shared, token_of(shared, Role.TENANT, TENANTS[1])) as http:
        for parameter, taken in (("tenant", TENANTS[0]), ("allocation", secret(TENANTS[0], "alloc")), ("node", "node-1-")):
            answers = [(await http.get("/v1/usage", params={**PERIOD, parameter: value})) for value in (taken, "x" * len(taken))]
            assert answers[0].content == answers[1].content and answers[0].status_code == 200


@pytest.mark.parametrize("tier", ["minute", "day"])
async def test_a_tenants_pages_join_to_the_whole_and_their_cursors_hold_no_position(shared: ApiState, tier: str) -> None:
    async with client(shared, token_of(shared, Role.TENANT, TENANTS[0])) as http:
        whole = (await http.get("/v1/usage", params={**PERIOD, "tier": tier})).json()["rows"]
        seen: list[object] = []
        cursor: str | None = None
        while True:
            params = {**PERIOD, "tier": tier, "limit": "1", **({"cursor": cursor} if cursor else {})}
            page = (await http.get("/v1/usage", params=params)).json()
            seen += page["rows"]
            cursor = page.get("cursor")
            if cursor is None:
                break
            assert len(str(parse_cursor(cursor, [int, str, str])[2])) == 32
        assert seen == whole and len(whole) == (6 if tier == "minute" else 2)
        # A position in a spool is no cursor of a tenant's.
        async with client(shared) as admin:
            theirs = (await admin.get("/v1/usage", params={**PERIOD, "limit": "1"})).json()["cursor"]
        assert (await http.get("/v1/usage", params={**PERIOD, "cursor": theirs})).status_code == 400


async def test_pages_of_decisions_join_to_the_whole_and_anothers_id_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions_module, "LIST_LIMIT_MOST", 2)
    with collector(tmp_path) as state:
        Pool([frozenset(TENANTS)] * 3).fill(state)
        own = token_of(state, Role.TENANT, TENANTS[1])
        for token, count in ((None, 9), (own, 3)):
            async with client(state, token) if token else client(state) as http:
                seen: list[str] = []
                after: str | None = None
                while True:
                    page = (await http.get("/v1/decisions", params={"limit": "1", **({"after": after} if after else {})})).json()
                    seen += [row["id"] for row in page["rows"]]
                    after = page.get("after")
                    if after is None:
                        break
                    assert after == seen[-1]
                assert len(seen) == len(set(seen)) == count
        async with client(state, own) as http:
            ids = (secret(TENANTS[0], "decision-0"), "x" * len(secret(TENANTS[0], "decision-0")), "\u0000")
            answers = [await http.get("/v1/decisions", params={"after": one, "limit": "1"}) for one in ids]
            assert {answer.status_code for answer in answers} == {404}
            assert answers[0].text.replace(ids[0], "") == answers[1].text.replace(ids[1], "")


async def test_an_allocation_that_two_tenants_are_said_to_have_is_neithers(tmp_path: Path) -> None:
    with collector(tmp_path) as state:
        epoch = str(uuid.UUID(int=1))
        rows = [
            replace(slice_("n1", epoch, n + 1, DAY + n * MINUTE_US, tenant), allocation_id="both") for n, tenant in enumerate(TENANTS[:2])
        ]
        state.store.publish([batch(rows, "n1", epoch)], now_us=NOW)
        state.books.add_decisions([Decision("d1", "n1", "both", "GPU-1", 1, 0, NOW, NOW + HOUR_US, "rule", "why", "00", memory_bytes=5)])
        for tenant in TENANTS[:2]:
            async with client(state, token_of(state, Role.TENANT, tenant)) as http:
                assert (await http.get("/v1/decisions")).json()["rows"] == []
