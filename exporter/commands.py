"""`poolmeter exporter` and `poolmeter exporter release`."""

import argparse
import json
import sys


class Exporter:
    """Run the exporter of this node: it reads cards and meters, integrates use, and keeps records until they are acknowledged.

    With --once it looks once, prints the page of /metrics (with --format the snapshot) and ends; nothing is recorded, and the exit code is 1
    when a source failed. SIGHUP reads configuration and web configuration again.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.set_defaults(format=None)
        parser.add_argument("--once", action="store_true", help="print one page of /metrics (with --format one snapshot) and end")
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
        parser.add_argument(
            "--web.config.file",
            dest="web_config_file",
            metavar="FILE",
            help="TLS and who may ask, in the format of Prometheus' exporter-toolkit ([exporter] web_config_file, else neither)",
        )
        parser.add_argument(
            "--compat",
            action="append",
            metavar="NAME",
            help="serve /metrics/NAME with the names of another exporter, dcgm or hami; repeatable ([exporter] compat, else none)",
        )
        parser.add_argument(
            "--otlp-endpoint",
            metavar="URL",
            help="push OpenTelemetry metrics to this collector by HTTP ([exporter] otlp_endpoint, else nowhere)",
        )
        parser.add_argument(
            "--push", metavar="URL", help="push records to this poolmeter collector, which cannot reach this node ([exporter] push_url)"
        )
        parser.add_argument("--push-token-file", metavar="FILE", help="this node's token for --push ([exporter] push_token_file)")

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.exporter import daemon

        return daemon.once(args) if args.once else daemon.serve(args)


class ExporterRelease:
    """Have the exporter of this node let go of the cards, so that they can be reset, or take them back with --resume.

    The child that holds the cards ends; until they are taken back nothing is read from them and /readyz says so. Programs that use the cards
    keep them: those are for you to stop. For root, and for whoever runs the exporter.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--for", dest="seconds", type=int, default=600, metavar="SECONDS", help="take them back after this long (600)")
        parser.add_argument("--resume", action="store_true", help="take the cards back now")
        parser.add_argument("--run", metavar="DIR", help="run folder of the exporter ($POOLMETER_RUN)")

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.exporter.control import ask
        from poolmeter.places import NodeRun, run_folder

        request = {"verb": "resume"} if args.resume else {"verb": "release", "seconds": args.seconds}
        answer = ask(NodeRun(run_folder(args.run)).exporter_socket, request)
        if args.format == "json":
            sys.stdout.write(json.dumps(answer) + "\n")
        else:
            sys.stdout.write(
                f"the cards are released until {answer['until']}\n" if answer["released"] else "the exporter takes the cards back\n"
            )
        return 0
