"""`poolmeter collector`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from poolmeter.config import load_config
from poolmeter.errors import BadInput
from poolmeter.places import CollectorData, data_folder
from poolmeter.tokens import read_token

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from poolmeter.collector.face import Face
    from poolmeter.collector.retention import Retention
    from poolmeter.config import CollectorSection


class Collector:
    """Pull every configured exporter, keep what they send in the store under the data folder, and serve it over HTTP.

    Stops on SIGTERM after a last pull of every node. One collector owns a data folder.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--host", help="address to listen on ([collector] host)")
        parser.add_argument("--port", type=int, help="port to listen on, 0 for a free one ([collector] port)")
        parser.add_argument("--nodes", metavar="URL,URL", help="exporters to pull ([collector] nodes)")
        parser.add_argument("--interval", type=float, metavar="SECONDS", help="time between pulls of a node ([collector] pull_interval_s)")
        parser.add_argument("--token-file", metavar="FILE", help="the exporters' token ([collector] token_file, else none)")
        parser.add_argument(
            "--web.config.file", dest="web_config_file", metavar="FILE", help="TLS, passwords and tokens ([collector] web_config_file)"
        )
        parser.add_argument("--otlp-endpoint", metavar="URL", help="push traces of its own work there ([collector] otlp_endpoint)")
        parser.add_argument("--local-books", action="store_true", help="keep the books in the data folder, whatever [collector] books says")
        parser.add_argument("--ready-file", metavar="FILE", help='write {"url", "pid"} to FILE once serving')

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.collector.daemon import Settings, run
        from poolmeter.collector.limits import Limits
        from poolmeter.collector.peers import PeerSettings
        from poolmeter.collector.pull import PullSettings
        from poolmeter.web.otlp import endpoint_of
        from poolmeter.web.trust import trust_of

        config = load_config(args.config).collector
        port = config.port if args.port is None else args.port
        if not 0 <= port <= 65535:
            raise BadInput(f"--port is {port}, expected 0 to 65535")
        interval_s = config.pull_interval_s if args.interval is None else args.interval
        if not 0.2 <= interval_s <= 3600:
            raise BadInput(f"--interval is {interval_s}, expected 0.2 to 3600 seconds")
        token_file = Path(args.token_file) if args.token_file else config.token_file
        # The exporter of this machine is the default where nothing says which ones there are.
        named = "nodes" in config.model_fields_set or not (config.discovery or config.push_tokens_file)
        nodes = (
            (config.nodes if named else ()) if args.nodes is None else tuple(url.strip() for url in args.nodes.split(",") if url.strip())
        )
        endpoint = args.otlp_endpoint or config.otlp_endpoint
        face_of(args)  # refused before anything starts
        run(
            Settings(
                data=CollectorData(data_folder(args.data)),
                host=args.host or config.host,
                port=port,
                nodes=tuple(check_url(url) for url in nodes),
                pull=PullSettings(config.name, None if token_file is None else read_token(token_file), interval_s, config.timeout_s),
                keep=retention(config),
                face=lambda: face_of(args),
                limits=Limits(config.requests_per_s, config.queries_at_once, config.query_timeout_s, config.query_memory_mib),
                otlp_endpoint=None if endpoint is None else endpoint_of(endpoint, "/v1/traces"),
                ready_file=Path(args.ready_file) if args.ready_file else None,
                books=None if args.local_books else config.books,
                discovery=config.discovery,
                discovery_limit=config.discovery_limit,
                gone_hours=config.gone_hours,
                push_tokens_file=config.push_tokens_file,
                peers=None
                if config.member is None
                else PeerSettings(config.member, config.members, config.peer_timeout_s, trust_of(config)),
            ),
            self.extra_routes(args),
        )
        return 0

    def extra_routes(self, args: argparse.Namespace) -> "Sequence[BaseRoute]":
        """Other components' routes, served beside the collector's own."""
        return ()


def retention(config: "CollectorSection") -> "Retention":
    """How long each tier of the store is kept, as configured."""
    from poolmeter.collector.retention import Retention

    return Retention(config.process_days, config.minute_days, config.hour_days, config.quarantine_days)


def face_of(args: argparse.Namespace) -> "Face":
    """Who may ask and over what, by the files as they are now: at the start and at each SIGHUP. Raises BadInput."""
    from poolmeter.collector.face import Face
    from poolmeter.web.config import WebConfig, load_web_config
    from poolmeter.web.tls import make_context

    config = load_config(args.config).collector
    file = Path(args.web_config_file) if args.web_config_file else config.web_config_file
    web = WebConfig() if file is None else load_web_config(file)
    if web.tls_server_config is not None:
        make_context(web.tls_server_config)
    return Face(web, None if config.api_token_file is None else read_token(config.api_token_file))


def check_url(text: str) -> str:
    """An exporter's base URL, without a slash at its end. Raises BadInput."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and not parts.fragment
        _ = parts.port
    except ValueError:
        good = False
    if not good:
        raise BadInput(f"node is {text!r:.200}, expected a URL such as http://127.0.0.1:9877")
    return text.rstrip("/")
