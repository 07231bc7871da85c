"""DNS names of exporters: addresses (A, AAAA) with a configured port, or services (SRV) with their own."""

import asyncio
from collections.abc import Sequence

import aiohttp
import dns.asyncresolver
import dns.exception
import dns.resolver
from dns.rdatatype import RdataType

from poolmeter.collector.discovery.source import Answer
from poolmeter.collector.discovery.targets import Urls, target_url
from poolmeter.errors import BadInput, DataError, Unavailable


def resolver_of(server: str | None, timeout_s: float) -> dns.asyncresolver.Resolver:
    """The resolver of `ADDRESS` or `ADDRESS:PORT`, else of the system. Raises BadInput."""
    try:
        found = dns.asyncresolver.Resolver(configure=server is None)
        if server is not None:
            host, port = _split(server)
            found.nameservers, found.port = [host], port
    except (dns.exception.DNSException, ValueError, OSError) as error:
        raise BadInput(f"DNS server is {server or 'that of /etc/resolv.conf'}: {error!s:.120}; expected ADDRESS or ADDRESS:PORT") from None
    found.lifetime = timeout_s
    return found


def _split(server: str) -> tuple[str, int]:
    host, colon, port = server.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        return server.strip("[]"), 53
    if not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(f"port is {port!r:.20}")
    return host.strip("[]"), int(port)


class Dns:
    """Some names, asked together: all of them answer, or the last answer stands."""

    def __init__(
        self, names: Sequence[str], record: str, port: int | None, resolver: dns.asyncresolver.Resolver, scheme: str, limit: int
    ) -> None:
        self._names = tuple(names)
        self._record = record
        self._port = port
        self._resolver = resolver
        self._scheme = scheme
        self._limit = limit

    @property
    def name(self) -> str:
        """Record and names."""
        return f"dns {self._record} {', '.join(self._names)}"[:200]

    async def ask(self, session: aiohttp.ClientSession) -> Answer:
        """What the names stand for now. Raises Unavailable for a name that does not resolve; one without such records stands for nothing."""
        urls = Urls(self._limit)
        for found in await asyncio.gather(*(self._resolve(name) for name in self._names)):
            for url in found:
                urls.add(url)
        return Answer(urls.all())

    async def _resolve(self, name: str) -> list[str]:
        try:
            answer = await self._resolver.resolve(name, self._record, search=False)
        except dns.resolver.NoAnswer:
            return []
        except dns.resolver.NXDOMAIN:
            # Scaled to nothing, or a server that lost its zone: exporters that are asked in vain cost less than those forgotten.
            raise Unavailable(f"name {name} does not exist, expected {self._record} records") from None
        except (dns.exception.DNSException, OSError) as error:
            raise Unavailable(f"name {name} cannot be resolved: {' '.join(str(error).split()):.160}") from None
        if len(answer) > self._limit:
            raise DataError(f"name {name} has {len(answer)} records, expected at most {self._limit}")
        if answer.rdtype == RdataType.SRV:
            # A target of "." says that there is no such service (RFC 2782).
            services = [(str(record.target).rstrip("."), record.port) for record in answer]
            return [target_url(_bracketed(host), self._scheme, port) for host, port in services if host]
        return [target_url(_bracketed(record.address), self._scheme, self._port) for record in answer]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
