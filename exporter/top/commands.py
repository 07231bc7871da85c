"""`poolmeter top`."""

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from poolmeter.errors import BadInput, Unavailable

if TYPE_CHECKING:
    from poolmeter.exporter.top.feed import Feed
    from poolmeter.exporter.top.watch import Watch

INTERVALS_S = (0.2, 3600.0)


class Top:
    """A live view of cards, slices, tenants and processes, of this node or of the whole pool; h in it shows the keys.

    Without an address it shows the pool that `poolmeter up` runs under the data folder, else the exporter of this node. It only looks:
    signals to processes are off unless --allow-signals, and then it asks. With --once it prints one frame as text and ends.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--exporter", metavar="URL", action="append", default=[], help="an exporter to show (repeatable)")
        parser.add_argument("--collector", metavar="URL", help="show every node that this collector pulls")
        parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="how often to ask (1)")
        parser.add_argument("--once", action="store_true", help="print one frame as text and end")
        parser.add_argument(
            "--sort", choices=("use", "memory", "pid", "tenant", "cpu", "rss", "user", "command", "card"), default="use",
            help="what processes are sorted by (use)",
        )  # fmt: skip
        parser.add_argument("--filter", metavar="TEXT", default="", help="show only processes that contain TEXT")
        parser.add_argument("--width", type=int, metavar="COLUMNS", help="width of --once (the terminal's, else 132)")
        parser.add_argument("--token-file", metavar="FILE", help="bearer token for addresses that ask for one")
        parser.add_argument("--ca-file", metavar="FILE", help="certificates to trust of https addresses (the system's)")
        parser.add_argument("--allow-signals", action="store_true", help="let the key x send a signal to a process of this machine")

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.exporter.top.watch import Watch

        if not INTERVALS_S[0] <= args.interval <= INTERVALS_S[1]:
            raise BadInput(f"--interval is {args.interval:g}, expected {INTERVALS_S[0]:g} to {INTERVALS_S[1]:g} seconds")
        if args.width is not None and not 40 <= args.width <= 1000:
            raise BadInput(f"--width is {args.width}, expected 40 to 1000 columns")
        if args.format != "table" and not args.once:
            raise BadInput(f"--format is {args.format} without --once, expected --once: a live view has no format")
        if args.output and not args.once:
            raise BadInput("--output is given without --once, expected --once: a live view goes to the terminal")
        watch = Watch(feed_of(args))
        try:
            if args.once:
                return once(args, watch)
            if not (sys.stdin.isatty() and sys.stdout.isatty()):
                raise BadInput("poolmeter top is not on a terminal, expected one; --once prints a frame to a pipe")
            import logging

            from poolmeter.exporter.top.app import TopApp

            logging.disable(logging.CRITICAL)  # a line of a log would tear the screen
            TopApp(watch, args.interval, args.sort, args.filter, args.allow_signals).run()
            return 0
        finally:
            watch.close()


def addresses_of(args: argparse.Namespace) -> list[str]:
    """The URLs to ask: those named; else the exporters of the pool under the data folder; else the configured exporter of this node."""
    from poolmeter.config import load_config
    from poolmeter.exporter.addresses import configured_url, running_pool
    from poolmeter.places import data_folder

    named = [*args.exporter, *([args.collector] if args.collector else [])]
    if named:
        return list(dict.fromkeys(named))
    urls = running_pool(data_folder(args.data)).get("urls")
    found = (
        [url for name, url in urls.items() if name.split(":")[0] == "exporter" and isinstance(url, str)] if isinstance(urls, dict) else []
    )
    return found or [configured_url(load_config(args.config).exporter)]


def feed_of(args: argparse.Namespace) -> "Feed":
    """What is asked. Raises BadInput."""
    from poolmeter.exporter.top.feed import Address, Feed
    from poolmeter.tokens import read_token

    token = read_token(Path(args.token_file)) if args.token_file else None
    return Feed([Address(url, token, args.ca_file, max(2.0, min(args.interval * 2, 10.0))) for url in addresses_of(args)])


def once(args: argparse.Namespace, watch: "Watch") -> int:
    """Print one frame: two looks, since rates need two. Raises Unavailable when no address answers."""
    from poolmeter.exporter.top.panes import matches
    from poolmeter.exporter.top.plain import as_report, as_text
    from poolmeter.report import write, write_whole

    watch.poll()
    deadline = time.monotonic() + max(2.5, args.interval)
    watch.frame()  # CPU of processes is between two looks, too
    while watch.histories.nodes and time.monotonic() < deadline and not watch.moved():
        time.sleep(min(0.25, args.interval))
        watch.poll()
    frame = watch.frame()
    if not frame.nodes:
        reasons = "; ".join(f"{url}: {why}" for url, _, why in frame.missing)
        raise Unavailable(f"no exporter answers ({reasons or 'the collector knows no node'}), expected one at --exporter URL")
    if args.filter:
        import dataclasses

        frame = dataclasses.replace(frame, processes=tuple(row for row in frame.processes if matches(row, args.filter)))
    if args.format != "table":
        write(as_report(frame), args.format, args.output)
        return 0
    terminal = sys.stdout.isatty() and not args.output
    width = args.width or (shutil.get_terminal_size().columns if terminal else 132)
    body = as_text(frame, width, args.sort).encode("utf-8", "replace")
    if args.output and args.output != "-":
        write_whole(Path(args.output), body)
    else:
        sys.stdout.buffer.write(body)
        sys.stdout.buffer.flush()
    return 0
