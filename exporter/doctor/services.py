"""Exporter, collector, token, clocks, and the optional neighbours Prometheus and Grafana."""

import http.client
import json
import os
import shlex
import ssl
import time
from collections.abc import Iterator, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from poolmeter.errors import BadInput, DataError
from poolmeter.exporter.doctor.finding import Finding, Subject, ok, problem, unknown, warning
from poolmeter.exporter.owners import process_key, unbilled
from poolmeter.exporter.top.feed import Address, parse_snapshots
from poolmeter.model.snapshot import Snapshot
from poolmeter.tokens import client_token, own_token_file
from poolmeter.web.trust import SYSTEM, Trust

_SKEW_WARNING_S, _SKEW_PROBLEM_S = 2, 30


def _get(
    url: str, path: str, token: str | None = None, timeout_s: float = 3.0, ca_file: str | None = None, trust: Trust | None = None
) -> tuple[int, bytes, str | None]:
    """Status, body and the Date header. Raises BadInput, OSError or HTTPException."""
    address = Address(url, token, ca_file, timeout_s, trust)
    try:
        status, body = address.get(path)
        return status, body, address.date
    finally:
        address.close()


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _rows(body: dict[str, Any], key: str) -> list[dict[str, Any]]:
    rows = body.get(key)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def exporter_findings(subject: Subject, token: str | None = None, ca_file: str | None = None) -> tuple[list[Finding], Snapshot | None]:
    """Whether the exporter answers and all its sources do; and its newest snapshot."""
    url, fix = subject.exporter_url, "sudo systemctl restart poolmeter-exporter"
    try:
        status, body, _ = _get(url, "/readyz", token, ca_file=ca_file)
    except BadInput as error:
        return [problem("exporter", str(error), "poolmeter config check")], None
    except ssl.SSLCertVerificationError as error:
        return [unknown("exporter", f"the certificate of {url} cannot be verified: {error.verify_message}", _by_name(url))], None
    except (ssl.SSLError, http.client.BadStatusLine, ConnectionResetError) as error:
        if url.startswith("http:"):
            return [unknown("exporter", f"what answers at {url} does not speak plain HTTP, and may want TLS", _by_name(url))], None
        found = f"what answers at {url} ends the connection, and may want a client's certificate: {_why(error)}"
        return [unknown("exporter", found, f"curl --cert FILE --key FILE --cacert FILE {url}/readyz")], None
    except (OSError, http.client.HTTPException) as error:
        return [problem("exporter", f"nobody answers at {url}: {_why(error)}", fix)], None
    if status in (401, 403):
        found = f"what answers at {url} {'refuses the token' if token else 'asks for a token or password'} (status {status})"
        return [unknown("exporter", found, "poolmeter doctor --token-file FILE")], None
    ready = _object(body)
    if ready.get("schema") != "poolmeter.ready/1":
        return [
            problem("exporter", f"what answers at {url} is no exporter (status {status})", f"ss -ltnp | grep :{url.rsplit(':', 1)[-1]}")
        ], None
    sources = _rows(ready, "sources")
    failing = [source for source in sources if not source.get("ok")]
    made = [
        problem(f"exporter source {source.get('source')}", str(source.get("reason") or "it fails, and does not say why"), fix)
        for source in failing
    ]
    if not failing:
        if ready.get("ok"):
            made.append(ok("exporter", f"it answers at {url}, all of its {len(sources)} sources are well"))
        else:
            made.append(warning("exporter", f"it answers at {url} and has collected nothing yet", f"curl {url}/readyz"))
    try:
        status, body, _ = _get(url, "/v1/snapshot", token, ca_file=ca_file)
        snapshot = parse_snapshots(body)[0][0] if status == 200 else None
    except (OSError, http.client.HTTPException, DataError, IndexError):
        snapshot = None
    if snapshot is None:
        made.append(unknown("exporter snapshot", f"{url}/v1/snapshot gives none", f"curl {url}/v1/snapshot"))
    else:
        age_s = (time.time_ns() // 1000 - snapshot.taken_us) // 1_000_000
        if age_s >= 10:
            made.append(problem("exporter snapshot", f"the newest one is {age_s} s old: its turns stand still", fix))
    return made, snapshot


def _by_name(url: str) -> str:
    return f"poolmeter doctor --exporter https://NAME:{urlsplit(url).port or 443} --ca-file FILE"


def snapshot_findings(snapshot: Snapshot) -> Iterator[Finding]:
    """What the exporter sees that somebody should know: programs that nobody is billed for, lost cards, slices that say nothing."""
    nobody = unbilled(snapshot)
    strangers = sorted({(process.command or "?", process.pid) for process in snapshot.processes if process_key(process) in nobody})
    if strangers:
        shown = ", ".join(f"{command} ({pid})" for command, pid in strangers[:3]) + (
            f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
        )
        count = f"{len(strangers)} programs use" if len(strangers) > 1 else "1 program uses"
        found = f"{count} cards without the hook, and nobody is billed for it: {shown}"
        yield warning("programs without hook", found, "poolmeter run --tenant NAME --compute 50 --memory 10G -- PROGRAM")
    elif any(source.source == "nvml" and source.ok for source in snapshot.sources):
        yield ok("programs without hook", "every program on a card has the hook, or is billed to an allocation without it")
    else:
        yield unknown("programs without hook", "the cards cannot be read, so nobody knows")
    for device in snapshot.devices:
        if not device.up and any(source.source == "nvml" and source.ok for source in snapshot.sources):
            yield problem(
                f"card {device.index}", f"{device.uuid} is lost: it does not answer", f"sudo nvidia-smi --gpu-reset -i {device.index}"
            )
    dumb = [part for part in snapshot.slices if part.state == "unknown"]
    if dumb:
        names = ", ".join(sorted({part.allocation_id for part in dumb})[:3])
        yield warning(
            "slices",
            f"nothing is known of {len(dumb)} slice(s): {names}",
            f"poolmeter allocation show {shlex.quote(dumb[0].allocation_id)}",
        )


def collector_findings(
    url: str | None, token_file: Path | None, data: Path, nodes: Sequence[str], trust: Trust = SYSTEM
) -> Iterator[Finding]:
    """Whether the collector answers, knows these nodes and takes our token, and whether its clock is ours."""
    if url is None:
        yield ok("collector", "none is configured")
        return
    token, bad = None, None
    try:
        token = client_token(token_file, data)
    except BadInput as error:
        bad = str(error)
    try:
        status, body, date = _get(url, "/v1/nodes", token, trust=trust)
    except BadInput as error:
        yield problem("collector", str(error), "poolmeter config check")
        return
    except (OSError, http.client.HTTPException) as error:
        yield problem("collector", f"nobody answers at {url}: {_why(error)}", "sudo systemctl restart poolmeter-collector")
        return
    if status == 200:
        yield from _known(url, _object(body), nodes)
    elif status not in (401, 403):
        yield problem(
            "collector", f"what answers at {url} gives status {status} for /v1/nodes, expected a collector's 200", f"curl {url}/v1/nodes"
        )
    where = token_file or own_token_file(data)
    if bad is not None:
        yield problem("collector token", bad, f"ls -l {shlex.quote(str(where))}")
    elif status in (401, 403):
        yield problem(
            "collector token",
            f"{url} refuses {'the token of ' + str(where) if token else 'to answer without one'}",
            f"ls -l {shlex.quote(str(where))}",
        )
    elif token is None:
        found = f"there is none at {where} that uid {os.geteuid()} may read, so decisions cannot be entered or approved from here"
        yield warning("collector token", found, f"sudo install -m 0600 -o $USER TOKEN {shlex.quote(str(where))}")
    else:
        yield ok("collector token", f"{where} holds one")
    yield _skew(url, date)


def _known(url: str, body: dict[str, Any], nodes: Sequence[str]) -> Iterator[Finding]:
    rows = _rows(body, "rows")
    yield ok("collector", f"it answers at {url} and pulls {len(rows)} nodes")
    for name in nodes:
        row = next((row for row in rows if row.get("node") == name), None)
        if row is None:
            yield problem(f"node {name}", f"the collector at {url} does not pull it", "poolmeter config show")
        elif row.get("state") != "up" or row.get("reason"):
            yield problem(
                f"node {name}",
                f"the collector says it is {row.get('state')}: {row.get('reason') or 'no reason known'}",
                f"curl {url}/v1/nodes",
            )


def _skew(url: str, date: str | None) -> Finding:
    try:
        theirs = parsedate_to_datetime(date or "").timestamp()
    except (TypeError, ValueError, OverflowError):
        return unknown("clock", f"{url} does not say what time it is there", "timedatectl")
    # The header is cut to the second, so it is up to one behind.
    seconds = round(time.time() - theirs - 0.5)
    if abs(seconds) > _SKEW_PROBLEM_S:
        return problem(
            "clock",
            f"the clock here is {abs(seconds)} s {_way(seconds)} the collector's: minutes are billed in the wrong place",
            "sudo timedatectl set-ntp true",
        )
    if abs(seconds) > _SKEW_WARNING_S:
        return warning("clock", f"the clock here is {abs(seconds)} s {_way(seconds)} the collector's", "sudo timedatectl set-ntp true")
    return ok("clock", "the clock here is the collector's, as far as a second can tell")


def _way(seconds: int) -> str:
    return "ahead of" if seconds > 0 else "behind"


def neighbour_findings(prometheus: str, grafana: str) -> Iterator[Finding]:
    """Prometheus and Grafana are optional: that they are not there is no fault."""
    try:
        status, body, _ = _get(prometheus, "/api/v1/query?query=count(poolmeter_build_info)", timeout_s=2.0)
        if status != 200:
            yield unknown("prometheus", f"what answers at {prometheus} gives status {status}", f"curl {prometheus}/-/ready")
        elif isinstance(data := _object(body).get("data"), dict) and data.get("result"):
            yield ok("prometheus", f"it answers at {prometheus} and scrapes poolmeter")
        else:
            yield warning(
                "prometheus", f"it answers at {prometheus} and scrapes no exporter of ours", "less deploy/prometheus/prometheus.yml"
            )
    except (OSError, http.client.HTTPException):
        yield ok("prometheus", f"optional, and there is none at {prometheus}")
    try:
        status, _, _ = _get(grafana, "/api/health", timeout_s=2.0)
        yield ok("grafana", f"it answers at {grafana}") if status == 200 else unknown("grafana", f"{grafana} gives status {status}")
    except (OSError, http.client.HTTPException):
        yield ok("grafana", f"optional, and there is none at {grafana}")


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
