"""The Python client: frames with types that tell what is not known, pages followed, errors in one sentence, and the page's own example."""

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest
from collector_fakes import DAY, EPOCH, NOW, batch, records, snapshot
from collector_served import ADMIN, collector, serving, token_of
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from poolmeter import client as module
from poolmeter.client import Client
from poolmeter.collector.api import ApiState, create_app
from poolmeter.collector.auth import Role
from poolmeter.collector.now import newest
from poolmeter.collector.state import NodeRow
from poolmeter.errors import BadInput, DataError, Refused, Unavailable
from poolmeter.model.decision import Decision
from poolmeter.model.units import HOUR_US
from poolmeter.model.usage import SliceRecord

MADE = records("n1", EPOCH, 1, 42, DAY)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiState]:
    with collector(tmp_path_factory.mktemp("client")) as made:
        rows = [
            NodeRow("http://n1", "n1", EPOCH, NOW, "up", None, "p", True),
            NodeRow("http://n2", None, None, NOW, "failing", "no answer"),
        ]
        made.store.publish([batch(MADE)], [newest(snapshot("n1", EPOCH, NOW))], rows, now_us=NOW)
        made.books.add_decisions([Decision("d1", "n1", "a-t1", "GPU-1", 1, 0, NOW, NOW + HOUR_US, "rule", "why", "00", memory_bytes=5)])
        made.books.assets.enter([{"uuid": f"GPU-{n}", "owner": "a"} for n in range(3)], "test", "test")
        yield made


@pytest.fixture(scope="module")
def url(state: ApiState) -> Iterator[str]:
    with serving(create_app(state)) as found:
        yield found


def test_usage_is_a_frame_with_types_that_know_what_is_not_known(url: str) -> None:
    frame = Client(url, ADMIN).usage(start="2027-01-15", end="2027-01-16")
    wanted = [record for record in MADE if isinstance(record, SliceRecord)]
    assert frame["sequence"].tolist() == [record.sequence for record in wanted]
    assert frame["minute"].dtype == "datetime64[us, UTC]" and frame["minute"][0] == pd.Timestamp(DAY, unit="us", tz="UTC")
    assert frame["used_us"].dtype == "Int64" and frame["tenant"].dtype == "string"
    assert frame["launches"].isna().all() and frame["last_activity"].isna().all() and frame["last_activity"].dtype == "datetime64[us, UTC]"
    process = Client(url, ADMIN).usage("process", datetime(2027, 1, 15, tzinfo=UTC), datetime(2027, 1, 16, tzinfo=UTC))
    assert process["hooked"].dtype == "boolean" and process["hooked"].all()


@pytest.mark.parametrize("path", ["/v1/nodes", "/v1/snapshot", "/v1/decisions", "/v1/books/assets"])
def test_a_list_in_pages_is_the_list(url: str, state: ApiState, path: str) -> None:
    client = Client(url, ADMIN)
    whole = client._object(path, [])
    found, after = [], ""
    for _ in whole["rows"]:
        page = client._object(path, [("limit", "1"), *([("after", after)] if after else [])])
        assert len(page["rows"]) == 1
        found += page["rows"]
        after = page.get("after", "")
    assert found == whole["rows"] == client._rows(path, [("limit", "1")]) and after == "" and "after" not in whole
    for limit in ("0", "10001", "x", "-1", "9" * 5000):
        with pytest.raises(BadInput, match="limit is"):
            client._object(path, [("limit", limit)])


def test_pages_are_followed_to_the_end(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    whole = Client.usage(Client(url, ADMIN), "device", "2027-01-15", "2027-01-16")
    plain = Client._ask

    def counted(self: Client, path: str, params: list[tuple[str, str]], accept: str) -> object:
        asked.append(dict(params).get("cursor"))
        return plain(self, path, [*params, ("limit", "3")], accept)

    monkeypatch.setattr(Client, "_ask", counted)
    pages = Client(url, ADMIN).usage("device", "2027-01-15", "2027-01-16")
    pd.testing.assert_frame_equal(pages, whole)
    assert len(asked) == 4 and len(set(asked)) == 4 and len(whole) == 10


def test_filters_tiers_and_columns(url: str) -> None:
    pool = Client(url, ADMIN)
    period = {"start": "2027-01-15", "end": "2027-01-16"}
    days = pool.usage(tier="day", **period)
    assert len(days) == 1 and days["records"][0] == 11 and days["day"][0] == pd.Timestamp("2027-01-15", tz="UTC")
    assert int(days["memory_allocated_kib_us"][0]) == sum(r.memory_allocated_kib_us for r in MADE if isinstance(r, SliceRecord))
    few = pool.usage(columns=["minute_us", "tenant"], tenant=["t1", "t2"], node="n1", device="GPU-1", allocation="a-t1", **period)
    assert list(few.columns) == ["minute", "tenant"] and len(few) == 11
    empty = pool.usage(tenant="nobody", **period)
    assert len(empty) == 0 and empty["used_us"].dtype == "Int64" and empty["minute"].dtype == "datetime64[us, UTC]"


def test_snapshot_nodes_health_and_decisions(url: str) -> None:
    pool = Client(url, ADMIN)
    parts = pool.snapshot()
    assert set(parts) == {"nodes", "devices", "slices", "processes", "sources"}
    assert parts["slices"]["tenant"].tolist() == ["t1"] and parts["slices"]["promise_ppm"].dtype == "Int64"
    assert len(parts["processes"]) == 0 and list(parts["processes"].columns) == ["node"]
    nodes = pool.nodes()
    assert nodes["state"].tolist() == ["up", "failing"] and nodes["node"].isna().tolist() == [False, True]
    assert nodes["simulated"].dtype == "boolean" and str(nodes["last_pull"].dtype).startswith("datetime64")
    assert pool.health()["status"] == "degraded"
    decisions = pool.decisions(state="proposed")
    assert decisions["id"].tolist() == ["d1"] and decisions["expires"][0] == pd.Timestamp(NOW + HOUR_US, unit="us", tz="UTC")
    assert len(pool.decisions(node="n2")) == 0


def test_errors_are_ours_with_the_collectors_sentence(url: str, state: ApiState) -> None:
    with pytest.raises(BadInput, match="kind is 'gadget', expected one of"):
        Client(url, ADMIN).usage("gadget")
    with pytest.raises(BadInput, match=r"from is .*expected a text such as 7d"):
        Client(url, ADMIN).usage(start=datetime(2027, 1, 1))
    with pytest.raises(Refused, match="the token is that of a node"):
        Client(url, token_of(state, Role.NODE)).nodes()
    with pytest.raises(Unavailable, match="has another token"):
        Client(url, "wrong").nodes()
    with pytest.raises(Unavailable, match="does not answer"):
        Client("http://127.0.0.1:9", timeout_s=2.0).nodes()
    for address in ("nonsense", "ftp://x", "http://", "http://x:0", "http://x:y", "http://x?y=1"):
        with pytest.raises(BadInput, match="expected a URL such as"):
            Client(address)
    with pytest.raises(BadInput, match="token has characters"):
        Client(url, "two words")
    with pytest.raises(BadInput, match=r"CA file .* cannot be used"):
        Client("https://127.0.0.1:1", ca_file="/nowhere/ca.pem")


def test_what_answers_and_is_no_collector_is_said_so() -> None:
    async def anything(request: Request) -> Response:
        if request.url.path == "/v1/usage":
            return Response(b"ARROW1", headers={"X-Poolmeter-Cursor": "same"})
        return PlainTextResponse('{"rows": 5}' if request.url.path == "/v1/nodes" else "<html>")

    with serving(Starlette(routes=[Route("/v1/{rest:path}", anything)])) as url:
        pool = Client(url)
        with pytest.raises(DataError, match="has no rows, expected a list of objects"):
            pool.nodes()
        with pytest.raises(DataError, match="expected a JSON object"):
            pool.health()
        with pytest.raises(DataError, match="is no Arrow stream"):
            pool.usage()


def test_a_request_that_comes_too_soon_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    slept: list[float] = []

    async def busy(_: Request) -> Response:
        asked.append(1)
        return Response('{"error": "too many"}', 429, {"Retry-After": "2"}) if len(asked) < 3 else Response('{"rows": []}')

    monkeypatch.setattr(module.time, "sleep", slept.append)
    with serving(Starlette(routes=[Route("/v1/nodes", busy)])) as url:
        assert len(Client(url).nodes()) == 0
        assert slept == [2, 2]


def test_the_example_of_the_page_runs(url: str, state: ApiState) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "client.md").read_text("utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.S)
    assert code is not None and state.authority is not None
    text = code[1].replace('"http://127.0.0.1:9878"', f'"{url}", "{ADMIN}"').replace('start="7d"', 'start="2027-01-15", end="2027-01-16"')
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text, "client.md", "exec"), {})
    assert re.search(r"^t1 +0\.00", out.getvalue(), re.M), out.getvalue()


def test_importing_it_imports_nothing_heavy() -> None:
    code = "import sys, poolmeter.client; print([m for m in ('pandas', 'pyarrow', 'numpy', 'duckdb', 'pydantic') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
