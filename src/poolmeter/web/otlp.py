"""OTLP over HTTP and protobuf: where to post, with which headers, and what became of a post.

`OTEL_EXPORTER_OTLP_HEADERS` and `OTEL_EXPORTER_OTLP_CERTIFICATE` are honoured, as by every OTLP exporter.
"""

import gzip
import http.client
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poolmeter.errors import BadInput
from poolmeter.web.trust import Trust

RETRYABLE = frozenset({429, 502, 503, 504})
LONGEST_PAUSE_S = 60.0
_ANSWER_LIMIT = 65_536


def endpoint_of(text: str, path: str = "/v1/metrics") -> str:
    """The address to post to: the signal's path is added where it is not there. Raises BadInput."""
    try:
        parts = urllib.parse.urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and text.isprintable() and " " not in text
    except ValueError:
        good = False
    if not good:
        raise BadInput(f"--otlp-endpoint is {text!r:.80}, expected a URL such as http://127.0.0.1:4318")
    found = parts.path.rstrip("/")
    return parts._replace(path=found if found.endswith(path) else found + path, fragment="").geturl()


def headers_of(text: str) -> dict[str, str]:
    """`name=value,name=value`, percent-encoded, as OpenTelemetry's environment variables write headers. Raises BadInput."""
    found = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = item.partition("=")
        value = urllib.parse.unquote(value.strip())
        if not equals or not name.strip().isascii() or not value.isprintable():
            raise BadInput("OTEL_EXPORTER_OTLP_HEADERS has an item that is no name=value")
        found[name.strip()] = value
    return found


@dataclass(frozen=True)
class Outcome:
    """What became of a post. `trouble` None: it was taken, and `answer` is the body; `retry` whether to try again soon; `after_s` what the
    receiver asked to wait."""

    trouble: str | None = None
    retry: bool = False
    after_s: float | None = None
    answer: bytes = b""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A post is not sent on elsewhere."""

    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        return None


class Poster:
    """Posts messages to one address. Raises BadInput when the environment's headers or authority cannot be used."""

    def __init__(self, endpoint: str, agent: str, timeout_s: float = 10.0, environment: Mapping[str, str] = os.environ) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        own = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip", "User-Agent": agent}
        self._headers = {**own, **headers_of(environment.get("OTEL_EXPORTER_OTLP_HEADERS", ""))}
        authority = environment.get("OTEL_EXPORTER_OTLP_CERTIFICATE") or None
        context = Trust(Path(authority) if authority is not None else None).context("OTEL_EXPORTER_OTLP_CERTIFICATE")
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _NoRedirects)

    def post(self, message: bytes) -> Outcome:
        """Send one serialized request; waits for the answer."""
        request = urllib.request.Request(self.endpoint, gzip.compress(message, 1), self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                return Outcome(answer=response.read(_ANSWER_LIMIT))
        except urllib.error.HTTPError as error:
            with error:
                return Outcome(f"status {error.code}", error.code in RETRYABLE, seconds_of(error.headers.get("Retry-After")))
        except (OSError, http.client.HTTPException) as error:
            return Outcome(str(getattr(error, "reason", None) or error), retry=True)


def seconds_of(text: str | None) -> float | None:
    """What Retry-After asks for in seconds, at most the longest pause; a date, or nothing, is None."""
    return min(LONGEST_PAUSE_S, float(text)) if text is not None and text.isascii() and text.isdigit() else None
