"""Every way to launch, launches that do not end, and a limit that is changed, under the hook on the simulated driver."""

import time
from collections.abc import Callable

import pytest

from poolmeter.pages.grant import DeviceGrant
from poolmeter.pages.meter import read_meter
from poolmeter.simulator.tenant import TenantPlan

from .conftest import Pair, first_line

# ---- every way to launch --------------------------------------------------------------------------------------------

SPELLED = """
d = Driver(); d.open(0); f = d.function()
call, stream = sys.argv[1], {"own": d.stream(), "null": 0, "legacy": 1, "per-thread": 2}[sys.argv[2]]
class Config(ctypes.Structure):
    _fields_ = [*((f"n{i}", ctypes.c_uint) for i in range(7)), ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]
length = ctypes.c_uint64(500_000)
params = (ctypes.c_void_p * 1)(ctypes.addressof(length))
handle = stream if isinstance(stream, ctypes.c_void_p) else ctypes.c_void_p(stream)
config = Config(64, 1, 1, 128, 1, 1, 0, handle, None, 0)
begin = d.now_ns()
for _ in range(1500):
    if "Ex" in call:
        d(call, ctypes.byref(config), f, params, None)
    elif "Cooperative" in call:
        d(call, f, 64, 1, 1, 128, 1, 1, 0, handle, params)
    else:
        d(call, f, 64, 1, 1, 128, 1, 1, 0, handle, params, None)
d("cuCtxSynchronize")
print(json.dumps({"took": d.now_ns() - begin}))
"""


@pytest.mark.parametrize(
    ("call", "stream"),
    [
        ("cuLaunchKernel", "null"),
        ("cuLaunchKernel", "legacy"),
        ("cuLaunchKernel", "per-thread"),
        ("cuLaunchKernel_ptsz", "null"),
        ("cuLaunchKernelEx", "own"),
        ("cuLaunchKernelEx_ptsz", "null"),
        ("cuLaunchCooperativeKernel", "own"),
        ("cuLaunchCooperativeKernel_ptsz", "null"),
    ],
)
def test_every_launch_call_and_stream_is_held_to_the_limit(pair: Callable[..., Pair], call: str, stream: str) -> None:
    here = pair()
    folder = here.allocation("a", DeviceGrant(here.uuids[0], 400_000))
    took = here.answer(folder, SPELLED, call, stream)["took"]
    assert 1500 * 500_000 / took == pytest.approx(0.4, abs=0.01)
    counters = read_meter(folder / "meter").total(here.uuids[0])
    assert (counters.launches, counters.busy_ns) == (1500, pytest.approx(1500 * 500_000, rel=0.01))


# ---- launches that do not end ---------------------------------------------------------------------------------------


def test_a_kernel_that_stays_is_paid_for_by_its_own_allocation_alone(pair: Callable[..., Pair]) -> None:
    here = pair("real")
    uuid = here.uuids[0]
    stays, beside = here.allocation("stays", DeviceGrant(uuid, 300_000)), here.allocation("beside", DeviceGrant(uuid, 400_000))
    source = """
d = Driver(); d.open(0); f = d.function(); s = d.stream()
d.launch(f, 20_000, s); d("cuStreamSynchronize", s)
d.launch(f, 600_000_000, s, 7)
print(json.dumps({"begun": 1}), flush=True)
d("cuStreamSynchronize", s)
for _ in range(100):
    d.launch(f, 1_000_000, s)
d("cuStreamSynchronize", s)
"""
    persistent = here.python(stays, source)
    first_line(persistent)
    began = time.monotonic()
    neighbour = here.tenant(beside, TenantPlan(1000, 1.5))
    owed: list[int] = []
    while persistent.poll() is None:
        owed.append(read_meter(stays / "meter").total(uuid).busy_ns)
        time.sleep(0.02)
    took = time.monotonic() - began
    persistent.communicate()
    assert here.share(neighbour)[0] > 25  # nobody else is starved: on a loaded machine a little less than its 40
    assert owed == sorted(owed) and len({value for value in owed if 100e6 < value < 500e6}) >= 2  # charged as it goes
    total = read_meter(stays / "meter").total(uuid)
    truth = sum(record.busy_ns for record in here.machine.truth() if record.pid == persistent.pid)
    # A long kernel that never had the card alone is known only up to its neighbours' turns.
    assert total.busy_ns == pytest.approx(truth, rel=0.15)
    assert took > 0.7 / 0.3 - 0.3 and total.throttled_ns > 0  # the later launches have paid its debt


# ---- a changed limit ------------------------------------------------------------------------------------------------

RESIZED = """
from pathlib import Path
from poolmeter.pages.grant import DeviceGrant, Grant, write_grant
from poolmeter.simulator.machine import Machine
d = Driver(); d.open(0); f = d.function(); s = d.stream()
machine = Machine.open(os.environ["POOLMETER_SIM_MACHINE"])
grant = Path(os.environ["POOLMETER_ALLOCATION_DIR"]) / "grant"
length, memory, shares = int(sys.argv[1]), [], []
def busy():
    return sum(truth.busy_ns for truth in machine.truth() if truth.pid == os.getpid())
def until(end):
    while d.now_ns() < end:
        d.launch(f, length, s)
for limit in (None, 700_000, 300_000):
    if limit:
        write_grant(grant, Grant("a", (DeviceGrant(machine.uuid(0), limit),)))
    begin = d.now_ns()
    until(begin + 1_000_000_000)
    settled, before = d.now_ns(), busy()
    until(settled + 1_000_000_000)
    shares.append(100 * (busy() - before) / (d.now_ns() - settled))
print(json.dumps(shares))
"""


@pytest.mark.parametrize("us", [50, 1000])
def test_a_changed_limit_has_settled_within_a_second(pair: Callable[..., Pair], us: int) -> None:
    here = pair()
    folder = here.allocation("a", DeviceGrant(here.uuids[0], 300_000))
    assert here.answer(folder, RESIZED, str(us * 1000)) == pytest.approx([30, 70, 30], abs=2)
