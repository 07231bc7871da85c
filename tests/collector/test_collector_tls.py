"""The real daemon behind TLS: its own commands and enforcers know it by configuration; certificates and users change while it runs."""

import asyncio
import base64
import contextlib
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import bcrypt
import pytest
from collector_daemon import Daemon, until
from web_certificates import Authority

from poolmeter.accounting.collector_api import collector_url
from poolmeter.accounting.recommend.decision_store import ApiStore
from poolmeter.books.writer import Books
from poolmeter.client import Client
from poolmeter.collector.peers import Peers, PeerSettings, _lives
from poolmeter.config import CollectorSection
from poolmeter.enforcer.decisions import fetch_url, parse_decisions
from poolmeter.errors import BadInput, Unavailable
from poolmeter.model.decision import Decision
from poolmeter.model.units import HOUR_US
from poolmeter.places import CollectorData
from poolmeter.tokens import own_token_file, read_token
from poolmeter.web.trust import SYSTEM, Trust

NOW_US = time.time_ns() // 1000
DECISION = Decision("d1", "n1", "a1", "GPU-1", 1, 0, NOW_US, NOW_US + HOUR_US, "rule", "why", "00", memory_bytes=5)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("authority"))
    made.issue("server")
    made.issue("client", "DNS:enforcer.example")
    return made


def users(secret: bytes) -> str:
    return f"basic_auth_users: {{alice: '{bcrypt.hashpw(secret, bcrypt.gensalt(4)).decode()}'}}\n"


def web_of(authority: Authority, mutual: bool) -> str:
    text = f"tls_server_config:\n  cert_file: {authority.folder}/server.pem\n  key_file: {authority.folder}/server.key\n"
    return text + (f"  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: {authority.certificate}\n" if mutual else "")


@contextlib.contextmanager
def daemon(folder: Path, *words: str) -> Iterator[Daemon]:
    made = Daemon(folder, "", *words)
    try:
        yield made
    finally:
        made.kill()


@pytest.mark.parametrize("mutual", [False, True])
async def test_peers_know_each_other_by_the_same_files(tmp_path: Path, authority: Authority, mutual: bool) -> None:
    (tmp_path / "web.yml").write_text(web_of(authority, mutual))
    own = (authority.folder / "client.pem", authority.folder / "client.key") if mutual else ()
    with daemon(tmp_path, "--web.config.file", str(tmp_path / "web.yml")) as made:
        url = await made.url()
        async with aiohttp.ClientSession() as session:
            for trust, lives in ((Trust(authority.certificate, *own), True), (SYSTEM, False)):
                peers = Peers(PeerSettings("a", {"a": "http://127.0.0.1:1", "b": url}, 30.0, trust))
                assert await _lives(session, url, 10.0, peers._context) is lives
    with pytest.raises(BadInput, match="CA file /nonexistent cannot be used"):
        Peers(PeerSettings("a", {"b": "https://b"}, 30.0, Trust(Path("/nonexistent"))))


@pytest.mark.parametrize("mutual", [False, True])
async def test_commands_enforcers_and_the_client_go_on_working(tmp_path: Path, authority: Authority, mutual: bool) -> None:
    web, config = tmp_path / "web.yml", tmp_path / "config.toml"
    web.write_text(web_of(authority, mutual))
    with Books(CollectorData(tmp_path).books) as books:
        books.add_decisions([DECISION], "test")
    files = {"ca_file": authority.certificate} | (
        {"cert_file": authority.folder / "client.pem", "key_file": authority.folder / "client.key"} if mutual else {}
    )
    text = f'[collector]\nweb_config_file = "{web}"\n' + "".join(f'api_{name} = "{path}"\n' for name, path in files.items())
    config.write_text(text)
    with daemon(tmp_path, "--config", str(config)) as made:
        url = await made.url()
        assert url.startswith("https://")
        token = read_token(own_token_file(tmp_path))
        assert Client(url, token, **files).health()["store"]["writable"]
        with pytest.raises(Unavailable, match="does not answer"):
            Client(url, token).health()
        if mutual:
            with pytest.raises(Unavailable):
                Client(url, token, ca_file=authority.certificate).health()
        trust = Trust(**files)
        found = fetch_url(f"{url}/v1/decisions?state=proposed&node=n1", token, trust)
        assert [decision.id for decision in parse_decisions(found)[0]] == ["d1"]
        with pytest.raises(Unavailable, match="gave no decisions"):
            fetch_url(f"{url}/v1/decisions", token)
        section = CollectorSection(port=urlsplit(url).port, **{f"api_{name}": path for name, path in files.items()})
        assert collector_url(tmp_path, section, token) == url
        assert [entry.decision.id for entry in ApiStore(url, token, trust).list()] == ["d1"]
        config.write_text(f"{text}port = {urlsplit(url).port}\n")
        words = ["approve", "d1", "--data", str(tmp_path), "--config", str(config), "--format", "json"]
        done = subprocess.run([sys.executable, "-m", "poolmeter.cli", *words], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 and json.loads(done.stdout)["rows"][0]["state"] == "approved", done.stderr


def serial(url: str, authority: Authority) -> bytes:
    where = urlsplit(url)
    context = ssl.create_default_context(cafile=authority.certificate)
    with (
        socket.create_connection((where.hostname or "", where.port or 0), 10) as plain,
        context.wrap_socket(plain, server_hostname=where.hostname) as wrapped,
    ):
        return wrapped.getpeercert(binary_form=True) or b""


async def test_certificates_and_users_change_while_it_runs(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    authority.issue("server")
    web = tmp_path / "web.yml"
    web.write_text(web_of(authority, False) + users(b"one"))
    log = tmp_path / "collector.log"

    def reads(secret: str) -> int:
        request = urllib.request.Request(
            f"{url}/v1/nodes", headers={"Authorization": "Basic " + base64.b64encode(f"alice:{secret}".encode()).decode()}
        )
        try:
            with Trust(authority.certificate).opener(url).open(request, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    with daemon(tmp_path, "--web.config.file", str(web)) as made:
        url = await made.url()
        before = await asyncio.to_thread(serial, url, authority)
        assert await asyncio.to_thread(reads, "one") == 200 and await asyncio.to_thread(reads, "two") == 401
        authority.issue("server")
        assert await asyncio.to_thread(serial, url, authority) != before  # without a signal
        for text, said in (("nonsense: 1", "nonsense is not a known key"), (users(b"x"), "turns TLS on or off")):
            web.write_text(text)
            made.process.send_signal(signal.SIGHUP)
            await until(lambda said=said: said in log.read_text())  # type: ignore[misc]
            assert await asyncio.to_thread(reads, "one") == 200
        web.write_text(web_of(authority, False) + users(b"two"))
        made.process.send_signal(signal.SIGHUP)
        await until(lambda: "tokens were reloaded" in log.read_text())
        assert await asyncio.to_thread(reads, "two") == 200 and await asyncio.to_thread(reads, "one") == 401
        assert await made.end() == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [("nonsense: 1", "nonsense is not a known key"), ("tls_server_config: {cert_file: a, key_file: b}", "cert_file .*a cannot be read")],
)
def test_a_web_configuration_that_cannot_be_honoured_is_refused_at_the_start(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "web.yml").write_text(text)
    words = ["collector", "--port", "0", "--data", str(tmp_path / "data"), "--web.config.file", str(tmp_path / "web.yml")]
    done = subprocess.run([sys.executable, "-m", "poolmeter.cli", *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and re.search(said, done.stderr), done.stderr
    assert not (tmp_path / "data").exists()
