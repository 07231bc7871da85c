"""TLS, client certificates, passwords, tokens: what a web configuration asks for is asked for, and what it cannot ask for is refused."""

import base64
import http.client
import os
import shutil
import socket
import ssl
import subprocess
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bcrypt
import pytest
from exporter_fakes import Node
from exporter_prometheus import ask, needs_prometheus, running, until
from web_certificates import Authority

from poolmeter.errors import BadInput
from poolmeter.exporter.server import Face, Server, listen
from poolmeter.web.config import CIPHERS, WebConfig, load_web_config, parse_web_config
from poolmeter.web.guard import _NOBODY, Guard, matches
from poolmeter.web.tls import RotatingContext, make_context

HASH = "$2y$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW"  # of "secret"
TLS = "tls_server_config: {cert_file: server.pem, key_file: server.key"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("authority"))
    made.issue("server")
    made.issue("client", "DNS:prometheus.example,IP:10.0.0.7,email:a@example.org,URI:spiffe://pool/prometheus")
    made.issue("stranger", "DNS:stranger.example")
    return made


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("other"), "other")
    made.issue("client")
    return made


@pytest.fixture
def folder(tmp_path: Path, authority: Authority) -> Path:
    """A folder with the server's certificate, as a web configuration names it."""
    made = tmp_path / "web"
    made.mkdir()
    for name in ("server.pem", "server.key", "authority.pem"):
        shutil.copy(authority.folder / name, made / name)
    return made


def parsed(text: str, folder: Path = Path("/nowhere")) -> WebConfig:
    return parse_web_config(text.encode(), "web.yml", folder)


class Served:
    """A server over a node, under a web configuration."""

    def __init__(self, node: Node, config: WebConfig, token: str | None = None) -> None:
        self.context = RotatingContext(config.tls_server_config) if config.tls_server_config else None
        self.guard = Guard(Face(node.agent, token).application(), config, token)
        self.server = Server(self.guard, listen("127.0.0.1", 0), self.context)
        self.server.start()

    def ask(
        self,
        path: str = "/healthz",
        trust: Path | None = None,
        client: tuple[Path, Path] | None = None,
        change: Callable[[ssl.SSLContext], None] | None = None,
        **headers: str,
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and the server's certificate."""
        where = urllib.parse.urlsplit(self.server.url)
        assert where.hostname is not None
        connection: http.client.HTTPConnection
        if where.scheme == "https":
            context = ssl.create_default_context(cafile=trust)
            if client is not None:
                context.load_cert_chain(*client)
            if change is not None:
                change(context)
            connection = http.client.HTTPSConnection(where.hostname, where.port, timeout=10, context=context)
        else:
            connection = http.client.HTTPConnection(where.hostname, where.port, timeout=10)
        try:
            connection.connect()
            seen = connection.sock.getpeercert(binary_form=True) if isinstance(connection.sock, ssl.SSLSocket) else b""
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, seen or b""
        finally:
            connection.close()

    def close(self) -> None:
        self.server.stop()


@pytest.fixture
def serve(node: Node) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def build(config: WebConfig, token: str | None = None) -> Served:
        made.append(Served(node, config, token))
        return made[-1]

    yield build
    for served in made:
        served.close()


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


# ---- the file ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a", "expected keys"),
        ("a: [", "no YAML"),
        ("\x00", "no YAML"),
        ("nonsense: 1", "nonsense is not a known key"),
        ("tokens: [a]", "tokens is not a known key"),
        ("basic_auth_users: {a: x}\nbasic_auth_users: {b: y}", "there twice"),
        ("tls_server_config: {cert_file: a}", "tls_server_config.key_file is missing"),
        ("tls_server_config: {cert: x, key: y}", "missing"),
        (TLS + ", cert: inline}", "tls_server_config.cert is not a known key"),
        (TLS + ", client_auth_type: RequireAnyClientCert}", "client_auth_type is 'RequireAnyClientCert'"),
        (TLS + ", client_auth_type: RequireAndVerifyClientCert}", "without client_ca_file"),
        (TLS + ", client_ca_file: ca.pem}", "NoClientCert with client_ca_file"),
        (TLS + ", client_ca_file: ca.pem, client_auth_type: VerifyClientCertIfGiven, client_allowed_sans: [a]}", "client_allowed_sans"),
        (TLS + ", min_version: TLS10}", "min_version is 'TLS10'"),
        (TLS + ", min_version: TLS13, max_version: TLS12}", "min_version TLS13 above max_version TLS12"),
        (TLS + ", cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]}", "TLS_RSA_WITH_RC4_128_SHA"),
        (TLS + ", curve_preferences: [CurveP256, X25519]}", "curve_preferences"),
        (TLS + ", cert_file: 7}", "there twice"),
        ("http_server_config: {headers: {Server: x}}", "headers names 'Server'"),
        ("http_server_config: {headers: {X-Frame-Options: \"a\\nSet-Cookie: b\"}}", "printable ASCII"),
        ("http_server_config: {http2: 1}", "http2"),
        ("basic_auth_users: {a: secret}", "user 'a' is no bcrypt hash"),
        (f'basic_auth_users: {{"a:b": "{HASH}"}}', "without a colon"),
        ("basic_auth_users: {a: 7}", "not text"),
        ("rate_limit: {interval: 1s}", "burst is 0"),
        ("rate_limit: {interval: soon, burst: 1}", "interval is 'soon'"),
        ("bearer_token_files: [absent]", "token file /nowhere/absent cannot be read"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_honoured(text: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        parsed(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


TAGS = (
    "",
    *(
        f"!!{tag} "
        for tag in [
            "bool",
            "int",
            "float",
            "timestamp",
            "binary",
            "null",
            "omap",
            "pairs",
            "set",
            "seq",
            "map",
            "str",
            "merge",
            "value",
            "nothing",
        ]
    ),
)
VALUES = (
    "x", "''", "[a]", "{a: b}", "-", "0x", "1:2", "2001-99-99", "2001-01-01T99:00:00Z", "[[a]]", "[{a: b, c: d}]", "0x" + "f" * 5000,
    "9" * 5000, '"a\\0b"', '"\\uD800"', ".",
)  # fmt: skip
PLACES = (
    "%s", "[%s]", "a: %s", "? %s\n: x", "<<: %s", "rate_limit: %s", "rate_limit: {burst: %s}", "basic_auth_users: {a: %s}",
    "basic_auth_users: {? %s : a}", "bearer_token_files: [%s]", "http_server_config: {headers: %s}",
    "tls_server_config: {cert_file: %s, key_file: x}",
    "tls_server_config: {cert_file: x, key_file: x, client_auth_type: VerifyClientCertIfGiven, client_ca_file: %s}",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_whatever_a_value_is_the_answer_is_a_configuration_or_one_sentence(place: str) -> None:
    refused = 0
    for tag in TAGS:
        for value in VALUES:
            try:
                config = parsed(place % (tag + value))
                if config.tls_server_config is not None:
                    make_context(config.tls_server_config)
            except BadInput as error:
                refused += 1
                assert "\n" not in str(error), (tag, value)
    assert refused > 0


def test_the_sample_of_the_format_is_taken(folder: Path) -> None:
    (folder / "token").write_text("t0ken\n")
    (folder / "web.yml").write_text(
        "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n  client_auth_type: RequireAndVerifyClientCert\n"
        "  client_ca_file: authority.pem\n  min_version: TLS12\n  max_version: TLS13\n  cipher_suites:\n"
        + "".join(f"    - {name}\n" for name in CIPHERS)
        + "  prefer_server_cipher_suites: false\n  curve_preferences: [X25519]\n  client_allowed_sans: [prometheus.example]\n"
        "http_server_config:\n  http2: true\n  headers:\n    X-Frame-Options: deny\n    X-Content-Type-Options: nosniff\n"
        f"basic_auth_users:\n  alice: {HASH}\nrate_limit:\n  interval: 1m30s\n  burst: 7\nbearer_token_files: [token]\n"
    )
    config = load_web_config(folder / "web.yml")
    assert config.tls_server_config is not None and config.tls_server_config.cert_file == str(folder / "server.pem")
    assert config.rate_limit.seconds == 90 and config.tokens == ("t0ken",) and config.guarded
    assert make_context(config.tls_server_config).verify_mode is ssl.CERT_REQUIRED
    assert load_web_config(_written(folder / "empty.yml", "")) == WebConfig()
    with pytest.raises(BadInput, match=r"absent\.yml cannot be read"):
        load_web_config(folder / "absent.yml")
    with pytest.raises(BadInput, match="cannot be read: embedded null byte"):
        load_web_config(folder / "a\0b.yml")


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "server.pem").unlink(), "cert_file .*server.pem cannot be read: No such file"),
        (lambda folder: (folder / "server.key").unlink(), "key_file .*server.key cannot be read"),
        (lambda folder: (folder / "server.pem").write_text("nothing"), "cannot be used together"),
        (lambda folder: (folder / "server.pem").write_text(""), "cannot be used together"),
        (lambda folder: shutil.copy(folder / "other.key", folder / "server.key"), "key values mismatch"),
        (lambda folder: (folder / "authority.pem").write_text("nothing"), "client_ca_file .* cannot be used"),
        (lambda folder: (folder / "authority.pem").unlink(), "client_ca_file .* cannot be read"),
    ],
)
def test_files_that_cannot_be_used(folder: Path, authority: Authority, change: Callable[[Path], object], said: str) -> None:
    shutil.copy(authority.folder / "client.key", folder / "other.key")
    config = parsed(TLS + ", client_ca_file: authority.pem, client_auth_type: VerifyClientCertIfGiven}", folder).tls_server_config
    assert config is not None
    make_context(config)
    change(folder)
    with pytest.raises(BadInput, match=said) as caught:
        make_context(config)
    assert "\n" not in str(caught.value)


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked(folder: Path) -> None:
    from web_certificates import run

    run("ec", "-in", str(folder / "server.key"), "-aes256", "-passout", "pass:x", "-out", str(folder / "locked.key"))
    config = parsed("tls_server_config: {cert_file: server.pem, key_file: locked.key}", folder).tls_server_config
    assert config is not None
    with pytest.raises(BadInput, match="without a passphrase"):
        make_context(config)


# ---- TLS -----------------------------------------------------------------------------------------------------------------------------


def test_tls_and_no_plain_text(serve: Callable[..., Served], folder: Path, authority: Authority) -> None:
    served = serve(parsed(TLS + ", min_version: TLS13}", folder))
    assert served.server.url.startswith("https://")
    assert served.ask("/metrics", trust=authority.certificate)[0] == 200
    where = urllib.parse.urlsplit(served.server.url)
    with socket.create_connection((where.hostname or "", where.port or 0), 5) as plain:
        plain.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"poolmeter" not in plain.recv(4096)

    def old(context: ssl.SSLContext) -> None:
        context.maximum_version = ssl.TLSVersion.TLSv1_2

    with pytest.raises(ssl.SSLError):
        served.ask(trust=authority.certificate, change=old)


def test_a_cipher_of_the_list_is_taken_and_no_other(serve: Callable[..., Served], folder: Path, authority: Authority) -> None:
    served = serve(parsed(TLS + ", max_version: TLS12, cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384]}", folder))
    assert served.ask(trust=authority.certificate)[0] == 200
    with pytest.raises(ssl.SSLError):
        served.ask(trust=authority.certificate, change=lambda context: context.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256"))


@pytest.mark.parametrize("kind", ["RequireAndVerifyClientCert", "VerifyClientCertIfGiven"])
def test_client_certificates(serve: Callable[..., Served], folder: Path, authority: Authority, other: Authority, kind: str) -> None:
    served = serve(parsed(f"{TLS}, client_ca_file: authority.pem, client_auth_type: {kind}}}", folder))
    mine, theirs = ((place.folder / "client.pem", place.folder / "client.key") for place in (authority, other))
    assert served.ask(trust=authority.certificate, client=mine)[0] == 200
    with pytest.raises((OSError, http.client.HTTPException)):
        served.ask(trust=authority.certificate, client=theirs)
    if kind == "VerifyClientCertIfGiven":
        assert served.ask(trust=authority.certificate)[0] == 200
    else:
        with pytest.raises((OSError, http.client.HTTPException)):
            served.ask(trust=authority.certificate)


@pytest.mark.parametrize("name", ["prometheus.example", "10.0.0.7", "a@example.org", "spiffe://pool/prometheus"])
def test_client_names(serve: Callable[..., Served], folder: Path, authority: Authority, name: str) -> None:
    both = "client_ca_file: authority.pem, client_auth_type: RequireAndVerifyClientCert"
    served = serve(parsed(f"{TLS}, {both}, client_allowed_sans: ['{name}', other.example]}}", folder))
    mine, stranger = ((authority.folder / f"{who}.pem", authority.folder / f"{who}.key") for who in ("client", "stranger"))
    assert served.ask(trust=authority.certificate, client=mine)[0] == 200
    with pytest.raises((OSError, http.client.HTTPException)):
        served.ask(trust=authority.certificate, client=stranger)


def test_a_certificate_rotated_on_disk(serve: Callable[..., Served], folder: Path, authority: Authority, tmp_path: Path) -> None:
    served = serve(parsed(TLS + "}", folder))
    where = urllib.parse.urlsplit(served.server.url)
    standing = http.client.HTTPSConnection(
        where.hostname or "", where.port, timeout=10, context=ssl.create_default_context(cafile=authority.certificate)
    )
    standing.request("GET", "/healthz")
    assert standing.getresponse().read()
    _, _, before = served.ask(trust=authority.certificate)
    fresh = Authority(tmp_path / "fresh", "fresh")
    certificate, key = fresh.issue("server")
    # In the midst of it the certificate is new and the key is old: the last good pair stays in force.
    shutil.copy(certificate, folder / "new.pem")
    os.replace(folder / "new.pem", folder / "server.pem")
    assert served.ask(trust=authority.certificate)[2] == before
    shutil.copy(key, folder / "new.key")
    os.replace(folder / "new.key", folder / "server.key")
    status, _, after = served.ask(trust=fresh.certificate)
    assert status == 200 and after != before
    with pytest.raises(ssl.SSLCertVerificationError):
        served.ask(trust=authority.certificate)
    standing.request("GET", "/healthz")
    assert standing.getresponse().status == 200
    standing.close()


def test_another_configuration_that_cannot_be_used_changes_nothing(folder: Path) -> None:
    config = parsed(TLS + "}", folder).tls_server_config
    assert config is not None
    context = RotatingContext(config)
    before = context.newest()
    with pytest.raises(BadInput):
        context.replace(config.model_copy(update={"cert_file": str(folder / "absent")}))
    assert context.newest() is before
    context.replace(config.model_copy(update={"min_version": "TLS13"}))
    assert context.newest().minimum_version is ssl.TLSVersion.TLSv1_3


# ---- who asks ------------------------------------------------------------------------------------------------------------------------


def test_passwords(serve: Callable[..., Served]) -> None:
    served = serve(parsed(f"basic_auth_users: {{alice: '{HASH}'}}"))
    for path in ("/metrics", "/healthz", "/readyz", "/v1/usage", "/v1/snapshot", "/absent"):
        status, headers, _ = served.ask(path)
        assert status == 401 and headers["www-authenticate"] == 'Basic realm="poolmeter"', path
    assert served.ask("/metrics", **basic("alice", "secret"))[0] == 200
    assert served.ask("/metrics", **basic("alice", "secret"))[0] == 200
    for user, password in (("alice", "wrong"), ("alice", ""), ("bob", "secret"), ("", ""), ("alice", "secret\0"), ("alice", "s" * 100)):
        assert served.ask("/metrics", **basic(user, password))[0] == 401, (user, password)
    for broken in ("Basic", "Basic !!!", "Basic " + base64.b64encode(b"no colon").decode(), "Bearer secret", "Digest x", "Basic \xff"):
        assert served.ask("/metrics", Authorization=broken)[0] == 401, broken


def test_a_name_that_is_not_there_costs_as_much_as_one_that_is() -> None:
    assert not matches(b"secret", _NOBODY) and len(_NOBODY) == len(HASH)
    assert bcrypt.checkpw(b"x", _NOBODY) is False  # a hash that bcrypt computes, not one it refuses


def test_tokens(serve: Callable[..., Served], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t0ken\n")
    served = serve(parsed("bearer_token_files: [token]", tmp_path), "collectors")
    status, headers, _ = served.ask("/metrics")
    assert status == 401 and headers["www-authenticate"] == "Bearer"
    for good in ("Bearer t0ken", "bearer t0ken", "Bearer collectors"):
        assert served.ask("/metrics", Authorization=good)[0] == 200, good
    for wrong in ("Bearer", "Bearer t0ke", "Bearer t0ken2", "t0ken", "Basic t0ken"):
        assert served.ask("/metrics", Authorization=wrong)[0] == 401, wrong


def test_without_users_and_tokens_nobody_is_asked(serve: Callable[..., Served]) -> None:
    assert serve(WebConfig(), "collectors").ask("/metrics")[0] == 200


def test_headers_are_on_every_answer(serve: Callable[..., Served]) -> None:
    served = serve(parsed(f"http_server_config: {{headers: {{X-Frame-Options: deny}}}}\nbasic_auth_users: {{alice: '{HASH}'}}"))
    for headers, status in (({}, 401), (basic("alice", "secret"), 200)):
        found, answered, _ = served.ask("/metrics", **headers)
        assert found == status and answered["x-frame-options"] == "deny"


def test_a_rate_limit(serve: Callable[..., Served]) -> None:
    served = serve(parsed("rate_limit: {interval: 1h, burst: 3}"))
    assert [served.ask()[0] for _ in range(5)] == [200, 200, 200, 429, 429]
    served.guard.config = WebConfig()
    assert served.ask()[0] == 200


def test_a_new_configuration_is_in_force_at_the_next_request(serve: Callable[..., Served]) -> None:
    served = serve(parsed(f"basic_auth_users: {{alice: '{HASH}'}}"))
    assert served.ask(**basic("alice", "secret"))[0] == 200
    served.guard.config = parsed(f"basic_auth_users: {{alice: '{bcrypt.hashpw(b'new', bcrypt.gensalt(4)).decode()}'}}")
    assert served.ask(**basic("alice", "secret"))[0] == 401 and served.ask(**basic("alice", "new"))[0] == 200


def test_many_at_once_under_a_password(serve: Callable[..., Served]) -> None:
    served = serve(parsed(f"basic_auth_users: {{alice: '{HASH}'}}"))
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda number: served.ask("/metrics", **basic("alice", "secret" if number % 2 else "no"))[0], range(32)))
    assert found == [401, 200] * 16


# ---- beside Prometheus' own ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("", True),
        (TLS + "}", True),
        (TLS + ", client_ca_file: authority.pem, client_auth_type: RequireAndVerifyClientCert}", True),
        (TLS + ", min_version: TLS13, max_version: TLS13, curve_preferences: [CurveP256]}", True),
        (TLS + ", cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384], prefer_server_cipher_suites: false}", True),
        ("http_server_config: {http2: false, headers: {X-Frame-Options: deny}}", True),
        (f"basic_auth_users: {{alice: '{HASH}'}}", True),
        ("rate_limit: {interval: 250ms, burst: 2}", True),
        (TLS + ", client_ca_file: authority.pem}", False),
        (TLS + ", min_version: TLS9}", False),
        (TLS + ", client_auth_type: Sometimes}", False),
        (TLS + ", cipher_suites: [NONE]}", False),
        ("tls_server_config: {cert_file: server.pem}", False),
        ("tls_server_config: {cert_file: absent.pem, key_file: server.key}", False),
        ("http_server_config: {headers: {Server: x}}", False),
        ("nonsense: 1", False),
        ("- a", False),
    ],
)
def test_files_mean_the_same_to_prometheus(folder: Path, text: str, good: bool) -> None:
    """What promtool takes is taken here, and what it refuses is refused."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    path = _written(folder / "web.yml", text)
    checked = subprocess.run([promtool, "check", "web-config", str(path)], capture_output=True, text=True, check=False)
    if "rate_limit" in text and checked.returncode != 0 and "not found in type" in checked.stderr:
        pytest.skip("this promtool is older than rate_limit")
    assert (checked.returncode == 0) is good, checked.stderr
    try:
        config = load_web_config(path)
        if config.tls_server_config is not None:
            make_context(config.tls_server_config)
    except BadInput:
        assert not good
    else:
        assert good


@needs_prometheus
def test_prometheus_scrapes_with_certificate_and_password(
    serve: Callable[..., Served], folder: Path, authority: Authority, node: Node, tmp_path: Path
) -> None:
    tls = TLS + ", client_ca_file: authority.pem, client_auth_type: RequireAndVerifyClientCert, client_allowed_sans: [prometheus.example]}"
    served = serve(parsed(f"{tls}\nbasic_auth_users: {{alice: '{HASH}'}}", folder))
    job: dict[str, Any] = {
        "scheme": "https",
        "scrape_interval": "1s",
        "static_configs": [{"targets": [urllib.parse.urlsplit(served.server.url).netloc]}],
        "tls_config": {
            "ca_file": str(authority.certificate),
            "cert_file": str(authority.folder / "client.pem"),
            "key_file": str(authority.folder / "client.key"),
        },
    }
    signed_on = {"basic_auth": {"username": "alice", "password": "secret"}}
    home = tmp_path / "prometheus"
    home.mkdir()
    with running(home, [{**job, **signed_on, "job_name": "good"}, {**job, "job_name": "nobody"}]) as url:
        until(lambda: ask(url, "/api/v1/query", query='up{job="good"} == 1')["result"], "the page is scraped")
        assert ask(url, "/api/v1/query", query='poolmeter_device_up{job="good"}')["result"]
        found = until(lambda: ask(url, "/api/v1/query", query='up{job="nobody"}')["result"], "the other was refused")
        assert found[0]["value"][1] == "0"
