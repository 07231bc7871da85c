"""Whose device and whose process it is: cards by UUID, pid namespaces, other users, children, leftovers of another life."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from poolmeter.native import native_path
from poolmeter.pages import layout
from poolmeter.pages.errors import PageVersionError
from poolmeter.pages.grant import DeviceGrant
from poolmeter.pages.meter import MeterReading, read_meter, reclaim
from poolmeter.simulator.tenant import TenantPlan, tenant_program

from .conftest import PRELUDE, Pair, first_line

MIB = 1 << 20
GIB = 1 << 30


# ---- cards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("visible", ["0,1", "1,0", "{1},{0}", "{1}", "1"])
def test_limits_go_by_the_card_and_not_by_its_number(pair: Callable[..., Pair], visible: str) -> None:
    here = pair()
    first, second = here.uuids
    folder = here.allocation("a", DeviceGrant(first, 800_000, GIB), DeviceGrant(second, 200_000, 2 * GIB))
    shown = visible.format(first, second)
    card = 0 if visible == "0,1" else 1
    share = here.share(here.tenant(folder, TenantPlan(1000, 1.0, allocate=MIB), CUDA_VISIBLE_DEVICES=shown))
    assert share == {card: pytest.approx((80, 20)[card], abs=1)}
    totals = read_meter(folder / "meter")
    assert [totals.total(uuid).memory_peak for uuid in here.uuids] == [0 if index != card else MIB for index in (0, 1)]
    source = "d = Driver(); d.open(0); t = ctypes.c_size_t(); d('cuDeviceTotalMem_v2', ctypes.byref(t), 0); print(json.dumps(t.value))"
    assert here.answer(folder, source, CUDA_VISIBLE_DEVICES=shown) == (GIB, 2 * GIB)[card]


def test_a_limit_on_the_second_card_with_the_first_busy(pair: Callable[..., Pair]) -> None:
    here = pair(participants=2)
    first, second = here.uuids
    busy = here.tenant(here.allocation("busy", DeviceGrant(first)), TenantPlan(1000, 1.5))
    limited = here.tenant(here.allocation("a", DeviceGrant(first), DeviceGrant(second, 300_000)), TenantPlan(1000, 1.5, device=1))
    assert here.share(limited) == {1: pytest.approx(30, abs=1)}
    assert here.share(busy) == {0: pytest.approx(100, abs=1)}


def test_one_program_on_two_cards_is_held_on_the_limited_one_only(pair: Callable[..., Pair]) -> None:
    here = pair()
    first, second = here.uuids
    folder = here.allocation("a", DeviceGrant(first), DeviceGrant(second, 250_000))
    source = """
d = Driver()
contexts = [d.open(n) for n in (0, 1)]
functions = []
for context in contexts:
    d("cuCtxSetCurrent", context)
    functions.append(d.function())
begin = d.now_ns()
for _ in range(500):
    for context, function in zip(contexts, functions):
        d("cuCtxSetCurrent", context)
        d.launch(function, 1_000_000)
for context in contexts:
    d("cuCtxSetCurrent", context)
    d("cuCtxSynchronize")
print(json.dumps({"took": d.now_ns() - begin}))
"""
    took = here.answer(folder, source)["took"] / 1e9
    assert took == pytest.approx(0.5 / 0.25, rel=0.05)
    reading = read_meter(folder / "meter")
    assert [reading.total(uuid).throttled_ns > 0 for uuid in here.uuids] == [False, True]
    assert [reading.total(uuid).busy_ns for uuid in here.uuids] == pytest.approx([500e6, 500e6], rel=0.02)


def test_memory_is_given_back_to_its_card_whichever_is_current(pair: Callable[..., Pair]) -> None:
    here = pair()
    first, second = here.uuids
    folder = here.allocation("a", DeviceGrant(first, memory_bytes=GIB), DeviceGrant(second, memory_bytes=GIB))
    source = """
import threading
d = Driver()
contexts = [d.open(n) for n in (0, 1)]
d("cuCtxSetCurrent", contexts[0])
held = [d.allocate(600 << 20) for _ in range(1)]
d("cuCtxSetCurrent", contexts[1])
other = d.allocate(700 << 20)
d("cuMemFree_v2", held[0])
def free():
    d("cuMemFree_v2", other)  # a thread without a context
thread = threading.Thread(target=free); thread.start(); thread.join()
d("cuCtxSetCurrent", contexts[0])
again = d.allocate(1024 << 20)
print(json.dumps(1))
"""
    here.answer(folder, source)
    reading = read_meter(folder / "meter")
    assert [reading.total(uuid).memory_peak for uuid in here.uuids] == [GIB, 700 * MIB]
    assert [reading.shared[uuid].memory_bytes for uuid in here.uuids] == [0, 0]


def test_a_limit_above_the_card_shows_and_gives_the_card(pair: Callable[..., Pair]) -> None:
    here = pair()
    card = here.machine.setting("memory", 0)
    folder = here.allocation("a", DeviceGrant(here.uuids[0], memory_bytes=10 * card))
    source = """
d = Driver(); d.open(0)
total = ctypes.c_size_t(); d("cuDeviceTotalMem_v2", ctypes.byref(total), 0)
at = ctypes.c_uint64()
print(json.dumps({"total": total.value, "over": d.status("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(2 * total.value))}))
"""
    told = here.answer(folder, source)
    alone = subprocess.run([sys.executable, "-c", PRELUDE + source], env=here.machine.environment(), capture_output=True, text=True)
    assert told == json.loads(alone.stdout) and told["over"] == 2 and told["total"] <= card
    counters = read_meter(folder / "meter").total(here.uuids[0])
    assert (counters.denied_card, counters.denied_limit, counters.memory_bytes) == (1, 0, 0)


def test_out_pointers_that_are_missing_are_the_drivers_to_refuse(pair: Callable[..., Pair]) -> None:
    here = pair()
    folder = here.allocation("a", DeviceGrant(here.uuids[0], 500_000, GIB))
    source = """
d = Driver(); d.open(0)
z, one, s = None, ctypes.c_size_t(1 << 20), d.stream()
calls = [("cuMemAlloc_v2", z, one), ("cuMemAllocManaged", z, one, 1), ("cuMemAllocPitch_v2", z, z, one, one, 4), ("cuMemAllocAsync", z, one, s),
    ("cuMemCreate", z, one, z, ctypes.c_uint64(0)), ("cuMemGetInfo_v2", z, z), ("cuDeviceTotalMem_v2", z, 0), ("cuMemFree_v2", ctypes.c_uint64(0)),
    ("cuStreamEndCapture", s, z), ("cuGetProcAddress_v2", b"cuMemAlloc", z, 12000, ctypes.c_uint64(0), z), ("cuLaunchKernelEx", z, z, z, z)]
print(json.dumps({call: d.status(call, *rest) for call, *rest in calls}))
"""
    told = here.answer(folder, source)
    bare = dict(here.machine.environment())
    alone = subprocess.run([sys.executable, "-c", PRELUDE + source], env=bare, capture_output=True, text=True, timeout=60)
    assert told == json.loads(alone.stdout)
    assert read_meter(folder / "meter").shared[here.uuids[0]].memory_bytes == 0


# ---- processes ------------------------------------------------------------------------------------------------------


def unshare(*flags: str) -> bool:
    words = ["unshare", *flags, "true"]
    return os.geteuid() == 0 and shutil.which("unshare") is not None and subprocess.run(words, capture_output=True).returncode == 0


HOLD = """
d = Driver(); d.open(0)
at = ctypes.c_uint64()
print(json.dumps({"status": d.status("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(600 << 20)), "pid": os.getpid()}), flush=True)
sys.stdin.readline()
"""


def end(*processes: "subprocess.Popen[str]") -> None:
    for process in processes:
        process.communicate("go\n", timeout=60)


@pytest.mark.skipif(not unshare("-p", "-f"), reason="needs root and pid namespaces")
def test_one_memory_limit_over_pid_namespaces_through_a_kill(pair: Callable[..., Pair]) -> None:
    here = pair("real")
    folder = here.allocation("a", DeviceGrant(here.uuids[0], memory_bytes=GIB))
    inside = here.start(folder, "unshare", "-p", "-f", "--mount-proc", "--kill-child", sys.executable, "-c", PRELUDE + HOLD)
    assert first_line(inside) == {"status": 0, "pid": 1}
    outside = here.python(folder, HOLD)
    assert first_line(outside)["status"] == 2
    slots = read_meter(folder / "meter").slots
    assert len({slot.pid_namespace for slot in slots}) == 2 and all(slot.locked for slot in slots)
    assert reclaim(folder / "meter") == 0  # its pid 1 means nothing here: its lock decides
    inside.kill()
    inside.wait()
    for stream in (inside.stdin, inside.stdout):
        assert stream is not None
        stream.close()
    until(lambda: any(slot.locked is False for slot in read_meter(folder / "meter").slots))
    third = here.start(folder, "unshare", "-p", "-f", "--mount-proc", "--kill-child", sys.executable, "-c", PRELUDE + HOLD)
    assert first_line(third)["status"] == 0  # a newcomer of a third namespace gave the dead one's memory back
    end(third, outside)
    assert read_meter(folder / "meter").shared[here.uuids[0]].memory_bytes == 0


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
@pytest.mark.usefixtures("seen_by_others", "open_tmp_path")
def test_another_user_is_metered_and_limited_like_the_first(pair: Callable[..., Pair], tmp_path: Path) -> None:
    here = pair()
    folder = here.allocation("a", DeviceGrant(here.uuids[0], 300_000, GIB))
    (tmp_path / "devices").chmod(0o1777)
    here.machine.file.chmod(0o666)
    other = ["setpriv", "--reuid", "4242", "--regid", "4242", "--clear-groups"]
    plan = TenantPlan(1000, 1.0, allocate=512 * MIB)
    process = here.start(folder, *other, str(tenant_program(plan.resolve)), *plan.words())
    assert here.share(process) == {0: pytest.approx(30, abs=1)}
    holder = here.start(folder, *other, sys.executable, "-c", PRELUDE + HOLD)
    assert first_line(holder)["status"] == 0
    assert [slot.uid for slot in read_meter(folder / "meter").slots] == [4242]
    mine = here.python(folder, HOLD)
    assert first_line(mine)["status"] == 2
    end(mine, holder)


@pytest.mark.skipif(not unshare("-m"), reason="needs root and mount namespaces")
def test_a_tmp_that_cannot_be_written_is_not_needed(pair: Callable[..., Pair], tmp_path: Path) -> None:
    here = pair()
    here.allocation("a", DeviceGrant(here.uuids[0], 300_000, GIB))
    plan = TenantPlan(1000, 1.0, allocate=MIB)
    # All of it stays visible, since the library and the machine may themselves lie there.
    read_only = "mount --bind /tmp /tmp && mount -o remount,bind,ro /tmp"
    script = f'mount --make-rprivate / && mount --bind "$1" /mnt && {read_only} && ! touch /tmp/written 2>&1 && shift && exec "$@"'
    machine = f"/mnt/{here.machine.file.name}"
    process = here.start(
        Path("/mnt/allocations/a"),
        "unshare",
        "-m",
        "sh",
        "-c",
        script,
        "sh",
        str(tmp_path),
        "env",
        "TMPDIR=/tmp",
        f"POOLMETER_SIM_MACHINE={machine}",
        str(tenant_program(plan.resolve)),
        *plan.words(),
    )
    assert here.share(process) == {0: pytest.approx(30, abs=1)}


PREFORK = """
def worker(n):
    d = Driver(); d.open(0); f = d.function()
    memory = d.allocate(64 << 20)
    for _ in range(100):
        d.launch(f, 50_000)
    d("cuCtxSynchronize")
    if n == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0) if n == 1 else sys.exit(0)

if sys.argv[1] == "after":
    Driver()("cuInit", 0)  # the master looks at the driver and makes no context
done = []
for n in [0, 1, 2, 3, 4]:
    pid = os.fork()
    if pid == 0:
        worker(n)
    done.append(pid)
print(json.dumps([os.waitpid(pid, 0)[1] for pid in done]))
"""


def test_a_server_that_forks_its_workers_before_the_driver_starts(pair: Callable[..., Pair]) -> None:
    here = pair("real")
    folder = here.allocation("a", DeviceGrant(here.uuids[0], 900_000, GIB))
    assert here.answer(folder, PREFORK, "before") == [signal.SIGKILL, 0, 0, 0, 0]
    reading = settled(folder)
    assert reading.retired[here.uuids[0]].launches == 500
    assert reading.shared[here.uuids[0]].memory_bytes == 0 and reading.slots == ()


def settled(folder: Path) -> MeterReading:
    reclaim(folder / "meter")
    return read_meter(folder / "meter")


def test_a_master_that_started_the_driver_keeps_its_slot_and_its_children_take_none(pair: Callable[..., Pair]) -> None:
    here = pair("real")
    folder = here.allocation("a", DeviceGrant(here.uuids[0], memory_bytes=GIB))
    source = """
d = Driver(); d.open(0); f = d.function(); held = d.allocate(64 << 20)
codes = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        try:
            d.launch(f, 50_000)  # the driver of the parent is of no use to a child
        except DriverError:
            os._exit(7)
        os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
d.launch(f, 50_000)
d("cuCtxSynchronize")
print(json.dumps({"codes": codes}), flush=True)
sys.stdin.readline()
"""
    process = here.python(folder, source)
    assert first_line(process)["codes"] == [7] * 4
    live = [slot for slot in read_meter(folder / "meter").slots if slot.locked]
    assert [slot.pid for slot in live] == [process.pid]
    assert read_meter(folder / "meter").shared[here.uuids[0]].memory_bytes == 64 * MIB
    end(process)
    assert settled(folder).retired[here.uuids[0]].launches == 1


# ---- another life ---------------------------------------------------------------------------------------------------


def test_a_bucket_of_another_life_holds_nobody_to_its_old_limit(pair: Callable[..., Pair]) -> None:
    here = pair()
    folder = here.allocation("a", DeviceGrant(here.uuids[0], 600_000))
    # A page that outlived a restart: an old limit, of a later generation, filled by a clock that was far ahead.
    with (folder / "meter").open("r+b") as file:
        header = layout.Meter.from_buffer_copy(file.read(4096))
        at = header.devices_offset + layout.MeterDevice.bucket.offset
        file.seek(at)
        old = layout.Bucket(balance_ns=5_000_000, last_refill_ns=2**62, generation=10**6, limit_ppm=100_000, in_burst=9)
        file.write(bytes(old))
    assert here.share(here.tenant(folder, TenantPlan(1000, 1.5))) == {0: pytest.approx(60, abs=2)}


@pytest.mark.parametrize("page", ["grant", "meter"])
def test_a_page_of_another_version_is_named_with_both_versions_and_counted(pair: Callable[..., Pair], page: str) -> None:
    here = pair()
    folder = here.allocation("a", DeviceGrant(here.uuids[0], 300_000))
    with (folder / page).open("r+b") as file:
        file.seek(8)
        file.write((7).to_bytes(4, "little") + (2).to_bytes(4, "little"))
    hook = {"LD_PRELOAD": str(native_path("libpoolmeter_hook.so")), "POOLMETER_ALLOCATION_DIR": str(folder)}
    words = [str(tenant_program("gpa")), *TenantPlan(1000, 0.05).words()]
    for on_fault, code in (("run", 0), ("refuse", 3)):
        environment = here.machine.environment() | hook | {"POOLMETER_ON_FAULT": on_fault}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == code
        assert f"poolmeter: page {folder / page} has ABI version 7.2, expected 1.x\n" in done.stderr
    if page == "grant":
        assert read_meter(folder / "meter").faults == 2
    else:
        with pytest.raises(PageVersionError, match=r"has ABI version 7\.2, expected 1\.x"):
            read_meter(folder / "meter")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
@pytest.mark.usefixtures("seen_by_others", "open_tmp_path")
def test_a_page_without_permission_is_named(pair: Callable[..., Pair], tmp_path: Path) -> None:
    here = pair()
    folder = here.allocation("a", DeviceGrant(here.uuids[0], 300_000))
    here.machine.file.chmod(0o666)
    (folder / "meter").chmod(0o600)
    hook = {"LD_PRELOAD": str(native_path("libpoolmeter_hook.so")), "POOLMETER_ALLOCATION_DIR": str(folder)}
    other = ["setpriv", "--reuid", "4242", "--regid", "4242", "--clear-groups"]
    words = [*other, str(tenant_program("gpa")), *TenantPlan(1000, 0.05).words()]
    done = subprocess.run(words, env=here.machine.environment() | hook, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert f"poolmeter: page cannot be opened, expected permission to: {folder / 'meter'}\n" in done.stderr


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
