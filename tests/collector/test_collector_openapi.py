"""The document says what is served: every answer of every endpoint fits its schema, and no status is one that it does not name."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from collector_fakes import DAY, EPOCH, NOW, batch, records, snapshot
from collector_served import ADMIN, client, collector, token_of

from poolmeter.accounting.routes import routes as report_routes
from poolmeter.collector.api import ApiState, create_app
from poolmeter.collector.auth import ACCESS, OPEN, Role
from poolmeter.collector.now import newest
from poolmeter.collector.state import NodeRow
from poolmeter.collector.usage import ARROW
from poolmeter.config import AccountingSection
from poolmeter.model.decision import Decision
from poolmeter.model.plain import to_plain
from poolmeter.model.units import HOUR_US
from poolmeter.model.usage import RecordKind
from poolmeter.serve import asking_tenant

PERIOD = "from=2027-01-15&to=2027-01-16"


@pytest.fixture
def state(tmp_path: Path) -> Iterator[ApiState]:
    with collector(tmp_path) as made:
        rows = [
            NodeRow("http://n1", "n1", EPOCH, NOW, "up", None, "p", True),
            NodeRow("http://n2", None, None, NOW, "failing", "no answer"),
        ]
        # A record that breaks a rule, so that the health page has somebody to name.
        bad = batch([*records("n1", EPOCH, 1, 42, DAY), *records("elsewhere", EPOCH, 43, 4, DAY)], now=NOW)
        made.store.publish([bad], [newest(snapshot("n1", EPOCH, NOW))], rows, now_us=NOW)
        made.books.add_decisions([Decision("d1", "n1", "a-t1", "GPU-1", 1, 0, NOW, NOW + HOUR_US, "rule", "why", "00", memory_bytes=5)])
        yield made


def fits(document: dict[str, Any], method: str, path: str, answer: httpx.Response) -> None:
    operation = document["paths"][path][method.lower()]
    assert str(answer.status_code) in operation["responses"], (method, path, answer.status_code, answer.text[:200])
    content = operation["responses"][str(answer.status_code)]["content"]
    media = answer.headers["content-type"].split(";")[0]
    assert media in content, (method, path, media)
    if media == "application/json":
        schema = {**content[media]["schema"], "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(answer.json())


def application(state: ApiState) -> Any:
    return create_app(state, report_routes(state.store.root, AccountingSection(), state.clock, asking_tenant))


@pytest.mark.parametrize("role", [Role.ADMIN, Role.TENANT, Role.NODE])
async def test_every_answer_fits_the_document(state: ApiState, role: Role) -> None:
    app = application(state)
    async with client(state, app=app) as http:
        document = (await http.get("/openapi.json")).json()
    async with client(state, ADMIN if role is Role.ADMIN else token_of(state, role), app=app) as http:
        made = to_plain(Decision("d2", "n1", "a1", "GPU-1", 1, 0, NOW, NOW + HOUR_US, "rule", "why", "00", memory_bytes=5))
        bodies = {
            "/v1/decisions": {"decisions": [made]},
            "/v1/books/assets": {"assets": [{"uuid": "GPU-1", "owner": "vision"}], "reason": "why"},
        }
        for method, path in ACCESS:
            asked = {"window": "1d"} if path.startswith("/allocation") else {}  # the one parameter that is not optional
            body = bodies.get(path, {}) if method == "POST" else None
            answer = await http.request(method, path.replace("{id}", "d1"), params=asked, json=body)
            fits(document, method, path, answer)
            assert role not in ACCESS[method, path] or role is not Role.ADMIN or answer.status_code in (200, 409), (
                method,
                path,
                answer.text,
            )
        for kind in RecordKind:
            for tier in ("minute", "day"):
                for accept in ("application/json", ARROW):
                    path = f"/v1/usage?kind={kind.value}&tier={tier}&limit=2&{PERIOD}"
                    fits(document, "GET", "/v1/usage", await http.get(path, headers={"Accept": accept}))


WORDS = (
    "",
    "x",
    "-1",
    "0",
    "9" * 30,
    "7d",
    "2027-01-15",
    "slice",
    "event",
    "device",
    "day",
    "hour",
    "n1",
    "é",
    "\u0000",
    "'; --",
    "tenant,node",
)


async def test_no_question_is_answered_otherwise_than_the_document_says(
    state: ApiState, rng: random.Random, rounds: Callable[[int, int], Iterator[int]]
) -> None:
    app = application(state)
    async with client(state, app=app) as http:
        document = (await http.get("/openapi.json")).json()
        reads = [path for method, path in ACCESS if method == "GET" and path.startswith(("/v1/", "/allocation"))]
        for _ in rounds(120, 20_000):
            path = rng.choice(reads)
            names = [item["name"] for item in document["paths"][path]["get"]["parameters"]] or ["none"]
            params = [(rng.choice([*names, "other"]), rng.choice(WORDS)) for _ in range(rng.randint(0, 3))]
            answer = await http.get(path, params=params)
            fits(document, "GET", path, answer)
            if answer.status_code == 400:
                told = answer.json()
                assert "\n" not in told.get("error", told.get("message"))


async def test_the_document_names_roles_and_schemas_that_are_there(state: ApiState) -> None:
    async with client(state, app=application(state)) as http:
        document = (await http.get("/openapi.json")).json()
    for method, path in ACCESS:
        operation = document["paths"][path][method.lower()]
        assert operation["x-roles"] == sorted(ACCESS[method, path])
        assert (operation["security"] == []) == (path in OPEN)
        answer = operation["responses"]["200"]["content"].get("application/json")
        if answer is not None:
            assert answer["schema"]["$ref"].rsplit("/", 1)[1] in document["components"]["schemas"]
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_the_health_page_names_who_sent_what_breaks_a_rule(state: ApiState) -> None:
    async with client(state) as http:
        body = (await http.get("/v1/health")).json()
        again = (await http.get("/v1/health")).json()
    row = next(row for row in body["rows"] if row.get("node") == "n1")
    assert row["quarantine_rows"] == 4 and "node is 'elsewhere', expected 'n1'" in row["quarantine_reason"]
    assert body["status"] == "degraded" and any(text.startswith("node n1 sent 4 rows within a day") for text in body["warnings"])
    assert again["rows"] == body["rows"]
