"""The Prometheus page: two renderers, one text; names that promtool accepts and the reference lists."""

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from exporter_fakes import CARD, GIB, OTHER, SECOND, Node, everything, process
from exporter_holders import with_attributions, with_holders
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from poolmeter.exporter.collectors import FAMILIES, amounts, itself, pool, reconciliation, slices
from poolmeter.exporter.collectors.family import Family, Outputs, Page
from poolmeter.exporter.render import ReferenceCollector, Renderer, render_reference
from poolmeter.model.allocation import Labels
from poolmeter.model.hardware import BusFunction

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


@pytest.fixture
def busy(tmp_path: Path) -> Node:
    """A node with two cards, one lost, two slices, a stranger, and a tenant with a hostile name."""
    node = Node(tmp_path, CARD, OTHER)
    node.create("a", ppm=700_000, cpu_milli=4000, host_memory_bytes=8 * GIB)
    node.create(
        "b", ppm=600_000, uuids=(CARD, OTHER), cpu_milli=500, host_memory_bytes=GIB, labels=Labels('te"na\\nt\n{}', workload="wörk")
    )
    node.meters["a"].attach()
    node.meters["a"].count(CARD, busy_ns=1_234_567_000, launches=12_345_678, memory=3 * GIB, last_activity_ns=node.clock.wall * 1000)
    node.sampler.change(CARD, busy_us_total=1_500_000, utilization_ppm=333_333, processes=(process(4_000_002, 9, 250_000, 2 * GIB),))
    node.sampler.change(OTHER, up=False, reason="lost")
    node.tick(turns=61)
    return node


def page_of(node: Node) -> Page:
    page = node.agent.page()
    assert page is not None
    return page


def values(body: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            found[(sample.name, tuple(sorted(sample.labels.items())))] = sample.value
    return found


def test_both_renderers_give_the_same_bytes_tick_after_tick(busy: Node) -> None:
    renderer = Renderer()
    for _ in range(3):
        assert renderer.render(page_of(busy)) == render_reference(page_of(busy))
        busy.tick()
    busy.sampler.change(OTHER, up=True)
    busy.meters["a"].count(CARD, busy_ns=10**15, memory=0)
    busy.tick()
    assert renderer.render(page_of(busy)) == render_reference(page_of(busy))
    busy.close()


NUMBERS = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.integers(0, 2**60).map(float))


@given(st.lists(st.tuples(st.tuples(st.text(max_size=8), st.text(max_size=8)), NUMBERS), max_size=6, unique_by=lambda item: item[0]))
def test_any_label_and_number(samples: list[tuple[tuple[str, str], float]]) -> None:
    from prometheus_client import generate_latest

    families = (Family("poolmeter_x", "gauge", 'Help with \\ and "\n.', ("a", "b"), lambda _: samples),)
    page = Page(None, 0, "")  # type: ignore[arg-type]
    try:
        expected = generate_latest(ReferenceCollector(page, families))
    except UnicodeEncodeError:
        return  # a lone surrogate cannot be on any page
    assert Renderer(families).render(page) == expected


def test_values(busy: Node) -> None:
    found = values(Renderer().render(page_of(busy)))
    card, part = ("uuid", CARD), (("allocation", "a"), ("uuid", CARD))
    assert found[("poolmeter_device_up", (card,))] == 1 and found[("poolmeter_device_up", (("uuid", OTHER),))] == 0
    assert found[("poolmeter_slice_busy_seconds_total", part)] == 1.234567
    assert found[("poolmeter_device_utilization_ratio", (card,))] == 0.333333
    assert found[("poolmeter_slice_kernel_launches_total", part)] == 12_345_678
    assert found[("poolmeter_device_unaccounted_memory_bytes", (card,))] == 2 * GIB
    assert found[("poolmeter_pool_overcommitted_devices", ())] == pytest.approx(0.3)
    assert found[("poolmeter_pool_allocated_devices", ())] == 1.6 and found[("poolmeter_pool_devices", ())] == 2
    state = {labels: value for (name, labels), value in found.items() if name == "poolmeter_slice_state" and ("allocation", "a") in labels}
    assert len(state) == 6 and sum(state.values()) == 1
    # A lost card has no gauges, and none of them is 0.
    lost = {name for name, labels in found if dict(labels).get("uuid") == OTHER and name.startswith("poolmeter_device_")}
    assert not lost & {"poolmeter_device_power_watts", "poolmeter_device_memory_used_bytes", "poolmeter_device_temperature_celsius"}
    assert ("poolmeter_slice_compute_limit_ratio", part) not in found  # no limit is not a limit of 0
    assert not any("tenant" in dict(labels) for name, labels in found if name not in ("poolmeter_slice_info", "poolmeter_holder_info"))
    assert all(0 <= value <= 1 for (name, _), value in found.items() if name.endswith("_ratio") and "allocated" not in name)
    assert all(value < 2**60 for value in found.values())
    busy.close()


def test_series_leave_with_their_object(busy: Node) -> None:
    allocation = dataclasses.replace(busy.agent.ledger.known["a"])
    assert b'allocation="a"' in Renderer().render(page_of(busy))
    busy.meters["a"].die()
    busy.release(allocation)
    busy.tick()
    assert b'allocation="a"' not in Renderer().render(page_of(busy))
    busy.close()


def test_counters_on_the_page_never_fall_over_a_restart(busy: Node) -> None:
    def counters() -> dict[object, float]:
        return {key: value for key, value in values(Renderer().render(page_of(busy))).items() if key[0].endswith("_total")}

    before = counters()
    busy.kill()
    busy.clock.advance(3 * SECOND)
    busy.start()
    after = counters()
    assert before.keys() <= after.keys() and all(after[key] >= value for key, value in before.items())
    busy.close()


def test_the_reference_lists_every_metric_and_no_other() -> None:
    rows = re.findall(r"^\| `(poolmeter_\w+)` \| (\w+) \| ([^|]*) \| (.*) \|$", REFERENCE.read_text(), re.MULTILINE)
    assert rows == [(f.name, f.kind, ", ".join(f"`{label}`" for label in f.labels), f.help) for f in FAMILIES]


def test_names(busy: Node) -> None:
    for family in FAMILIES:
        assert family.name.startswith("poolmeter_") and (family.name.endswith("_total") == (family.kind == "counter"))
        assert len(family.labels) <= 15 and family.help.endswith(".")
    busy.close()


def test_promtool(busy: Node) -> None:
    """Every family there is, on one page."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    page = with_attributions(with_holders(page_of(busy), ("a", CARD, "vision", "train-0", "main")))
    outputs = Outputs(sampler_restarts=1, released=False, reload_ok=True, pushes_ok=3, pushes_failed=1)
    outputs = dataclasses.replace(outputs, push_ok=2, push_refused=1, push_failed=0, push_last_us=5, push_waiting=7)
    limited = tuple(dataclasses.replace(part, compute_limit_ppm=500_000) for part in page.snapshot.slices)
    full = tuple(dataclasses.replace(card, hardware=everything()) for card in page.snapshot.devices)
    function = BusFunction(pci_bus_id="0000:28:00.0", state="passed_through")
    snapshot = dataclasses.replace(page.snapshot, slices=limited, devices=full, functions=(function,))
    body = Renderer().render(dataclasses.replace(page, outputs=outputs, snapshot=snapshot))
    shown = set(re.findall(r"^# TYPE (\w+) ", body.decode(), re.MULTILINE))
    # What depends on hardware and on other attribution than allocations is shown in tests of its own.
    modules = (reconciliation, slices, pool, amounts, itself)
    assert {family.name for module in modules for family in module.FAMILIES} <= shown
    checked = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout.decode() + checked.stderr.decode()
    busy.close()
