"""`poolmeter top` below its screen: rates, freshness, sums, words, and the text of one frame."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import jsonschema
import pytest
from exporter_top_fakes import GIB, HOSTILE, SECOND, T0, URL, Watched, device, later, part, process, snapshot
from hypothesis import given
from hypothesis import strategies as st

from poolmeter import cli
from poolmeter.config import load_config
from poolmeter.errors import BadInput, DataError
from poolmeter.exporter.addresses import running_pool
from poolmeter.exporter.doctor.commands import Doctor, subjects_of
from poolmeter.exporter.top import words
from poolmeter.exporter.top.attribution import named, place_of
from poolmeter.exporter.top.columns import line, place
from poolmeter.exporter.top.commands import Top, addresses_of
from poolmeter.exporter.top.details import details
from poolmeter.exporter.top.feed import Address, parse_snapshots
from poolmeter.exporter.top.host import Host, parse_maps, where_in
from poolmeter.exporter.top.panes import (
    card_columns,
    framework_of,
    matches,
    process_columns,
    sort_processes,
    tenant_columns,
    user_of,
    where_of,
)
from poolmeter.exporter.top.plain import as_report, as_text, card_lines
from poolmeter.exporter.top.rows import UNACCOUNTED, PartRow
from poolmeter.model.hardware import Activity, BusFunction, Hardware, MigInstance, Vgpu
from poolmeter.model.plain import to_plain
from poolmeter.model.snapshot import Snapshot, SourceHealth
from poolmeter.report import as_json
from poolmeter.simulator.machine import Machine

GOLDEN = Path(__file__).parent / "top.golden.txt"
SCHEMA = Path(__file__).parents[2] / "docs" / "reference" / "top.schema.json"


def test_shares_are_of_the_time_between_snapshots(tmp_path: Path) -> None:
    made = Watched(tmp_path, first := snapshot())
    made.watch.poll()
    frame = made.watch.frame()
    assert frame.cards[0].slices[0].obtained_ppm is None, "one snapshot makes no rate"
    assert frame.cards[0].use_ppm == 500_000, "until then the card's own figure"
    made.say(later(first, card=400_000, vision=300_000, stranger=50_000, throttled=100_000))
    frame = made.watch.frame()
    search, vision = frame.cards[0].slices
    assert (vision.obtained_ppm, search.obtained_ppm, vision.throttled_ppm) == (300_000, 0, 100_000)
    assert frame.cards[0].use_ppm == 400_000
    assert {row.tenant: row.use_ppm for row in frame.processes} == {"vision": 300_000, "search": 0, UNACCOUNTED: 50_000}


def test_a_new_origin_makes_no_rate(tmp_path: Path) -> None:
    made = Watched(tmp_path, first := snapshot())
    made.watch.poll()
    after = later(first, vision=900_000)
    made.say(dataclasses.replace(after, slices=tuple(dataclasses.replace(item, origin="e:2") for item in after.slices)))
    assert [row.obtained_ppm for row in made.watch.frame().cards[0].slices] == [None, None]


def test_a_card_that_is_lost_shows_nothing_of_what_it_was(tmp_path: Path) -> None:
    lost = device(0, up=False, memory_used_bytes=None, utilization_ppm=None, power_mw=None, temperature_celsius=None)
    made = Watched(tmp_path, snapshot(devices=(lost,)))
    made.watch.poll()
    made.say(snapshot(at_us=T0 + SECOND, devices=(dataclasses.replace(lost, busy_us_total=10),)))
    (card,) = made.watch.frame().cards
    assert card.state == "lost" and card.use_ppm is None
    row = as_text(made.watch.frame(), 200).splitlines()[3]
    assert "lost" in row and row.count("?") >= 4 and " 0%" not in row


def test_a_card_that_the_driver_tells_nothing_of_is_unknown(tmp_path: Path) -> None:
    source = SourceHealth(source="nvml", ok=False, at_us=None, duration_us=None, reason="NVML does not answer: Driver Not Loaded")
    made = Watched(tmp_path, snapshot(devices=(device(0, up=False),), sources=(source,)))
    made.watch.poll()
    frame = made.watch.frame()
    assert frame.cards[0].state == "unknown" and "Driver Not Loaded" in as_text(frame, 100).splitlines()[1]


def test_no_utilisation_is_unknown_and_not_0(tmp_path: Path) -> None:
    made = Watched(tmp_path, snapshot(devices=(device(0, mig=True, utilization_ppm=None, busy_us_total=None),)))
    made.watch.poll()
    (card,) = made.watch.frame().cards
    assert card.state == "ok" and card.modes == "mig" and card.use_ppm is None and card.trend[-1] is None


def test_stale_when_nothing_new_comes(tmp_path: Path) -> None:
    made = Watched(tmp_path, first := snapshot())
    made.watch.poll()
    made.say(second := later(first))
    assert not made.watch.frame().nodes[0].stale and made.watch.frame().nodes[0].age_us == 0
    made.say(second, us=4 * SECOND)
    assert not made.watch.frame().nodes[0].stale and made.watch.frame().nodes[0].age_us == 4 * SECOND
    made.say(second, us=4 * SECOND)
    (node,) = made.watch.frame().nodes
    assert node.stale and "stale, nothing new since" in as_text(made.watch.frame(), 100)
    assert all(row.stale for row in made.watch.frame().processes)


def test_an_old_snapshot_is_stale_at_the_first_look(tmp_path: Path) -> None:
    made = Watched(tmp_path, snapshot(at_us=T0 - 60 * SECOND))
    made.watch.poll()
    assert made.watch.frame().nodes[0].stale
    pooled = Watched(tmp_path, snapshot(at_us=T0 - 60 * SECOND), pooled=True)
    pooled.watch.poll()
    assert not pooled.watch.frame().nodes[0].stale, "a collector's are as old as its pulls"


def test_a_clock_that_differs_is_told_and_is_not_staleness(tmp_path: Path) -> None:
    made = Watched(tmp_path, first := snapshot(at_us=T0 - 60 * SECOND))
    made.watch.poll()
    made.say(later(first))
    (node,) = made.watch.frame().nodes
    assert not node.stale and "its clock is 1m00s behind" in as_text(made.watch.frame(), 100)


def test_an_exporter_that_goes_away_keeps_its_last_values_marked(tmp_path: Path) -> None:
    made = Watched(tmp_path, first := snapshot())
    made.watch.poll()
    made.say(second := later(first, vision=300_000))
    made.fail()
    made.fail("it gives no answer within 2 s")
    text = as_text(made.watch.frame(), 100)
    assert "gpu-01: not reachable since" in text and "it gives no answer within 2 s" in text
    assert "stale" in text and "(active)" in text and "30%" in text
    made.say(later(second))
    assert "not reachable" not in as_text(made.watch.frame(), 100)


def test_an_address_that_never_answered_is_named(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    made.fail()
    frame = made.watch.frame()
    assert not frame.nodes and f"{URL}: not reachable since" in as_text(frame, 100)


def test_tenants_add_up_over_cards_and_an_unknown_part_makes_the_sum_unknown(tmp_path: Path) -> None:
    first = snapshot(
        devices=(device(0), device(1)),
        slices=(part("a", "vision", 0), part("a", "vision", 1), part("b", "search", 1, busy_us_total=None, memory_used_bytes=None)),
    )
    made = Watched(tmp_path, first)
    made.watch.poll()
    made.say(later(first, vision=200_000))
    search, vision, nobody = made.watch.frame().tenants
    assert (vision.use_ppm, vision.cards, vision.allocations, vision.memory_used_bytes) == (400_000, 2, 1, 20 * GIB)
    assert vision.promise_ppm == 500_000 and (search.use_ppm, search.memory_used_bytes) == (None, None)
    assert nobody.tenant == UNACCOUNTED and nobody.processes == 1


def test_what_is_not_known_is_sorted_last_whichever_way(tmp_path: Path) -> None:
    made = Watched(tmp_path, first := snapshot())
    made.watch.poll()
    made.say(later(first, vision=300_000, stranger=400_000))
    rows = made.watch.frame().processes
    assert [row.process.pid for row in sort_processes(rows, "memory", False)] == [10, 9, 200]
    assert [row.process.pid for row in sort_processes(rows, "memory", True)] == [9, 10, 200]
    assert [row.process.pid for row in sort_processes(rows, "use", False)] == [200, 10, 9]
    assert [row.process.pid for row in sort_processes(rows, "tenant", False)] == [9, 10, 200]
    assert [row.process.pid for row in rows if matches(row, "VIS")] == [10] and not any(matches(row, "zzz") for row in rows)


@given(st.text(), st.integers(0, 40), st.booleans())
def test_a_cell_is_as_wide_as_it_is_told_and_holds_nothing_that_moves_the_cursor(text: str, width: int, right: bool) -> None:
    shown = words.fitted(words.clean(text), width, right)
    assert words.width_of(shown) == width
    assert not any(ord(char) < 32 or char in "\x7f\x9b\u202e\u2066\u200f\u2028" for char in shown)


@given(st.integers(20, 260))
def test_every_line_is_as_wide_as_the_terminal_at_most(width: int) -> None:
    made = Watched(Path("/nonexistent"), first := snapshot(processes=(process(1, HOSTILE, command=HOSTILE), process(2, "ＷＩＤＥ" * 9))))
    made.watch.poll()
    made.say(later(first, vision=1))
    frame = made.watch.frame()
    for columns, rows in (
        (card_columns(True), card_lines(frame)),
        (tenant_columns(), frame.tenants),
        (process_columns(True), frame.processes),
    ):
        placed = place(columns, rows, width)  # type: ignore[type-var, arg-type]
        for row in rows:
            assert words.width_of("".join(text for text, _ in line(placed, row))) <= width  # type: ignore[arg-type]


def test_words() -> None:
    assert [words.percent(ppm) for ppm in (None, 0, 1, 5_000, 494_999, 1_000_000)] == ["?", "0%", "<1%", "1%", "49%", "100%"]
    assert [words.size(value) for value in (None, 0, 512, 1023, 640 << 20, 41 * GIB, 141 * GIB, 3 << 40)] == [
        "?", "0", "512B", "1K", "640M", "41.0G", "141G", "3.0T",
    ]  # fmt: skip
    assert [words.duration(us) for us in (None, 400_000, 12 * SECOND, 185 * SECOND, 7800 * SECOND)] == [
        "?",
        "0.4s",
        "12s",
        "3m05s",
        "2h10m",
    ]
    assert words.bar(None, 10, 3) == ("", "   ") and words.bar(1, 10**9, 3) == ("▏", "··") and words.bar(20, 10, 3) == ("███", "")
    assert words.trend((None, 0, 1_000_000), 4) == "  ▁█"


def test_what_this_machine_knows_of_a_process(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", "a b"], stdin=subprocess.PIPE)
    try:
        from poolmeter.vendors.proc import start_ticks_of

        ticks = start_ticks_of(child.pid)
        assert ticks is not None
        host = Host()
        deadline = time.monotonic() + 20
        while (facts := host.look(child.pid, ticks)) is None or "import sys" not in (facts.command_line or "") or not facts.rss_bytes:
            assert time.monotonic() < deadline
            host = Host()
        assert facts.rss_bytes and facts.user and facts.cpu_ppm is None
        assert host.look(child.pid, ticks + 1) is None, "another process of the same pid"
    finally:
        child.communicate()
    assert Host().look(child.pid, ticks) is None


def test_where_a_process_runs(tmp_path: Path) -> None:
    name, other = "0123456789abcdef" * 4, "f" * 64
    uid = "1b0c2a4e-0000-1111-2222-333344445555"
    pod = f"/kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice/cri-containerd-{name}.scope"
    mine = "/user.slice/user-1000.slice/user@1000.service"
    for path, where in (
        (f"/system.slice/docker-{name}.scope", "container 0123456789ab"),
        (pod, "pod 1b0c2a4e"),
        (f"/kubepods/pod{uid}/{name}", "pod 1b0c2a4e"),
        ("/system.slice/slurmstepd.scope/job_123/step_0/user", "job 123"),
        ("/system.slice/train.service", "train.service"),
        ("/", None),
        # Whoever is in there may have made the folders below: a user, a unit, a container, a job.
        (f"{mine}/pod{uid}", "user@1000.service"),
        (f"{mine}{pod}", "container 0123456789ab"),  # a container of that user's own
        (f"{mine}/slurm/job_7", "user@1000.service"),
        (f"{mine}/other.service", "user@1000.service"),
        (f"/system.slice/train.service/kubepods/pod{uid}", "train.service"),
        (f"/system.slice/train.service/docker-{name}.scope", "train.service"),
        ("/system.slice/train.service/slurm/uid_1/job_7", "train.service"),
        (f"/system.slice/docker-{name}.scope{pod}", "container 0123456789ab"),
        (f"/system.slice/docker-{name}.scope/docker-{other}.scope", "container 0123456789ab"),
        (f"/system.slice/slurmstepd.scope/job_123/step_0/user/docker-{other}.scope", "job 123"),
        (f"/home/pod{uid}", None),
        ("/job_7", None),
        ("/system.slice/tr\x1bain.service", "tr\\x1bain.service"),
    ):
        assert where_in(f"0::{path}\n".encode()) == where, path
    assert where_in(b"0::/system.slice/\xff\xfe.service\n").encode() and where_in(b"") is None  # type: ignore[union-attr]
    assert where_in(f"5:memory:/kubepods/pod{uid}/{name}\n1:name=systemd:/\n".encode()) == "pod 1b0c2a4e"


def test_what_a_process_computes_with() -> None:
    line = b"7f0000000000-7f0000001000 r-xp 00000000 08:01 1 "
    for path, framework in (
        (b"/usr/lib/libcuda.so.1", "cuda"), (b"/opt/dtk-24.04/lib/libamdhip64.so.6", "dtk"), (b"/opt/rocm/lib/libamdhip64.so.6", "rocm"),
        (b"/usr/lib/libc.so.6", None), (b"/home/libcuda.so.copy", None),
    ):  # fmt: skip
        assert parse_maps(line + path + b"\n") == framework
    assert parse_maps(line + b"/usr/lib/libcuda.so.1\n" + line + b"/x/libtorch_cuda.so\n") == "PyTorch"


def test_what_the_exporter_attributes_goes_before_what_proc_says() -> None:
    def claim(**values: str) -> SimpleNamespace:
        return SimpleNamespace(**{**dict.fromkeys(("namespace", "pod", "container", "container_id", "job", "unit", "user")), **values})

    places = [claim(namespace="ml", pod="train-0", container="main"), claim(pod="train-0"), claim(job="7"), claim(container="web"),
              claim(container_id="0123456789abcdef"), claim(unit="x.service"), claim(user="eve")]  # fmt: skip
    assert [place_of(item) for item in places] == [
        "ml/train-0:main", "train-0", "job 7", "web", "container 0123456789ab", "x.service", None,
    ]  # fmt: skip
    fault = SimpleNamespace(field="tenant", source="own", value="a", other="slurm", other_value="b")
    said = SimpleNamespace(
        pid=10,
        start_ticks=110,
        claims=(claim(user="eve"), places[2]),
        framework="CANN",
        tenant="vision",
        source="own",
        disagreements=(fault,),
    )
    found = named(SimpleNamespace(attributions=(said,)))[10, 110]
    assert (found.where, found.user, found.framework) == ("job 7", "eve", "CANN")
    assert found.disagreements == ("tenant: own says a, slurm says b",) and not named(snapshot())
    made = Watched(Path("/nonexistent"), snapshot())
    made.watch.poll()
    row = dataclasses.replace(made.watch.frame().processes[1], named=found)
    assert (where_of(row), user_of(row), framework_of(row)) == ("job 7", "eve", "CANN") and matches(row, "cann")
    assert ("sources disagree", "tenant: own says a, slurm says b") in details(row)


def golden_frame(tmp_path: Path) -> Watched:
    lost = device(1, up=False, utilization_ppm=None, memory_used_bytes=None, power_mw=None, temperature_celsius=None, allocated_ppm=250_000)
    instances = (
        MigInstance(uuid="MIG-1", gpu_instance_id=1, compute_instance_id=0, profile="3g.71gb", memory_used_bytes=5 * GIB,
                    memory_total_bytes=71 * GIB, processes=2, activity=Activity(window_us=SECOND, graphics_ppm=420_000)),
        MigInstance(uuid="MIG-2", gpu_instance_id=2, compute_instance_id=0, placement_start=4, placement_size=2),
    )  # fmt: skip
    vgpus = (Vgpu(uuid="vgpu-1", type_name="H200-8C", vm_id=HOSTILE, licensed=False, utilization_ppm=10_000),)
    hardware = Hardware(instances=instances, vgpus=vgpus)
    mig = device(2, mig=True, utilization_ppm=None, busy_us_total=None, temperature_celsius=88, allocated_ppm=0, hardware=hardware)
    first = snapshot(
        functions=(
            BusFunction(pci_bus_id="0000:41:00.0", state="not_up", driver="nvidia", device_id="10de:2335"),
            BusFunction(pci_bus_id="0000:c1:00.0", state="passed_through", driver="vfio-pci", device_id="10de:2335"),
        ),
        devices=(device(0), lost, mig),
        slices=(
            part("a-vision", "vision", denied_allocations_total=3),
            part("a-search", "search", state="held", compute_limit_ppm=None),
            part("a-evil", HOSTILE, 1, state="unknown", busy_us_total=None, throttled_us_total=None, memory_used_bytes=None,
                 memory_peak_bytes=None, denied_allocations_total=None),
        ),
        processes=(process(10, "vision"), process(9, "search", memory_used_bytes=2 * GIB),
                   process(200, None, 2, memory_used_bytes=None, command=HOSTILE)),
    )  # fmt: skip
    gone = snapshot("gpu-02", devices=(device(0),), slices=(part("a-x", "research"),), processes=())
    made = Watched(tmp_path, first, gone)
    made.watch.poll()
    made.say(first, later(gone, research=100_000))
    for _ in range(8):
        first = later(first, card=600_000, vision=480_000, throttled=20_000)
        made.say(first, later(gone, research=100_000))
    return made


def test_the_text_of_a_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    frame = golden_frame(tmp_path).watch.frame()
    text = "".join(f"--- {width} columns\n{as_text(frame, width)}" for width in (80, 132, 200))
    if os.environ.get("POOLMETER_GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    monkeypatch.undo()
    time.tzset()


def test_parts_of_a_card_and_what_is_on_the_bus_alone(tmp_path: Path) -> None:
    def split(busy: int, origin: str = "o") -> Snapshot:
        part = MigInstance(uuid="MIG-1", gpu_instance_id=1, compute_instance_id=0, busy_us_total=busy)
        return snapshot(devices=(device(0, mig=True, hardware=Hardware(origin=origin, instances=(part,))),))

    made = Watched(tmp_path, first := split(0))
    made.watch.poll()
    assert [row.use_ppm for row in made.watch.frame().cards[0].parts] == [None]
    made.say(second := dataclasses.replace(split(250_000), taken_us=first.taken_us + SECOND))
    assert [row.use_ppm for row in made.watch.frame().cards[0].parts] == [250_000]
    made.say(dataclasses.replace(split(999_999, "another"), taken_us=second.taken_us + SECOND))
    assert [row.use_ppm for row in made.watch.frame().cards[0].parts] == [None]
    frame = golden_frame(tmp_path).watch.frame()
    told = {row.id: dict(details(row)) for row in card_lines(frame) if isinstance(row, PartRow)}
    assert told["0000:41:00.0"]["state"] == "not up" and "its use is unknown" in told["0000:41:00.0"]["on the bus"]
    assert told["MIG-2"]["memory slices"] == "2 from 4" and told["MIG-2"]["processes"] == words.UNKNOWN
    assert told["vgpu-1"]["virtual machine"] == HOSTILE  # cleaned where it is drawn, as every value is
    assert [row.id for row in card_lines(frame, slices=False) if isinstance(row, PartRow)] == ["0000:41:00.0", "0000:c1:00.0"]


def test_the_json_of_a_frame_fits_its_schema(tmp_path: Path) -> None:
    body = json.loads(as_json(as_report(golden_frame(tmp_path).watch.frame())))
    jsonschema.validate(body, json.loads(SCHEMA.read_text()))
    rows = body["rows"]
    assert {row["kind"] for row in rows} == {"card", "part", "slice", "function", "tenant", "process"}
    lost = next(row for row in rows if row["kind"] == "card" and row["state"] == "lost")
    assert "use_ppm" not in lost and "memory_used_bytes" not in lost
    assert any("gpu-02" in warning for warning in body["warnings"])


def test_other_bodies_are_no_snapshots() -> None:
    good = json.dumps(to_plain(snapshot())).encode()
    assert parse_snapshots(good) == ((snapshot(),), False)
    assert parse_snapshots(b'{"schema": "poolmeter.snapshots/1", "rows": [' + good + b"]}") == ((snapshot(),), True)
    for body in (b"", b"\xff\xfe", b"[]", b"{}", b'{"rows": [1]}', b"<html>"):
        with pytest.raises(DataError):
            parse_snapshots(body)
    for url in (
        "",
        "127.0.0.1:9877",
        "ftp://x",
        "http://",
        "http://x:99999999",
        "http://[::1",
        f"http://{'x' * 64}",
        "http://.x",
        "http://x/ä",
    ):
        with pytest.raises(BadInput):
            Address(url)


class _Handler(BaseHTTPRequestHandler):
    body: ClassVar[bytes] = b""
    status: ClassVar[int] = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def served() -> Iterator[str]:
    class Handler(_Handler):
        protocol_version = "HTTP/1.1"
        turns = 0

        def do_GET(self) -> None:
            Handler.turns += 1
            now = snapshot(at_us=time.time_ns() // 1000 - 1000)
            self.body = json.dumps(to_plain(later(now, 1, vision=Handler.turns))).encode()  # type: ignore[misc]
            super().do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_once_prints_a_frame(served: str, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    assert cli.dispatch(["top", "--once", "--exporter", served, "--data", str(tmp_path), "--interval", "0.2"]) == 0
    text = capsysbinary.readouterr().out.decode()
    assert "gpu-01" in text and "vision" in text and "\x1b" not in text and max(map(len, text.splitlines())) <= 132
    out = tmp_path / "frame.json"
    assert cli.dispatch(["top", "--once", "--exporter", served, "--format", "json", "--output", str(out), "--filter", "vision"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["pid"] for row in rows if row["kind"] == "process"] == [10]


def test_a_program_without_the_hook_that_is_billed_says_so(tmp_path: Path) -> None:
    strangers = tuple(process(pid, None, allocation_id=name) for pid, name in ((1, None), (2, "a")))
    made = Watched(tmp_path, snapshot(processes=(process(3, "t"), *strangers), slices=(part("a", "t", used_basis="sampled"),)))
    made.watch.poll()
    assert [dict(details(row))["hook"] for row in made.watch.frame().processes] == [
        "no hook: nobody is billed for it", "no hook: billed to its allocation", "hooked",
    ]  # fmt: skip


def test_bad_input_and_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--interval"):
        cli.dispatch(["top", "--interval", "0"])
    with pytest.raises(BadInput, match="--once"):
        cli.dispatch(["top", "--format", "json"])
    assert cli.main(["top", "--once", "--exporter", "http://127.0.0.1:1", "--data", str(tmp_path)]) == 3
    assert cli.main(["top", "--once", "--exporter", "nonsense", "--data", str(tmp_path)]) == 2
    assert cli.main(["top", "--exporter", "http://127.0.0.1:1", "--data", str(tmp_path)]) == 2, "no terminal"


def test_the_addresses_of_a_pool(tmp_path: Path) -> None:
    def named(**values: object) -> list[str]:
        return addresses_of(argparse.Namespace(**{"exporter": [], "collector": None, "data": str(tmp_path), "config": None, **values}))

    assert named(exporter=["http://a", "http://b", "http://a"], collector="http://c") == ["http://a", "http://b", "http://c"]
    assert named() == ["http://127.0.0.1:9877"]
    state = {"urls": {"exporter:a": "http://127.0.0.1:5", "collector": "http://x"}, "pids": {"up": os.getpid()}}
    (tmp_path / "up.json").write_text(json.dumps(state))
    assert named() == ["http://127.0.0.1:5"]
    (tmp_path / "up.json").write_text("{")
    assert named() == ["http://127.0.0.1:9877"]


@pytest.mark.parametrize("pids", [{"up": 1}, {"up": "1"}])
def test_a_pool_of_another_user_runs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pids: dict[str, object]) -> None:
    def denied(pid: int, number: int) -> None:
        assert (pid, number) == (1, 0)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", denied)
    nodes = [{"name": "a", "run": "/run/a"}]
    (tmp_path / "up.json").write_text(json.dumps({"urls": {"exporter:a": "http://127.0.0.1:5"}, "pids": pids, "nodes": nodes}))
    assert [url for _, url in known_urls(tmp_path)] == ["http://127.0.0.1:5"] * 2


def known_urls(data: Path, config: Path | None = None) -> list[tuple[str, str]]:
    """The exporters that `top` and the doctor ask when they are told nothing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data"), parser.add_argument("--config")
    found = []
    for command, urls in (
        (Top(), lambda args: addresses_of(args)),
        (Doctor(), lambda args: [item.exporter_url for item in subjects_of(args, load_config(args.config), running_pool(data))]),
    ):
        own = argparse.ArgumentParser(parents=[parser], add_help=False)
        command.configure(own)
        words = ["--data", str(data), *(["--config", str(config)] if config else [])]
        found += [(type(command).__name__, url) for url in urls(own.parse_args(words))]
    return found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([0, -1, 1 << 80, float("inf"), float("nan"), "", "x", "a" * 5000]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["up", "exporter", "exporter:a", "name", "run", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(JSON | st.fixed_dictionaries({"pids": JSON | st.just({"up": os.getpid()}), "urls": JSON, "nodes": JSON}))
def test_whatever_up_json_holds(tmp_path_factory: pytest.TempPathFactory, state: object) -> None:
    data = tmp_path_factory.mktemp("data")
    (data / "up.json").write_text(json.dumps(state))
    assert {name for name, url in known_urls(data) if isinstance(url, str)} == {"Top", "Doctor"}


def test_the_configured_exporter_speaks_what_its_web_configuration_says(tmp_path: Path) -> None:
    config, web = tmp_path / "config.toml", tmp_path / "web.yml"
    tls = "tls_server_config: {cert_file: absent, key_file: absent}"
    for text, host, url in (
        ("", "0.0.0.0", "http://127.0.0.1:9877"),
        ("bearer_token_files: [absent]", "::", "http://[::1]:9877"),
        (tls, "gpu-01", "https://gpu-01:9877"),
        (tls + "\nbearer_token_files: [absent]", "::", "https://[::1]:9877"),
        ("nonsense: 1", "127.0.0.1", "http://127.0.0.1:9877"),
    ):
        web.write_text(text)
        config.write_text(f'[exporter]\nhost = "{host}"\nweb_config_file = "{web}"\n')
        assert [url for _, url in known_urls(tmp_path, config)] == [url] * 2
    web.unlink()
    assert [url for _, url in known_urls(tmp_path, config)] == ["http://127.0.0.1:9877"] * 2


def test_what_the_frame_costs_does_not_grow_with_time(tmp_path: Path) -> None:
    made = Watched(tmp_path, current := snapshot())
    made.watch.poll()
    for turn in range(400):
        current = dataclasses.replace(later(current), processes=(process(turn + 1, "vision"),))
        made.say(current)
        made.watch.frame()
    (history,) = made.watch.histories.nodes.values()
    assert len(history.counters) <= 5 and all(len(kept) <= 241 for kept in history.trends.values())
    assert isinstance(history.snapshot, Snapshot) and not made.watch._host._seen


def test_a_real_exporter_on_a_simulated_card(tmp_path: Path, machine: Machine) -> None:
    """A program without the hook on the simulated card, as `poolmeter top --once` shows it through a real exporter."""
    ready, run = tmp_path / "ready", tmp_path / "run"
    environment = {**machine.environment(), "POOLMETER_RUN": str(run), "POOLMETER_DATA": str(tmp_path / "data")}

    def start(*words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "poolmeter.cli", *words], env=environment, stdout=subprocess.DEVNULL)

    children = [start("exporter", "--simulate", "--name", "node-a", "--port", "0", "--ready-file", str(ready))]
    try:
        children.append(start("simulate", "tenant", "--kernel-us", "1000", "--seconds", "60", "--allocate", "1G"))
        deadline = time.monotonic() + 60
        rows: list[dict[str, object]] = []
        while not any(row["kind"] == "process" and row.get("use_ppm", 0) > 500_000 for row in rows):  # type: ignore[operator]
            assert time.monotonic() < deadline, rows
            if not ready.exists():
                time.sleep(0.1)
                continue
            words = [
                "top",
                "--once",
                "--exporter",
                json.loads(ready.read_text())["url"],
                "--format",
                "json",
                "--output",
                str(tmp_path / "o"),
            ]
            assert cli.dispatch(words) == 0
            rows = json.loads((tmp_path / "o").read_text())["rows"]
        (shown,) = [row for row in rows if row["kind"] == "process"]
        assert shown["hooked"] is False and shown["host_rss_bytes"] and "tenant" in str(shown["command"]) and shown["framework"] == "CUDA"
        cards = [row for row in rows if row["kind"] == "card"]
        assert [card["state"] for card in cards] == ["ok", "ok"] and cards[0]["use_ppm"] > 500_000 and cards[1]["use_ppm"] == 0  # type: ignore[operator]
        assert cards[0]["memory_used_bytes"] >= GIB and cards[0]["temperature_celsius"]  # type: ignore[operator]
    finally:
        for child in reversed(children):
            child.terminate()
            child.wait()
