"""Hardware on the page: what a card does not tell is not there, series go with their object, and nobody's label changes."""

import re
from dataclasses import replace

from exporter_fakes import CARD, OTHER, SECOND, Node

from poolmeter.exporter.collectors import device, parts
from poolmeter.exporter.render import Renderer, render_reference
from poolmeter.model.hardware import Activity, BusFunction, Hardware, MigInstance, Vgpu, XidCount
from poolmeter.vendors.reading import VendorReading

FULL = Hardware(
    at_us=1,
    compute_mode="default",
    persistence=True,
    accounting=False,
    ecc=True,
    virtualization="host_vgpu",
    power_limit_mw=700_000,
    memory_temperature_celsius=50,
    graphics_clock_hz=1_980_000_000,
    throttle_us_total={"sw_power_cap": 1_500_000},
    ecc_errors_total={"corrected": 3, "uncorrected": 0},
    remapped_rows_total={"correctable": 1},
    row_remap_pending=False,
    xids=(XidCount(xid=79, count=1, last_us=5_000_000),),
    pcie_tx_bytes_total=10,
    nvlink_rx_bytes_total=2**60,
    activity=Activity(window_us=1_000_000, sm_active_ppm=555_000, dram_ppm=1_000_000),
    instances=(
        MigInstance(uuid="MIG-1", gpu_instance_id=1, compute_instance_id=0, profile="1g.18gb", placement_start=0, placement_size=1),
        MigInstance(
            uuid="MIG-2",
            gpu_instance_id=2,
            compute_instance_id=0,
            memory_used_bytes=5,
            activity=Activity(window_us=1, sm_active_ppm=10_000),
            busy_us_total=2_000_000,
        ),
    ),
    vgpus=(Vgpu(uuid="v-1", type_name="T-8C", vm_id="vm", licensed=False, utilization_ppm=250_000),),
    mps_server_pid=7,
)


def page(node: Node) -> str:
    made = node.agent.page()
    assert made is not None
    text = Renderer().render(made)
    assert text == render_reference(made)
    return text.decode()


def of(text: str, name: str) -> dict[str, str]:
    """Label text to value of the series of a family."""
    return {m[1]: m[2] for m in re.finditer(rf"^poolmeter_{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)}


def names(text: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))


def test_everything_a_card_tells_is_on_the_page(node: Node) -> None:
    node.sampler.change(CARD, hardware=FULL)
    node.tick()
    text, uuid = page(node), f'uuid="{CARD}"'
    assert of(text, "device_throttle_seconds_total") == {f'reason="sw_power_cap",{uuid}': "1.5"}
    assert of(text, "device_ecc_errors_total") == {f'error="corrected",{uuid}': "3.0", f'error="uncorrected",{uuid}': "0.0"}
    assert of(text, "device_xid_errors_total") == {f'{uuid},xid="79"': "1.0"}
    assert of(text, "device_xid_last_timestamp_seconds") == {f'{uuid},xid="79"': "5.0"}
    assert of(text, "device_temperature_celsius") == {f'sensor="gpu",{uuid}': "40.0", f'sensor="memory",{uuid}': "50.0"}
    assert of(text, "device_sm_active_ratio") == {uuid: "0.555"} and of(text, "device_dram_active_ratio") == {uuid: "1.0"}
    assert of(text, "device_sm_occupancy_ratio") == {} and of(text, "device_pcie_receive_bytes_total") == {}
    assert of(text, "mig_instances") == {uuid: "2.0"}
    assert of(text, "mig_sm_active_ratio") == {f'gpu_instance_id="2",instance="MIG-2",{uuid}': "0.01"}
    assert f'placement="0+1",profile="1g.18gb",{uuid}' in next(iter(of(text, "mig_info")))
    assert of(text, "vgpu_info") == {f'type="T-8C",{uuid},vgpu="v-1",vm_id="vm"': "1.0"}
    assert of(text, "vgpu_licensed") == {f'{uuid},vgpu="v-1"': "0.0"} and of(text, "vgpu_busy_seconds_total") == {}
    assert of(text, "mps_server") == {uuid: "1.0"}
    assert of(text, "device_stale") == {uuid: "0.0"}


def test_what_a_card_does_not_tell_is_absent_and_never_0(node: Node) -> None:
    node.tick()
    text = page(node)
    told = {family.name for family in (*device.FAMILIES, *parts.FAMILIES)} & names(text)
    assert told == {
        *(f"poolmeter_device_{name}" for name in ("info", "up", "memory_total_bytes", "memory_used_bytes", "memory_reserved_bytes")),
        *(f"poolmeter_device_{name}" for name in ("utilization_ratio", "busy_seconds_total", "energy_joules_total", "allocated_ratio")),
        *(
            f"poolmeter_device_{name}"
            for name in ("power_watts", "temperature_celsius", "clock_hertz", "processes", "memory_allocated_bytes")
        ),
    }


def test_old_values_served_after_the_source_died(node: Node) -> None:
    node.sampler.change(CARD, hardware=FULL)
    node.tick()
    node.sampler.answers = False
    node.tick()
    assert of(page(node), "device_stale") == {f'uuid="{CARD}"': "1.0"}  # the last values, marked
    node.tick(turns=9)
    text = page(node)
    gone = {"power_watts", "sm_active_ratio", "throttle_seconds_total", "stale", "sample_timestamp_seconds", "modes_info"}
    assert not names(text) & {f"poolmeter_device_{name}" for name in gone} and "mig_info" not in text and "vgpu_info" not in text
    assert of(text, "device_up") == {f'uuid="{CARD}"': "0.0"}


def test_a_lost_card_keeps_its_xids_on_the_page(tmp_path: object, node: Node) -> None:
    node.sampler.change(CARD, hardware=FULL)
    node.tick()
    node.sampler.change(CARD, up=False, reason="GPU is lost", hardware=Hardware())
    node.tick()
    text = page(node)
    assert of(text, "device_xid_errors_total") == {f'uuid="{CARD}",xid="79"': "1.0"}
    assert of(text, "device_up") == {f'uuid="{CARD}"': "0.0"} and "mig_info" not in text and of(text, "device_stale") == {}


def test_changing_labels_on_info_series(node: Node) -> None:
    """Values that change from tick to tick are in no info series."""
    node.sampler.change(CARD, hardware=FULL)
    node.tick()
    before = {name: of(page(node), name) for name in ("device_info", "device_modes_info", "mig_info", "vgpu_info")}
    moved = replace(
        FULL,
        at_us=99,
        stale=True,
        throttle_us_total={"sw_power_cap": 9_000_000},
        instances=tuple(replace(part, memory_used_bytes=9, processes=3) for part in FULL.instances or ()),
        vgpus=tuple(replace(part, licensed=True, framebuffer_used_bytes=4) for part in FULL.vgpus or ()),
    )
    node.sampler.change(CARD, hardware=moved, power_mw=1, utilization_ppm=999_999)
    node.tick()
    assert {name: of(page(node), name) for name in before} == before


def test_counters_of_the_hardware_survive_a_restart_of_the_exporter(node: Node) -> None:
    node.sampler.change(CARD, hardware=FULL)
    node.tick(turns=3)
    before = of(page(node), "device_xid_errors_total") | of(page(node), "device_throttle_seconds_total")
    node.kill()
    node.clock.advance(3 * SECOND)
    # A new sampler has been told of no Xid, and the driver was loaded anew.
    node.sampler.origin = "origin-2"
    node.sampler.change(CARD, hardware=replace(FULL, xids=(), throttle_us_total={"sw_power_cap": 250_000}))
    node.start()
    node.tick()
    after = of(page(node), "device_xid_errors_total") | of(page(node), "device_throttle_seconds_total")
    assert before.keys() == after.keys()
    assert after[f'reason="sw_power_cap",uuid="{CARD}"'] == "1.75" and after[f'uuid="{CARD}",xid="79"'] == "1.0"


def test_functions_of_the_bus_are_shown_without_use(node: Node) -> None:
    poll = node.sampler.poll
    function = BusFunction(pci_bus_id="0000:28:00.0", state="passed_through", driver="vfio-pci")

    def with_bus(budget_s: float) -> VendorReading | None:
        reading = poll(budget_s)
        return replace(reading, functions=(function,)) if reading is not None else None

    node.sampler.poll = with_bus  # type: ignore[method-assign]
    node.tick()
    shown = of(page(node), "bus_function_info")
    assert list(shown.values()) == ["1.0"] and 'state="passed_through"' in next(iter(shown))
    # All cards passed through: the vendor's library finds no driver, and what is on the bus is known all the same.
    error = "NVML does not answer: Driver Not Loaded"
    node.sampler.poll = lambda budget_s: replace(with_bus(budget_s), devices=(), error=error)  # type: ignore[method-assign, type-var]
    node.tick(turns=9)
    assert list(of(page(node), "bus_function_info").values()) == ["1.0"] and of(page(node), "device_up") == {f'uuid="{CARD}"': "0.0"}
    node.sampler.poll = with_bus  # type: ignore[method-assign]
    node.sampler.answers = False
    node.tick(turns=9)
    assert of(page(node), "bus_function_info") == {}


def test_one_slow_card_marks_itself_alone(tmp_path: object, node: Node) -> None:
    from exporter_fakes import device as card

    node.sampler.devices[OTHER] = card(OTHER, 1, hardware=Hardware(at_us=5, stale=True))
    node.sampler.change(CARD, hardware=Hardware(at_us=9))
    node.tick()
    assert of(page(node), "device_stale") == {f'uuid="{CARD}"': "0.0", f'uuid="{OTHER}"': "1.0"}
