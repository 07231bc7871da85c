"""What a source of discovery says, as base URLs of exporters: parsing of text, TOML and Prometheus' target groups, all bounded.

Labels are dropped: pool, tenant and whatever else is billed by come from the exporter's own records alone.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from poolmeter.errors import DataError
from poolmeter.toml import parse_toml

BODY_LIMIT = 4 << 20  # ten thousand targets have one
URL_LIMIT = 300
_HOST = re.compile(r"^[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?\.?$")
_V6 = re.compile(r"^[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,16})?$")


class Urls:
    """Collects different URLs up to `limit`; more raise DataError, so that no answer costs more than that."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._found: dict[str, None] = {}

    def add(self, url: str) -> None:
        """One more; a known one changes nothing."""
        self._found[url] = None
        if len(self._found) > self._limit:
            raise DataError(f"more than {self._limit} targets, expected at most that (collector.discovery_limit)")

    def all(self) -> frozenset[str]:
        """What was collected."""
        return frozenset(self._found)


def target_url(target: object, scheme: str, port: int | None = None) -> str:
    """The one spelling of an exporter's base URL, from `http://host:port`, `host:port` or, with `port`, `host`. Raises DataError.

    One spelling, since the same exporter under two of them would be two. A name and password are refused: URLs are shown to readers.
    """
    shown = f"target is {target!r:.100}"
    if not isinstance(target, str) or not 0 < len(target) <= URL_LIMIT or not target.isascii() or not target.isprintable() or " " in target:
        raise DataError(f"{shown}, expected text such as 10.0.0.1:9877")
    try:
        parts = urlsplit(target if "://" in target else f"{scheme}://{target}")
        host, found = parts.hostname or "", parts.port if parts.port is not None else port
    except ValueError:
        raise DataError(f"{shown}, expected host:port with a port from 1 to 65535") from None
    if parts.scheme not in ("http", "https") or parts.query or parts.fragment or "@" in parts.netloc or "?" in target or "#" in target:
        raise DataError(f"{shown}, expected host:port, or a URL with http or https and neither user nor query")
    if not (_V6.match(host) if ":" in host else _HOST.match(host)):
        raise DataError(f"{shown}, expected a name or an address of a host")
    if found is None:
        if "://" not in target:
            raise DataError(f"{shown}, expected a port behind the host")
        found = 443 if parts.scheme == "https" else 80
    if not 1 <= found <= 65535:
        raise DataError(f"{shown}, expected a port from 1 to 65535")
    where = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{where}:{found}{parts.path.rstrip('/')}"


def parse_lines(text: str, scheme: str, limit: int) -> frozenset[str]:
    """URLs of a text file, one a line; what follows `#` is a comment. Raises DataError, also for a file without a line."""
    urls = Urls(limit)
    lines = text.splitlines()
    if not lines:
        raise DataError("is empty, expected a URL a line (a comment alone says that there are none)")
    for number, line in enumerate(lines, 1):
        word = line.partition("#")[0].strip()
        if word:
            try:
                urls.add(target_url(word, scheme))
            except DataError as error:
                raise DataError(f"line {number}: {error}") from None
    return urls.all()


def parse_toml_nodes(body: bytes, scheme: str, limit: int) -> frozenset[str]:
    """URLs of `nodes = [...]`. Raises DataError."""
    values = parse_toml(body, "content")
    if set(values) != {"nodes"} or not isinstance(values["nodes"], list):
        raise DataError(f"keys are {', '.join(values) or 'none'}"[:200] + ", expected nodes = [...] alone")
    urls = Urls(limit)
    for item in values["nodes"]:
        urls.add(target_url(item, scheme))
    return urls.all()


def parse_json(body: bytes) -> Any:
    """Any JSON value. Raises DataError."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON: {error!s:.120}") from None


def parse_yaml(body: bytes) -> Any:
    """Any YAML value of the safe kinds. Raises DataError."""
    import yaml

    try:
        # libyaml: the parser in Python takes minutes for what is still within the limit.
        return yaml.load(body, Loader=yaml.CSafeLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise DataError(f"is not YAML: {' '.join(str(error).split()):.120}") from None


def parse_groups(value: object, scheme: str, limit: int) -> frozenset[str]:
    """URLs of Prometheus' target groups, `[{"targets": [...], "labels": {...}}]`. Raises DataError.

    Of the labels only `__scheme__` says something about where a target is.
    """
    if not isinstance(value, list):
        raise DataError(f"is {_kind(value)}, expected a list of target groups")
    urls = Urls(limit)
    for group in value:
        for target, own in _targets(group, scheme):
            urls.add(target_url(target, own))
    return urls.all()


def _targets(group: object, scheme: str) -> Iterator[tuple[object, str]]:
    if not isinstance(group, dict):
        raise DataError(f"a target group is {_kind(group)}, expected an object with targets")
    unknown = sorted(str(name) for name in group if name not in ("targets", "labels"))
    if unknown:
        raise DataError(f"a target group has {unknown[0]!r:.60}, expected targets and labels alone")
    targets, labels = group.get("targets"), group.get("labels")
    if not isinstance(targets, list):
        raise DataError(f"targets of a group are {_kind(targets)}, expected a list")
    if labels is not None and not isinstance(labels, dict):
        raise DataError(f"labels of a group are {_kind(labels)}, expected an object")
    own = (labels or {}).get("__scheme__", scheme)
    if own not in ("http", "https"):
        raise DataError(f"__scheme__ is {own!r:.40}, expected http or https")
    return ((target, own) for target in targets)


def _kind(value: object) -> str:
    names: Iterable[tuple[type, str]] = ((dict, "an object"), (list, "a list"), (str, "text"), (bool, "a truth value"))
    return next((name for kind, name in names if isinstance(value, kind)), "nothing" if value is None else f"a {type(value).__name__}")
