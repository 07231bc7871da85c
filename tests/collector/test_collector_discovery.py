"""Sources of discovery against fakes of each, and what follows for the exporters that are asked."""

import asyncio
import contextlib
import json
import re
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from discovery_fakes import FakeDns, FakeKubernetes, endpoint_slice, serve

from poolmeter.clock import ManualClock
from poolmeter.collector.discovery import kubernetes as kubernetes_module
from poolmeter.collector.discovery import watch as watch_module
from poolmeter.collector.discovery.build import KINDS, sources_of
from poolmeter.collector.discovery.dns import resolver_of
from poolmeter.collector.discovery.kubernetes import in_cluster_server, own_namespace, slice_urls
from poolmeter.collector.discovery.source import Answer, Source
from poolmeter.collector.discovery.watch import Discovery
from poolmeter.config import parse_config
from poolmeter.errors import BadInput, DataError, Unavailable


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False, trust_env=False) as made:
        yield made


def source(toml: str, limit: int = 100) -> Source:
    config = parse_config(f"[[collector.discovery]]\n{toml}".encode(), "test")
    return sources_of(config.collector.discovery, limit)[0]


async def first(session: aiohttp.ClientSession, made: Source) -> Answer:
    async with contextlib.aclosing(made.answers(session)) as answers:  # type: ignore[type-var]
        return await anext(answers)


async def until(done: Callable[[], object], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not done():
            await asyncio.sleep(0.005)


# ---- http_sd


class Groups:
    """A server of http_sd: `answer` is what it says."""

    def __init__(self) -> None:
        self.answer: Callable[[web.Request], web.StreamResponse] = lambda _: web.json_response([{"targets": ["a:1"]}])
        self.tokens: list[str | None] = []
        self.elsewhere = 0

    async def get(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization"))
        return self.answer(request)

    async def other(self, request: web.Request) -> web.StreamResponse:
        self.elsewhere += 1
        return web.json_response([{"targets": ["evil:1"]}])


async def test_http_sd_is_asked_with_its_token_and_hostile_answers_are_named(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    groups = Groups()
    runner, url = await serve([web.get("/sd", groups.get), web.get("/other", groups.other)])
    (tmp_path / "token").write_text("t1\n")
    try:
        made = source(f'type = "http_sd"\nurl = "{url}/sd?pool=x"\ntoken_file = "{tmp_path / "token"}"\nscheme = "https"')
        assert made.name == f"http_sd {url}/sd"
        assert await first(session, made) == Answer(frozenset({"https://a:1"}))
        (tmp_path / "token").write_text("t2\n")
        await first(session, made)
        assert groups.tokens == ["Bearer t1", "Bearer t2"]
        million = json.dumps([{"targets": [f"h{n}:1" for n in range(1_000_000)]}])
        hostile: list[tuple[Callable[[web.Request], web.StreamResponse], str]] = [
            (lambda _: web.Response(status=302, headers={"Location": "/other"}), "answered 302, expected 200"),
            (lambda _: web.Response(status=500), "answered 500"),
            (lambda _: web.Response(text="<html>"), "is not JSON"),
            (lambda _: web.json_response({"targets": ["a:1"]}), "is an object, expected a list"),
            (lambda _: web.json_response([{"targets": [f"h{n}:1" for n in range(101)]}]), "more than 100 targets"),
            (lambda _: web.Response(text=million), "more than 4194304 bytes"),
            (lambda _: web.Response(body=b"\x1f\x8b", headers={"Content-Encoding": "gzip"}), "Content-Encoding 'gzip'"),
            (lambda _: web.Response(text="[" * 100_000), "is not JSON"),
        ]
        for answer, reason in hostile:
            groups.answer = answer
            with pytest.raises((DataError, Unavailable), match=reason):
                await first(session, made)
        assert groups.elsewhere == 0
    finally:
        await runner.cleanup()


# ---- DNS


async def test_names_stand_for_addresses_and_services(session: aiohttp.ClientSession) -> None:
    fake = await FakeDns().start()
    fake.records = {
        ("gpu.test", "A"): ["10.0.0.1", "10.0.0.2"],
        ("gpu.test", "AAAA"): ["2001:db8::1"],
        ("_poolmeter._tcp.gpu.test", "SRV"): ["0 0 9877 n1.gpu.test.", "0 0 9878 n2.gpu.test."],
        ("none.test", "SRV"): ["0 0 0 ."],
    }
    base = f'type = "dns"\nserver = "{fake.address}"\ntimeout_s = 5\n'
    try:
        found = await first(session, source(base + 'names = ["gpu.test"]\nport = 9000'))
        assert found.urls == {"http://10.0.0.1:9000", "http://10.0.0.2:9000"}
        assert (await first(session, source(base + 'names = ["gpu.test"]\nrecord = "AAAA"'))).urls == {"http://[2001:db8::1]:9877"}
        services = source(base + 'names = ["_poolmeter._tcp.gpu.test", "none.test"]\nrecord = "SRV"\nscheme = "https"')
        assert (await first(session, services)).urls == {"https://n1.gpu.test:9877", "https://n2.gpu.test:9878"}
        # The name is there, records of this type are not: nobody.
        assert (await first(session, source(base + 'names = ["none.test"]'))).urls == frozenset()
        with pytest.raises(Unavailable, match=r"name lost\.test does not exist"):
            await first(session, source(base + 'names = ["gpu.test", "lost.test"]'))
        many = [f"10.{n // 250}.{n % 250}.1" for n in range(600)]
        fake.records["many.test", "A"], fake.udp_most = many, 100
        assert len((await first(session, source(base + 'names = ["many.test"]', 1000))).urls) == 600
        assert fake.asked[-2:] == ["many.test A udp", "many.test A tcp"]
        with pytest.raises(DataError, match="600 records, expected at most 100"):
            await first(session, source(base + 'names = ["many.test"]'))
        fake.silent = True
        quick = source(base.replace("= 5", "= 0.2") + 'names = ["gpu.test"]')
        with pytest.raises(Unavailable, match=r"name gpu\.test cannot be resolved"):
            await first(session, quick)
    finally:
        await fake.stop()


@pytest.mark.parametrize("server", ["nonsense", "10.0.0.1:0", "10.0.0.1:x", "[::1"])
def test_a_dns_server_that_is_none_is_refused(server: str) -> None:
    with pytest.raises(BadInput, match="DNS server is"):
        resolver_of(server, 1.0)


def test_a_dns_server_may_have_a_port() -> None:
    for text, host, port in (
        ("10.0.0.1", "10.0.0.1", 53),
        ("10.0.0.1:5353", "10.0.0.1", 5353),
        ("[::1]:54", "::1", 54),
        ("::1", "::1", 53),
    ):
        made = resolver_of(text, 1.0)
        assert (made.nameservers, made.port) == ([host], port)


# ---- Kubernetes


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_module, "GATHER_S", 0.01)
    monkeypatch.setattr(watch_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(watch_module, "LONGEST_PAUSE_S", 0.05)


def kubernetes_of(url: str, folder: Path, more: str = "", limit: int = 100) -> Source:
    (folder / "token").write_text("secret\n")
    text = f'type = "kubernetes"\napi_server = "{url}"\nnamespace = "gpu"\nselector = "app=poolmeter-exporter"\n'
    return source(f'{text}token_file = "{folder / "token"}"\n{more}', limit)


class Assigned:
    """What was assigned, each time."""

    def __init__(self) -> None:
        self.calls: list[tuple[set[str], str]] = []

    async def __call__(self, urls: Collection[str], reason: str) -> None:
        assert len(set(urls)) == len(urls)
        self.calls.append((set(urls), reason))

    @property
    def urls(self) -> set[str]:
        return {url.removeprefix("http://").removesuffix(":9877") for url in self.calls[-1][0]} if self.calls else set()


@contextlib.asynccontextmanager
async def followed(
    sources: list[Source], fixed: tuple[str, ...] = (), before: tuple[str, ...] = (), limit: int = 100
) -> AsyncIterator[Any]:
    assigned = Assigned()
    discovery = Discovery(sources, fixed, before, assigned, limit, ManualClock(1))
    await discovery.start()
    task = asyncio.create_task(discovery.run())
    try:
        yield discovery, assigned
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_endpoints_are_listed_in_pages_then_watched(tmp_path: Path, quick: None) -> None:
    fake = FakeKubernetes()
    for number in range(5):
        fake.slices[f"s{number}"] = endpoint_slice(f"s{number}", [f"10.0.{number}.1", f"10.0.{number}.2"])
    await fake.start()
    try:
        async with followed([kubernetes_of(fake.url, tmp_path)]) as (discovery, assigned):
            status = discovery.statuses[0]
            everyone = {f"10.0.{number}.{n}" for number in range(5) for n in (1, 2)}
            # Those that are not ready are asked too: they have records.
            await until(lambda: assigned.urls == everyone)
            assert fake.lists == 3 and status.state == "up" and status.name == "kubernetes gpu app=poolmeter-exporter"
            await until(lambda: fake.watches)
            fake.put(endpoint_slice("s5", ["10.0.5.1"]))
            await until(lambda: assigned.urls == everyone | {"10.0.5.1"})
            fake.put(endpoint_slice("s5", ["10.0.5.2"]))
            await until(lambda: assigned.urls == everyone | {"10.0.5.2"})
            assert assigned.calls[-1][1] == f"discovery {status.name} names it no more"
            fake.delete("s5")
            await until(lambda: assigned.urls == everyone)
            fake.say({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(fake.version + 1)}}})
            # The server ends a watch, the next goes on where it ended, without a list.
            fake.end_watches += 1
            fake._changed.set()
            await until(lambda: len(fake.watches) == 2)
            assert fake.watches[1] == str(fake.version) and fake.lists == 3
            # What was missed while it knew nothing any more comes with a new list.
            del fake.slices["s0"]
            fake.forget()
            await until(lambda: assigned.urls == everyone - {"10.0.0.1", "10.0.0.2"})
            assert fake.lists > 3
    finally:
        await fake.stop()


async def test_a_kubernetes_that_fails_or_lies_keeps_its_last_answer(tmp_path: Path, quick: None) -> None:
    fake = FakeKubernetes(slices={"a": endpoint_slice("a", ["10.0.0.1"])})
    await fake.start()
    try:
        async with followed([kubernetes_of(fake.url, tmp_path)]) as (discovery, assigned):
            status = discovery.statuses[0]
            await until(lambda: fake.watches)
            # One slice that cannot be read keeps what it said, the others go on.
            fake.put(endpoint_slice("a", ["10.0.0.9"], ports=[{"name": "x", "port": "9877"}]))
            fake.put(endpoint_slice("b", ["10.0.0.2"]))
            await until(lambda: assigned.urls == {"10.0.0.1", "10.0.0.2"})
            assert status.state == "failing" and "EndpointSlice a: ports of an EndpointSlice are x, expected one alone" in (
                status.reason or ""
            )
            fake.put(endpoint_slice("a", ["10.0.0.1"]))
            await until(lambda: status.state == "up" and status.reason is None)
            calls = len(assigned.calls)
            events: list[tuple[Any, str]] = [
                ({"type": "ERROR", "object": {"code": 500, "message": "etcd is gone"}}, "etcd is gone"),
                ({"type": "SURPRISE", "object": {"metadata": {}}}, "an event 'SURPRISE'"),
                ([], "object is null"),
                ({"type": "ADDED", "object": {"metadata": {"name": 7}}}, "name of an EndpointSlice is 7"),
            ]
            for event, reason in events:
                fake.log.clear()
                watches = len(fake.watches)
                await until(lambda watches=watches: len(fake.watches) > watches or status.state == "up")
                fake.say(event)
                await until(lambda reason=reason: reason in (status.reason or ""))
            fake.fail = 403
            fake.log.clear()
            fake.forget()
            await until(lambda: "answered 403, expected 200" in (status.reason or ""))
            assert len(assigned.calls) == calls and assigned.urls == {"10.0.0.1", "10.0.0.2"} and status.failures >= 5
            fake.fail = None
            await until(lambda: status.state == "up")
    finally:
        await fake.stop()


async def test_kubernetes_is_asked_over_tls_with_its_own_authority(session: aiohttp.ClientSession, tmp_path: Path, quick: None) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=k8s",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    await asyncio.to_thread(subprocess.run, [*words, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    fake = FakeKubernetes(slices={"a": endpoint_slice("a", ["10.0.0.1"])})
    await fake.start(context)
    try:
        assert (await first(session, kubernetes_of(fake.url, tmp_path, f'ca_file = "{cert}"'))).urls == {"http://10.0.0.1:9877"}
        with pytest.raises(aiohttp.ClientError, match="certificate"):
            await first(session, kubernetes_of(fake.url, tmp_path))
        with pytest.raises(BadInput, match="expected a PEM file"):
            kubernetes_of(fake.url, tmp_path, f'ca_file = "{tmp_path / "none"}"')
    finally:
        await fake.stop()


def test_ports_and_addresses_of_a_slice() -> None:
    two = endpoint_slice("a", ["10.0.0.1", "fd00::1"], ports=[{"name": "metrics", "port": 1}, {"name": "other", "port": 2}])
    assert slice_urls(two, "other", "https", 9) == {"https://10.0.0.1:2", "https://[fd00::1]:2"}
    assert slice_urls(two, "9000", "http", 9) == {"http://10.0.0.1:9000", "http://[fd00::1]:9000"}
    assert slice_urls(endpoint_slice("a", [], ports=None, endpoints=None), "", "http", 9) == frozenset()
    for wrong in ({"endpoints": [{}]}, {"endpoints": {"a": 1}}, {"ports": []}, {"endpoints": [{"addresses": [7]}]}, {"endpoints": [None]}):
        with pytest.raises(DataError):
            slice_urls({**two, **wrong}, "metrics", "http", 9)
    with pytest.raises(DataError, match="expected one alone"):
        slice_urls(two, "", "http", 9)


def test_in_a_pod_the_server_and_namespace_are_known(tmp_path: Path) -> None:
    assert in_cluster_server({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}) == "https://[fd00::1]:443"
    (tmp_path / "namespace").write_text("gpu")
    assert own_namespace(tmp_path) == "gpu"
    with pytest.raises(BadInput, match="expected to run in a pod"):
        in_cluster_server({})
    with pytest.raises(BadInput, match="expected to run in a pod"):
        own_namespace(tmp_path / "none")


# ---- all together


class Says:
    """A source that says what it is told to; an exception is a failure."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: asyncio.Queue[Answer | Exception] = asyncio.Queue()
        self.begun = 0

    def say(self, *urls: str) -> None:
        self.queue.put_nowait(Answer(frozenset(urls)))

    async def answers(self, session: aiohttp.ClientSession) -> AsyncIterator[Answer]:
        self.begun += 1
        while True:
            said = await self.queue.get()
            if isinstance(said, Exception):
                raise said
            yield said


async def test_exporters_are_those_of_every_source_each_once(quick: None) -> None:
    one, two = Says("one"), Says("two")
    async with followed([one, two], ("fixed", "x"), ("old", "x"), limit=3) as (discovery, assigned):
        # Until each has answered, those known from before go on.
        assert assigned.calls == [({"fixed", "x", "old"}, "no longer configured")]
        one.say("a", "x")
        await until(lambda: assigned.urls == {"fixed", "x", "old", "a"})
        two.queue.put_nowait(Unavailable("two is down"))
        await until(lambda: discovery.statuses[1].failures == 1)
        assert assigned.urls == {"fixed", "x", "old", "a"} and discovery.statuses[1].reason == "two is down"
        two.say("a", "b")
        await until(lambda: assigned.urls == {"fixed", "x", "a", "b"})
        assert assigned.calls[-1][1] == "discovery two names it no more" and discovery.statuses[1].state == "up"
        one.say("x")
        await until(lambda: discovery.statuses[0].urls == {"x"})
        assert assigned.urls == {"fixed", "x", "a", "b"}
        one.say(*(f"n{n}" for n in range(3)))
        await until(lambda: discovery.statuses[0].state == "failing")
        assert "3 targets, 5 with those of other sources, expected at most 3" in (discovery.statuses[0].reason or "")
        assert discovery.statuses[0].urls == {"x"} and assigned.urls == {"fixed", "x", "a", "b"}
        for surprise in (RuntimeError("what"), TimeoutError(), OSError("gone")):
            failures = discovery.statuses[0].failures
            one.queue.put_nowait(surprise)
            await until(lambda failures=failures: discovery.statuses[0].failures > failures)
        one.say()
        await until(lambda: discovery.statuses[0].state == "up")
        assert assigned.urls == {"fixed", "x", "a", "b"} and one.begun == 5


async def test_without_sources_only_what_is_configured_is_asked() -> None:
    async with followed([], ("fixed",), ("old",)) as (_, assigned):
        assert assigned.calls == [({"fixed"}, "no longer configured")]


def test_the_page_names_every_kind_and_key_and_its_example_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "collector.md").read_text("utf-8")
    part = page.split("\n## Discovery\n")[1].split("\n## ")[0]
    example = parse_config(part.split("```toml\n")[1].split("```")[0].encode(), "example").collector.discovery
    assert {type(section) for section in example} == {kind for kind, _ in KINDS}
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("| ")][1:]
    for section in example:
        own = [names for kinds, names, *_ in rows if kinds == "all" or f"`{section.type}`" in kinds]
        keys = set(re.findall("`([a-z_]+)`", " ".join(own)))
        assert keys == set(type(section).model_fields) - {"type"}, section


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ('type = "consul"', "discovery.0"),
        ('type = "file"', "path"),
        ('type = "file"\npath = "x"\nurl = "http://x"', "is not a known key"),
        ('type = "dns"\nnames = []', "names"),
        ('type = "dns"\nnames = ["a"]\nport = 0', "port"),
        ('type = "http_sd"\nurl = "ftp://x"', "url"),
        ('type = "kubernetes"\nselector = "a=b"\nnamespace = "../secrets"', "namespace"),
    ],
)
def test_a_wrong_section_is_named(toml: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        parse_config(f"[[collector.discovery]]\n{toml}\n".encode(), "test")
