"""Configuration: one TOML file, checked by pydantic before anything starts.

Searched: --config, $POOLMETER_CONFIG, then /etc/poolmeter/config.toml as root or the XDG configuration folder. A file that is named
must exist; the default places may be empty. Unknown keys are errors: a misspelt limit is not a default.
"""

import os
import re
import socket
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from poolmeter.books.place import check_url
from poolmeter.errors import BadInput
from poolmeter.period import time_zone
from poolmeter.toml import parse_toml, read_toml

T = TypeVar("T", bound=str)


def _name(value: str) -> str:
    if not value or len(value) > 128 or not value.isprintable() or value != value.strip():
        raise ValueError("1 to 128 printable characters without outer spaces")
    return value


def _url(value: str) -> str:
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and value.isprintable() and " " not in value
    except ValueError:  # a port that is no port, half an IPv6 address
        good = False
    if not good:
        raise ValueError("a URL such as http://127.0.0.1:9877")
    return value


def _books(value: str) -> str:
    try:
        return check_url(value)
    except BadInput as error:
        raise ValueError(str(error).removeprefix("books ")) from None


def _different(values: tuple[T, ...]) -> tuple[T, ...]:
    if len(set(values)) != len(values):
        raise ValueError("each once")
    return values


def _zone(value: str) -> str:
    try:
        time_zone(value)
    except BadInput:
        raise ValueError("a name such as UTC or Europe/Vienna") from None
    return value


# Numbers are strict: true is not 1, and "9" is not 9.
Port = Annotated[int, Field(strict=True, ge=0, le=65535)]
Name = Annotated[str, AfterValidator(_name)]
Url = Annotated[str, AfterValidator(_url)]
Days = Annotated[int, Field(strict=True, ge=1, le=36_600)]
NodeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NodeSection(_Section):
    """Who this node is."""

    name: NodeName = Field(default_factory=socket.gethostname)
    pool: Name = "default"


class ExporterSection(_Section):
    """The exporter: where it listens, how often it looks, who must acknowledge its records."""

    host: Name = "127.0.0.1"
    port: Port = 9877
    interval_ms: Annotated[int, Field(strict=True, ge=100, le=60_000)] = 1000
    consumers: Annotated[tuple[Name, ...], Field(min_length=1), AfterValidator(_different)] = ("collector",)
    token_file: Path | None = None
    retention_days: Annotated[int, Field(strict=True, ge=1, le=366)] = 7
    sampler_timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    web_config_file: Path | None = None
    compat: Annotated[tuple[Literal["dcgm", "hami"], ...], AfterValidator(_different)] = ()
    otlp_endpoint: Url | None = None
    otlp_interval_s: Annotated[float, Field(ge=1, le=3600)] = 15.0
    push_url: Url | None = None
    push_token_file: Path | None = None
    push_ca_file: Path | None = None
    push_interval_s: Annotated[float, Field(ge=0.2, le=3600)] = 15.0


def _order(values: tuple[str, ...]) -> tuple[str, ...]:
    if sorted(values) != sorted(ATTRIBUTION_ORDER):
        raise ValueError("each of " + ", ".join(ATTRIBUTION_ORDER) + " once")
    return values


def _pattern(value: str) -> str:
    pattern, equals, tenant = value.rpartition("=")
    if not equals or not pattern.strip() or not tenant.strip() or not value.isprintable():
        raise ValueError("a pattern and a tenant, as team-a-*=team-a")
    return value


def _form(*fields: str) -> AfterValidator:
    def check(value: str) -> str:
        rest = value
        for field in fields:
            rest = rest.replace("{" + field + "}", "")
        if not value.isprintable() or len(value) > 128 or "{" in rest or "}" in rest:
            raise ValueError("text with no other names in braces than " + ", ".join(fields))
        return value

    return AfterValidator(check)


ATTRIBUTION_ORDER = ("allocations", "slurm", "kubernetes", "containerd", "docker", "podman", "systemd", "user")
SourceUse = Literal["auto", "on", "off"]
Patterns = Annotated[tuple[Annotated[str, AfterValidator(_pattern)], ...], AfterValidator(_different)]


class AttributionSection(_Section):
    """Whose a process is: which sources are asked, where, in what order of trust, and how a tenant's name follows."""

    order: Annotated[tuple[str, ...], AfterValidator(_order)] = ATTRIBUTION_ORDER
    interval_s: Annotated[float, Field(ge=0.2, le=3600)] = 10.0
    timeout_s: Annotated[float, Field(gt=0, le=60)] = 2.0
    kubernetes: SourceUse = "auto"
    kubelet_socket: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    kubernetes_logs: Path = Path("/var/log")
    kubernetes_resources: Annotated[tuple[Name, ...], Field(min_length=1), AfterValidator(_different)] = (
        "nvidia.com/*",
        "gpu.nvidia.com",
        "volcano.sh/vgpu-*",
    )
    kubernetes_tenant: Annotated[str, _form("namespace", "pod", "container")] = "{namespace}"
    namespaces: Patterns = ()
    docker: SourceUse = "auto"
    docker_socket: Path = Path("/run/docker.sock")
    podman: SourceUse = "auto"
    podman_socket: Path = Path("/run/podman/podman.sock")
    containerd: SourceUse = "auto"
    containerd_socket: Path = Path("/run/containerd/containerd.sock")
    tenant_label: Name = "poolmeter.tenant"
    rootless: Literal["off", "names", "labels"] = "names"
    slurm: SourceUse = "auto"
    slurm_jobs: Path | None = None
    slurm_tenant: Annotated[str, _form("user", "job")] = "{user}"
    slurm_users: Patterns = ()
    units: Patterns = ()
    users: Patterns = ()
    user_tenant: Annotated[str, _form("user")] = ""


class DiscoverySection(_Section):
    """What every kind of discovery has: the scheme of targets that name none."""

    scheme: Literal["http", "https"] = "http"


class FileDiscovery(DiscoverySection):
    """A file of exporters: a URL a line, or TOML."""

    type: Literal["file"]
    path: Path
    refresh_s: Annotated[float, Field(ge=0.2, le=3600)] = 5.0


class FileSdDiscovery(DiscoverySection):
    """Files of Prometheus' file_sd, by name or pattern."""

    type: Literal["file_sd"]
    files: Annotated[tuple[Name, ...], Field(min_length=1), AfterValidator(_different)]
    refresh_s: Annotated[float, Field(ge=0.2, le=3600)] = 5.0


class HttpSdDiscovery(DiscoverySection):
    """A URL of Prometheus' http_sd."""

    type: Literal["http_sd"]
    url: Url
    refresh_s: Annotated[float, Field(ge=0.2, le=3600)] = 60.0
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    token_file: Path | None = None
    ca_file: Path | None = None


class DnsDiscovery(DiscoverySection):
    """Names whose records are exporters."""

    type: Literal["dns"]
    names: Annotated[tuple[Name, ...], Field(min_length=1, max_length=100), AfterValidator(_different)]
    record: Literal["A", "AAAA", "SRV"] = "A"
    port: Annotated[int, Field(strict=True, ge=1, le=65535)] = 9877
    server: Name | None = None
    refresh_s: Annotated[float, Field(ge=0.2, le=3600)] = 30.0
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 5.0


class KubernetesDiscovery(DiscoverySection):
    """The endpoints of services in one namespace."""

    type: Literal["kubernetes"]
    selector: Name
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] | None = None
    port: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{0,15}$")] = ""
    api_server: Url | None = None
    token_file: Path | None = None
    ca_file: Path | None = None
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0


AnyDiscovery = Annotated[
    FileDiscovery | FileSdDiscovery | HttpSdDiscovery | DnsDiscovery | KubernetesDiscovery, Field(discriminator="type")
]


def _peer_parts(value: str) -> tuple[str, str]:
    name, _, url = value.partition("=")
    return name.strip(), url.strip().rstrip("/")


def _peer(value: str) -> str:
    name, url = _peer_parts(value)
    try:
        return f"{_name(name)}={_url(url)}"
    except ValueError:
        raise ValueError("a name and a URL, as a=http://127.0.0.1:9878") from None


def _different_peers(values: tuple[str, ...]) -> tuple[str, ...]:
    parts = [_peer_parts(value) for value in values]
    if len({name for name, _ in parts}) != len(parts) or len({url for _, url in parts}) != len(parts):
        raise ValueError("each name and each URL once")
    return values


class CollectorSection(_Section):
    """The collector: where it listens, which exporters it pulls, how often."""

    host: Name = "127.0.0.1"
    port: Port = 9878
    name: Name = "collector"
    nodes: Annotated[tuple[Url, ...], AfterValidator(_different)] = ("http://127.0.0.1:9877",)
    pull_interval_s: Annotated[float, Field(ge=0.2, le=3600)] = 15.0
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    token_file: Path | None = None
    api_token_file: Path | None = None
    api_ca_file: Path | None = None
    api_cert_file: Path | None = None
    api_key_file: Path | None = None
    web_config_file: Path | None = None
    requests_per_s: Annotated[float, Field(ge=0, le=100_000)] = 100.0
    queries_at_once: Annotated[int, Field(strict=True, ge=1, le=64)] = 4
    query_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    query_memory_mib: Annotated[int, Field(strict=True, ge=64, le=1_048_576)] = 1024
    otlp_endpoint: Url | None = None
    books: Annotated[str, AfterValidator(_books)] | None = None
    process_days: Days = 1
    minute_days: Days = 400
    hour_days: Annotated[Days, Field(validate_default=True)] = 731
    quarantine_days: Days = 30
    discovery: tuple[AnyDiscovery, ...] = ()
    discovery_limit: Annotated[int, Field(strict=True, ge=1, le=100_000)] = 5000
    gone_hours: Annotated[int, Field(strict=True, ge=1, le=8760)] = 24
    push_tokens_file: Path | None = None
    member: Name | None = None
    peers: Annotated[tuple[Annotated[str, AfterValidator(_peer)], ...], AfterValidator(_different_peers)] = ()
    peer_timeout_s: Annotated[float, Field(ge=0.5, le=3600)] = 60.0

    @property
    def members(self) -> dict[str, str]:
        """The collectors that share the nodes, name to URL."""
        return dict(_peer_parts(peer) for peer in self.peers)

    @field_validator("hour_days")
    @classmethod
    def _not_before_minutes(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("minute_days", value):
            raise ValueError(f"minute_days ({info.data['minute_days']}) or more")
        return value

    @model_validator(mode="after")
    def _is_a_member(self) -> "CollectorSection":
        if (self.member is None) != (not self.peers) or (self.member is not None and self.member not in self.members):
            raise ValueError("member names one of peers, which lists every collector, this one too; or neither is given")
        return self


class EnforcerSection(_Section):
    """The enforcer: how far promises may exceed the cards, where decisions come from."""

    compute_over_commit: Annotated[Decimal, Field(ge=1, le=100)] = Decimal(1)
    memory_over_commit: Annotated[Decimal, Field(ge=1, le=100)] = Decimal(1)
    collector: Url | None = "http://127.0.0.1:9878"
    decision_interval_s: Annotated[float, Field(ge=0.2, le=3600)] = 5.0


class AccountingSection(_Section):
    """Accounting: the price plan, who bills (None: the pool), and the time zone that days are cut in."""

    plan: Path | None = None
    issuer: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")] | None = None
    time_zone: Annotated[str, AfterValidator(_zone)] = "UTC"


class RecommendSection(_Section):
    """The recommender: when a memory limit counts as far above its peak, and how far it may come down."""

    memory_headroom_percent: Annotated[int, Field(strict=True, ge=0, le=1000)] = 30
    memory_resident_percent: Annotated[int, Field(strict=True, ge=0, le=1000)] = 10
    memory_dead_band_percent: Annotated[int, Field(strict=True, ge=0, le=100)] = 15
    memory_window_days: Annotated[int, Field(strict=True, ge=1, le=90)] = 7
    minimum_minutes: Annotated[int, Field(strict=True, ge=1, le=129_600)] = 10
    expires_hours: Annotated[int, Field(strict=True, ge=1, le=8760)] = 24


class DashboardSection(_Section):
    """The Streamlit dashboard."""

    host: Name = "127.0.0.1"
    port: Port = 8501


class Config(_Section):
    """The whole file."""

    node: NodeSection = Field(default_factory=NodeSection)
    exporter: ExporterSection = Field(default_factory=ExporterSection)
    attribution: AttributionSection = Field(default_factory=AttributionSection)
    collector: CollectorSection = Field(default_factory=CollectorSection)
    enforcer: EnforcerSection = Field(default_factory=EnforcerSection)
    accounting: AccountingSection = Field(default_factory=AccountingSection)
    recommend: RecommendSection = Field(default_factory=RecommendSection)
    dashboard: DashboardSection = Field(default_factory=DashboardSection)


def config_path(option: str | None) -> Path | None:
    """The file to read: the one named, else a default one that exists, else None."""
    named = option if option is not None else os.environ.get("POOLMETER_CONFIG") or None
    if named is not None:
        return Path(named)
    folder = Path("/etc") if os.geteuid() == 0 else Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    default = folder / "poolmeter" / "config.toml"
    return default if default.is_file() else None


def load_config(option: str | None = None) -> Config:
    """The checked configuration. Raises BadInput naming file, key, value found and value expected."""
    path = config_path(option)
    return parse_config(read_toml(path, f"configuration file {path}"), str(path)) if path else Config()


def parse_config(body: bytes, name: str) -> Config:
    """Configuration from TOML bytes; `name` is what errors call the file."""
    values = parse_toml(body, f"configuration file {name}")
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise BadInput(f"configuration file {name}: {key} is not a known key") from None
        raise BadInput(
            f"configuration file {name}: {key} is {_shown(first['input'])}, expected: {first['msg'].removeprefix('Value error, ')}"
        ) from None


def _shown(value: object) -> str:
    """What was found, for an error: shortened, and without what a URL may tell of users and passwords."""
    text = re.sub(r"://.*@", "://…@", repr(value))
    return re.sub(r"(password\w*=)[^&'\" ]*", r"\1…", text, flags=re.IGNORECASE)[:80]
