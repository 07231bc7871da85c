"""What `poolmeter top` costs: CPU of the live view on a pseudo-terminal, at 1 Hz, over a node of 8 cards x 64 slices and processes.

The node is a server of this program's own; its processes are real ones (sleepers, each on every card), so that /proc is read as it would be.
"""

import argparse
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from poolmeter.model.plain import to_plain
from poolmeter.model.snapshot import DeviceSnapshot, ProcessSnapshot, SliceSnapshot, Snapshot
from poolmeter.model.units import GIB
from poolmeter.vendors.proc import start_ticks_of

CARDS, EACH = 8, 64


def node_at(seconds: float, pids: list[tuple[int, int]]) -> Snapshot:
    """The node after so many seconds of use."""
    us = int(seconds * 1_000_000)
    places = [(card, number) for card in range(CARDS) for number in range(EACH)]
    return Snapshot(
        node="busy",
        epoch="e",
        sequence=1,
        taken_us=us,
        simulated=False,
        devices=tuple(
            DeviceSnapshot(
                uuid=f"GPU-{card}", index=card, model="NVIDIA H200", vendor="nvidia", up=True, memory_total_bytes=141 * GIB, origin="e",
                memory_used_bytes=(card + 1) * 8 * GIB, utilization_ppm=500_000, power_mw=400_000, temperature_celsius=50, busy_us_total=us // 2,
                unaccounted_us_total=0, allocated_ppm=900_000, driver_version="580",
            )
            for card in range(CARDS)
        ),
        slices=tuple(
            SliceSnapshot(
                allocation_id=f"a-{card}-{number}", device_uuid=f"GPU-{card}", tenant=f"tenant-{number % 10}", mode="hook", state="active",
                used_basis="hook", generation=1, enforcement="cooperative", promise_ppm=15_000, memory_promise_bytes=GIB, created_us=1, origin="e",
                busy_us_total=us * (number % 7) // 100, throttled_us_total=us // 100, memory_used_bytes=GIB // 4, memory_limit_bytes=GIB,
                memory_peak_bytes=GIB // 2, denied_allocations_total=0, processes=1,
            )
            for card, number in places
        ),
        processes=tuple(
            ProcessSnapshot(
                pid=pids[number][0], start_ticks=pids[number][1], device_uuid=f"GPU-{card}", hooked=True, command="sleep",
                allocation_id=f"a-{card}-{number}", tenant=f"tenant-{number % 10}", used_basis="hook", busy_us_total=us * (number % 7) // 100,
                memory_used_bytes=GIB // 4,
            )
            for card, number in places
        ),
    )  # fmt: skip


def serve(pids: list[tuple[int, int]]) -> ThreadingHTTPServer:
    """The node's exporter, as far as top asks one."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = json.dumps(to_plain(node_at(time.time(), pids))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def measure(url: str, columns: int, rows: int, seconds: float) -> dict[str, object]:
    """One run at one size of the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-m", "poolmeter.cli", "top", "--exporter", url])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(until: float) -> int:
        count = 0
        while (left := until - time.monotonic()) > 0:
            if select.select([terminal], [], [], left)[0]:
                count += len(os.read(terminal, 65536))
        return count

    def cpu() -> float:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    read(time.monotonic() + 6)
    began, before = time.monotonic(), cpu()
    drawn = read(began + seconds)
    used = (cpu() - before) / (time.monotonic() - began)
    with open(f"/proc/{pid}/status") as file:
        rss = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))
    os.write(terminal, b"q")
    os.waitpid(pid, 0)
    os.close(terminal)
    return {
        "terminal": f"{columns}x{rows}", "cpu_percent_of_a_core": round(100 * used, 2), "bytes_drawn_per_s": round(drawn / seconds),
        "rss_mib": rss >> 20, "seconds": seconds,
    }  # fmt: skip


def main() -> int:
    """One JSON line a size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each size is measured (60)")
    args = parser.parse_args()
    sleepers = [subprocess.Popen(["sleep", "3600"]) for _ in range(EACH)]
    server = serve([(child.pid, start_ticks_of(child.pid) or 0) for child in sleepers])
    try:
        for columns, rows in ((80, 24), (200, 60)):
            row = measure(f"http://127.0.0.1:{server.server_address[1]}", columns, rows, args.seconds)
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    finally:
        server.shutdown()
        for child in sleepers:
            child.kill()
            child.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
