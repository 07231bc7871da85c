"""From the sections of the configuration to sources: one line a kind."""

from collections.abc import Callable, Sequence

from poolmeter.collector.discovery.source import Polled, Source
from poolmeter.config import DiscoverySection, DnsDiscovery, FileDiscovery, FileSdDiscovery, HttpSdDiscovery, KubernetesDiscovery


def _file(section: FileDiscovery, limit: int) -> Source:
    from poolmeter.collector.discovery.files import Files, parse_node_file

    return Polled(Files("file", (str(section.path),), parse_node_file, section.scheme, limit), section.refresh_s)


def _file_sd(section: FileSdDiscovery, limit: int) -> Source:
    from poolmeter.collector.discovery.files import Files, parse_file_sd

    return Polled(Files("file_sd", section.files, parse_file_sd, section.scheme, limit), section.refresh_s)


def _http_sd(section: HttpSdDiscovery, limit: int) -> Source:
    from poolmeter.collector.discovery.http import HttpSd, Requests

    requests = Requests(section.token_file, section.ca_file)
    return Polled(HttpSd(section.url, requests, section.scheme, limit, section.timeout_s), section.refresh_s)


def _dns(section: DnsDiscovery, limit: int) -> Source:
    from poolmeter.collector.discovery.dns import Dns, resolver_of

    resolver = resolver_of(section.server, section.timeout_s)
    return Polled(Dns(section.names, section.record, section.port, resolver, section.scheme, limit), section.refresh_s)


def _kubernetes(section: KubernetesDiscovery, limit: int) -> Source:
    from poolmeter.collector.discovery.http import Requests
    from poolmeter.collector.discovery.kubernetes import ACCOUNT, Kubernetes, in_cluster_server, own_namespace

    inside = section.api_server is None
    server = section.api_server or in_cluster_server()
    namespace = section.namespace or own_namespace()
    token_file = section.token_file or (ACCOUNT / "token" if inside else None)
    ca_file = section.ca_file or (ACCOUNT / "ca.crt" if inside else None)
    requests = Requests(token_file, ca_file)
    return Kubernetes(server, namespace, section.selector, section.port, requests, section.scheme, limit, section.timeout_s)


KINDS: tuple[tuple[type[DiscoverySection], Callable[..., Source]], ...] = (
    (FileDiscovery, _file),
    (FileSdDiscovery, _file_sd),
    (HttpSdDiscovery, _http_sd),
    (DnsDiscovery, _dns),
    (KubernetesDiscovery, _kubernetes),
)


def sources_of(sections: Sequence[DiscoverySection], limit: int) -> list[Source]:
    """A source a section. Raises BadInput for what cannot be honoured: certificates, a DNS server, Kubernetes outside of it."""
    made = dict(KINDS)
    return [made[type(section)](section, limit) for section in sections]
