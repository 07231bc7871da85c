"""What an exporter is told by flags, configuration and web configuration, and the part of it that SIGHUP can change."""

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from poolmeter.config import AttributionSection, Config, load_config
from poolmeter.errors import BadInput, PoolmeterError
from poolmeter.exporter.agent import Agent, Settings
from poolmeter.exporter.push import PushPlan, push_plan
from poolmeter.exporter.sampling import SamplerProcess
from poolmeter.tokens import read_token
from poolmeter.web.config import WebConfig, load_web_config

if TYPE_CHECKING:
    from poolmeter.exporter.server import Face
    from poolmeter.web.guard import Guard
    from poolmeter.web.tls import RotatingContext

_LOG = logging.getLogger("poolmeter.exporter")
COMPAT = ("dcgm", "hami")
# What the running daemon cannot change: it is built around it.
_FIXED = ("host", "port", "consumers", "compat", "otlp_endpoint", "otlp_interval_s", "push")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything the daemon is built from."""

    settings: Settings
    host: str
    port: int
    consumers: tuple[str, ...]
    sampler_timeout_s: float
    token: str | None
    web: WebConfig
    compat: tuple[str, ...]
    otlp_endpoint: str | None
    otlp_interval_s: float
    push: PushPlan | None
    attribution: AttributionSection


def plan_of(args: argparse.Namespace) -> Plan:
    """Flags over configuration. Raises BadInput for anything that cannot be honoured, before anything has started."""
    config = load_config(args.config)
    settings = settings_of(args, config)
    section = config.exporter
    token_file = Path(args.token_file) if args.token_file else section.token_file
    web_file = Path(args.web_config_file) if args.web_config_file else section.web_config_file
    web = load_web_config(web_file) if web_file is not None else WebConfig()
    if web.tls_server_config is not None:
        from poolmeter.web.tls import make_context

        make_context(web.tls_server_config)
    unknown = [name for name in args.compat or () if name not in COMPAT]
    if unknown:
        raise BadInput(f"--compat is {unknown[0]!r:.40}, expected {' or '.join(COMPAT)}")
    endpoint = args.otlp_endpoint or section.otlp_endpoint
    if endpoint is not None:
        from poolmeter.web.otlp import endpoint_of

        endpoint = endpoint_of(endpoint)
    return Plan(
        settings=settings,
        host=args.host or section.host,
        port=section.port if args.port is None else args.port,
        consumers=section.consumers,
        sampler_timeout_s=section.sampler_timeout_s,
        token=None if token_file is None else read_token(token_file),
        web=web,
        compat=tuple(dict.fromkeys(args.compat or section.compat)),
        otlp_endpoint=endpoint,
        otlp_interval_s=section.otlp_interval_s,
        push=push_plan(
            args.push or section.push_url,
            Path(args.push_token_file) if args.push_token_file else section.push_token_file,
            section.push_ca_file,
            section.push_interval_s,
        ),
        attribution=config.attribution,
    )


def settings_of(args: argparse.Namespace, config: Config) -> Settings:
    """What the agent is told."""
    from poolmeter.config import NodeSection

    try:
        name = NodeSection(name=args.name).name if args.name is not None else config.node.name
    except ValueError:
        raise BadInput(f"--name is {args.name!r:.80}, expected letters, digits, dots, dashes and underscores") from None
    if args.port is not None and not 0 <= args.port <= 65535:
        raise BadInput(f"--port is {args.port}, expected 0 to 65535")
    if not 0 <= args.linger <= 3600:
        raise BadInput(f"--linger is {args.linger:g}, expected 0 to 3600 seconds")
    return Settings(
        node=name,
        pool=config.node.pool,
        interval_ms=config.exporter.interval_ms,
        retention_days=config.exporter.retention_days,
        simulated=args.simulate,
    )


class Live:
    """What a running exporter can be told anew. `ok` is None before the first reload, then whether the last one was taken."""

    def __init__(
        self,
        args: argparse.Namespace,
        plan: Plan,
        agent: Agent,
        sampler: SamplerProcess,
        face: "Face",
        guard: "Guard",
        context: "RotatingContext | None",
        attribute: Callable[[AttributionSection], None],
    ) -> None:
        self.ok: bool | None = None
        self._args, self._plan, self._attribute = args, plan, attribute
        self._agent, self._sampler, self._face, self._guard, self._context = agent, sampler, face, guard, context

    def reload(self) -> None:
        """Read every file again; all of it is taken, or nothing, which is said."""
        try:
            plan = plan_of(self._args)
            if (plan.web.tls_server_config is None) != (self._context is None):
                raise BadInput("the web configuration turns TLS on or off, expected that only at a start")
            if self._context is not None and plan.web.tls_server_config is not None:
                self._context.replace(plan.web.tls_server_config)
            if plan.attribution != self._plan.attribution:
                self._attribute(plan.attribution)  # the last that may fail
        except Exception as error:
            # Also what no reader foresaw: a file must not end an exporter that runs.
            self.ok = False
            foreseen = isinstance(error, (PoolmeterError, OSError))
            _LOG.error("the configuration was not reloaded: %s; what was in force stays", error, exc_info=not foreseen)
            return
        was, now = self._plan, plan
        later = [name for name in _FIXED if getattr(was, name) != getattr(now, name)]
        later += [f"settings.{f.name}" for f in fields(Settings) if f.name in ("node", "pool") and _differs(was, now, f.name)]
        kept = replace(was.settings, interval_ms=now.settings.interval_ms, retention_days=now.settings.retention_days)
        self._agent.settings = kept
        self._sampler.timeout_s = now.sampler_timeout_s
        self._face.token = self._guard.extra_token = now.token
        self._guard.config = now.web
        fixed = {name: getattr(was, name) for name in _FIXED}
        self._plan = replace(now, settings=kept, **fixed)
        self.ok = True
        _LOG.info("the configuration was reloaded%s", f"; at the next start only: {', '.join(later)}" if later else "")


def _differs(was: Plan, now: Plan, name: str) -> bool:
    return bool(getattr(was.settings, name) != getattr(now.settings, name))
