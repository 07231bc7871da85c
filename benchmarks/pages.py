"""What a page of the exporter costs: 8 cards with 64 slices and processes each, every counter another than on the page before.

CPU of a render, with label text kept and without; wall time of a scrape over HTTP, each of a new page, as text and gzipped OpenMetrics; and how many
renders 50 scrapes at once cost. Medians; no card is needed. Figures go to --output as well; the exit code is 1 when one misses what it must be.
"""

import argparse
import dataclasses
import http.client
import json
import os
import statistics
import sys
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from poolmeter.exporter.collectors.family import Page
from poolmeter.exporter.compat import PAGES
from poolmeter.exporter.otlp_points import request_of
from poolmeter.exporter.render import Renderer, render_reference
from poolmeter.exporter.scrape import Scrapes
from poolmeter.exporter.server import Face, Server, listen
from poolmeter.model.snapshot import DeviceSnapshot, ProcessSnapshot, SliceSnapshot, Snapshot, SourceHealth
from poolmeter.model.units import GIB

CARDS, SHARERS = 8, 64
MUST = {
    "render_cpu_ms": 10.0,
    "render_churn_cpu_ms": 10.0,
    "served_ms": 30.0,
    "served_openmetrics_gzip_ms": 30.0,
    "renders_of_50_scrapes": 1.0,
}
T0 = 1_764_500_000_000_000


def page(tick: int) -> Page:
    """The page of a second in which everybody is at work, with the snapshot before it."""
    made = bare(tick)
    return dataclasses.replace(made, before=bare(tick - 1).snapshot)


def bare(tick: int) -> Page:
    """The page of a second, the first there is."""
    at = T0 + tick * 1_000_000
    devices = tuple(
        DeviceSnapshot(
            uuid=f"GPU-00000000-0000-0000-0000-{card:012d}",
            index=card,
            model="NVIDIA H200",
            vendor="nvidia",
            up=True,
            memory_total_bytes=141 * GIB,
            origin="epoch",
            pci_bus_id=f"00000000:{card:02X}:00.0",
            minor=card,
            serial=f"165{card}",
            driver_version="580.95.05",
            mig=False,
            memory_used_bytes=90 * GIB + tick * 2_097_152,
            memory_reserved_bytes=GIB // 2,
            utilization_ppm=(500_000 + tick * 7001) % 1_000_000,
            power_mw=400_000 + tick * 13,
            temperature_celsius=50 + tick % 9,
            sm_clock_hz=1_980_000_000 - tick % 3 * 15_000_000,
            memory_clock_hz=3_201_000_000,
            busy_us_total=10**9 + tick * 987_654,
            energy_uj_total=10**12 + tick * 412_345_678,
            hooked_us_total=10**9 + tick * 912_345,
            switch_overhead_us_total=10**6 + tick // 60 * 4321,
            unaccounted_us_total=10**6 + tick * 111,
            unaccounted_memory_bytes=2 * GIB,
            allocated_ppm=960_000,
            memory_allocated_bytes=128 * GIB,
        )
        for card in range(CARDS)
    )
    slices = tuple(
        SliceSnapshot(
            allocation_id=f"a-{card:02d}{part:04d}-78a1c330bcda",
            device_uuid=device.uuid,
            tenant=f"tenant-{part % 16}",
            mode="hook",
            state="active",
            used_basis="hook",
            generation=2,
            enforcement="hook",
            promise_ppm=15_000,
            memory_promise_bytes=2 * GIB,
            created_us=T0,
            origin="epoch:1",
            project="vision",
            user="somebody",
            workload="train",
            workload_class="training",
            environment="prod",
            pool="lab",
            compute_limit_ppm=15_000,
            memory_limit_bytes=2 * GIB,
            memory_used_bytes=GIB + tick * 2_097_152,
            memory_peak_bytes=GIB + tick * 2_097_152,
            busy_us_total=10**8 + part * 1_234_567 + tick * 14_801,
            launches_total=10**6 + part + tick * 331,
            graph_launches_total=part + tick * 7,
            throttled_us_total=10**6 + tick * 1001,
            denied_allocations_total=part % 2,
            energy_uj_total=10**9 + tick // 60 * 1_000_000,
            last_activity_us=at - part * 1000,
            hook_faults_total=0,
            processes=1,
        )
        for card, device in enumerate(devices)
        for part in range(SHARERS)
    )
    processes = tuple(
        ProcessSnapshot(pid=10_000 + number, start_ticks=1, device_uuid=part.device_uuid, hooked=True, allocation_id=part.allocation_id)
        for number, part in enumerate(slices)
    )
    sources = tuple(SourceHealth(source=name, ok=True, at_us=at, duration_us=2000 + tick) for name in ("nvml", "hook", "allocations"))
    snapshot = Snapshot(
        node="node",
        epoch="epoch",
        sequence=tick,
        taken_us=at,
        simulated=True,
        pool="lab",
        devices=devices,
        slices=slices,
        processes=processes,
    )
    return Page(dataclasses.replace(snapshot, sources=sources), tick, "0.1.0")


def churned(made: Page, number: int) -> Page:
    """The page after the first allocation of each card ended, another one for each page."""
    kept = tuple(part for place, part in enumerate(made.snapshot.slices) if place % SHARERS != number % SHARERS)
    return dataclasses.replace(made, snapshot=dataclasses.replace(made.snapshot, slices=kept))


class Fake:
    """An agent that has this page."""

    def __init__(self) -> None:
        self.now = page(0)

    def page(self) -> Page:
        return self.now

    def age_us(self) -> int:
        return 0

    stalled_us = 1


def cpu_ms(call: object, *arguments: object) -> float:
    """CPU time of a call in ms."""
    began = time.process_time()
    call(*arguments)  # type: ignore[operator]
    return (time.process_time() - began) * 1e3


def scrape_ms(connection: http.client.HTTPConnection, path: str, headers: dict[str, str]) -> float:
    """Wall time of a scrape in ms, to the last byte."""
    began = time.perf_counter()
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    took = (time.perf_counter() - began) * 1e3
    assert answer.status == 200 and body
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--output", type=Path, help="also write the figures here, as JSON")
    args = parser.parse_args()
    pages = [page(tick) for tick in range(1, args.rounds + 1)]
    figures: dict[str, float] = {}
    renderer = Renderer()
    body = renderer.render(page(0))
    assert body == render_reference(page(0))
    figures["series"] = sum(not line.startswith(b"#") for line in body.splitlines())
    figures["page_bytes"] = len(body)
    figures["render_first_cpu_ms"] = statistics.median(cpu_ms(Renderer().render, made) for made in pages[:7])
    figures["render_cpu_ms"] = statistics.median(cpu_ms(renderer.render, made) for made in pages)
    figures["render_churn_cpu_ms"] = statistics.median(cpu_ms(renderer.render, churned(made, number)) for number, made in enumerate(pages))
    figures["render_reference_cpu_ms"] = statistics.median(cpu_ms(render_reference, made) for made in pages[:7])
    for name, families in PAGES.items():
        scrapes = Scrapes(families)
        figures[f"render_{name}_cpu_ms"] = statistics.median(cpu_ms(scrapes.answer, made, "", "") for made in pages)
    figures["otlp_request_cpu_ms"] = statistics.median(
        cpu_ms(lambda made: request_of(made).SerializeToString(), made) for made in pages[:7]
    )
    agent = Fake()
    face = Face(agent, None)  # type: ignore[arg-type]
    server = Server(face.application(), listen("127.0.0.1", 0))
    server.start()
    where = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port)
    scrape_ms(connection, "/metrics", {})
    for name, headers in (
        ("served_ms", {}),
        ("served_openmetrics_gzip_ms", {"Accept": "application/openmetrics-text", "Accept-Encoding": "gzip"}),
    ):
        times = []
        for made in pages:
            agent.now = made
            times.append(scrape_ms(connection, "/metrics", headers))
        figures[name] = statistics.median(times)
        figures[name.replace("_ms", "_again_ms")] = statistics.median(scrape_ms(connection, "/metrics", headers) for _ in pages)
    agent.now = page(args.rounds + 1)
    before = face.renders
    with ThreadPoolExecutor(50) as pool:

        def one(_: int) -> float:
            return scrape_ms(http.client.HTTPConnection(str(where.hostname), where.port), "/metrics", {})

        began = time.perf_counter()
        list(pool.map(one, range(50)))
    figures["fifty_scrapes_ms"] = (time.perf_counter() - began) * 1e3
    figures["renders_of_50_scrapes"] = face.renders - before
    server.stop()
    missed = {name for name, most in MUST.items() if figures[name] > most}
    for name, value in figures.items():
        print(f"{name:32} {value:12.2f}{f'  must be at most {MUST[name]:g}: MISSED' if name in missed else ''}")
    if args.output:
        args.output.write_text(json.dumps({"cores": os.cpu_count(), **figures}, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
