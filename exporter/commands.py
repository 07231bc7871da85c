"""`poolmeter exporter`."""

import argparse


class Exporter:
    """Run the exporter of this node: it reads cards and meters, integrates use, and keeps records until they are acknowledged.

    With --once it looks once, prints the snapshot and ends; nothing is recorded.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--once", action="store_true", help="print one snapshot and end")
        parser.add_argument(
            "--simulate", action="store_true", help="read the simulated library ($POOLMETER_SIM_MACHINE, else a card of our own)"
        )
        parser.add_argument("--name", metavar="NODE", help="name of this node (configuration, else the host's name)")
        parser.add_argument("--run", metavar="DIR", help="run folder ($POOLMETER_RUN)")
        parser.add_argument("--host", metavar="ADDRESS", help="address to listen on (configuration, else 127.0.0.1)")
        parser.add_argument("--port", type=int, metavar="N", help="port to listen on, 0 for a free one (configuration, else 9877)")
        parser.add_argument(
            "--linger",
            type=float,
            default=0.0,
            metavar="SECONDS",
            help="after SIGTERM, serve until all is acknowledged, at most this long (0)",
        )
        parser.add_argument("--token-file", metavar="FILE", help="what acknowledgements must carry ([exporter] token_file, else nothing)")
        parser.add_argument("--ready-file", metavar="FILE", help="write {url, pid} here once serving")

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.exporter import daemon

        return daemon.once(args) if args.once else daemon.serve(args)
