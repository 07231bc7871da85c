"""Fakes of what discovery asks: a DNS server over UDP and TCP, an HTTP server of target groups, Kubernetes' API with list and watch."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import dns.message
import dns.rcode
import dns.rrset
from aiohttp import web

GROUP = "/apis/discovery.k8s.io/v1/namespaces/gpu/endpointslices"


@dataclass
class FakeDns:
    """Answers by `records`: (name, type) -> record texts, no entry: the name does not exist. More than `udp_most` only over TCP."""

    records: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    udp_most: int = 1000
    silent: bool = False
    asked: list[str] = field(default_factory=list)
    address: str = ""
    _transport: asyncio.DatagramTransport | None = None
    _server: asyncio.Server | None = None

    async def start(self) -> "FakeDns":
        self._server = await asyncio.start_server(self._tcp, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        fake = self

        class Protocol(asyncio.DatagramProtocol):
            transport: asyncio.DatagramTransport

            def connection_made(self, transport: Any) -> None:
                self.transport = transport

            def datagram_received(self, data: bytes, address: Any) -> None:
                if not fake.silent:
                    self.transport.sendto(fake.answer(data, True), address)

        self._transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Protocol, local_addr=("127.0.0.1", port))
        self.address = f"127.0.0.1:{port}"
        return self

    async def stop(self) -> None:
        assert self._transport is not None and self._server is not None
        self._transport.close()
        self._server.close()

    def answer(self, data: bytes, udp: bool) -> bytes:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, kind = question.name.to_text(omit_final_dot=True), question.rdtype.name
        self.asked.append(f"{name} {kind} {'udp' if udp else 'tcp'}")
        response = dns.message.make_response(query)
        if not any(known == name for known, _ in self.records):
            response.set_rcode(dns.rcode.NXDOMAIN)
        found = self.records.get((name, kind), [])
        if udp and len(found) > self.udp_most:
            response.flags |= 0x0200  # truncated
        elif found:
            response.answer.append(dns.rrset.from_text(question.name, 5, "IN", kind, *found))
        return response.to_wire(max_size=65_535)

    async def _tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(2), "big")
        body = self.answer(await reader.readexactly(size), False)
        writer.write(len(body).to_bytes(2, "big") + body)
        await writer.drain()
        writer.close()


async def serve(routes: list[web.RouteDef], ssl: Any = None) -> tuple[web.AppRunner, str]:
    """A server on a free port, and its URL."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=ssl).start()
    return runner, f"{'https' if ssl else 'http'}://127.0.0.1:{runner.addresses[0][1]}"


def endpoint_slice(name: str, addresses: list[str], port: int = 9877, version: int = 1, **changes: Any) -> dict[str, Any]:
    endpoints = [{"addresses": [address], "conditions": {"ready": number % 2 == 0}} for number, address in enumerate(addresses)]
    return {
        "metadata": {"name": name, "namespace": "gpu", "resourceVersion": str(version)},
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": [{"name": "metrics", "port": port, "protocol": "TCP"}],
        **changes,
    }


@dataclass
class FakeKubernetes:
    """EndpointSlices by name; `put` and `delete` tell every watch. `forget` makes versions before now unknown, as a compaction does."""

    token: str = "secret"
    slices: dict[str, dict[str, Any]] = field(default_factory=dict)
    page: int = 2
    fail: int | None = None
    lists: int = 0
    watches: list[str] = field(default_factory=list)
    log: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    version: int = 1
    forgotten: int = 0
    end_watches: int = 0
    url: str = ""
    before_watch: Callable[[], None] = lambda: None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _runner: web.AppRunner | None = None

    async def start(self, ssl: Any = None) -> "FakeKubernetes":
        self._runner, self.url = await serve([web.get(GROUP, self._get)], ssl)
        return self

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def put(self, item: dict[str, Any]) -> None:
        name = item["metadata"]["name"]
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.slices[name] = item
        self._tell(kind, item)

    def delete(self, name: str) -> None:
        self._tell("DELETED", self.slices.pop(name))

    def say(self, event: Any) -> None:
        """Any event at all, from a server gone wrong."""
        self.version += 1
        self.log.append((self.version, event))
        self._changed.set()

    def forget(self) -> None:
        self.version += 1
        self.forgotten = self.version
        self.end_watches += 1
        self._changed.set()

    def _tell(self, kind: str, item: dict[str, Any]) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.log.append((self.version, {"type": kind, "object": json.loads(json.dumps(item))}))
        self._changed.set()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        assert request.query["labelSelector"] == "app=poolmeter-exporter"
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401)
        if self.fail:
            return web.Response(status=self.fail)
        return await (self._watch(request) if request.query.get("watch") == "true" else self._list(request))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        self.lists += 1
        start = int(request.query.get("continue", "0"))
        names = sorted(self.slices)
        page = [self.slices[name] for name in names[start : start + self.page]]
        metadata = {"resourceVersion": str(self.version)}
        if start + self.page < len(names):
            metadata["continue"] = str(start + self.page)
        return web.json_response({"kind": "EndpointSliceList", "metadata": metadata, "items": page})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        at = int(request.query["resourceVersion"])
        self.watches.append(str(at))
        ends = self.end_watches
        response = web.StreamResponse()
        await response.prepare(request)
        if at < self.forgotten:
            await response.write(
                json.dumps({"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}).encode() + b"\n"
            )
            return response
        while True:
            self._changed.clear()
            for version, event in [entry for entry in self.log if entry[0] > at]:
                at = version
                line = json.dumps(event).encode() + b"\n"
                await response.write(line[:7])  # in pieces, as networks do
                await response.write(line[7:])
            if self.end_watches != ends:
                return response
            await self._changed.wait()
