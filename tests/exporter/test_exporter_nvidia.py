"""NVIDIA's readings over a binding that answers what the test says: integration, errors, lost cards, duplicates."""

import os
import types
from pathlib import Path

import pynvml as real
import pytest
from exporter_binding import DEFAULTS, Say, clock, error, holder, only, sample, say, use

from poolmeter.vendors.nvidia import NvidiaVendor
from poolmeter.vendors.proc import namespace_pids, parse_start_ticks

__all__ = ["clock", "say"]


def test_what_a_card_says(say: Say) -> None:
    device = only(NvidiaVendor())
    assert (device.uuid, device.model, device.pci_bus_id, device.serial, device.driver_version) == (
        "GPU-0",
        "H200",
        "0000:01:00.0",
        None,
        "580.1",
    )
    assert (device.memory_total_bytes, device.memory_used_bytes, device.memory_reserved_bytes) == (1000, 100, 10)
    assert (device.utilization_ppm, device.energy_uj_total, device.power_mw) == (300_000, 1_234_000, 80_000)
    assert (device.sm_clock_hz, device.temperature_celsius, device.mig) == (1_900_000_000, 40, False)
    assert device.up and device.processes_known and device.errors == ()


def test_an_error_makes_its_value_absent_and_nothing_else(say: Say) -> None:
    say(nvmlDeviceGetPowerUsage=error(real.NVML_ERROR_NOT_SUPPORTED), nvmlDeviceGetMigMode=error(real.NVML_ERROR_NOT_SUPPORTED))
    say(nvmlDeviceGetTotalEnergyConsumption=error(real.NVML_ERROR_FUNCTION_NOT_FOUND))
    device = only(NvidiaVendor())
    assert device.power_mw is device.mig is device.energy_uj_total is None
    assert device.temperature_celsius == 40 and len(device.errors) == 3


LACKS = (real.NVML_ERROR_NOT_SUPPORTED, real.NVML_ERROR_FUNCTION_NOT_FOUND)


@pytest.mark.parametrize("compute", [0, real.NVML_ERROR_UNKNOWN, real.NVML_ERROR_TIMEOUT, real.NVML_ERROR_NO_PERMISSION, *LACKS])
@pytest.mark.parametrize("others", [0, real.NVML_ERROR_UNKNOWN, *LACKS])
def test_nobody_is_on_a_card_only_when_the_list_of_programs_says_so(say: Say, compute: int, others: int) -> None:
    say(
        nvmlDeviceGetComputeRunningProcesses_v3=error(compute) if compute else [],
        nvmlDeviceGetMPSComputeRunningProcesses_v3=error(others) if others else [],
        nvmlDeviceGetGraphicsRunningProcesses_v3=error(others) if others else [],
    )
    device = only(NvidiaVendor())
    assert device.processes == () and device.processes_known == (compute == 0 or (compute in LACKS and others == 0))


def test_memory_of_an_older_driver(say: Say) -> None:
    def memory(handle: int, version: int | None = None) -> object:
        return error(real.NVML_ERROR_FUNCTION_NOT_FOUND) if version else types.SimpleNamespace(total=1000, used=110)

    say(nvmlDeviceGetMemoryInfo=memory)
    device = only(NvidiaVendor())
    assert device.memory_used_bytes == 110 and device.memory_reserved_bytes is None


def test_utilisation_samples_are_integrated_over_their_time(say: Say) -> None:
    vendor = NvidiaVendor()
    say(nvmlDeviceGetSamples=(1, [sample(1_000_000, 90), sample(2_000_000, 90)]))
    assert only(vendor).busy_us_total == 0  # used before anybody watched
    say(nvmlDeviceGetSamples=(1, [sample(3_500_000, 40), sample(2_500_000, 100), sample(2_000_000, 90)]))
    assert only(vendor).busy_us_total == 500_000 + 400_000
    say(nvmlDeviceGetSamples=error(real.NVML_ERROR_NOT_FOUND))
    assert only(vendor).busy_us_total == 900_000
    say(nvmlDeviceGetSamples=(1, [sample(4_500_000, 250)]))
    assert only(vendor).busy_us_total == 1_900_000  # what a sample says above 100 is 100


def test_without_samples_the_rate_counts(say: Say, clock: list[int]) -> None:
    say(nvmlDeviceGetSamples=error(real.NVML_ERROR_NOT_SUPPORTED))
    vendor = NvidiaVendor()
    assert only(vendor).busy_us_total == 0
    clock[0] += 2_000_000
    assert only(vendor).busy_us_total == 600_000
    say(nvmlDeviceGetUtilizationRates=error(real.NVML_ERROR_NOT_SUPPORTED))
    clock[0] += 2_000_000
    device = only(vendor)
    assert device.utilization_ppm is None and device.busy_us_total == 600_000
    clock[0] += 2_000_000
    assert only(vendor).busy_us_total is None  # nothing told for long: not known


def test_process_samples(say: Say) -> None:
    me, parent = os.getpid(), os.getppid()
    say(
        nvmlDeviceGetComputeRunningProcesses_v3=[holder(me, 40), holder(parent, None)],
        nvmlDeviceGetMPSComputeRunningProcesses_v3=[holder(me, 50)],
    )
    vendor = NvidiaVendor()
    say(nvmlDeviceGetProcessUtilization=[use(1_000_000, me, 80)])
    first = {process.pid: process for process in only(vendor).processes}
    assert len(first) == 2 and first[me].memory_bytes == 50 and first[parent].memory_bytes is None
    assert first[me].busy_us_total == 0 and first[me].start_ticks and first[me].command
    # An old entry, one of nobody, an absurd one, and the hundred zeros that drivers have been seen to return.
    strange = [use(900_000, me, 90), use(2_000_000, 4_190_000, 50), use(0, 0, 0), use(0, 0, 0)]
    say(nvmlDeviceGetProcessUtilization=[use(2_000_000, me, 30), use(2_000_000, parent, 10), *strange])
    second = {process.pid: process for process in only(vendor).processes}
    assert second[me].busy_us_total == 300_000 and second[parent].busy_us_total == 100_000 and 4_190_000 not in second
    say(nvmlDeviceGetProcessUtilization=error(real.NVML_ERROR_NOT_FOUND))
    assert {p.pid: p.busy_us_total for p in only(vendor).processes}[me] == 300_000
    say(nvmlDeviceGetProcessUtilization=error(real.NVML_SUCCESS))  # a size call that returned SUCCESS with 0
    assert only(vendor).errors == ()
    say(nvmlDeviceGetProcessUtilization=[use(3_000_000, me, 400), use(3_000_000, parent, 100)])
    fourth = {process.pid: process for process in only(vendor).processes}
    assert (fourth[me].busy_us_total or 0) + (fourth[parent].busy_us_total or 0) == 400_000 + 1_000_000  # divided, never more than the card


def test_a_mean_reaches_to_the_newest_sample_of_the_device(say: Say, clock: list[int]) -> None:
    me = os.getpid()
    vendor = NvidiaVendor()
    say(nvmlDeviceGetSamples=(1, [sample(1_000_000, 0)]), nvmlDeviceGetProcessUtilization=[use(1_000_000, me, 80)])
    only(vendor)
    clock[0] += 1_000_000
    # Active up to 1.2 s and idle to 2 s: 20 % on the mean of the whole second.
    say(nvmlDeviceGetSamples=(1, [sample(2_000_000, 20)]), nvmlDeviceGetProcessUtilization=[use(1_200_000, me, 20)])
    device = only(vendor)
    assert device.busy_us_total == device.processes[0].busy_us_total == 200_000
    clock[0] += 7_000_000
    # Idle for a long while: the next mean begins where nothing was found.
    say(nvmlDeviceGetSamples=(1, [sample(9_000_000, 0)]), nvmlDeviceGetProcessUtilization=error(real.NVML_ERROR_NOT_FOUND))
    only(vendor)
    clock[0] += 1_000_000
    say(nvmlDeviceGetSamples=(1, [sample(10_000_000, 50)]), nvmlDeviceGetProcessUtilization=[use(10_000_000, me, 50)])
    assert only(vendor).processes[0].busy_us_total == 700_000


def test_a_list_that_grows_between_the_two_calls_is_asked_again(say: Say) -> None:
    answers = [error(real.NVML_ERROR_INSUFFICIENT_SIZE), [use(1_000_000, os.getpid(), 5)]]
    say(nvmlDeviceGetProcessUtilization=lambda *_: answers.pop(0))
    only(NvidiaVendor())
    assert not answers


def test_a_process_that_ends_leaves_its_use(say: Say) -> None:
    me = os.getpid()
    vendor = NvidiaVendor()
    say(nvmlDeviceGetComputeRunningProcesses_v3=[holder(me, 40)], nvmlDeviceGetProcessUtilization=[use(1_000_000, me, 80)])
    only(vendor)
    say(nvmlDeviceGetComputeRunningProcesses_v3=[], nvmlDeviceGetProcessUtilization=[use(2_000_000, me, 50)])
    (process,) = only(vendor).processes
    assert not process.listed and process.busy_us_total == 500_000 and process.memory_bytes is None


@pytest.mark.parametrize("code", [real.NVML_ERROR_GPU_IS_LOST, real.NVML_ERROR_RESET_REQUIRED])
@pytest.mark.parametrize("call", ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"])
def test_a_lost_card_leaves_the_others_alone(say: Say, code: int, call: str) -> None:
    say(nvmlDeviceGetCount=3)
    vendor = NvidiaVendor()
    assert [device.up for device in vendor.read().devices] == [True] * 3
    say(**{call: lambda handle: error(code) if handle == 1 else (DEFAULTS.get(call) or (handle if "Handle" in call else f"GPU-{handle}"))})
    reading = vendor.read()
    assert [device.up for device in reading.devices] == [True, False, True] and reading.error is None
    lost = reading.devices[1]
    assert lost.uuid == "GPU-1" and lost.reason and lost.power_mw is lost.memory_used_bytes is lost.busy_us_total is None


def test_a_card_that_never_said_who_it_is_is_counted(say: Say) -> None:
    say(nvmlDeviceGetCount=2, nvmlDeviceGetUUID=lambda handle: error(real.NVML_ERROR_GPU_IS_LOST) if handle else "GPU-0")
    reading = NvidiaVendor().read()
    assert [device.uuid for device in reading.devices] == ["GPU-0"] and reading.unidentified == 1


def test_a_library_that_appears_later_and_a_driver_that_reloads(say: Say) -> None:
    say(nvmlInit=error(real.NVML_ERROR_LIBRARY_NOT_FOUND))
    vendor = NvidiaVendor()
    reading = vendor.read()
    assert reading.devices == () and reading.error is not None and "NVML does not answer" in reading.error
    say(nvmlInit=None, nvmlDeviceGetSamples=(1, [sample(1_000_000, 0)]))
    only(vendor)
    say(nvmlDeviceGetSamples=(1, [sample(2_000_000, 50)]))
    assert only(vendor).busy_us_total == 500_000
    say(nvmlDeviceGetCount=error(real.NVML_ERROR_DRIVER_NOT_LOADED))
    assert vendor.read().error is not None
    say(nvmlDeviceGetCount=1, nvmlDeviceGetSamples=(1, []))
    assert only(vendor).busy_us_total == 500_000


def test_stat_and_status_lines() -> None:
    stat = b"77 (a ) b (c) S 1 77 77 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 123456 1 1"
    assert parse_start_ticks(stat) == 123456 and parse_start_ticks(b"7 (x") is None
    assert namespace_pids(b"Name:\tx\nNSpid:\t4711\t12\t3\n") == (4711, 12, 3) and namespace_pids(b"Name:\tx\n") == ()


def test_a_folder_of_proc_may_be_given(say: Say, tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "stat").write_bytes(b"5 (cuda) S 1 5 5 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 99 1 1")
    (tmp_path / "5" / "comm").write_bytes(b"cuda\n")
    say(nvmlDeviceGetComputeRunningProcesses_v3=[holder(5, 1)])
    (process,) = only(NvidiaVendor(tmp_path)).processes
    assert (process.start_ticks, process.command) == (99, "cuda")


def test_a_program_with_the_pid_of_a_hooked_one_is_asked_for(say: Say, tmp_path: Path, clock: list[int]) -> None:
    def lives(start: int) -> None:
        (tmp_path / "5").mkdir(exist_ok=True)
        (tmp_path / "5" / "stat").write_bytes(b"5 (cuda) S 1 5 5 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 %d 1 1" % start)

    asked: list[int] = []
    say(
        nvmlDeviceGetComputeRunningProcesses_v3=[holder(5, 1)],
        nvmlDeviceGetProcessUtilization=lambda *_: asked.append(clock[0]) or [],
    )
    lives(99)
    vendor = NvidiaVendor(tmp_path)
    hooked = frozenset({(5, 99)})
    vendor.read(hooked)
    asked.clear()
    for _ in range(3):
        clock[0] += 1_000_000
        vendor.read(hooked)
    assert asked == []
    lives(100)  # the hooked program has ended, and another has its pid
    clock[0] += 1_000_000
    vendor.read(hooked)
    assert asked == [clock[0]]
