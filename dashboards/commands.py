"""The command `poolmeter dashboard`: Streamlit on loopback over a collector's data folder."""

import argparse
import contextlib
import http.client
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

from poolmeter.config import load_config
from poolmeter.errors import BadInput, Unavailable
from poolmeter.places import data_folder
from poolmeter.report import write_whole

APP = Path(__file__).with_name("app.py")
READY_S = 60.0


class Dashboard:
    """Show the pool and its bill in a browser, until SIGTERM.

    Reads the collector's data folder and changes nothing in it; listens on loopback unless the configuration says otherwise, and
    asks no other machine for anything.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--port", type=int, metavar="N", help="TCP port (8501; 0: one that is free)")
        parser.add_argument("--ready-file", metavar="FILE", help='write {"url": ...} there once it serves')

    def run(self, args: argparse.Namespace) -> int:
        config = load_config(args.config)
        wanted = config.dashboard.port if args.port is None else args.port
        if not 0 <= wanted <= 65535:
            raise BadInput(f"--port is {wanted}, expected 0 to 65535")
        host = config.dashboard.host
        port = free_port(host, wanted)
        os.environ["POOLMETER_DATA"] = str(data_folder(args.data))
        if args.config:
            os.environ["POOLMETER_CONFIG"] = str(Path(args.config).absolute())
        if args.ready_file:
            threading.Thread(target=announce, args=(host, port, Path(args.ready_file)), daemon=True).start()
        sys.stderr.write(f"poolmeter: dashboard on {url_of(host, port)}\n")
        return serve(host, port)


def url_of(host: str, port: int) -> str:
    """The address to open."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def free_port(host: str, port: int) -> int:
    """`port` if it can be listened on, any free one for 0. Raises Unavailable."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise Unavailable(f"dashboard cannot listen on {host}:{port}: {error.strerror or error}; expected a port that is free") from None


def serve(host: str, port: int) -> int:
    """Run Streamlit in this process until SIGTERM or SIGINT; its exit status."""
    from streamlit.web import cli as streamlit

    options = {
        "server.address": host,
        "server.port": port,
        "server.headless": "true",
        # Nothing on disk changes under an installed dashboard, and the watcher costs a wake-up a second.
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",
        "global.developmentMode": "false",
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    try:
        # Streamlit greets on stdout, which belongs to results.
        with contextlib.redirect_stdout(sys.stderr):
            streamlit.main(["run", str(APP), *words], prog_name="streamlit")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def announce(host: str, port: int, ready: Path) -> None:
    """Write the ready file once the server answers on its health path."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection(host, port, timeout=2)
        try:
            connection.request("GET", "/_stcore/health")
            if connection.getresponse().status == 200:
                write_whole(ready, (json.dumps({"url": url_of(host, port)}) + "\n").encode())
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.05)
