"""Kubernetes' EndpointSlices of a service, listed once and then watched, over the API server's HTTPS.

Endpoints that are not ready are asked like the others: an exporter whose source fails is not ready, and still has records.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from poolmeter.collector.discovery.http import Requests
from poolmeter.collector.discovery.source import Answer
from poolmeter.collector.discovery.targets import BODY_LIMIT, Urls, parse_json, target_url
from poolmeter.collector.fetch import bounded
from poolmeter.errors import BadInput, DataError, Unavailable

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PAGE = 500
PAGES_MOST = 100
WATCH_S = 240  # the server ends a watch after that, and the next begins where it ended
GATHER_S = 0.5  # changes that come together, as those of a rollout, are one answer


def in_cluster_server(environment: Mapping[str, str] = os.environ) -> str:
    """The API server's address as a pod is told it. Raises BadInput outside of one."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise BadInput("KUBERNETES_SERVICE_HOST is not set, expected to run in a pod, or api_server of the kubernetes discovery")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"


def own_namespace(account: Path = ACCOUNT) -> str:
    """The namespace of the pod this runs in. Raises BadInput outside of one."""
    try:
        return (account / "namespace").read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise BadInput(
            f"{account / 'namespace'} cannot be read, expected to run in a pod, or namespace of the kubernetes discovery"
        ) from None


def slice_urls(item: Mapping[str, Any], port: str, scheme: str, limit: int) -> frozenset[str]:
    """URLs of one EndpointSlice; `port` is a name or number, empty for the only one. Raises DataError."""
    ports = item.get("ports") or []
    endpoints = item.get("endpoints") or []
    if not isinstance(ports, list) or not isinstance(endpoints, list):
        raise DataError("an EndpointSlice has ports or endpoints that are no list")
    urls = Urls(limit)
    if not endpoints:
        return urls.all()
    number = _port(ports, port)
    for endpoint in endpoints:
        addresses = endpoint.get("addresses") if isinstance(endpoint, dict) else None
        if not isinstance(addresses, list) or not addresses or not isinstance(addresses[0], str):
            raise DataError("an endpoint has no addresses, expected a list of text")
        # The first one: the others are the same endpoint (discovery.k8s.io/v1).
        host = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
        urls.add(target_url(host, scheme, number))
    return urls.all()


def _port(ports: list[Any], wanted: str) -> int:
    found = {str(port.get("name") or ""): port.get("port") for port in ports if isinstance(port, dict)}
    if wanted.isdigit():
        return int(wanted)
    number = found.get(wanted) if wanted else next(iter(found.values())) if len(found) == 1 else None
    if type(number) is not int:
        names = ", ".join(sorted(found))[:100] or "none"
        raise DataError(f"ports of an EndpointSlice are {names}, expected {repr(wanted) if wanted else 'one alone (name it by port)'}")
    return number


class Kubernetes:
    """The endpoints of what a label selector names in one namespace."""

    def __init__(
        self, server: str, namespace: str, selector: str, port: str, requests: Requests, scheme: str, limit: int, timeout_s: float
    ) -> None:
        self._url = f"{server.rstrip('/')}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._where = f"{namespace} {selector}"
        self._selector = selector
        self._port = port
        self._requests = requests
        self._scheme = scheme
        self._limit = limit
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._watch_timeout = aiohttp.ClientTimeout(total=WATCH_S + timeout_s, sock_connect=timeout_s)
        self._slices: dict[str, frozenset[str]] = {}
        self._troubles: dict[str, str] = {}

    @property
    def name(self) -> str:
        """Namespace and selector."""
        return f"kubernetes {self._where}"[:200]

    async def answers(self, session: aiohttp.ClientSession) -> AsyncIterator[Answer]:
        """The endpoints, whenever they change. Ends, to be begun anew with a list, when the server forgot where the watch was."""
        version: str | None = await self._list(session)
        yield self._answer()
        while version is not None:
            changes: asyncio.Queue[bool] = asyncio.Queue(1)
            watching = asyncio.create_task(self._watch(session, version, changes))
            try:
                while not watching.done():
                    waiting = asyncio.create_task(changes.get())
                    try:
                        await asyncio.wait({watching, waiting}, return_when=asyncio.FIRST_COMPLETED)
                        changed = waiting.done()
                    finally:
                        waiting.cancel()
                    if changed:
                        await asyncio.sleep(GATHER_S)
                        yield self._answer()
                if not changes.empty():
                    yield self._answer()
                version = watching.result()
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            await asyncio.sleep(GATHER_S)  # a server that ends every watch at once is not asked without a pause

    def _answer(self) -> Answer:
        urls = Urls(self._limit)
        for found in self._slices.values():
            for url in found:
                urls.add(url)
        return Answer(urls.all(), next(iter(self._troubles.values()), None))

    async def _list(self, session: aiohttp.ClientSession) -> str:
        slices, troubles = dict[str, frozenset[str]](), dict[str, str]()
        after = ""
        for _ in range(PAGES_MOST):
            params = {"labelSelector": self._selector, "limit": str(PAGE)} | ({"continue": after} if after else {})
            async with await self._requests.get(session, self._url, params, self._timeout) as response:
                body = parse_json(await bounded(response, BODY_LIMIT))
            metadata = _part(body, "metadata")
            items = body.get("items") or []
            if not isinstance(items, list):
                raise DataError("items of the list are no list, expected EndpointSlices")
            for item in items:
                self._take(item, slices, troubles)
            self._refuse_many(slices)
            version, more = metadata.get("resourceVersion"), metadata.get("continue") or ""
            if not isinstance(more, str) or not isinstance(version, str):
                raise DataError(f"metadata of the list is {str(metadata)[:100]}, expected continue and resourceVersion as text")
            if not more:
                self._slices, self._troubles = slices, troubles
                return version
            after = more
        raise DataError(f"the list has more than {PAGES_MOST} pages, expected fewer")

    def _take(self, item: object, slices: dict[str, frozenset[str]], troubles: dict[str, str]) -> None:
        name = _name(item)
        try:
            slices[name] = slice_urls(item, self._port, self._scheme, self._limit) if isinstance(item, dict) else frozenset()
            troubles.pop(name, None)
        except DataError as error:  # this slice stays as it was, the others do not wait for it
            slices[name] = self._slices.get(name, frozenset())
            troubles[name] = f"EndpointSlice {name}: {error}"

    def _refuse_many(self, slices: Mapping[str, frozenset[str]]) -> None:
        if max(len(slices), sum(map(len, slices.values()))) > 2 * self._limit:
            raise DataError(f"more than {2 * self._limit} EndpointSlices or endpoints, expected at most {self._limit} targets")

    async def _watch(self, session: aiohttp.ClientSession, version: str, changes: "asyncio.Queue[bool]") -> str | None:
        """Follow changes until the server ends the watch; where to go on from, None when it no longer knows."""
        params = {
            "labelSelector": self._selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        async with await self._requests.get(session, self._url, params, self._watch_timeout) as response:
            if response.status == 410:
                return None
            if response.status != 200:
                raise Unavailable(f"{response.url.with_query(None)} answered {response.status} to a watch, expected 200")
            async for line in _lines(response):
                event = parse_json(line)
                kind, item = event.get("type") if isinstance(event, dict) else None, _part(event, "object")
                if kind == "ERROR":
                    if item.get("code") == 410:
                        return None
                    raise Unavailable(f"the watch ended with {str(item.get('message'))[:160]!r}")
                if kind not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK"):
                    raise DataError(f"the watch has an event {kind!r:.40}, expected ADDED, MODIFIED, DELETED, BOOKMARK or ERROR")
                found = _part(item, "metadata").get("resourceVersion")
                if isinstance(found, str):
                    version = found
                if kind == "BOOKMARK":
                    continue
                if kind == "DELETED":
                    self._slices.pop(_name(item), None)
                    self._troubles.pop(_name(item), None)
                else:
                    self._take(item, self._slices, self._troubles)
                    self._refuse_many(self._slices)
                if changes.empty():
                    changes.put_nowait(True)
        return version


def _name(item: object) -> str:
    name = _part(item, "metadata").get("name")
    if not isinstance(name, str) or not 0 < len(name) <= 253:
        raise DataError(f"name of an EndpointSlice is {name!r:.60}, expected text")
    return name


def _part(value: object, name: str) -> dict[str, Any]:
    found = value.get(name) if isinstance(value, dict) else None
    if not isinstance(found, dict):
        raise DataError(f"{name} is {json.dumps(found)[:60]}, expected an object")
    return found


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of an answer, none longer than `BODY_LIMIT`."""
    rest = bytearray()
    async for chunk in response.content.iter_any():
        rest += chunk
        *lines, tail = rest.split(b"\n")
        rest = bytearray(tail)
        for line in lines:
            if line.strip():
                yield bytes(line)
        if len(rest) > BODY_LIMIT:
            raise DataError(f"a line of the watch has more than {BODY_LIMIT} bytes, expected at most that")
