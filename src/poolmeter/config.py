"""Configuration: one TOML file, checked by pydantic before anything starts.

Searched: --config, $POOLMETER_CONFIG, then /etc/poolmeter/config.toml as root or the XDG configuration folder. A file that is named
must exist; the default places may be empty. Unknown keys are errors: a misspelt limit is not a default.
"""

import os
import socket
import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from poolmeter.errors import BadInput

Port = Annotated[int, Field(ge=0, le=65535)]
NodeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NodeSection(_Section):
    """Who this node is."""

    name: NodeName = Field(default_factory=socket.gethostname)
    pool: str = "default"


class ExporterSection(_Section):
    """The exporter: where it listens, how often it looks, who must acknowledge its records."""

    host: str = "127.0.0.1"
    port: Port = 9877
    interval_ms: Annotated[int, Field(ge=100, le=60_000)] = 1000
    consumers: tuple[str, ...] = ("collector",)
    token_file: Path | None = None
    retention_days: Annotated[int, Field(ge=1, le=366)] = 7
    sampler_timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0


class CollectorSection(_Section):
    """The collector: where it listens, which exporters it pulls, how often."""

    host: str = "127.0.0.1"
    port: Port = 9878
    name: str = "collector"
    nodes: tuple[str, ...] = ("http://127.0.0.1:9877",)
    pull_interval_s: Annotated[float, Field(ge=0.2, le=3600)] = 15.0
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    token_file: Path | None = None
    api_token_file: Path | None = None
    process_days: Annotated[int, Field(ge=1)] = 1


class EnforcerSection(_Section):
    """The enforcer: how far promises may exceed the cards, where decisions come from."""

    compute_over_commit: Annotated[Decimal, Field(ge=1, le=100)] = Decimal(1)
    memory_over_commit: Annotated[Decimal, Field(ge=1, le=100)] = Decimal(1)
    collector: str | None = "http://127.0.0.1:9878"
    decision_interval_s: Annotated[float, Field(ge=0.2, le=3600)] = 5.0


class AccountingSection(_Section):
    """Accounting: the price plan and the time zone that days are cut in."""

    plan: Path | None = None
    time_zone: str = "UTC"


class RecommendSection(_Section):
    """The recommender: when a memory limit counts as far above its peak, and how far it may come down."""

    memory_headroom_percent: Annotated[int, Field(ge=0, le=1000)] = 30
    memory_resident_percent: Annotated[int, Field(ge=0, le=1000)] = 10
    memory_dead_band_percent: Annotated[int, Field(ge=0, le=100)] = 15
    memory_window_days: Annotated[int, Field(ge=1, le=90)] = 7
    minimum_minutes: Annotated[int, Field(ge=1)] = 10
    expires_hours: Annotated[int, Field(ge=1)] = 24


class DashboardSection(_Section):
    """The Streamlit dashboard."""

    host: str = "127.0.0.1"
    port: Port = 8501


class Config(_Section):
    """The whole file."""

    node: NodeSection = Field(default_factory=NodeSection)
    exporter: ExporterSection = Field(default_factory=ExporterSection)
    collector: CollectorSection = Field(default_factory=CollectorSection)
    enforcer: EnforcerSection = Field(default_factory=EnforcerSection)
    accounting: AccountingSection = Field(default_factory=AccountingSection)
    recommend: RecommendSection = Field(default_factory=RecommendSection)
    dashboard: DashboardSection = Field(default_factory=DashboardSection)


def config_path(option: str | None) -> Path | None:
    """The file to read: the one named (which must exist), else a default one that exists, else None. Raises BadInput."""
    named = option or os.environ.get("POOLMETER_CONFIG")
    if named:
        if not Path(named).is_file():
            raise BadInput(f"configuration file {named} is not there, expected a TOML file")
        return Path(named)
    folder = Path("/etc") if os.geteuid() == 0 else Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    default = folder / "poolmeter" / "config.toml"
    return default if default.is_file() else None


def load_config(option: str | None = None) -> Config:
    """The checked configuration. Raises BadInput naming file, key, value found and value expected."""
    path = config_path(option)
    return parse_config(path.read_bytes(), str(path)) if path else Config()


def parse_config(body: bytes, name: str) -> Config:
    """Configuration from TOML bytes; `name` is what errors call the file."""
    try:
        values = tomllib.loads(body.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"configuration file {name} is not TOML: {error}") from None
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise BadInput(f"configuration file {name}: {key} is not a known key") from None
        raise BadInput(f"configuration file {name}: {key} is {first['input']!r:.80}, expected: {first['msg']}") from None
