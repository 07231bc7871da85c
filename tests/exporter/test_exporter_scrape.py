"""What a scrape gets: formats, encodings, one render a snapshot, and nothing old once the exporter no longer looks."""

import dataclasses
import gc
import gzip
import json
import socket
import threading
import time
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from exporter_fakes import CARD, GIB, OTHER, SECOND, Node, process
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.responses import Response

from poolmeter.exporter.collectors import FAMILIES
from poolmeter.exporter.collectors.family import Family, Page, Rows, by_rows, scaled
from poolmeter.exporter.render import CONTENT_TYPE, OPENMETRICS_TYPE, Renderer, render_reference
from poolmeter.exporter.scrape import Scrapes, newest, wants_gzip, wants_openmetrics
from poolmeter.exporter.server import Face, Server, listen
from poolmeter.model.snapshot import DeviceSnapshot
from poolmeter.period import rfc3339

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PLAIN_FIRST = "text/plain;version=0.0.4;q=0.5,application/openmetrics-text;version=1.0.0;q=0.4,*/*;q=0.1"


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Node]:
    """A node with two cards, one lost, two slices, a stranger."""
    made = Node(tmp_path, CARD, OTHER)
    made.create("a", ppm=700_000)
    made.create("b", ppm=200_000, uuids=(CARD, OTHER))
    made.meters["a"].attach()
    made.meters["a"].count(CARD, busy_ns=1_234_567_000, launches=12_345_678, memory=3 * GIB, last_activity_ns=made.clock.wall * 1000)
    made.sampler.change(CARD, busy_us_total=1_500_000, utilization_ppm=333_333, processes=(process(4_000_002, 9, 250_000, 2 * GIB),))
    made.sampler.change(OTHER, up=False, reason="lost")
    made.tick(turns=61)
    yield made
    made.close()


@pytest.fixture
def served(busy: Node) -> Iterator[str]:
    server = Server(Face(busy.agent, None).application(), listen("127.0.0.1", 0))
    server.start()
    yield server.url
    server.stop()


def get(url: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    request = urllib.request.Request(url, headers={name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read(), {name.lower(): value for name, value in response.headers.items()}
    except urllib.error.HTTPError as error:
        return error.code, error.read(), {name.lower(): value for name, value in error.headers.items()}


def page_of(node: Node) -> Page:
    page = node.agent.page()
    assert page is not None
    return page


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        ("*/*", False),
        (PROMETHEUS, True),
        (PLAIN_FIRST, False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=2.0.0", False),
        ('Application/OpenMetrics-Text; version="1.0.0"; charset=utf-8', True),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=nan", False),
        ("text/plain;q=0.9,application/openmetrics-text;q=x", False),
        (",;,=;q=", False),
        ("text/html", False),
    ],
)
def test_the_format_that_is_asked_for(accept: str, openmetrics: bool) -> None:
    assert wants_openmetrics(accept) is openmetrics


@pytest.mark.parametrize(
    ("accepted", "wanted"),
    [("", False), ("gzip", True), ("gzip;q=0", False), ("br, gzip;q=0.5", True), ("*", True), ("*, gzip;q=0", False), ("identity", False)],
)
def test_the_encoding_that_is_accepted(accepted: str, wanted: bool) -> None:
    assert wants_gzip(accepted) is wanted


@given(st.text(max_size=60))
def test_no_header_breaks_it(text: str) -> None:
    assert wants_openmetrics(text) in (True, False) and wants_gzip(text) in (True, False)


def test_one_page_in_four_forms(served: str, busy: Node) -> None:
    _, text, headers = get(f"{served}/metrics")
    assert headers["content-type"] == CONTENT_TYPE and headers["vary"] == "Accept, Accept-Encoding" and "content-encoding" not in headers
    assert text == render_reference(page_of(busy))
    _, packed, headers = get(f"{served}/metrics", Accept_Encoding="gzip")
    assert headers["content-encoding"] == "gzip" and gzip.decompress(packed) == text and len(packed) < len(text) / 3
    _, body, headers = get(f"{served}/metrics", Accept=PROMETHEUS)
    assert headers["content-type"] == OPENMETRICS_TYPE and body == render_reference(page_of(busy), openmetrics=True)
    _, packed, headers = get(f"{served}/metrics", Accept=PROMETHEUS, Accept_Encoding="gzip, deflate")
    assert gzip.decompress(packed) == body and headers["content-type"] == OPENMETRICS_TYPE


def test_openmetrics_says_the_same_and_parses_strictly(busy: Node) -> None:
    renderer = Renderer()
    text, openmetrics = renderer.render(page_of(busy)), renderer.render_openmetrics(page_of(busy))
    assert openmetrics.endswith(b"# EOF\n")

    def numbers(families: object) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}  # type: ignore[attr-defined]

    found = numbers(parse_openmetrics(openmetrics.decode()))
    assert found == numbers(parse_text(text.decode())) and len(found) > 100


def test_pages_after_pages_are_those_of_the_reference(busy: Node) -> None:
    """Only what changed is written anew: slices come, go and change places, values come and go."""
    renderer = Renderer()
    allocations = {}
    for number in range(14):
        if number % 3 == 0:
            allocations[number] = busy.create(f"{9 - number % 10}-{number}", ppm=10_000, memory=GIB)
        if number % 4 == 3:
            busy.release(allocations.pop(min(allocations)))
        busy.meters["a"].count(CARD, busy_ns=1_234_567_000 + number // 2 * 10**9, memory=number % 5 * GIB)
        busy.sampler.change(OTHER, up=number % 2 == 0)
        busy.sampler.change(CARD, power_mw=None if number % 3 else 90_000, temperature_celsius=number)
        busy.tick()
        for openmetrics in (False, True):
            made = renderer.render_openmetrics(page_of(busy)) if openmetrics else renderer.render(page_of(busy))
            assert made == render_reference(page_of(busy), openmetrics), number


CELLS = st.lists(st.tuples(st.text(max_size=3), st.none() | st.integers(-(2**40), 2**60)), max_size=5, unique_by=lambda cell: cell[0])


@given(st.lists(CELLS, min_size=1, max_size=4))
def test_rows_of_any_kind(pages: list[list[tuple[str, int | None]]]) -> None:
    now: list[tuple[str, int | None]] = []
    rows = Rows(lambda _: now, lambda cell: (cell[0],), lambda cell: cell[1], scaled(lambda value: value / 1_000_000))
    families = (by_rows("poolmeter_x", "gauge", "Text.", ("a",), rows),)
    renderer, page = Renderer(families), Page(None, 0, "")  # type: ignore[arg-type]
    for cells in pages:
        now = cells
        try:
            expected = render_reference(page, families=families)
        except UnicodeEncodeError:
            return  # a lone surrogate cannot be on any page
        assert renderer.render(page) == expected


def test_many_scrapes_are_one_collection_and_one_render(busy: Node) -> None:
    face = Face(busy.agent, None)
    server = Server(face.application(), listen("127.0.0.1", 0))
    server.start()
    polls = busy.sampler.polls
    kinds = [{}, {"Accept": PROMETHEUS}, {"Accept_Encoding": "gzip"}, {"Accept": PROMETHEUS, "Accept_Encoding": "gzip"}]
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda kind: get(f"{server.url}/metrics", **kind), kinds * 13))
    server.stop()
    assert {status for status, _, _ in answers} == {200} and len({body for _, body, _ in answers}) == 4
    assert busy.sampler.polls == polls and face.renders == 1


def test_a_family_may_be_slow_and_scrapes_still_share_it(busy: Node) -> None:
    calls = []

    def samples(page: Page) -> list[tuple[tuple[str, ...], float]]:
        calls.append(1)
        time.sleep(0.05)
        return [((), 1.0)]

    scrapes = Scrapes((Family("poolmeter_slow", "gauge", "Slow.", (), samples),))
    with ThreadPoolExecutor(16) as pool:
        answers = set(pool.map(lambda _: scrapes.answer(page_of(busy), "", "").body, range(32)))
    assert len(answers) == 1 and len(calls) == 1


def test_an_exporter_that_no_longer_looks_serves_no_values(busy: Node, served: str) -> None:
    """Turns that all fail, or a loop that hangs: the page says so and is empty of values, and health is not OK."""
    assert get(f"{served}/healthz")[0] == 200
    last = page_of(busy).snapshot.taken_us
    busy.clock.advance(busy.agent.stalled_us + SECOND)
    status, body, _ = get(f"{served}/metrics")
    assert status == 200 and b'poolmeter_collect_success{source="agent"} 0.0' in body
    assert b"poolmeter_device" not in body and b"poolmeter_slice" not in body and b"poolmeter_pool" not in body
    status, body, _ = get(f"{served}/healthz")
    assert status == 503 and "has not looked for 16 s" in json.loads(body)["reason"]
    status, body, _ = get(f"{served}/readyz")
    failures = {item["source"]: item for item in json.loads(body)["failures"]}
    assert status == 503 and failures["agent"]["since"] == rfc3339(last)
    snapshot = json.loads(get(f"{served}/v1/snapshot")[1])
    assert snapshot["devices"] == [] and snapshot["slices"] == []
    busy.tick()
    assert get(f"{served}/healthz")[0] == 200 and b"poolmeter_device_up" in get(f"{served}/metrics")[1]


def test_nothing_that_a_stuck_exporter_once_saw_is_served(busy: Node) -> None:
    """Whatever kinds of values a snapshot comes to hold: all but who and when are as of a snapshot that holds none."""
    full = page_of(busy)
    kinds = {item.name for item in dataclasses.fields(full.snapshot)}
    who_and_when = {"node", "epoch", "sequence", "taken_us", "simulated", "pool", "sources"}
    marked = dataclasses.replace(full.snapshot, **dict.fromkeys(kinds - who_and_when, ("old",)))

    class Stuck:
        stalled_us = SECOND

        def page(self) -> Page:
            return dataclasses.replace(full, snapshot=marked, before=marked)

        def age_us(self) -> int:
            return 2 * SECOND

    left = newest(Stuck())
    assert left is not None and left.before is None
    assert {name for name in kinds if getattr(left.snapshot, name) not in ((), None)} <= who_and_when
    assert {name for name in who_and_when - {"sources"} if getattr(left.snapshot, name) == getattr(full.snapshot, name)} == (
        who_and_when - {"sources"}
    )


def test_health_before_the_first_look(tmp_path: Path) -> None:
    class Nothing:
        def page(self) -> None:
            return None

        def age_us(self) -> None:
            return None

        def released_us(self) -> None:
            return None

        stalled_us = 0

    assert newest(Nothing()) is None
    server = Server(Face(Nothing(), None).application(), listen("127.0.0.1", 0))  # type: ignore[arg-type]
    server.start()
    for path in ("/healthz", "/readyz", "/metrics", "/v1/snapshot"):
        assert get(server.url + path)[0] == 503, path
    server.stop()


def test_old_values_leave_when_their_source_dies(busy: Node, served: str) -> None:
    began = busy.clock.wall
    busy.sampler.answers, busy.sampler.trouble = False, "the library is gone"
    busy.tick()
    _, body, _ = get(f"{served}/metrics")
    families = {family.name for family in parse_text(body.decode())}
    gauges = {f"poolmeter_device_{name}" for name in ("utilization_ratio", "power_watts", "temperature_celsius", "memory_used_bytes")}
    assert not families & gauges and f'poolmeter_device_up{{uuid="{CARD}"}} 0.0'.encode() in body
    busy.tick(turns=20)
    status, body, _ = get(f"{served}/readyz")
    (failure,) = json.loads(body)["failures"]
    assert status == 503 and failure["source"] == "nvml" and failure["reason"] == "the library is gone"
    # Since when is when it began, not when it was last seen to fail; and when its last values are from stays told.
    assert failure["since"] == rfc3339(began + SECOND)
    _, body, _ = get(f"{served}/metrics")
    last = [line for line in body.splitlines() if line.startswith(b'poolmeter_last_collect_timestamp_seconds{source="nvml"}')]
    assert float(last[0].split()[-1]) == pytest.approx(began / 1e6)
    busy.sampler.answers, busy.sampler.trouble = True, None
    busy.tick()
    assert get(f"{served}/readyz")[0] == 200


def test_a_slow_reading_is_kept_for_a_while_with_its_own_time(busy: Node, served: str) -> None:
    read = busy.clock.wall
    busy.sampler.answers = False
    busy.tick(turns=3)
    _, body, _ = get(f"{served}/metrics")
    assert b"poolmeter_device_power_watts" in body
    last = [line for line in body.splitlines() if line.startswith(b'poolmeter_last_collect_timestamp_seconds{source="nvml"}')]
    assert float(last[0].split()[-1]) == pytest.approx(read / 1e6)
    busy.tick(turns=5)
    assert b"poolmeter_device_power_watts" not in get(f"{served}/metrics")[1]


def test_no_series_holds_a_percentage_or_a_sentinel(busy: Node) -> None:
    body = Renderer(FAMILIES).render(page_of(busy)).decode()
    for family in parse_text(body):
        for sample in family.samples:
            assert "N/A" not in sample.labels.values() and sample.value < 2**63
            if sample.name.endswith("_ratio") and sample.name != "poolmeter_device_allocated_ratio":
                assert 0 <= sample.value <= 1, sample


def test_info_labels_do_not_change_while_values_do(busy: Node) -> None:
    def infos() -> set[str]:
        return {line for line in Renderer().render(page_of(busy)).decode().splitlines() if "_info{" in line}

    before = infos()
    busy.meters["a"].count(CARD, busy_ns=9 * 10**9, memory=GIB)
    busy.sampler.change(CARD, utilization_ppm=900_000, temperature_celsius=80)
    busy.tick(turns=5)
    assert infos() == before


def test_a_hostile_name_takes_no_page_away(busy: Node, served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = page_of(busy)
    part = dataclasses.replace(page.snapshot.slices[0], tenant='\udc80\n"\\{} 1')
    hostile = dataclasses.replace(page, snapshot=dataclasses.replace(page.snapshot, slices=(part,)))
    monkeypatch.setattr(busy.agent, "page", lambda: hostile)
    status, body, _ = get(f"{served}/metrics", Accept=PROMETHEUS)
    tenants = {s.labels["tenant"] for f in parse_openmetrics(body.decode()) if f.name == "poolmeter_slice_info" for s in f.samples}
    assert status == 200 and tenants == {'?\n"\\{} 1'}
    status, body, _ = get(f"{served}/v1/snapshot")
    assert status == 200 and json.loads(body)["slices"][0]["tenant"] == '?\n"\\{} 1'


def test_connections_do_not_wait_for_acknowledgements(busy: Node) -> None:
    seen: list[int] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        sockets = [sock for sock in gc.get_objects() if isinstance(sock, socket.socket) and sock.fileno() >= 0]
        port = scope["server"][1]
        mine = [sock for sock in sockets if sock.family == socket.AF_INET and sock.getsockname()[1] == port and sock is not bound]
        seen.extend(
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for sock in mine
            if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        )
        await Response("x")(scope, receive, send)

    bound = listen("127.0.0.1", 0)
    server = Server(application, bound)
    server.start()
    get(server.url)
    server.stop()
    assert seen and all(seen)


def test_a_page_is_there_while_a_look_takes_its_time(busy: Node, served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards whose calls add up to many times a scrape's time-out delay no page: it is that of the look before."""
    asked, go_on = threading.Event(), threading.Event()

    def slow(budget_s: float) -> None:
        asked.set()
        assert go_on.wait(30)

    before = get(f"{served}/metrics")[1]
    monkeypatch.setattr(busy.sampler, "poll", slow)
    turn = threading.Thread(target=busy.tick)
    turn.start()
    assert asked.wait(30)
    for path in ("/metrics", "/v1/snapshot", "/readyz", "/healthz"):
        status, body, _ = get(served + path)
        assert status == 200 and (path != "/metrics" or body == before)
    assert turn.is_alive()
    go_on.set()
    turn.join()


def test_memory_stays_flat_while_slices_come_and_go(busy: Node) -> None:
    """A thousand pages, none of whose slices was on the one before."""
    scrapes, page = Scrapes(), page_of(busy)
    part = page.snapshot.slices[0]

    def serve(number: int) -> None:
        parts = tuple(dataclasses.replace(part, allocation_id=f"a-{number}-{place}") for place in range(20))
        scrapes.answer(
            dataclasses.replace(page, snapshot=dataclasses.replace(page.snapshot, slices=parts, taken_us=number)), PROMETHEUS, "gzip"
        )

    tracemalloc.start()
    sizes = []
    for number in range(1000):
        serve(number)
        if number in (99, 999):
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[1] < sizes[0] * 1.1 + 20_000, sizes


def test_an_interval_of_a_minute_is_no_standstill(busy: Node) -> None:
    busy.agent.settings = dataclasses.replace(busy.agent.settings, interval_ms=60_000)
    busy.clock.advance(100 * SECOND)
    page = newest(busy.agent)
    assert page is page_of(busy)
    busy.clock.advance(100 * SECOND)
    page = newest(busy.agent)
    assert page is not None and not page.snapshot.devices


def test_a_fault_in_one_family_leaves_the_others(busy: Node, caplog: pytest.LogCaptureFixture) -> None:
    broken = [True]

    def value(device: DeviceSnapshot) -> int:
        if broken[0]:
            raise ZeroDivisionError("by design")
        return 7

    rows = Rows(lambda page: page.snapshot.devices, lambda device: (device.uuid,), value, scaled(float))
    families = (FAMILIES[0], by_rows("poolmeter_broken", "gauge", "Broken.", ("uuid",), rows), *FAMILIES[1:])
    whole, renderer = Renderer().render(page_of(busy)), Renderer(families)
    for _ in range(3):
        assert renderer.render(page_of(busy)) == whole
    assert list(renderer.failed) == ["poolmeter_broken"] and len(caplog.records) == 1
    face = Face(busy.agent, None)
    face._scrapes = Scrapes(families)
    server = Server(face.application(), listen("127.0.0.1", 0))
    server.start()
    assert get(f"{server.url}/metrics")[1] == whole
    status, body, _ = get(f"{server.url}/readyz")
    assert status == 503 and "family poolmeter_broken cannot be written: ZeroDivisionError" in json.loads(body)["failures"][0]["reason"]
    broken[0] = False
    busy.tick()
    assert b"poolmeter_broken" in get(f"{server.url}/metrics")[1] and get(f"{server.url}/readyz")[0] == 200
    server.stop()
