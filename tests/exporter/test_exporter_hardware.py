"""What a card tells beside its use, over a binding that answers what the test says: counters, activity, events, MPS, sentinels."""

import dataclasses
import gc
import itertools
import json
import os
import time
import types
from collections.abc import Callable
from pathlib import Path

import pynvml as real
import pytest
from attribution_fakes import FakeProc
from exporter_binding import Say, error, holder, sample, say, use
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.exporter.hardware import HardwareTotals
from poolmeter.exporter.instances import Layout
from poolmeter.model.hardware import Hardware, MigInstance, Vgpu, XidCount
from poolmeter.vendors.mps import ENVIRON_BYTES, MpsClient, MpsControl, parse_clients
from poolmeter.vendors.nvidia import NvidiaVendor
from poolmeter.vendors.nvidia_card import SELDOM_US
from poolmeter.vendors.nvidia_use import Use, divide
from poolmeter.vendors.nvidia_vgpu import Vgpus
from poolmeter.vendors.nvml import Nvml
from poolmeter.vendors.reading import DeviceReading, VendorReading

__all__ = ["say"]
NOT_SUPPORTED = real.NVML_ERROR_NOT_SUPPORTED
UINT64_MAX = 2**64 - 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Monotonic time in us, moved by the test; wall time goes with it."""
    now = [1_000_000_000]
    ahead = time.time_ns() // 10_000_000_000 * 10_000_000_000 - now[0] * 1000
    monkeypatch.setattr("poolmeter.vendors.nvidia_card.time.monotonic_ns", lambda: now[0] * 1000)
    monkeypatch.setattr("poolmeter.vendors.nvidia_card.time.time_ns", lambda: now[0] * 1000 + ahead)
    return now


def only(vendor: NvidiaVendor) -> DeviceReading:
    reading = vendor.read()
    assert reading.error is None
    (device,) = reading.devices
    return device


def vendor_of(tmp_path: Path, **options: object) -> NvidiaVendor:
    return NvidiaVendor(sysfs=tmp_path, **options)  # type: ignore[arg-type]


def fields(**values: tuple[int, int, int]) -> list[object]:
    """Field values by name: (field, type, value); a name of no number is one that failed."""
    made = []
    for identifier, kind, value in values.values():
        union = real.c_nvmlValue_t()
        union.ullVal = value
        made.append(types.SimpleNamespace(fieldId=identifier, nvmlReturn=0, valueType=kind, value=union))
    return made


def test_time_held_down_is_the_cards_own_counter_in_whole_microseconds(say: Say, tmp_path: Path) -> None:
    say(nvmlDeviceGetFieldValues=fields(power=(74, 3, 5_000_000_999), thermal=(269, 3, 7_000)))
    held = only(vendor_of(tmp_path)).hardware.throttle_us_total
    assert held == {"sw_power_cap": 5_000_000, "sw_thermal": 7}


def test_what_costs_much_and_is_only_looked_at_is_asked_seldom(say: Say, tmp_path: Path, clock: list[int]) -> None:
    asked: list[str] = []

    def counted(name: str, value: object) -> Callable[..., object]:
        def answer(*_: object, **__: object) -> object:
            asked.append(name)
            return value

        return answer

    seldom = {
        "nvmlDeviceGetFieldValues": [],
        "nvmlDeviceGetTotalEnergyConsumption": 5,
        "nvmlDeviceGetTemperature": 50,
        "nvmlDeviceGetClockInfo": 1500,
    }
    often = {"nvmlDeviceGetPowerUsage": 5, "nvmlDeviceGetCurrentClocksEventReasons": 0x8}
    say(**{name: counted(name, value) for name, value in {**seldom, **often}.items()})
    vendor = vendor_of(tmp_path)
    for _ in range(10):
        device = only(vendor)
        assert device.temperature_celsius == 50 and device.sm_clock_hz == 1_500_000_000
        clock[0] += 1_000_000
    assert {name: asked.count(name) for name in (*seldom, *often)} == dict(zip((*seldom, *often), (2, 2, 2, 8, 10, 10), strict=True))
    assert device.hardware.throttle_us_total["hw_slowdown"] == 9_000_000


def test_device_time_of_processes_is_asked_less_where_hooks_tell_it(say: Say, tmp_path: Path, clock: list[int]) -> None:
    """Whoever has no hook loses nothing by that: who comes, who is never there at a turn, and while nobody can say who is there."""
    asked: list[int] = []
    works: dict[int, list[int]] = {}  # pid -> from when to when
    proc = FakeProc(tmp_path / "proc")
    for pid in (70, 71, 72):
        proc.add(pid)
    ahead = time.time_ns() // 1000 - clock[0]

    def utilization(_: object, last: int) -> list[object]:
        asked.append(last)
        now, found = clock[0] + ahead, []
        for pid, (begun, ended) in works.items():
            worked = min(ended, now) - max(begun, last)
            if worked > 0:  # always: its mean over the time since the last look
                found.append(types.SimpleNamespace(timeStamp=now, pid=pid, smUtil=round(100 * worked / (now - last))))
        if not found:
            raise error(real.NVML_ERROR_NOT_FOUND)
        return found

    def samples(*_: object) -> tuple[int, list[object]]:
        return 0, [types.SimpleNamespace(timeStamp=clock[0] + ahead, sampleValue=types.SimpleNamespace(uiVal=80))]

    say(nvmlDeviceGetProcessUtilization=utilization, nvmlDeviceGetSamples=samples)
    vendor = vendor_of(tmp_path, proc=proc.root)

    def turn(*listed: int, lists: bool = True) -> dict[int, int | None]:
        rows = [types.SimpleNamespace(pid=pid, usedGpuMemory=1, gpuInstanceId=None, computeInstanceId=None) for pid in listed]
        say(nvmlDeviceGetComputeRunningProcesses_v3=rows if lists else error(real.NVML_ERROR_TIMEOUT))
        clock[0] += 1_000_000
        (device,) = vendor.read(frozenset({70})).devices
        return {process.pid: process.busy_us_total for process in device.processes}

    turn(70)
    before = len(asked)
    for _ in range(60):
        turn(70)
    assert len(asked) - before == 12
    turn(70)
    works[71] = [clock[0] + ahead, clock[0] + ahead + 2_000_000]
    assert turn(70, 71)[71] == 1_000_000  # of the last second alone, at once
    assert turn(70, 71)[71] == turn(70)[71] == 2_000_000
    for _ in range(125):  # until it is forgotten
        turn(70)
    works[72] = [clock[0] + ahead + 100_000, clock[0] + ahead + 900_000]
    for _ in range(5):
        last = turn(70)
    assert last[72] == pytest.approx(800_000, rel=0.03)
    works[72] = [clock[0] + ahead, clock[0] + ahead + 10_000_000]
    for _ in range(10):
        last = turn(lists=False)
    assert last[72] == pytest.approx(10_800_000, rel=0.03)


def test_a_steady_link_has_a_steady_rate(say: Say, tmp_path: Path, clock: list[int]) -> None:
    vendor, rates, begun = vendor_of(tmp_path), list[object](), clock[0]
    for second in range(20):
        kib, down = (clock[0] - begun) * 3, second >= 15
        say(nvmlDeviceGetFieldValues=[] if down else fields(sent=(197, 3, (clock[0] - begun) * 1000), link=(139, 3, kib)))
        rates.append(only(vendor).hardware.bytes_per_s)
        clock[0] += 1_000_000
    assert rates == [{}] * 5 + [{"pcie_tx": 1_000_000_000, "nvlink_rx": 3_072_000_000}] * 10 + [{}] * 5


def test_without_a_counter_the_reasons_are_integrated(say: Say, tmp_path: Path, clock: list[int]) -> None:
    say(nvmlDeviceGetCurrentClocksEventReasons=0x4 | 0x8)
    vendor = vendor_of(tmp_path)
    assert only(vendor).hardware.throttle_us_total["hw_slowdown"] == 0
    clock[0] += 1_000_000
    assert only(vendor).hardware.throttle_us_total["hw_slowdown"] == 1_000_000
    say(nvmlDeviceGetCurrentClocksEventReasons=0x4)
    clock[0] += 500_000
    held = only(vendor).hardware.throttle_us_total
    assert held["hw_slowdown"] == 1_000_000 and held["sw_power_cap"] == 1_500_000 and held["hw_thermal"] == 0


@pytest.mark.parametrize("first", ["told", "call fails", "item fails"])
@pytest.mark.parametrize("fault", ["call fails", "item fails", "item is missing", "not available", "not supported"])
def test_time_held_down_is_counted_once_when_its_counter_cannot_be_asked_for_a_while(
    say: Say, tmp_path: Path, clock: list[int], first: str, fault: str
) -> None:
    vendor, totals, kept = vendor_of(tmp_path), HardwareTotals({}, "epoch"), list[int]()
    say(nvmlDeviceGetCurrentClocksEventReasons=0x4)
    for how in (first, "told", fault, fault, "told"):
        made = fields(power=(74, 3, UINT64_MAX if how == "not available" else 3_600_000_000))
        made[0].nvmlReturn = {"item fails": real.NVML_ERROR_UNKNOWN, "not supported": NOT_SUPPORTED}.get(how, 0)  # type: ignore[attr-defined]
        failed = error(real.NVML_ERROR_TIMEOUT)
        say(nvmlDeviceGetFieldValues={"call fails": failed, "item is missing": []}.get(how, made))
        (device,) = totals.carry(vendor.read()).devices
        held = device.hardware.throttle_us_total
        assert "hw_slowdown" in held  # which has no counter
        kept.append(held.get("sw_power_cap", -1))
        clock[0] += SELDOM_US
    assert kept == [3_600_000 if first == "told" else -1, 3_600_000, -1, -1, 3_600_000]


@pytest.mark.parametrize("code", [NOT_SUPPORTED, real.NVML_ERROR_FUNCTION_NOT_FOUND, real.NVML_ERROR_INVALID_ARGUMENT])
def test_a_reason_that_was_integrated_goes_on_so(say: Say, tmp_path: Path, clock: list[int], code: int) -> None:
    vendor, kept = vendor_of(tmp_path), list[int]()
    say(nvmlDeviceGetCurrentClocksEventReasons=0x4)
    for answer in (error(code), error(real.NVML_ERROR_TIMEOUT), fields(power=(74, 3, 3_600_000_000))):
        say(nvmlDeviceGetFieldValues=answer)
        kept.append(only(vendor).hardware.throttle_us_total["sw_power_cap"])
        clock[0] += 1_000_000
    assert kept == [0, 1_000_000, 2_000_000]


def test_a_card_that_tells_no_reason_has_no_throttle_series(say: Say, tmp_path: Path) -> None:
    hardware = only(vendor_of(tmp_path)).hardware
    assert hardware.throttle_us_total == {} and hardware.ecc_errors_total == {} and hardware.remapped_rows_total == {}
    assert hardware.activity is hardware.instances is hardware.vgpus is hardware.pcie_tx_bytes_total is None


@pytest.mark.parametrize("sentinel", [UINT64_MAX, 2**32 - 1])
def test_sentinel_values_in_output(say: Say, tmp_path: Path, sentinel: int) -> None:
    wide = UINT64_MAX  # a count of 64 bits may well be 2**32 - 1
    say(
        nvmlDeviceGetTotalEnergyConsumption=wide,
        nvmlDeviceGetPowerUsage=sentinel,
        nvmlDeviceGetTemperature=sentinel,
        nvmlDeviceGetClockInfo=sentinel,
        nvmlDeviceGetMinorNumber=sentinel,
        nvmlDeviceGetUtilizationRates=types.SimpleNamespace(gpu=sentinel, memory=sentinel),
        nvmlDeviceGetEnforcedPowerLimit=sentinel,
        nvmlDeviceGetTotalEccErrors=wide,
        nvmlDeviceGetRemappedRows=(2**32 - 1, 2**32 - 1, 0, 0),
        nvmlDeviceGetFieldValues=fields(t=(82, 1, 2**32 - 1), power=(74, 3, wide), tx=(138, 3, wide), rx=(139, 3, wide)),
        nvmlDeviceGetComputeRunningProcesses_v3=[holder(os.getpid(), wide)],
        nvmlDeviceGetSerial="N/A",
        nvmlDeviceGetSamples=error(NOT_SUPPORTED),
    )
    device = only(vendor_of(tmp_path))
    assert device.energy_uj_total is device.power_mw is device.temperature_celsius is device.sm_clock_hz is device.minor is None
    assert device.utilization_ppm is device.serial is device.processes[0].memory_bytes is None
    hardware = device.hardware
    assert hardware.power_limit_mw is hardware.memory_temperature_celsius is hardware.nvlink_tx_bytes_total is None
    assert hardware.ecc_errors_total == {} and hardware.remapped_rows_total == {} and "sw_power_cap" not in hardware.throttle_us_total


UTILISATION = [("gpuUtilization", 2**32 - 1), ("time", UINT64_MAX)]
SUMS = [("sampleCount", 2**32 - 1), ("sumGpuUtil", UINT64_MAX), ("time", UINT64_MAX), ("startTime", UINT64_MAX)]


@pytest.mark.parametrize(("field", "sentinel"), [(None, 0), *UTILISATION, *(("v2." + field, value) for field, value in SUMS)])
def test_accounting_that_is_not_available_is_unknown(say: Say, tmp_path: Path, field: str | None, sentinel: int) -> None:
    ended = real.c_nvmlAccountingStats_t(gpuUtilization=50, time=2_000, startTime=1)
    say(
        nvmlDeviceGetAccountingMode=1,
        nvmlDeviceGetComputeRunningProcesses_v3=[holder(os.getpid(), 1)],
        nvmlDeviceGetAccountingStats_v2=error(NOT_SUPPORTED),
        nvmlDeviceGetAccountingStats=ended,
    )
    if field is not None and field.startswith("v2."):
        sums = real.c_nvmlAccountingStats_v2_t(isRunning=1, sampleCount=10, sumGpuUtil=50_000, time=0, startTime=1)
        setattr(sums, field.removeprefix("v2."), sentinel)
        say(nvmlDeviceGetAccountingStats_v2=sums)
    elif field is not None:
        setattr(ended, field, sentinel)
    vendor = vendor_of(tmp_path)
    only(vendor)
    if field is None or not field.startswith("v2."):
        say(nvmlDeviceGetComputeRunningProcesses_v3=[])  # older drivers tell of a process that has ended
    (process,) = only(vendor).processes
    assert process.accounted_us_total == (1_000_000 if field is None else None)


def test_samples_that_are_not_available_count_nothing(say: Say, tmp_path: Path) -> None:
    me, none = os.getpid(), 2**32 - 1
    say(
        nvmlDeviceGetComputeRunningProcesses_v3=[holder(me, 1)],
        nvmlDeviceGetSamples=(1, [sample(1_000_000, none)]),
        nvmlDeviceGetProcessUtilization=[use(1_000_000, me, none)],
    )
    vendor = vendor_of(tmp_path)
    assert only(vendor).busy_us_total is None
    say(
        nvmlDeviceGetSamples=(1, [sample(2_000_000, 50), sample(3_000_000, none), sample(4_000_000, 20)]),
        nvmlDeviceGetProcessUtilization=[use(2_000_000, me, 50), use(3_000_000, me, none), use(4_000_000, me, 20)],
    )
    device = only(vendor)
    assert device.busy_us_total == device.processes[0].busy_us_total == 700_000


@pytest.mark.parametrize(
    ("values", "busy_us", "ppm"), [((50, 20), 200_000, 200_000), ((50, 2**32 - 1), 0, None), ((2**32 - 1,) * 2, None, None)]
)
def test_samples_of_vgpus_that_are_not_available(values: tuple[int, int], busy_us: int | None, ppm: int | None) -> None:
    at = iter((1_000_000, 2_000_000))
    told = iter(values)

    def samples(*_: object) -> list[object]:
        made = real.c_nvmlVgpuInstanceUtilizationSample_t(vgpuInstance=7, timeStamp=next(at))
        made.smUtil.uiVal = next(told)
        return [made]

    binding = types.SimpleNamespace(
        NVMLError=real.NVMLError, NVML_ERROR_FUNCTION_NOT_FOUND=real.NVML_ERROR_FUNCTION_NOT_FOUND, NVML_ERROR_NOT_FOUND=real.NVML_ERROR_NOT_FOUND,
        NVML_ERROR_GPU_IS_LOST=real.NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED=real.NVML_ERROR_RESET_REQUIRED,
        NVML_ERROR_LIB_RM_VERSION_MISMATCH=real.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        nvmlDeviceGetActiveVgpus=lambda _: [7], nvmlDeviceGetVgpuUtilization=samples,
    )  # fmt: skip
    vgpus = Vgpus(Nvml(binding))
    vgpus.read(0)
    (found,) = vgpus.read(0) or ()
    assert (found.busy_us_total, found.utilization_ppm) == (busy_us, ppm)


class Moments:
    """A card that is busy all the time, whose calls answer or fail as a test says, and the clock."""

    def __init__(self, percent: int) -> None:
        self.percent, self.now_us, self.kind = percent, 1_000_000_000, "samples"

    def samples(self, handle: object, kind: int, last: int) -> tuple[int, list[object]]:
        if self.kind != "samples":
            raise error(real.NVML_ERROR_NOT_FOUND if self.kind == "nothing new" else real.NVML_ERROR_UNKNOWN)
        return 1, [
            sample(at, self.percent) for at in range(self.now_us // 200_000 * 200_000 - 4_000_000, self.now_us + 1, 200_000) if at > last
        ]


@given(
    st.integers(0, 100),
    st.lists(st.tuples(st.integers(1, 3_000_000), st.sampled_from(["samples", "nothing new", "fails", "all fail"])), max_size=40),
)
def test_whatever_reading_fails_no_time_is_counted_twice(percent: int, readings: list[tuple[int, str]]) -> None:
    card = Moments(percent)
    codes = {name: getattr(real, name) for name in dir(real) if name.startswith("NVML")}
    used = Use(Nvml(types.SimpleNamespace(**codes, nvmlDeviceGetSamples=card.samples)), Path("/proc"))
    start = card.now_us - 200_000  # the newest sample at the first reading may be as old as that
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("poolmeter.vendors.nvidia_use.time", types.SimpleNamespace(time_ns=lambda: card.now_us * 1000))
        for pause_us, card.kind in [(0, "samples"), *readings]:
            card.now_us += pause_us
            used.device(0, None if card.kind == "all fail" else percent * 10_000, [])
            assert used.busy_us is not None and used.busy_us <= (card.now_us - start) * percent // 100


def gpm(say: Say, values: dict[int, float]) -> None:
    def metrics(request: object) -> object:
        for place in range(request.numMetrics):  # type: ignore[attr-defined]
            metric = request.metrics[place]  # type: ignore[attr-defined]
            metric.nvmlReturn = 0 if metric.metricId in values else 3
            metric.value = values.get(metric.metricId, float("nan"))
        return request

    say(
        nvmlGpmQueryDeviceSupport=types.SimpleNamespace(isSupportedDevice=1),
        nvmlGpmSampleAlloc=lambda: real.c_nvmlGpmSample_t(),
        nvmlGpmSampleGet=None,
        nvmlGpmMetricsGet=metrics,
    )


def test_ratios_holding_0_to_100(say: Say, tmp_path: Path, clock: list[int]) -> None:
    gpm(say, {1: 80.0, 2: 55.5, 3: float("nan"), 5: 250.0, 10: -1.0})
    vendor = vendor_of(tmp_path)
    assert only(vendor).hardware.activity is None  # one sample is no window
    clock[0] += 1_000_000
    activity = only(vendor).hardware.activity
    assert activity is not None and activity.window_us == 1_000_000
    assert (activity.graphics_ppm, activity.sm_active_ppm, activity.tensor_ppm, activity.dram_ppm) == (800_000, 555_000, 1_000_000, 0)
    assert activity.sm_occupancy_ppm is None


def test_a_window_of_100_ms_or_less_is_not_read(say: Say, tmp_path: Path, clock: list[int]) -> None:
    gpm(say, {1: 80.0})
    vendor = vendor_of(tmp_path)
    only(vendor)
    clock[0] += 100_000
    assert only(vendor).hardware.activity is None
    clock[0] += 100_000
    activity = only(vendor).hardware.activity
    assert activity is not None and activity.window_us == 200_000


def test_a_byte_counter_that_wraps_many_times_a_second(say: Say, tmp_path: Path, clock: list[int]) -> None:
    mib_per_s = 40_000.0
    gpm(say, {20: mib_per_s, 21: 0.0})
    sent = 4_000_000_000
    say(nvmlDeviceGetFieldValues=lambda *_: fields(tx=(197, 1, sent % 2**32), rx=(198, 1, 77)))
    vendor = vendor_of(tmp_path)
    only(vendor)
    for _ in range(5):
        clock[0] += 1_000_000
        sent += 40_000 * 2**20 + 12_345
        hardware = only(vendor).hardware
    assert hardware.pcie_tx_bytes_total == 5 * (40_000 * 2**20 + 12_345) and hardware.pcie_rx_bytes_total == 0


def test_a_byte_counter_that_may_have_wrapped_unseen_is_absent(say: Say, tmp_path: Path, clock: list[int]) -> None:
    say(nvmlDeviceGetFieldValues=fields(tx=(197, 1, 5), rx=(198, 3, 7 * 2**40)))
    vendor = vendor_of(tmp_path)
    only(vendor)
    clock[0] += 1_000_000
    hardware = only(vendor).hardware
    assert hardware.pcie_tx_bytes_total is None and hardware.pcie_rx_bytes_total == 7 * 2**40


def test_pcie_throughput_is_never_asked(say: Say, tmp_path: Path) -> None:
    say(nvmlDeviceGetPcieThroughput=lambda *_: pytest.fail("it blocks for 20 ms"))
    only(vendor_of(tmp_path))


def events(say: Say, told: list[tuple[int, int]]) -> None:
    def wait(event_set: object, timeout: int) -> object:
        assert timeout == 0
        if not told:
            raise error(real.NVML_ERROR_TIMEOUT)
        device, xid = told.pop(0)
        return types.SimpleNamespace(device=device, eventType=real.nvmlEventTypeXidCriticalError, eventData=xid)

    say(
        nvmlEventSetCreate=lambda: object(),
        nvmlDeviceGetSupportedEventTypes=real.nvmlEventTypeXidCriticalError,
        nvmlDeviceRegisterEvents=None,
        nvmlEventSetWait_v2=wait,
    )


def test_xids_are_counted_by_card_and_number(say: Say, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    events(say, told)
    say(nvmlDeviceGetCount=2)
    vendor = vendor_of(tmp_path)
    vendor.read()
    told += [(1, 31), (0, 79), (1, 31), (1, 43)]
    vendor.read()
    first, second = (device.hardware.xids for device in vendor.read().devices)
    assert [(x.xid, x.count) for x in first] == [(79, 1)] and [(x.xid, x.count) for x in second] == [(31, 2), (43, 1)]
    assert all(x.last_us > 0 for x in (*first, *second))


def test_a_card_that_is_lost_keeps_its_xids(say: Say, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    events(say, told)
    vendor = vendor_of(tmp_path)
    only(vendor)
    told.append((0, 79))
    say(nvmlDeviceGetUtilizationRates=error(real.NVML_ERROR_GPU_IS_LOST))
    only(vendor)
    device = only(vendor)
    assert not device.up and [(x.xid, x.count) for x in device.hardware.xids] == [(79, 1)]


# ---- what the agent keeps ------------------------------------------------------------------------------------------------------------


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


# ---- MPS -----------------------------------------------------------------------------------------------------------------------------

TABLE = """PID       ID        SERVER    DEVICE             NAMESPACE COMMAND
4711      0         1000      GPU-cb213c89       4026531836 ./train --lr 1
4712      1         1000      GPU-cb213c89       4026531836 ./serve
half a line
"""
LIMIT = b"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="


def fake_proc(root: Path, processes: dict[int, str], environ: dict[int, bytes] | None = None) -> Path:
    for pid, comm in processes.items():
        (root / str(pid)).mkdir(parents=True)
        (root / str(pid) / "stat").write_bytes(b"%d (x) S " % pid + b" ".join(b"%d" % n for n in range(4, 60)))
        (root / str(pid) / "comm").write_text(comm + "\n")
        (root / str(pid) / "environ").write_bytes((environ or {}).get(pid, b""))
    return root


def test_the_control_pipe_tells_servers_clients_and_percentages(tmp_path: Path) -> None:
    answers = {"get_server_list": "1000\n", "get_active_thread_percentage 1000": "60.0\n", "ps": TABLE}
    proc = fake_proc(tmp_path, {4711: "train", 4712: "serve"}, {4711: b"A=1\0CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25\0"})
    assert MpsControl(answers.get, proc=proc).read() == (
        MpsClient(pid=4711, server=1000, active_thread_ppm=250_000),
        MpsClient(pid=4712, server=1000, active_thread_ppm=600_000),
    )


def test_no_daemon_a_refusal_and_rubbish_are_nothing(tmp_path: Path) -> None:
    assert MpsControl(pipe_folder=tmp_path / "none").read() is None
    assert MpsControl(lambda _: None).read() is None
    assert MpsControl(lambda _: "Failed to connect").read() == ()
    assert parse_clients("") == [] and parse_clients("PID SERVER\nx y\n1\n") == []


def test_a_daemon_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "control").touch()
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nread line\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("poolmeter.vendors.mps.TIMEOUT_S", 0.3)
    assert MpsControl(pipe_folder=tmp_path).read() is None
    program.write_text(
        '#!/bin/sh\nread line\n[ "$line" = get_server_list ] && echo 77\n[ "$line" = ps ] && echo "PID SERVER\n4711 77"\nexit 0\n'
    )
    assert MpsControl(pipe_folder=tmp_path).read() == (MpsClient(pid=4711, server=77),)


@pytest.mark.parametrize("answering", ["own", "another's folder", "another's pipe", "another's link"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_only_a_daemon_of_root_or_of_the_same_user_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answering: str) -> None:
    folder, link = tmp_path / "mps", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    (folder / "control").touch()
    given = {"another's folder": folder, "another's pipe": folder / "control", "another's link": link}.get(answering)
    if given is not None:
        os.lchown(given, 4711, 4711)
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nread line\necho $line >> {tmp_path}/asked\necho 77\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    clients = MpsControl(pipe_folder=link).read()
    assert (tmp_path / "asked").exists() == (clients is not None) == (answering == "own")


@pytest.mark.parametrize(
    ("environ", "ppm"),
    [
        (LIMIT + b"25\0", 250_000),
        (b"A=1\0" + LIMIT + b"25\0B=2\0", 250_000),
        (LIMIT + b"25", 600_000),  # no end: it may be cut off
        (LIMIT + b"90\0", 600_000),
        (LIMIT + b"x\0", 600_000),
        (b"SECRET=" + b"x" * (1 << 20) + b"\0" + LIMIT + b"25\0", 600_000),
        (b"A=" + b"x" * (ENVIRON_BYTES - 3 - len(LIMIT) - 1) + b"\0" + LIMIT + b"25\0", 600_000),  # the bound is within the number
    ],
)
def test_of_a_clients_environment_its_limit_is_taken_from_a_bounded_part(tmp_path: Path, environ: bytes, ppm: int) -> None:
    answers = {"get_server_list": "1000\n", "get_active_thread_percentage 1000": "60.0\n", "ps": TABLE}
    clients = MpsControl(answers.get, proc=fake_proc(tmp_path, {4711: "train"}, {4711: environ})).read()
    assert clients is not None and clients[0].active_thread_ppm == ppm


def test_one_device_value_copied_to_all_sharers(say: Say, tmp_path: Path) -> None:
    """Under MPS the server has the sum: clients get parts that add up to it, marked, and nobody gets the whole."""
    proc = fake_proc(tmp_path / "proc", {10: "nvidia-cuda-mps", 11: "train", 12: "serve"})
    clients = [holder(11, 100), holder(12, 200)]
    say(
        nvmlDeviceGetComputeRunningProcesses_v3=[holder(10, 30), *clients],
        nvmlDeviceGetMPSComputeRunningProcesses_v3=clients,
        nvmlDeviceGetSamples=(1, [sample(1_000_000, 0)]),
        nvmlDeviceGetProcessUtilization=[use(1_000_000, 10, 90)],
    )
    vendor = vendor_of(tmp_path, proc=proc)
    first = only(vendor)
    assert first.hardware.mps_server_pid == 10 and [p.pid for p in first.processes] == [10, 11, 12]  # once each, though in both lists
    say(nvmlDeviceGetSamples=(1, [sample(2_000_001, 90)]), nvmlDeviceGetProcessUtilization=[use(2_000_001, 10, 90)])
    server, *parts = only(vendor).processes
    assert server.busy_us_total == 0 and server.mps == "server" and not server.divided
    assert [p.busy_us_total for p in parts] == [450_000, 450_000] and all(p.divided and p.mps == "client" for p in parts)
    assert [p.memory_bytes for p in parts] == [100, 200]


def test_clients_share_by_their_active_thread_percentages(say: Say, tmp_path: Path) -> None:
    proc = fake_proc(tmp_path / "proc", {10: "nvidia-cuda-mps", 4711: "train", 4712: "serve"})
    clients = [holder(4711, 1), holder(4712, 1)]
    say(
        nvmlDeviceGetComputeRunningProcesses_v3=[holder(10, 1), *clients],
        nvmlDeviceGetMPSComputeRunningProcesses_v3=clients,
        nvmlDeviceGetSamples=(1, [sample(1_000_000, 0)]),
    )
    answers = {"get_server_list": "10\n", "get_active_thread_percentage 10": "100.0\n", "ps": TABLE.replace("1000 ", "10   ")}
    (proc / "4711" / "environ").write_bytes(b"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25\0")
    vendor = vendor_of(tmp_path, proc=proc, mps=MpsControl(answers.get, proc=proc))
    only(vendor)
    only(vendor)  # a server was seen: the daemon is asked
    assert vendor._mps_worker.wait(10)
    say(nvmlDeviceGetSamples=(1, [sample(2_000_000, 100)]), nvmlDeviceGetProcessUtilization=[use(2_000_000, 10, 100)])
    _, first, second = only(vendor).processes
    assert (first.busy_us_total, second.busy_us_total) == (200_000, 800_000) and first.active_thread_ppm == 250_000


@given(st.integers(0, 10**12), st.dictionaries(st.integers(1, 100), st.integers(0, 10**6), min_size=1, max_size=9))
def test_shares_above_100_percent(amount: int, weights: dict[int, int]) -> None:
    parts = divide(amount, weights)
    assert sum(parts.values()) == amount and parts.keys() == weights.keys() and min(parts.values()) >= 0


# ---- states --------------------------------------------------------------------------------------------------------------------------


def test_one_bad_card_emptying_the_page(say: Say, tmp_path: Path) -> None:
    def worse(handle: int) -> object:
        if handle == 1:
            raise RuntimeError("a binding that breaks")
        return types.SimpleNamespace(gpu=1, memory=1)

    say(nvmlDeviceGetCount=3)
    vendor = vendor_of(tmp_path)
    vendor.read()
    say(nvmlDeviceGetUtilizationRates=worse)
    first = vendor.read()
    assert [device.up for device in first.devices] == [True, False, True] and first.error is None
    assert first.devices[1].reason is not None and "a binding that breaks" in first.devices[1].reason


def test_a_driver_that_is_replaced_under_the_sampler_asks_for_a_new_one(say: Say, tmp_path: Path) -> None:
    vendor = vendor_of(tmp_path)
    assert not vendor.read().replace
    say(nvmlDeviceGetUtilizationRates=error(real.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
    found = vendor.read()
    assert found.replace and found.devices == () and found.error is not None and "mismatch" in found.error
    say(nvmlDeviceGetCount=error(real.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
    assert vendor.read().replace


def test_a_library_that_is_missing_asks_for_no_new_sampler(say: Say, tmp_path: Path) -> None:
    say(nvmlInit=error(real.NVML_ERROR_LIBRARY_NOT_FOUND))
    found = vendor_of(tmp_path).read()
    assert not found.replace and found.error is not None


def test_a_card_keeps_what_it_counted_when_its_number_changes(say: Say, tmp_path: Path) -> None:
    order = ["GPU-a", "GPU-b"]
    say(nvmlDeviceGetCount=2, nvmlDeviceGetUUID=lambda handle: order[handle], nvmlDeviceGetSamples=(1, [sample(1_000_000, 0)]))
    vendor = vendor_of(tmp_path)
    vendor.read()
    say(nvmlDeviceGetSamples=(1, [sample(2_000_000, 50)]))
    vendor.read()
    order.reverse()
    say(nvmlDeviceGetSamples=error(real.NVML_ERROR_NOT_FOUND))
    found = {device.uuid: device for device in vendor.read().devices}
    assert {device.busy_us_total for device in found.values()} == {500_000} and found["GPU-a"].index == 1


def test_memory_flat_over_10_000_cycles_with_process_churn(
    say: Say, tmp_path: Path, clock: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = [1_700_000_000_000_000]
    monkeypatch.setattr("poolmeter.vendors.nvidia_use.time.time_ns", lambda: wall[0] * 1000)
    monkeypatch.setattr("poolmeter.vendors.nvidia_use.FORGET_AFTER_US", 5_000_000)
    monkeypatch.setattr("poolmeter.vendors.nvidia_use.start_ticks_of", lambda pid, _: pid)
    monkeypatch.setattr("poolmeter.vendors.nvidia_use.command_of", lambda *_: "x")
    pids = itertools.count(1000)

    def churn(*_: object) -> list[object]:
        return [holder(next(pids), 1) for _ in range(4)]

    nothing_new = lambda *_: error(real.NVML_ERROR_NOT_FOUND)  # noqa: E731 - an error that is raised anew each time
    say(nvmlDeviceGetComputeRunningProcesses_v3=churn, nvmlDeviceGetProcessUtilization=nothing_new)
    vendor = vendor_of(tmp_path)

    def cycles(count: int) -> int:
        for _ in range(count):
            wall[0] += 1_000_000
            clock[0] += 1_000_000
            vendor.read()
        gc.collect()
        return len(gc.get_objects())

    before = cycles(500)
    assert abs(cycles(9_500) - before) < 500
    assert len(only(vendor).processes) < 50
