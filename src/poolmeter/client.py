"""A collector's answers as pandas DataFrames.

    from poolmeter.client import Client

    pool = Client("https://collector.example:9878", token="pm_...", ca_file="authority.pem")
    hours = pool.usage(tier="hour", start="7d").groupby("tenant")["used_us"].sum() / 3.6e9

Numbers are nullable integers (`Int64`), truths `boolean`, text `string`: what is not known is `pd.NA`, never 0. Moments are UTC timestamps:
a column `minute_us` of the wire is `minute` here. Every error is one of `poolmeter.errors` with one sentence.
"""

import http.client
import io
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poolmeter.errors import BadInput, DataError, PoolmeterError, Refused, Unavailable
from poolmeter.web.trust import Trust

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_ARROW = "application/vnd.apache.arrow.stream"
BODY_MOST = 256 << 20
RETRIES = 3
WAIT_MOST_S = 30.0
# Columns in microseconds that are moments; the others are amounts of time.
MOMENTS = frozenset(
    {
        "minute_us", "hour_us", "day_us", "start_us", "at_us", "last_activity_us", "first_minute_us", "last_minute_us", "created_us", "expires_us",
        "decided_at_us", "outcome_at_us", "taken_us", "since_us",
    }
)  # fmt: skip
_KINDS: Mapping[int, type[PoolmeterError]] = {400: BadInput, 403: Refused, 404: BadInput, 409: Refused, 413: BadInput, 415: BadInput}


class Client:
    """One collector. `token` is a bearer token; `ca_file`, `cert_file` and `key_file` are PEM files, the system's authorities without.

    Raises BadInput for an address that is no http or https URL and files that cannot be used. Safe for use from several threads.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        ca_file: str | Path | None = None,
        cert_file: str | Path | None = None,
        key_file: str | Path | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and parts.port != 0
        except ValueError:
            good = False
        if not good:
            raise BadInput(f"collector is {url!r:.120}, expected a URL such as http://127.0.0.1:9878")
        if token is not None and (not token.isascii() or not token.isprintable() or " " in token or not token):
            raise BadInput("token has characters that no token has, expected printable ASCII text without spaces")
        self._url, self._token, self._timeout_s = url.rstrip("/"), token, timeout_s
        files = [None if name is None else Path(name) for name in (ca_file, cert_file, key_file)]
        self._opener = Trust(*files).opener(url)

    def usage(
        self,
        kind: str = "slice",
        start: object = None,
        end: object = None,
        *,
        tier: str = "minute",
        node: str | Iterable[str] = (),
        tenant: str | Iterable[str] = (),
        allocation: str | Iterable[str] = (),
        device: str | Iterable[str] = (),
        columns: Sequence[str] | None = None,
    ) -> "pd.DataFrame":
        """Records of a kind (slice, device, process, event) in [start, end), all pages of them, oldest first.

        `start` and `end` are RFC 3339 texts, dates, `7d`, `last-month`, or datetimes with a time zone; without them this month until now.
        `columns` are the wire's names (`minute_us`, `tenant`).
        """
        import pyarrow as pa

        asked: list[tuple[str, str]] = [("kind", kind), ("tier", tier)]
        asked += [(name, _moment(value, name)) for name, value in (("from", start), ("to", end)) if value is not None]
        for name, given in (("node", node), ("tenant", tenant), ("allocation", allocation), ("device", device)):
            asked += [(name, value) for value in ((given,) if isinstance(given, str) else given)]
        if columns is not None:
            asked.append(("columns", ",".join(columns)))
        return _typed(pa.concat_tables(self._pages(asked)))

    def snapshot(self) -> "dict[str, pd.DataFrame]":
        """The newest snapshot of every node that may be seen: `nodes`, `devices`, `slices`, `processes`, `sources`."""
        rows = self._rows("/v1/snapshot", [("limit", "100")])
        parts = ("devices", "slices", "processes", "sources")
        head = [{name: value for name, value in row.items() if name not in parts} for row in rows]
        found = {"nodes": _frame(head, ("node",))}
        for part in parts:
            found[part] = _frame(
                [{"node": row["node"], "taken_us": row["taken_us"], **item} for row in rows for item in row[part]], ("node",)
            )
        return found

    def nodes(self) -> "pd.DataFrame":
        """Every exporter with its state and reason."""
        return _frame(self._rows("/v1/nodes", [("limit", "1000")]), ("url", "node", "state", "reason"), ("last_pull", "last_success"))

    def health(self) -> dict[str, Any]:
        """The health page: `status`, `store`, `warnings`, and `rows` of the nodes."""
        return self._object("/v1/health", [])

    def decisions(self, state: str | None = None, node: str | None = None) -> "pd.DataFrame":
        """Decisions by node and sequence."""
        asked = [(name, value) for name, value in (("state", state), ("node", node)) if value is not None]
        return _frame(self._rows("/v1/decisions", asked), ("id", "state", "node", "allocation_id", "device_uuid"))

    def _pages(self, asked: list[tuple[str, str]]) -> "Iterator[pa.Table]":
        import pyarrow as pa

        cursor: str | None = None
        while True:
            body, headers = self._ask("/v1/usage", [*asked, *([("cursor", cursor)] if cursor else [])], _ARROW)
            try:
                with pa.ipc.open_stream(io.BytesIO(body)) as reader:
                    yield reader.read_all()
            except (pa.ArrowException, OSError, ValueError) as error:
                raise DataError(f"usage of {self._url} is no Arrow stream: {str(error).splitlines()[0]:.120}") from None
            before, cursor = cursor, headers.get("X-Poolmeter-Cursor")
            if cursor is None:
                return
            if cursor == before:
                raise DataError(f"usage of {self._url} gave the same cursor twice, expected each page to go on")

    def _rows(self, path: str, asked: Sequence[tuple[str, str]] = ()) -> list[dict[str, Any]]:
        """The rows of all pages of a list."""
        found: list[dict[str, Any]] = []
        after: str | None = None
        while True:
            answer = self._object(path, [*asked, *([("after", after)] if after else [])])
            rows = answer.get("rows")
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise DataError(f"answer of {self._url}{path} has no rows, expected a list of objects")
            found += rows
            before, after = after, answer.get("after")
            if after is None:
                return found
            if not isinstance(after, str) or after == before:
                raise DataError(f"{self._url}{path} gave the same place twice, expected each page to go on")

    def _object(self, path: str, asked: Sequence[tuple[str, str]]) -> dict[str, Any]:
        body, _ = self._ask(path, asked, "application/json")
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise DataError(f"answer of {self._url}{path} is {body[:60]!r}, expected a JSON object")
        return value

    def _ask(self, path: str, asked: Sequence[tuple[str, str]], accept: str) -> tuple[bytes, Mapping[str, str]]:
        url = f"{self._url}{path}" + (f"?{urllib.parse.urlencode(asked)}" if asked else "")
        headers = {"Accept": accept, **({"Authorization": f"Bearer {self._token}"} if self._token else {})}
        for turn in range(RETRIES + 1):
            try:
                with self._opener.open(urllib.request.Request(url, headers=headers), timeout=self._timeout_s) as answer:
                    body = answer.read(BODY_MOST + 1)
                    if len(body) > BODY_MOST:
                        raise DataError(f"{self._url}{path} answered with more than {BODY_MOST} bytes, expected fewer")
                    return body, answer.headers
            except urllib.error.HTTPError as error:
                with error:
                    later = error.headers.get("Retry-After", "")
                    if error.code == 429 and turn < RETRIES and later.isdigit() and int(later) <= WAIT_MOST_S:
                        time.sleep(int(later))
                        continue
                    raise _failure(error, f"{self._url}{path}") from None
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(
                    f"collector {self._url} does not answer: {getattr(error, 'reason', error) or type(error).__name__}"
                ) from None
        raise AssertionError("unreachable")


def _failure(error: urllib.error.HTTPError, url: str) -> PoolmeterError:
    try:
        sentence = str(json.loads(error.read(65_536))["error"])
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        sentence = f"{url} answered with status {error.code}, expected 200"
    return _KINDS.get(error.code, Unavailable)(sentence)


def _moment(value: object, name: str) -> str:
    if isinstance(value, str):
        return value
    zone = getattr(value, "tzinfo", None)
    if not hasattr(value, "isoformat") or (hasattr(value, "hour") and zone is None):
        raise BadInput(f"{name} is {value!r:.60}, expected a text such as 7d or 2026-11-01, or a datetime with a time zone")
    return str(value.isoformat())


def _typed(table: "pa.Table") -> "pd.DataFrame":
    import pandas as pd
    import pyarrow as pa

    kinds = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype(), pa.utf8(): pd.StringDtype()}
    # A sum over a day may pass 64 bits: those columns are Python's own whole numbers, as decimals.
    frame: pd.DataFrame = table.to_pandas(types_mapper=kinds.get)
    return _with_moments(frame)


def _frame(rows: Sequence[Mapping[str, object]], least: Sequence[str], texts: Sequence[str] = ()) -> "pd.DataFrame":
    """Rows as a frame with nullable types; `least` are columns that are there without rows, `texts` hold moments as text."""
    import pandas as pd

    names = list(dict.fromkeys([*least, *(name for row in rows for name in row)]))
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        found = {type(value) for value in values if value is not None}
        if name in texts:
            columns[name] = pd.Series(pd.to_datetime(pd.Series(values, dtype="string"), utc=True, format="ISO8601"))
        else:
            kind = (
                {bool: "boolean", int: "Int64"}.get(next(iter(found)), "string") if len(found) == 1 else "string" if not found else "object"
            )
            columns[name] = pd.Series(values, dtype=kind)
    return _with_moments(pd.DataFrame(columns, columns=names))


def _with_moments(frame: "pd.DataFrame") -> "pd.DataFrame":
    import pandas as pd

    for name in [name for name in frame.columns if name in MOMENTS]:
        frame[name] = pd.to_datetime(frame[name], unit="us", utc=True).astype("datetime64[us, UTC]")
    return frame.rename(columns={name: name.removesuffix("_us") for name in frame.columns if name in MOMENTS})
