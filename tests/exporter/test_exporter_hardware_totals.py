"""What the agent keeps of a card's counters: they never go down, whoever starts anew and whatever reading fails."""

import dataclasses
import json
import types
from collections.abc import Callable
from pathlib import Path

import pynvml as real
import pytest
from exporter_binding import Say, clock, error, say, vendor_of
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.exporter.hardware import HardwareTotals
from poolmeter.exporter.instances import Layout
from poolmeter.model.hardware import Hardware, MigInstance, Vgpu, XidCount
from poolmeter.vendors.reading import DeviceReading, VendorReading

__all__ = ["clock", "say"]


def reading(origin: str, **values: object) -> VendorReading:
    hardware = Hardware(**values)  # type: ignore[arg-type]
    device = DeviceReading(uuid="GPU-0", index=0, model="m", vendor="nvidia", up=True, memory_total_bytes=1, hardware=hardware)
    return VendorReading(vendor="nvidia", origin=origin, at_us=1, duration_us=1, devices=(device,))


def xid(count: int, last_us: int = 5) -> tuple[XidCount, ...]:
    return (XidCount(xid=31, count=count, last_us=last_us),)


def test_xid_gauge_that_sticks_or_goes_down() -> None:
    kept: dict[str, list[int]] = {}
    totals = HardwareTotals(kept, "epoch")

    def told(of: HardwareTotals, origin: str, **values: object) -> list[tuple[int, int]]:
        return [(x.count, x.last_us) for x in of.carry(reading(origin, **values)).devices[0].hardware.xids]

    assert told(totals, "a") == []
    assert told(totals, "a", xids=xid(2)) == [(2, 5)]
    assert told(totals, "b") == [(2, 5)]  # the sampler was restarted: told of nothing yet
    assert told(totals, "b", xids=xid(2, 9)) == [(4, 9)]  # two more, though the number is the old one
    assert told(HardwareTotals(kept, "epoch"), "c", xids=xid(1, 11)) == [(5, 11)]  # the exporter was restarted
    assert told(totals, "b", xids=xid(2, 9))[0][0] >= 4


@given(st.lists(st.sampled_from(["xid", "another card's turn", "new sampler", "new totals"]), max_size=30))
def test_an_xid_is_counted_once_whoever_starts_anew(steps: list[str]) -> None:
    kept: dict[str, list[int]] = {}
    totals, sampler, count, told = HardwareTotals(kept, "epoch"), 0, 0, dict[int, int]()
    for step in ["xid", *steps, "look"]:
        if step == "new sampler":
            sampler, count = sampler + 1, 0
        elif step == "new totals":  # as when the agent goes back to its last commit, or is started again
            kept = json.loads(json.dumps(kept))
            totals = HardwareTotals(kept, "epoch")
        elif step == "another card's turn":
            totals.carry(dataclasses.replace(reading(f"sampler-{sampler}"), devices=()))
        else:
            count += step == "xid"
            (found,) = totals.carry(reading(f"sampler-{sampler}", xids=xid(count) if count else ())).devices
            told[sampler] = count
            assert [item.count for item in found.hardware.xids] == [sum(told.values())]


@given(st.lists(st.integers(0, 2**40), max_size=30))
def test_counters_never_go_down(raws: list[int]) -> None:
    totals, last = HardwareTotals({}, "epoch"), 0
    for raw in raws:
        hardware = totals.carry(reading("a", nvlink_tx_bytes_total=raw, ecc_errors_total={"corrected": raw})).devices[0].hardware
        assert hardware.nvlink_tx_bytes_total == hardware.ecc_errors_total["corrected"] >= max(last, raw)
        last = hardware.nvlink_tx_bytes_total


def test_what_is_kept_of_instances_goes_with_them() -> None:
    kept: dict[str, list[int]] = {}
    totals = HardwareTotals(kept, "epoch")
    for number in range(1000):
        part = MigInstance(uuid=f"MIG-{number}", gpu_instance_id=1, compute_instance_id=0, busy_us_total=7)
        assert totals.carry(reading("a", instances=(part,))).devices[0].hardware.instances == (part,)
    assert len(kept) <= 2


def test_an_instance_that_one_reading_lacks_goes_on_where_it_was() -> None:
    totals = HardwareTotals({}, "epoch")
    part = MigInstance(uuid="MIG-1", gpu_instance_id=1, compute_instance_id=0, busy_us_total=700)
    vgpu = Vgpu(uuid="vgpu", busy_us_total=900)
    totals.carry(reading("a", instances=(part,), vgpus=(vgpu,)))
    # A kind that is not told of is not gone, however long that takes.
    for times, lacking in (
        (9, {}),
        (1, {"instances": ()}),
        (1, {"vgpus": ()}),
        (1, {"instances": (), "vgpus": ()}),
        (9, {"vgpus": (vgpu,)}),
    ):
        for _ in range(times):
            totals.carry(reading("a", **lacking))
        hardware = totals.carry(reading("a", instances=(part,), vgpus=(vgpu,))).devices[0].hardware
        assert hardware.instances == (part,) and hardware.vgpus == (vgpu,)


def mig(say: Say, break_: Callable[[str], None]) -> None:
    """A card with one instance, always busy. `break_` may raise in any call that is about instances."""
    placement = types.SimpleNamespace(placement=types.SimpleNamespace(start=0, size=1))
    attributes = types.SimpleNamespace(memorySizeMB=10, computeInstanceSliceCount=1, multiprocessorCount=16)

    def call(name: str, value: object) -> Callable[..., object]:
        def answer(*arguments: object) -> object:
            break_(name)
            return value(*arguments) if callable(value) else value

        return answer

    def handle(_: object, index: int) -> object:
        return "mig" if index == 0 else error(real.NVML_ERROR_NOT_FOUND)

    def uuid(of: object) -> str:
        if of == "mig":
            break_("nvmlDeviceGetUUID")
        return "MIG-1" if of == "mig" else f"GPU-{of}"

    def metrics(request: object) -> object:
        for place in range(request.numMetrics):  # type: ignore[attr-defined]
            request.metrics[place].nvmlReturn, request.metrics[place].value = 0, 100.0  # type: ignore[attr-defined]
        return request

    calls: dict[str, object] = {
        "nvmlDeviceGetMigMode": [1, 1],
        "nvmlDeviceGetMaxMigDeviceCount": 2,
        "nvmlDeviceGetMigDeviceHandleByIndex": handle,
        "nvmlDeviceGetGpuInstanceId": 1,
        "nvmlDeviceGetComputeInstanceId": 0,
        "nvmlDeviceGetAttributes_v2": attributes,
        "nvmlDeviceGetGpuInstanceById": 7,
        "nvmlGpuInstanceGetInfo": placement,
        "nvmlDeviceGetName": "H200 MIG 1g.10gb",
        "nvmlGpmQueryDeviceSupport": types.SimpleNamespace(isSupportedDevice=1),
        "nvmlGpmSampleAlloc": lambda: real.c_nvmlGpmSample_t(),
        "nvmlGpmMigSampleGet": None,
        "nvmlGpmMetricsGet": metrics,
    }
    say(nvmlDeviceGetUUID=uuid, nvmlGpmSampleFree=None, **{name: call(name, value) for name, value in calls.items()})


MIG_CALLS = [
    "nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetUUID",
    "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetAttributes_v2", "nvmlDeviceGetGpuInstanceById",
    "nvmlGpuInstanceGetInfo", "nvmlDeviceGetName", "nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmMigSampleGet", "nvmlGpmMetricsGet",
]  # fmt: skip


@pytest.mark.parametrize("call", MIG_CALLS)
@pytest.mark.parametrize("when", [{0}, {9}, {9, 10, 11}])
def test_a_call_that_fails_for_a_while_does_not_end_the_count_of_an_instance(
    say: Say, tmp_path: Path, clock: list[int], call: str, when: set[int]
) -> None:
    second = 0

    def broken(name: str) -> None:
        if name == call and second in when:
            raise error(real.NVML_ERROR_UNKNOWN)

    mig(say, broken)
    vendor, layout, totals, last = vendor_of(tmp_path), Layout(), HardwareTotals({}, "epoch"), 0
    for second in range(20):  # noqa: B007 - read by `broken`
        carried = totals.carry(vendor.read())
        layout.learn(carried.devices)
        for part in carried.devices[0].hardware.instances or ():
            assert part.uuid == "MIG-1" and (part.busy_us_total or 0) >= last
            last = part.busy_us_total or 0
        clock[0] += 1_000_000
    assert last >= (19 - len(when) - 1) * 1_000_000  # at most the windows that a failed call touches are lost
    assert layout.known
