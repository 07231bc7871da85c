"""What takes memory or copies besides the plain calls, under the hook on the simulated driver."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from poolmeter.pages.grant import DeviceGrant, Grant, write_grant

from .conftest import Bench, finish

MIB = 1 << 20
SHARING_PROGRAM = Path(__file__).parent / "sharing_program.py"

# ---- memory of every kind ------------------------------------------------------------------------------------------


def only(memory: dict[str, int]) -> dict[str, int]:
    return {kind: held for kind, held in memory.items() if held}


def test_arrays_take_what_the_driver_says_and_go_exactly(bench: Callable[..., Bench]) -> None:
    here = bench(memory=64 * MIB)
    assert here.run("arrays") == {
        "flat": 0,
        "after_flat": 16 * MIB,
        "deep": 0,
        "after_deep": 32 * MIB,
        "mip": 0,
        "after_mip": 53 * MIB,
        "too_big": 2,
        "too_big_mip": 2,
        "later": 0,
        "later_destroy": 0,
        "sparse": 0,
        "sparse_destroy": 0,
        "null": 1,
        "null_shape": 1,
        "bad_format": 1,
        "level_destroy": 400,
        "no_context": 201,
        "destroy_without_context": 0,
        "destroy_deep": 0,
        "destroy_mip": 0,
        "after": 0,
        "old_flat": 0,
        "old_deep": 0,
        "after_old": 32 * MIB,
        "in_own_context": 0,
        "after_own": 48 * MIB,
        "after_context": 32 * MIB,
    }
    counters = here.counters()
    # The driver refuses the unknown format only after its smallest piece was reserved.
    assert (counters.denied_limit, counters.denied_card, counters.internal_faults, counters.memory_peak) == (2, 0, 0, 53 * MIB + 512)


def test_an_array_whose_size_the_driver_does_not_tell_is_counted_by_its_shape(bench: Callable[..., Bench]) -> None:
    here = bench(memory=64 * MIB)
    here.machine.script("cuArrayGetMemoryRequirements", code=801)
    here.machine.script("cuMipmappedArrayGetMemoryRequirements", code=801)
    answer = here.run("arrays")
    assert (answer["after_flat"], answer["after_deep"], answer["after_mip"]) == (16 * MIB, 32 * MIB, 53 * MIB)


def test_physical_memory_lives_while_an_array_is_mapped_to_it(bench: Callable[..., Bench]) -> None:
    assert bench(memory=64 * MIB).run("tiles") == {
        "map": 0,
        "mapped_only": 2 * MIB,
        "unmap": 0,
        "unmapped": 0,
        "destroy": 0,
        "destroyed": 0,
    }


def test_graph_memory_is_what_the_driver_keeps_for_graphs(bench: Callable[..., Bench]) -> None:
    here = bench(memory=64 * MIB)
    assert here.run("graphs") == {
        "instantiated": 0,
        "launch": 0,
        "launched": 12 * MIB,
        "again": 0,
        "launched_again": 12 * MIB,
        "upload": 0,
        "uploaded": 14 * MIB,
        "old": 0,
        "old_launched": 16 * MIB,
        "large": 2,
        "large_upload": 2,
        "after_large": 16 * MIB,
        "synchronize": 0,
        "destroy": 0,
        "destroyed": 16 * MIB,
        "trim": 0,
        "trimmed": 4 * MIB,
        "half": 0,
        "half_launched": 44 * MIB,
        "end": 0,
        "captured": 0,
        "captured_launch": 0,
        "captured_launched": 6 * MIB,
        "after_reset": 0,
    }
    counters = here.counters()
    assert (counters.denied_limit, counters.denied_limit_bytes, counters.memory_bytes, counters.internal_faults) == (2, 2 * 54 * MIB, 0, 0)
    assert counters.graph_launches == 5


def test_modules_take_what_the_card_has_less_of(bench: Callable[..., Bench]) -> None:
    here = bench(memory=64 * MIB)
    assert here.run("modules", CUDA_MODULE_LOADING="EAGER") == {
        "load": 0,
        "loaded": 4 * MIB,
        "unload": 0,
        "unloaded": 0,
        "unload_twice": 400,
        "globals": 0,
        "globals_loaded": 8 * MIB,
        "get_global": 0,
        "get_global_null": 0,
        "get_global_unknown": 500,
        "after_get": 8 * MIB,
        "too_big": 2,
        "too_big_handle": 0,
        "after_too_big": 8 * MIB,
        "null": 1,
        "library": 0,
        "library_loaded": 12 * MIB,
        "library_global": 0,
        "library_global_known": 14 * MIB,
        "library_unload": 0,
        "library_unloaded": 8 * MIB,
        "end_unload": 0,
        "end": 0,
    }
    assert (here.counters().denied_limit, here.counters().internal_faults) == (1, 0)


def test_lazily_loaded_code_is_not_seen_but_globals_are(bench: Callable[..., Bench]) -> None:
    answer = bench(memory=64 * MIB).run("modules")
    assert (answer["loaded"], answer["globals_loaded"], answer["library_loaded"], answer["library_global_known"]) == (
        0,
        8 * MIB,
        8 * MIB,
        10 * MIB,
    )
    assert answer["end"] == 0


def test_limits_of_a_context_are_overhead_beyond_what_it_began_with(bench: Callable[..., Bench]) -> None:
    here = bench(memory=1024 * MIB)
    stacks = 1024 * here.machine.setting("sms", 0) * here.machine.setting("threads_per_sm", 0)
    answer = here.run("limits")
    assert {name: answer[name] for name in answer if name.endswith("set") or name.startswith("after")} == {
        "heap_set": 16 * MIB,
        "heap_less_set": 2 * MIB,
        "heap_least_set": 0,
        "printf_set": MIB,
        "stack_set": MIB + stacks,
        "after_too_much": MIB + stacks,
        "after_others": MIB + stacks,
        "after_reset": 0,
    }
    assert (answer["too_much"], answer["unknown"], answer["pending"], answer["no_context"]) == (2, 215, 0, 201)
    assert here.counters().memory_peak == MIB + stacks


def test_imported_memory_is_charged_to_its_exporter_alone(bench: Callable[..., Bench], tmp_path: Path) -> None:
    here = bench(memory=64 * MIB)
    path = tmp_path / "socket"
    exporting = here.program(sys.executable, "-S", str(SHARING_PROGRAM), "exporter", str(path))
    while not path.exists():
        assert exporting.poll() is None
    importing = here.program(sys.executable, "-S", str(SHARING_PROGRAM), "importer", str(path))
    answer = finish(importing)
    shared, own = 7 * MIB, 8 * MIB
    assert answer.pop("byte") == 42
    assert (answer["imported"], answer["given_back"], answer["end"]) == (shared + own, shared + own, shared)
    results = {name: answer[name] for name in answer if name not in ("imported", "given_back", "end", "own")}
    assert {name: result for name, result in results.items() if result} == {"alloc_from_imported": 800, "free_opened": 1, "close_twice": 1}
    assert finish(exporting) == {
        "exported": shared,
        "while_imported": shared,
        "own_import": shared,
        "own_import_released": shared,
        "freed": 0,
    }
    assert (here.counters().memory_bytes, here.counters().internal_faults) == (0, 0)


def test_threads_that_take_and_give_back_every_kind_leave_nothing(bench: Callable[..., Bench], long_run: int) -> None:
    here = bench(memory=1024 * MIB, clock="real")
    assert here.run("together", str(40 * long_run)) == {"left": 0}
    counters = here.counters()
    assert (counters.memory_bytes, counters.copies, counters.internal_faults) == (0, 4 * 40 * long_run, 0)
    assert counters.graph_launches == 4 * 40 * long_run and counters.memory_peak > 0


# ---- copies --------------------------------------------------------------------------------------------------------


def test_copies_of_every_shape_are_counted_by_direction(bench: Callable[..., Bench]) -> None:
    here = bench()
    answer = here.run("copies")
    assert {name: result for name, result in answer.items() if result} == {"2d_null": 1, "refused": 1}
    counters = here.counters()
    assert counters.copy_h2d_bytes == 3 * 30 + 20000 + 17 + 29
    assert counters.copy_d2h_bytes == 2 * 140 + 19 + 31 + 2 * 2000
    assert counters.copy_d2d_bytes == 11 + 13 + 23 + 2 * 1000 + 6000
    assert (counters.copy_p2p_bytes, counters.copies, counters.copy_busy_ns, counters.internal_faults) == (2 * 140, 20, 0, 0)


@pytest.mark.parametrize("compute_ppm", [None, 250_000])
def test_copies_are_charged_and_limited_where_the_grant_says_so(bench: Callable[..., Bench], compute_ppm: int | None) -> None:
    here = bench(compute_ppm=compute_ppm, charge_copies=True)
    here.run("copy_loop", "300", "10000000")
    took = 300 * 10_000_000 * 1_000_000_000 // (here.machine.setting("h2d_bps", 0))
    counters = here.counters()
    # A length is unknown for the first few copies, which nobody can time: they have ended when the second mark is recorded.
    assert counters.busy_ns == pytest.approx(took, rel=0.05)
    assert counters.copy_busy_ns == pytest.approx(took, rel=0.05)
    if compute_ppm:
        assert here.machine.now_ns() == pytest.approx(4 * took, rel=0.06)
        assert counters.throttled_ns > 0


def test_copies_are_free_unless_the_grant_says_so(bench: Callable[..., Bench]) -> None:
    here = bench(compute_ppm=250_000)
    here.run("copy_loop", "50", "10000000")
    counters = here.counters()
    assert (counters.copies, counters.busy_ns, counters.throttle_waits) == (50, 0, 0)


# ---- launches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handle", ["function", "kernel"])
def test_a_collective_is_charged_and_never_held_by_either_handle(bench: Callable[..., Bench], handle: str) -> None:
    here = bench(compute_ppm=100_000)
    here.run("collective", handle, "50")
    counters = here.counters()
    assert (counters.launches, counters.throttle_waits) == (50, 0)
    assert counters.busy_ns == pytest.approx(50_000_000, rel=0.01)


def test_other_kernels_are_held(bench: Callable[..., Bench]) -> None:
    here = bench(compute_ppm=100_000)
    here.run("collective", "other", "50")
    assert here.counters().throttle_waits > 0
    assert here.machine.now_ns() > 400_000_000


def test_a_launch_on_several_devices_waits_for_each(bench: Callable[..., Bench]) -> None:
    here = bench(compute_ppm=200_000, machine="t4x2")
    assert here.run("several", "30") == {"devices": 2}
    for device in range(2):
        counters = here.counters(device)
        assert (counters.launches, counters.pending_ns, counters.internal_faults) == (30, 0, 0)
        assert counters.busy_ns == pytest.approx(30_000_000, rel=0.02)
    assert here.counters(0).throttled_ns + here.counters(1).throttled_ns > 100_000_000
    assert here.machine.now_ns() == pytest.approx(150_000_000, rel=0.15)  # the bucket begins with 20 ms at most


def test_a_context_on_a_part_of_the_processors_is_metered_and_limited(bench: Callable[..., Bench]) -> None:
    here = bench(memory=1024 * MIB, compute_ppm=500_000)
    answer = here.run("green", "30")
    assert answer.pop("after") == 4 * MIB  # of the primary context, which lives on
    assert {name: result for name, result in answer.items() if result} == {}
    counters = here.counters()
    assert counters.launches == 30 and counters.throttle_waits > 0
    assert counters.busy_ns == pytest.approx(60_000_000, rel=0.02)  # half of the processors, twice the time
    assert (counters.memory_peak, counters.memory_bytes, counters.pending_ns) == (4 * MIB, 0, 0)


def test_a_green_context_of_a_device_outside_the_grant_is_refused(bench: Callable[..., Bench]) -> None:
    here = bench(memory=1024 * MIB)
    write_grant(here.folder / "grant", Grant("a", (DeviceGrant("GPU-00000000-0000-0000-0000-00000000dead"),)))
    process = here.start("green", "1")
    assert process.communicate(timeout=60) and process.returncode != 0
    assert here.counters().denied_device >= 1


def test_waiting_for_the_context_settles_every_stream(bench: Callable[..., Bench]) -> None:
    here = bench()
    here.run("streams", "8", "60", "100000")
    counters = here.counters()
    assert (counters.launches, counters.pending_ns) == (480, 0)
    assert counters.busy_ns == pytest.approx(480 * 100_000, rel=0.01)
