"""The API: every route, both formats, paging, decisions, tokens, errors in one sentence, OpenAPI and metrics."""

import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pyarrow as pa
import pytest
from collector_fakes import records, snapshot
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from poolmeter import arrow
from poolmeter.books.writer import Books
from poolmeter.clock import ManualClock
from poolmeter.collector.api import ARROW, ApiState, create_app
from poolmeter.collector.check import RULES, Expected, check_usage
from poolmeter.collector.now import newest
from poolmeter.collector.publisher import Publisher
from poolmeter.collector.pullers import Names
from poolmeter.collector.push import Pushes
from poolmeter.collector.reception import NodeStatus
from poolmeter.collector.state import NodeRow
from poolmeter.collector.store import Batch, Store
from poolmeter.collector.tracing import Tracer
from poolmeter.config import CollectorSection
from poolmeter.model.decision import Decision
from poolmeter.model.plain import from_plain, to_plain
from poolmeter.model.snapshot import Snapshot
from poolmeter.model.units import HOUR_US
from poolmeter.model.usage import RecordKind
from poolmeter.web.otlp import Poster

DAY = 1_799_971_200_000_000
NOW = DAY + 12 * HOUR_US
TOKEN = "between-daemons"
EPOCH = "0b8f1c1e-5a55-4c59-9a55-0d6a4a2c7b11"
MADE = records("n1", EPOCH, 1, 42, DAY)
DECISION = Decision("d1", "n1", "a1", "GPU-1", 1, 0, NOW, NOW + HOUR_US, "rule", "why", "00", memory_bytes=5)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[ApiState]:
    with Store(tmp_path / "store") as store, Books(tmp_path / "books.sqlite", ManualClock(NOW)) as books:
        checked = check_usage(arrow.to_table(MADE), Expected("n1", EPOCH, 42, NOW))
        bad = NodeRow("http://n2", None, None, NOW, "failing", "no answer")
        rows = [NodeRow("http://n1", "n1", EPOCH, NOW, "up", None, "p", True), bad]
        store.publish([Batch("n1", EPOCH, checked, NOW)], [newest(snapshot("n1", EPOCH, NOW))], rows, now_us=NOW)
        statuses = [NodeStatus(row, pulls=3, failures=index, rows=42) for index, row in enumerate(store.state.nodes.values())]
        yield ApiState(store, books, TOKEN, lambda: statuses, clock=ManualClock(NOW))


def client(state: ApiState, *extra: Route, token: str | None = TOKEN) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(state, extra))
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.AsyncClient(transport=transport, base_url="http://collector", headers=headers)


async def test_writing_needs_the_token_where_reading_needs_none(state: ApiState) -> None:
    """Or whoever reaches the port could raise their own limit."""
    body = {"decisions": [to_plain(DECISION)], "by": "me"}
    async with client(state, token=None) as http:
        assert (await http.get("/v1/decisions")).status_code == 200
        for headers, found in (({}, "has no token"), ({"Authorization": "Bearer wrong"}, "has another token than the collector's")):
            answer = await http.post("/v1/decisions", json=body, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"].startswith(f"the request {found}, expected Authorization: Bearer with the token of")
            assert (await http.post("/v1/decisions/d1/approve", json={"by": "me"}, headers=headers)).status_code == 401
        assert (await http.get("/v1/decisions")).json()["rows"] == []
        assert (await http.post("/v1/decisions", json=body, headers={"Authorization": f"Bearer {TOKEN}"})).status_code == 200


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("/v1/usage?by=tenant", "kind or tier or from or to"),
        ("/v1/decisions?stat=approved", "state or node"),
        ("/v1/nodes?node=n1", "after or limit"),
        ("/v1/health?node=n1", "none"),
    ],
)
async def test_a_parameter_that_is_not_known_is_refused(state: ApiState, path: str, known: str) -> None:
    """A filter that is silently ignored answers for everything."""
    async with client(state) as http:
        answer = await http.get(path)
    assert answer.status_code == 400 and f"expected {known}" in answer.json()["error"]


async def test_probes_and_scrapes_may_add_parameters(state: ApiState) -> None:
    async with client(state) as http:
        assert [(await http.get(f"{path}?probe=1")).status_code for path in ("/healthz", "/metrics")] == [200, 200]


async def test_health_names_the_node_that_fails_and_why(state: ApiState) -> None:
    async with client(state) as http:
        body = (await http.get("/v1/health")).json()
        assert body["schema"] == "poolmeter.health/1" and body["status"] == "degraded"
        assert body["warnings"] == ["node http://n2 is failing: no answer"]
        assert body["store"]["writable"] and body["store"]["generation"] == 2 and body["store"]["quarantine_rows"] == 0
        assert body["store"]["disk_free_bytes"] > 0
        first = body["rows"][0]
        assert (first["node"], first["state"], first["last_sequence"], first["pulls"]) == ("n1", "up", 42, 3)
        assert first["last_pull"].endswith("Z") and "reason" not in first
        assert (await http.get("/v1/nodes")).json()["rows"] == body["rows"]
        assert (await http.get("/healthz")).status_code == (await http.get("/readyz")).status_code == 200
        state.store.trouble = "store x cannot be written: No space left on device"
        ready = await http.get("/readyz")
        assert ready.status_code == 503 and "No space left" in ready.text
        assert "No space left" in (await http.get("/v1/health")).json()["warnings"][0]


@pytest.mark.parametrize("kind", list(RecordKind))
async def test_usage_gives_the_records_back_in_both_formats(state: ApiState, kind: RecordKind) -> None:
    wanted = [record for record in MADE if type(record).__name__.lower().startswith(kind.value)]
    async with client(state) as http:
        body = (await http.get("/v1/usage", params={"kind": kind.value})).json()
        assert body["rows"] == [to_plain(record) for record in wanted] and "cursor" not in body
        assert body["from"] == "2027-01-01T00:00:00Z" and body["to"] == "2027-01-15T12:00:00Z"
        answer = await http.get("/v1/usage", params={"kind": kind.value}, headers={"Accept": ARROW})
        assert answer.headers["content-type"] == ARROW
        table = pa.ipc.open_stream(io.BytesIO(answer.content)).read_all()
        assert table.schema.equals(arrow.kind_schema(kind), check_metadata=True)
        assert table.to_pylist() == [{name: getattr(record, name) for name in table.column_names} for record in wanted]


async def test_pages_join_to_the_whole_without_a_gap(state: ApiState) -> None:
    async with client(state) as http:
        seen: list[int] = []
        cursor: str | None = None
        for _ in range(20):
            params = {"kind": "device", "limit": "4", **({"cursor": cursor} if cursor else {})}
            answer = await http.get("/v1/usage", params=params)
            seen += [row["sequence"] for row in answer.json()["rows"]]
            cursor = answer.json().get("cursor")
            assert answer.headers.get("X-Poolmeter-Cursor") == cursor
            if cursor is None:
                break
        assert seen == list(range(4, 43, 4))
        part = await http.get("/v1/usage", params={"kind": "device", "from": "2027-01-15T00:02:00Z", "to": "2027-01-15T00:04:00Z"})
        assert [row["sequence"] for row in part.json()["rows"]] == [8, 12]


@pytest.mark.parametrize(
    "query",
    [
        "kind=gadget", "limit=0", "limit=x", "limit=100001", "limit=%C2%B2", "from=never", "from=2027-01-15&to=2027-01-14", "cursor=abc",
        "cursor=WzEsMl0",
    ],
)  # fmt: skip
async def test_bad_questions_get_one_sentence(state: ApiState, query: str) -> None:
    async with client(state) as http:
        answer = await http.get(f"/v1/usage?{query}")
    assert answer.status_code == 400
    assert "expected" in answer.json()["error"] and "\n" not in answer.json()["error"]


async def test_snapshots_come_back_as_they_were(state: ApiState) -> None:
    async with client(state) as http:
        rows = (await http.get("/v1/snapshot")).json()["rows"]
    assert [from_plain(Snapshot, row) for row in rows] == [snapshot("n1", EPOCH, NOW)]


async def test_decisions_are_entered_approved_and_listed(state: ApiState) -> None:
    plain = to_plain(DECISION)
    plain.pop("sequence")
    async with client(state) as http:
        entered = await http.post("/v1/decisions", json={"decisions": [plain, {**plain, "id": "d2"}], "by": "recommender"})
        assert entered.status_code == 200
        assert [(row["id"], row["sequence"], row["state"]) for row in entered.json()["rows"]] == [
            ("d1", 1, "proposed"),
            ("d2", 2, "proposed"),
        ]
        moved = await http.post("/v1/decisions/d1/approve", json={"by": "ann", "reason": "fine"})
        assert moved.json()["rows"][0]["state"] == "approved" and moved.json()["rows"][0]["decided_by"] == "ann"
        approved = (await http.get("/v1/decisions", params={"state": "approved", "node": "n1"})).json()
        assert [from_plain(Decision, row).id for row in approved["rows"]] == ["d1"]
        assert (await http.post("/v1/decisions/d2/reject", json={})).json()["rows"][0]["decided_by"] == "api"
        assert (await http.get("/v1/decisions", params={"state": "approved", "node": "n2"})).json()["rows"] == []


async def test_wrong_changes_of_decisions_are_refused_with_their_status(state: ApiState) -> None:
    headers = {"Content-Type": "application/json"}
    state.books.add_decisions([DECISION])
    async with client(state) as http:
        for path, content, sent, status in [
            ("/v1/decisions/d9/approve", b"{}", headers, 404),
            ("/v1/decisions/d1/approve", b"{}", {"Content-Type": "text/plain"}, 415),
            ("/v1/decisions/d1/approve", b"", {}, 415),
            ("/v1/decisions/d1/approve", b"[]", headers, 400),
            ("/v1/decisions/d1/approve", b"{", headers, 400),
            ("/v1/decisions/d1/approve", b'{"by": 5}', headers, 400),
            ("/v1/decisions/d1/approve", b" " * (1 << 20) + b"{}", headers, 413),
            ("/v1/decisions", b'{"decisions": []}', headers, 400),
            ("/v1/decisions", b'{"decisions": [5]}', headers, 400),
            ("/v1/decisions", b'{"decisions": [{"id": "d5"}]}', headers, 400),
            ("/v1/decisions", json.dumps({"decisions": [{**to_plain(DECISION), "generation": 8}]}).encode(), headers, 409),
        ]:
            answer = await http.post(path, content=content, headers=sent)
            assert (answer.status_code, "error" in answer.json()) == (status, True), (path, content[:40], answer.text)
        assert (await http.get("/v1/decisions", params={"state": "lost"})).status_code == 400
        await http.post("/v1/decisions/d1/reject", json={})
        again = await http.post("/v1/decisions/d1/approve", json={})
        assert again.status_code == 409 and "is rejected and cannot become approved" in again.json()["error"]


async def test_a_store_that_is_gone_is_said_so(state: ApiState) -> None:
    shutil.rmtree(state.store.root / "segments")
    async with client(state) as http:
        answer = await http.get("/v1/usage?kind=slice")
    assert answer.status_code == 503 and "cannot be read" in answer.json()["error"]


async def test_a_token_guards_everything_but_liveness(state: ApiState) -> None:
    state.reads_need_token = True
    async with client(state, token=None) as http:
        for path in ("/v1/health", "/v1/usage", "/v1/decisions", "/metrics", "/openapi.json"):
            assert (await http.get(path)).status_code == 401
            assert (await http.get(path, headers={"Authorization": "Bearer wrong"})).status_code == 401
            assert (await http.get(path, headers={"Authorization": f"Bearer {TOKEN}"})).status_code == 200
        assert (await http.post("/v1/decisions/d1/approve", json={})).status_code == 401
        assert (await http.get("/healthz")).status_code == 200


async def test_openapi_holds_every_route_and_the_routes_of_other_components(state: ApiState) -> None:
    async def extra(_: Request) -> Response:
        """What it cost."""
        return PlainTextResponse("42")

    app = create_app(state, [Route("/v1/chargeback", extra)])
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://collector", headers=headers) as http:
        document = (await http.get("/openapi.json")).json()
        assert (await http.get("/v1/chargeback")).text == "42"
    assert document["openapi"].startswith("3.")
    served = {(route.path, method) for route in app.routes if isinstance(route, Route) for method in (route.methods or set()) - {"HEAD"}}
    listed = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert served == listed
    assert document["paths"]["/v1/chargeback"]["get"]["summary"] == "What it cost."
    assert {parameter["name"] for parameter in document["paths"]["/v1/usage"]["get"]["parameters"]} == {
        "kind",
        "from",
        "to",
        "tier",
        "node",
        "tenant",
        "allocation",
        "device",
        "columns",
        "limit",
        "cursor",
    }


async def test_metrics_are_prometheus_text_with_the_numbers_of_the_health_page(state: ApiState) -> None:
    async with client(state) as http:
        text = (await http.get("/metrics")).text
    samples = {(s.name, tuple(s.labels.values())): s.value for family in text_string_to_metric_families(text) for s in family.samples}
    assert samples[("poolmeter_collector_pulls_total", ("http://n1",))] == 3
    assert samples[("poolmeter_collector_node_up", ("http://n2",))] == 0
    assert samples[("poolmeter_collector_store_rows", ("slice",))] == sum(1 for record in MADE if type(record).__name__ == "SliceRecord")
    assert samples[("poolmeter_collector_store_writable", ())] == 1
    assert not any(name == "poolmeter_collector_node_lag_seconds" for name, _ in samples)


async def test_the_reference_page_lists_every_endpoint_metric_rule_and_setting(state: ApiState) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "collector.md").read_text("utf-8")
    parts = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    first = {name: re.findall(r"^\| `([^`]+)` \|", text, re.M) for name, text in parts.items()}
    state.push = Pushes({}, Publisher(state.store), Names({}), "c1", state.clock, lambda _: None).push
    app = create_app(state)
    routes = [
        f"{method} {route.path}" for route in app.routes if isinstance(route, Route) for method in (route.methods or set()) - {"HEAD"}
    ]
    assert sorted(first["API"]) == sorted(routes)
    state.publisher = Publisher(state.store)
    state.tracer = Tracer(Poster("http://127.0.0.1:1", "test", environment={}), "c1")
    state.reload_ok = lambda: True
    status = state.statuses()[0]
    status.lag_us = 5
    async with client(state) as http:
        text = (await http.get("/metrics")).text
    families = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert sorted(first["Metrics"]) == sorted(name + ("_total" if kind == "counter" else "") for name, kind in families.items())
    assert first["Rules of ingestion"] == [rule.name for rule in RULES]
    settings = re.findall(r"^\| `([^`]+)` \|", page.split("\n## ")[0], re.M)
    assert settings == list(CollectorSection.model_fields)


async def test_the_page_of_metrics_is_one_that_prometheus_takes_without_a_word(state: ApiState) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    state.publisher, state.reload_ok = Publisher(state.store), lambda: False
    state.tracer = Tracer(Poster("http://127.0.0.1:1", "test", environment={}), "c1")
    app = create_app(state)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://collector") as http:
        for path in ("/v1/usage", "/v1/nodes", "/v1/nothing", "/v1/usage?kind=x"):
            await http.get(path)
        await http.post("/v1/decisions", json={})
        body = (await http.get("/metrics")).content
    checked = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout.decode() + checked.stderr.decode()
    samples = {(s.name, *sorted(s.labels.values())): s.value for f in text_string_to_metric_families(body.decode()) for s in f.samples}
    name = "poolmeter_collector_http_requests_total"
    assert samples[name, "/v1/usage", "200", "GET"] == samples[name, "/v1/usage", "400", "GET"] == 1
    assert samples[name, "(none)", "404", "GET"] == samples[name, "/v1/decisions", "401", "POST"] == 1
    assert (
        samples["poolmeter_collector_http_request_seconds_count", "/v1/usage"] == 2 and samples["poolmeter_collector_http_in_flight",] == 1
    )
    assert samples["poolmeter_collector_http_rejected_total", "token"] == 1 and samples["poolmeter_collector_query_seconds_count",] == 2
