"""What a card tells beside its use, over a binding that answers what the test says: counters, activity, events, sentinels."""

import gc
import itertools
import os
import time
import types
from collections.abc import Callable
from pathlib import Path

import pynvml as real
import pytest
from attribution_fakes import FakeProc
from exporter_binding import Say, clock, error, holder, only, sample, say, use, vendor_of
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.exporter.hardware import HardwareTotals
from poolmeter.vendors.nvidia_card import SELDOM_US
from poolmeter.vendors.nvidia_use import Use
from poolmeter.vendors.nvidia_vgpu import Vgpus
from poolmeter.vendors.nvml import Nvml

__all__ = ["clock", "say"]
NOT_SUPPORTED = real.NVML_ERROR_NOT_SUPPORTED
UINT64_MAX = 2**64 - 1


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
        (device,) = vendor.read(frozenset({(70, 100)})).devices
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
        clock = types.SimpleNamespace(time_ns=lambda: card.now_us * 1000, monotonic_ns=lambda: card.now_us * 1000)
        patch.setattr("poolmeter.vendors.nvidia_use.time", clock)
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
