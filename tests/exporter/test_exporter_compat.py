"""Pages under other exporters' names: what they hold, and that the queries of dashboards made for those answer in a real Prometheus."""

import dataclasses
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from exporter_fakes import CARD, GIB, OTHER, Node
from exporter_holders import with_holders
from exporter_prometheus import ask, needs_prometheus, running, until
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from poolmeter.exporter.collectors import FAMILIES
from poolmeter.exporter.collectors.family import Page
from poolmeter.exporter.compat import PAGES, dcgm
from poolmeter.exporter.owners import device_owners
from poolmeter.exporter.render import Renderer
from poolmeter.exporter.server import Face, Server, listen
from poolmeter.model.allocation import Mode
from poolmeter.model.hardware import Activity, Hardware, MigInstance, XidCount

# What the panels and the variables of Grafana dashboard 12239 ask, as first published (by instance) and as it is now (by Hostname).
BY_INSTANCE = '{instance=~"$instance", gpu=~"$gpu"}'
BY_HOST = '{Hostname=~"$Hostname", gpu=~"$gpu"}'
PANELS = (
    f"DCGM_FI_DEV_GPU_TEMP{BY_INSTANCE}",
    f"avg(DCGM_FI_DEV_GPU_TEMP{BY_INSTANCE})",
    f"DCGM_FI_DEV_POWER_USAGE{BY_INSTANCE}",
    f"sum(DCGM_FI_DEV_POWER_USAGE{BY_INSTANCE})",
    f"DCGM_FI_DEV_SM_CLOCK{BY_INSTANCE} * 1000000",
    f"DCGM_FI_DEV_GPU_UTIL{BY_INSTANCE}",
    f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{BY_INSTANCE}",
    f"DCGM_FI_DEV_FB_USED{BY_INSTANCE}",
    f"max(DCGM_FI_DEV_GPU_TEMP{BY_HOST}) by (Hostname, gpu, uuid)",
    f"avg(DCGM_FI_DEV_GPU_TEMP{BY_HOST})",
    f"max(DCGM_FI_DEV_POWER_USAGE{BY_HOST}) by (Hostname, gpu, uuid)",
    f"sum(max(DCGM_FI_DEV_POWER_USAGE{BY_HOST}) by (gpu))",
    f"max(DCGM_FI_DEV_SM_CLOCK{BY_HOST} * 1000000) by (Hostname, UUID, gpu)",
    f"max(DCGM_FI_PROF_GR_ENGINE_ACTIVE{BY_HOST}) by (Hostname, gpu, GPU_I_ID, GPU_I_PROFILE)",
    f"max(DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{BY_HOST}) by (Hostname, gpu, GPU_I_ID, GPU_I_PROFILE)",
    f"max(DCGM_FI_DEV_FB_USED{BY_HOST}) by (Hostname, gpu, GPU_I_ID, GPU_I_PROFILE)",
)
VARIABLES = (("DCGM_FI_DEV_GPU_TEMP", "instance"), ("DCGM_FI_DEV_GPU_TEMP", "gpu"), ("DCGM_FI_DEV_FB_FREE", "Hostname"))
HAMI = (
    "hami_host_gpu_memory_used_bytes",
    "hami_host_gpu_utilization_ratio",
    "hami_vgpu_memory_used_bytes",
    "hami_vgpu_memory_limit_bytes",
    "hami_container_device_memory_bytes",
    "hami_container_device_utilization_ratio",
    "hami_container_last_kernel_elapsed_seconds",
    "HostGPUMemoryUsage",
    "HostCoreUtilization",
    "vGPU_device_memory_usage_in_bytes",
    "vGPU_device_memory_limit_in_bytes",
    "Device_memory_desc_of_container",
    "Device_utilization_desc_of_container",
    "Device_last_kernel_of_container",
)


def monitored(page: Page) -> Page:
    """The page with performance monitoring of its first device."""
    first, *rest = page.snapshot.devices
    device = dataclasses.replace(first, hardware=Hardware(activity=Activity(window_us=1_000_000, graphics_ppm=400_000, tensor_ppm=250_000)))
    return dataclasses.replace(page, snapshot=dataclasses.replace(page.snapshot, devices=(device, *rest)))


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path, CARD, OTHER)
    made.create("a", ppm=700_000, memory=20 * GIB)
    made.create("b", ppm=200_000, memory=10 * GIB)
    made.meters["a"].attach()
    made.tick(turns=2)
    made.meters["a"].count(CARD, busy_ns=250_000_000, launches=12, memory=3 * GIB, last_activity_ns=made.clock.wall * 1000)
    made.sampler.change(
        CARD, busy_us_total=1_500_000, utilization_ppm=333_333, energy_uj_total=5_000_000, power_mw=412_500, memory_used_bytes=6 * GIB
    )
    made.sampler.change(OTHER, up=False, reason="lost")
    made.tick()
    yield made
    made.close()


def page_of(node: Node) -> Page:
    page = node.agent.page()
    assert page is not None
    return page


def samples(page: Page, name: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in parse_text(Renderer(PAGES[name]).render(page).decode()):
        for sample in family.samples:
            found.setdefault(sample.name.removesuffix("_total"), []).append(
                ({key: value for key, value in sample.labels.items() if value}, sample.value)
            )
    return found


def test_off_unless_asked_for_and_on_a_path_of_its_own(busy: Node) -> None:
    bodies = []
    for compat in ((), ("dcgm", "hami")):
        server = Server(Face(busy.agent, None, compat).application(), listen("127.0.0.1", 0))
        server.start()
        for name in PAGES:
            try:
                with urllib.request.urlopen(f"{server.url}/metrics/{name}", timeout=10) as response:
                    assert compat and response.status == 200
                    body = response.read().decode()
                    assert {f.name for f in parse_text(body)} and "poolmeter_" not in body
            except urllib.error.HTTPError as error:
                assert error.code == 404 and not compat
        bodies.append(urllib.request.urlopen(f"{server.url}/metrics", timeout=10).read())
        server.stop()
    assert bodies[0] == bodies[1] and b"DCGM" not in bodies[0] and b"hami" not in bodies[0]


@pytest.mark.parametrize("name", PAGES)
def test_pages_parse_strictly(busy: Node, name: str) -> None:
    for page in (page_of(busy), monitored(page_of(busy)), with_holders(page_of(busy), ("a", CARD, "ns", 'p"\\\n', "c"))):
        families = {family.name for family in parse_openmetrics(Renderer(PAGES[name]).render_openmetrics(page).decode())}
        assert families
    names = [family.name for family in (*FAMILIES, *PAGES["dcgm"], *PAGES["hami"])]
    assert len(names) == len(set(names))


def test_the_units_and_labels_of_dcgm(busy: Node) -> None:
    found = samples(monitored(page_of(busy)), "dcgm")
    value = {name: {labels["gpu"]: number for labels, number in series} for name, series in found.items()}
    assert value["DCGM_FI_DEV_GPU_UTIL"] == {"0": 33.3333} and value["DCGM_FI_DEV_FB_USED"] == {"0": 6144.0}
    assert value["DCGM_FI_DEV_POWER_USAGE"] == {"0": 412.5} and value["DCGM_FI_DEV_SM_CLOCK"] == {"0": 1900.0}
    assert value["DCGM_FI_DEV_FB_FREE"]["0"] + value["DCGM_FI_DEV_FB_USED"]["0"] + value["DCGM_FI_DEV_FB_RESERVED"]["0"] == 100 * 1024
    assert value["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"]["0"] == 5000.0  # mJ
    assert value["DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"] == {"0": 0.25}
    labels, _ = found["DCGM_FI_DEV_GPU_TEMP"][0]
    assert labels == {
        "gpu": "0",
        "UUID": CARD,
        "pci_bus_id": "00000000:00:00.0",
        "device": "nvidia0",
        "modelName": "Simulated H200",
        "Hostname": "node-a",
        "hostname": "node-a",
        "DCGM_FI_DRIVER_VERSION": "580.1",
    }
    # A lost card has no gauges; and a card that does not tell has none of the ratios.
    assert all(
        labels["gpu"] == "0" for name, series in found.items() if name != "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION" for labels, _ in series
    )
    assert "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE" not in samples(page_of(busy), "dcgm")


def with_hardware(page: Page, hardware: Hardware, **values: object) -> Page:
    first, *rest = page.snapshot.devices
    device = dataclasses.replace(first, hardware=hardware, **values)  # type: ignore[arg-type]
    return dataclasses.replace(page, snapshot=dataclasses.replace(page.snapshot, devices=(device, *rest)))


def test_what_else_dcgm_tells_of_a_card(busy: Node) -> None:
    page = page_of(busy)
    hardware = Hardware(
        origin="o",
        at_us=9_000_000,
        memory_temperature_celsius=61,
        power_limit_mw=700_000,
        xids=(XidCount(xid=79, count=1, last_us=7), XidCount(xid=31, count=9, last_us=8)),
        remapped_rows_total={"correctable": 2, "uncorrectable": 1},
        row_remap_failed=False,
        licensed=True,
        bytes_per_s={"pcie_tx": 1_000_000},
    )
    page = with_hardware(page, hardware)
    found = {name: [number for _, number in series] for name, series in samples(page, "dcgm").items()}
    assert found["DCGM_FI_DEV_XID_ERRORS"] == [31.0] and found["DCGM_FI_DEV_MEMORY_TEMP"] == [61.0]
    assert found["DCGM_FI_DEV_POWER_MGMT_LIMIT"] == [700.0] and found["DCGM_FI_DEV_ROW_REMAP_FAILURE"] == [0.0]
    assert found["DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS"] == [2.0] and found["DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS"] == [1.0]
    assert found["DCGM_FI_DEV_VGPU_LICENSE_STATUS"] == [1.0] and found["DCGM_FI_PROF_PCIE_TX_BYTES"] == [1e6]
    assert "DCGM_FI_PROF_NVLINK_RX_BYTES" not in found  # not told, and no rate of 0
    lost = samples(with_hardware(page, hardware, up=False), "dcgm")
    assert [number for _, number in lost["DCGM_FI_DEV_XID_ERRORS"]] == [31.0]
    assert "DCGM_FI_DEV_MEMORY_TEMP" not in lost and "DCGM_FI_DEV_POWER_MGMT_LIMIT" not in lost


def test_instances_of_a_card_with_mig_have_series_of_their_own(busy: Node) -> None:
    active = Activity(window_us=1_000_000, graphics_ppm=400_000, tensor_ppm=250_000)
    common = {"profile": "3g.71gb", "memory_total_bytes": 71 * GIB, "memory_used_bytes": 5 * GIB, "activity": active}
    parts = (
        MigInstance(uuid="MIG-1", gpu_instance_id=1, compute_instance_id=0, **common),  # type: ignore[arg-type]
        MigInstance(uuid="MIG-2", gpu_instance_id=1, compute_instance_id=1, **common),  # type: ignore[arg-type]
        MigInstance(uuid="MIG-3", gpu_instance_id=2, compute_instance_id=0, profile="1g.18gb"),
    )
    found = samples(with_hardware(page_of(busy), Hardware(instances=parts), mig=True, utilization_ppm=None), "dcgm")
    # Two compute instances have one memory: once, as the GPU instance's; and no card's beside it, which a sum would count again.
    for name, value in (("FB_USED", 5 * 1024.0), ("FB_FREE", 66 * 1024.0)):
        assert [(s.get("GPU_I_ID"), s.get("GPU_I_PROFILE"), number) for s, number in found[f"DCGM_FI_DEV_{name}"]] == [
            ("1", "3g.71gb", value)
        ]
    assert [(s["GPU_I_ID"], number) for s, number in found["DCGM_FI_PROF_GR_ENGINE_ACTIVE"]] == [("1", 0.4)]
    assert "DCGM_FI_DEV_GPU_UTIL" not in found
    assert all("GPU_I_ID" not in s for s, _ in found["DCGM_FI_DEV_GPU_TEMP"])
    # Instances that do not tell leave the card's own.
    silent = samples(with_hardware(page_of(busy), Hardware(instances=parts[2:]), mig=True), "dcgm")
    assert ["GPU_I_ID" in s for s, _ in silent["DCGM_FI_DEV_FB_USED"]] == [False]


def test_a_devices_value_is_never_copied_to_its_sharers(busy: Node) -> None:
    shared = samples(with_holders(page_of(busy), ("a", CARD, "ns", "p1", "c"), ("b", CARD, "ns", "p2", "c")), "dcgm")
    assert [set(labels) & {"pod", "namespace", "container"} for labels, _ in shared["DCGM_FI_DEV_GPU_UTIL"]] == [set()]
    # One pod beside an allocation of somebody whose pod is not known is not alone either.
    one = samples(with_holders(page_of(busy), ("a", CARD, "ns", "p1", "c")), "dcgm")
    assert [set(labels) & {"pod"} for labels, _ in one["DCGM_FI_DEV_GPU_UTIL"]] == [set()]
    page = page_of(busy)
    alone = dataclasses.replace(page, snapshot=dataclasses.replace(page.snapshot, slices=page.snapshot.slices[:1]))
    found = samples(with_holders(alone, ("a", CARD, "ns", "p1", "c")), "dcgm")["DCGM_FI_DEV_GPU_UTIL"]
    assert [(labels["namespace"], labels["pod"], labels["container"]) for labels, _ in found] == [("ns", "p1", "c")]


def test_owners_are_worked_out_once_a_page(busy: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(dcgm, "device_owners", lambda snapshot: asked.append(snapshot) or device_owners(snapshot))
    for number in (1, 2):
        page = with_holders(page_of(busy), ("a", CARD, "ns", f"p{number}", "c"))
        assert len(samples(page, "dcgm")) > 3
        assert len(asked) == number


def test_the_units_and_labels_of_hami(busy: Node) -> None:
    found = samples(with_holders(page_of(busy), ("a", CARD, "ns", "p1", "c")), "hami")
    assert set(HAMI) <= set(found)
    (card,) = found["hami_host_gpu_utilization_ratio"]
    assert card == (
        {"device_index": "0", "device_type": "NVIDIA-Simulated H200", "device_uuid": CARD, "node": "node-a", "zone": "vGPU"},
        33.3333,
    )
    where = {"container": "c", "device_uuid": CARD, "namespace": "ns", "pod": "p1", "vdevice_index": "0", "zone": "vGPU"}
    assert (where, 25.0) in found["hami_container_device_utilization_ratio"]
    assert (where, float(3 * GIB)) in found["hami_vgpu_memory_used_bytes"]
    assert (where, float(20 * GIB)) in found["hami_vgpu_memory_limit_bytes"]
    assert found["hami_container_last_kernel_elapsed_seconds"] == [(where, 1.0)]  # b has run none: no series, not one of 0
    old = {"ctrname": "c", "deviceuuid": CARD, "podnamespace": "ns", "podname": "p1", "vdeviceid": "0", "zone": "vGPU"}
    assert (old, 25.0) in found["Device_utilization_desc_of_container"]
    # A slice that no pod is known of goes by tenant and allocation.
    assert any(labels["pod"] == "b" and labels["namespace"] == "tenant-b" for labels, _ in found["hami_vgpu_memory_limit_bytes"])
    lone = dataclasses.replace(page_of(busy), before=None)
    assert "hami_container_device_utilization_ratio" not in samples(lone, "hami")


def test_utilisation_over_a_restart_of_a_counter_is_no_number(busy: Node) -> None:
    page = page_of(busy)
    part = dataclasses.replace(page.snapshot.slices[0], origin="another", busy_us_total=1)
    page = dataclasses.replace(page, snapshot=dataclasses.replace(page.snapshot, slices=(part,)))
    assert "hami_container_device_utilization_ratio" not in samples(page, "hami")


def test_a_whole_card_without_a_meter_is_as_busy_as_the_card(node: Node) -> None:
    node.create("w", ppm=1_000_000, meter=False, mode=Mode.WHOLE)
    for second in range(1, 130):
        node.sampler.change(CARD, busy_us_total=second * 250_000)
        node.tick()
        if second > 2:  # from two pages on that know of the allocation
            ((_, percent),) = samples(page_of(node), "hami")["hami_container_device_utilization_ratio"]
            assert percent == 25.0, second


@needs_prometheus
def test_dashboards_made_for_the_others_answer(busy: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = monitored(page_of(busy))
    monkeypatch.setattr(busy.agent, "page", lambda: page)
    server = Server(Face(busy.agent, None, ("dcgm", "hami")).application(), listen("127.0.0.1", 0))
    server.start()
    target = urllib.parse.urlsplit(server.url).netloc
    jobs = [
        {"job_name": name, "metrics_path": f"/metrics/{name}", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
        for name in ("dcgm", "hami")
    ]
    with running(tmp_path, jobs) as url:
        until(lambda: ask(url, "/api/v1/query", query="count(up == 1) == 2")["result"], "both pages are scraped")
        until(lambda: ask(url, "/api/v1/query", query=HAMI[-1])["result"], "the page is stored")
        for metric, label in VARIABLES:
            assert ask(url, f"/api/v1/label/{label}/values", **{"match[]": metric}), (metric, label)
        for panel in PANELS:
            query = panel.replace("$instance", ".*").replace("$Hostname", "node-a").replace("$gpu", "0")
            found = ask(url, "/api/v1/query", query=query)["result"]
            assert len(found) == 1 and float(found[0]["value"][1]) > 0, panel
        for name in HAMI:
            assert ask(url, "/api/v1/query", query=name)["result"], name
    server.stop()
