"""Who may ask what: a table that holds every route, roles that are held to it, credentials that come and go, rates."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import bcrypt
import httpx
import pytest
from collector_fakes import DAY, EPOCH, NOW, batch, records, snapshot
from collector_served import ADMIN, PERSONS, client, collector, token_of
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from poolmeter.accounting.routes import routes as report_routes
from poolmeter.collector.api import ApiState, create_app
from poolmeter.collector.auth import ACCESS, OPEN, Authority, Credentials, Role
from poolmeter.collector.limits import Limits, Rates
from poolmeter.collector.now import newest
from poolmeter.collector.state import NodeRow
from poolmeter.config import AccountingSection
from poolmeter.model.decision import Decision
from poolmeter.model.units import HOUR_US
from poolmeter.serve import asking_tenant
from poolmeter.web.config import WebConfig
from poolmeter.web.guard import Admission

DECISION = Decision("d1", "n1", "a-t1", "GPU-1", 1, 0, NOW, NOW + HOUR_US, "rule", "why", "00", memory_bytes=5)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[ApiState]:
    with collector(tmp_path) as made:
        row = NodeRow("http://n1", "n1", EPOCH, NOW, "up", None, "p", True)
        made.store.publish([batch(records("n1", EPOCH, 1, 42, DAY))], [newest(snapshot("n1", EPOCH, NOW))], [row], now_us=NOW)
        made.books.add_decisions([DECISION])
        yield made


def reports(state: ApiState) -> list[Route]:
    return report_routes(state.store.root, AccountingSection(), state.clock, asking_tenant)


def served(state: ApiState) -> list[tuple[str, str]]:
    """Every method of every route that the collector's process has."""
    routes = create_app(state, reports(state)).routes
    return [(method, route.path) for route in routes if isinstance(route, Route) for method in sorted((route.methods or set()) - {"HEAD"})]


def test_every_route_has_its_line_in_the_table_and_every_line_its_route(state: ApiState) -> None:
    assert sorted(served(state)) == sorted(ACCESS)


async def ask(http: httpx.AsyncClient, method: str, path: str) -> int:
    answer = await http.request(method, path.replace("{id}", "d1"), json={} if method == "POST" else None)
    return answer.status_code


@pytest.mark.parametrize("role", list(Role))
async def test_each_role_is_answered_what_the_table_says_and_nothing_else(state: ApiState, role: Role) -> None:
    token = {Role.ADMIN: ADMIN, Role.READER: None}.get(role) if role not in PERSONS else token_of(state, role)
    async with client(state, token, reports(state)) as http:
        for method, path in served(state):
            status = await ask(http, method, path)
            if role in ACCESS[method, path]:
                assert status not in (401, 403), (method, path)
            else:
                assert status == (403 if token else 401), (method, path)


@pytest.mark.parametrize("role", PERSONS)
async def test_what_no_line_names_is_the_admins(state: ApiState, role: Role) -> None:
    async def new(_: Request) -> Response:
        return PlainTextResponse("new")

    extra = [Route("/v1/new", new), Mount("/v2", routes=[Route("/new", new)])]
    app = create_app(state, extra)
    for path in ("/v1/new", "/v2/new"):
        async with client(state, token_of(state, role, name=path), app=app) as http:
            assert (await http.get(path)).status_code == 403
        async with client(state, app=app) as http:
            assert (await http.get(path)).text == "new"
    async with client(state, app=app) as http:
        assert (await http.get("/v1/nothing")).status_code == 404
        assert (await http.delete("/v1/nodes")).status_code == 405


async def test_reading_asks_for_a_token_once_somebody_has_one(state: ApiState) -> None:
    app, credentials = create_app(state), state.authority
    assert credentials is not None
    async with client(state, None, app=app) as http:
        assert (await http.get("/v1/nodes")).status_code == 200
        made, text = state.books.tokens.add("ann", _role("operator"), "test")
        credentials.forget()
        assert (await http.get("/v1/nodes")).status_code == 401
        assert (await http.get("/healthz")).status_code == 200
        headers = {"Authorization": f"Bearer {text}"}
        assert (await http.get("/v1/nodes", headers=headers)).status_code == 200
        state.books.tokens.revoke(made.id, "test")
        assert (await http.get("/v1/nodes", headers=headers)).status_code == 200  # known for a moment
        credentials.forget()
        assert (await http.get("/v1/nodes", headers=headers)).status_code == 401
        assert (await http.get("/v1/nodes")).status_code == 200


def _role(text: str):  # type: ignore[no-untyped-def]
    from poolmeter.books.tokens import Role as TokenRole

    return TokenRole(text)


async def test_a_known_token_is_looked_up_once_in_two_seconds_and_a_wrong_one_each_time() -> None:
    asked: list[str] = []
    now = [0.0]

    def find(secret: str) -> None:
        asked.append(secret)

    authority = Authority(Credentials("t", find=find), lambda: now[0])
    for _ in range(3):
        assert await authority.caller(b"Bearer x") is None
    assert asked == ["x", "x", "x"] and authority.recent(b"Bearer x") is None
    assert (await authority.caller(b"Bearer t")) is not None and authority.recent(b"Bearer t") is not None
    now[0] = 2.0
    assert authority.recent(b"Bearer t") is None
    for nonsense in (b"Bearer", b"Bearer \xff", b"Basic !", b"t", b" "):
        assert await authority.caller(nonsense) is None


async def test_passwords_and_tokens_of_the_web_configuration_read(state: ApiState) -> None:
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
    assert state.authority is not None
    web = Admission(WebConfig(basic_auth_users={"alice": hashed}, tokens=("scrape",)))
    state.authority.credentials.web = web
    async with client(state, None) as http:
        assert (await http.get("/v1/nodes")).status_code == 401
        assert (await http.get("/v1/nodes", auth=("alice", "wrong"))).status_code == 401
        assert (await http.get("/v1/nodes", auth=("alice", "secret"))).status_code == 200
        assert (await http.post("/v1/decisions/d1/approve", json={}, auth=("alice", "secret"))).status_code == 403
        assert (await http.get("/metrics", headers={"Authorization": "Bearer scrape"})).status_code == 200
        assert (await http.get("/metrics", headers={"Authorization": f"Bearer {ADMIN}"})).status_code == 200


async def test_the_books_say_which_token_it_was_whatever_the_client_says(state: ApiState) -> None:
    async with client(state, token_of(state, Role.OPERATOR, name="night shift")) as http:
        answer = await http.post("/v1/decisions/d1/approve", json={"by": "the boss", "reason": "fine"})
        assert answer.json()["rows"][0]["decided_by"] == "the boss (night shift)"
    async with client(state, token_of(state, Role.FINANCE)) as http:
        rows = (await http.get("/v1/books/decisions", params={"decision": "d1"})).json()["rows"]
        assert [(row.get("from_state"), row["to_state"], row["by"]) for row in rows] == [
            (None, "proposed", "recommender"),
            ("proposed", "approved", "the boss (night shift)"),
        ]
        seen, after = [], 0
        for _ in itertools.count():
            page = (await http.get("/v1/books/log", params={"limit": "1", "after": str(after)})).json()
            seen += [(row["subject"], row["key"]) for row in page["rows"]]
            if "after" not in page:
                break
            after = page["after"]
        assert seen.count(("decisions", "d1")) == 2 and len(seen) == len(set(seen)) + 1
        text = (await http.get("/v1/books/log")).text
    assert "secret" not in text and "sha256" not in text


async def test_too_many_requests_of_one_caller_are_told_when_to_come_back(state: ApiState) -> None:
    state.limits = Limits(requests_per_s=0.001)
    app, other = create_app(state), token_of(state, Role.OPERATOR)
    async with client(state, app=app) as http:
        # The first by its address, for nobody is known yet; the second by its token; the third is one too many.
        found = [(await http.get("/v1/nodes")) for _ in range(3)]
        assert [answer.status_code for answer in found] == [200, 200, 429]
        assert 900 < int(found[2].headers["Retry-After"]) <= 1000 and "too many requests" in found[2].json()["error"]
    assert state.observed.rejected.labels("rate")._value.get() == 1
    # Who was never seen counts by address, which is used up; a wrong token is not even looked at.
    for token in (other, "wrong", None):
        async with client(state, token, app=app) as http:
            assert (await http.get("/v1/nodes")).status_code == 429


async def test_who_was_seen_is_not_held_up_by_others_at_its_address(state: ApiState) -> None:
    now = [0.0]
    assert state.authority is not None
    state.authority._monotonic = lambda: now[0]
    state.limits = Limits(requests_per_s=1.0)
    app = create_app(state)
    async with client(state, app=app) as known, client(state, "wrong", app=app) as stranger:
        assert (await known.get("/v1/nodes")).status_code == 200
        now[0] = 60.0  # long past the two seconds for which its role is known
        refused = [(await stranger.get("/v1/nodes")).status_code for _ in range(50)]
        assert 429 in refused and set(refused) <= {401, 429}
        assert (await known.get("/v1/nodes")).status_code == 200


def test_a_bucket_fills_at_its_rate_and_callers_do_not_share_one() -> None:
    now = [0.0]
    rates = Rates(2.0, lambda: now[0])
    assert [rates.wait_s("a") for _ in range(4)] == [None] * 4
    assert rates.wait_s("a") == 0.5 and rates.wait_s("b") is None
    now[0] = 0.5
    assert rates.wait_s("a") is None and rates.wait_s("a") is not None
    for number in range(5000):
        rates.wait_s(str(number))
    assert len(rates._buckets) == 4096


@pytest.mark.parametrize("path", OPEN)
async def test_probes_need_nobody(state: ApiState, path: str) -> None:
    async with client(state, "wrong") as http:
        assert (await http.get(path)).status_code == 200
