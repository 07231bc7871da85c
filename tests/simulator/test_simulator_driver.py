"""The simulated libcuda as a program meets it: resolution, initialisation, visible cards, refusals, fork."""

import subprocess

import pytest

from .conftest import MakeMachine, RunProgram, start_tenant


def test_symbol_resolution_by_version_and_flag(make_machine: MakeMachine, run_program: RunProgram) -> None:
    answer = run_program(
        make_machine(),
        """
def ask(name, version, flags=0):
    at, status = c_void_p(), c_int(-1)
    code = cu.library.cuGetProcAddress_v2(name, byref(at), version, c_uint64(flags), byref(status))
    named = next((n for n in CANDIDATES if at.value and ctypes.cast(getattr(cu.library, n), c_void_p).value == at.value), None)
    return [code, status.value, named]
CANDIDATES = ["cuMemAlloc", "cuMemAlloc_v2", "cuLaunchKernel", "cuLaunchKernel_ptsz", "cuStreamBeginCapture", "cuStreamBeginCapture_v2",
              "cuCtxCreate_v2", "cuCtxCreate_v3", "cuCtxCreate_v4", "cuMemcpyHtoD_v2_ptds", "cuGetProcAddress", "cuGetProcAddress_v2",
              "cuGraphInstantiate", "cuGraphInstantiate_v2", "cuEventElapsedTime", "cuEventElapsedTime_v2", "cuCtxGetDevice", "cuCtxGetDevice_v2"]
say(old=ask(b"cuMemAlloc", 2000), new=ask(b"cuMemAlloc", 13000), launch=ask(b"cuLaunchKernel", 12000), own=ask(b"cuLaunchKernel", 12000, 2),
    legacy=ask(b"cuLaunchKernel", 12000, 1), own_copy=ask(b"cuMemcpyHtoD", 12000, 2), own_alloc=ask(b"cuMemAlloc", 12000, 2),
    too_old=ask(b"cuLaunchKernelEx", 11000), unknown=ask(b"cuNoSuchCall", 13000), bad_flags=ask(b"cuInit", 13000, 8),
    context=[ask(b"cuCtxCreate", v)[2] for v in (3020, 11040, 12050)], self=ask(b"cuGetProcAddress", 12000),
    graph=[ask(b"cuGraphInstantiate", v)[2] for v in (10000, 11000)], elapsed=[ask(b"cuEventElapsedTime", v)[2] for v in (12000, 12080)],
    device=[ask(b"cuCtxGetDevice", v)[2] for v in (12000, 13000)],
    without_status=cu.library.cuGetProcAddress_v2(b"cuNoSuchCall", byref(c_void_p()), 13000, c_uint64(0), None),
    first_version=cu.library.cuGetProcAddress(b"cuNoSuchCall", byref(c_void_p()), 13000, c_uint64(0)))
""",
    )
    assert answer["old"] == [0, 0, "cuMemAlloc"]
    assert answer["new"] == [0, 0, "cuMemAlloc_v2"]
    assert answer["launch"] == answer["legacy"] == [0, 0, "cuLaunchKernel"]
    assert answer["own"] == [0, 0, "cuLaunchKernel_ptsz"]
    assert answer["own_copy"] == [0, 0, "cuMemcpyHtoD_v2_ptds"]
    assert answer["own_alloc"] == [0, 0, "cuMemAlloc_v2"]
    assert answer["too_old"] == [0, 2, None]
    assert answer["unknown"] == [0, 1, None]
    assert answer["bad_flags"][0] == 1
    assert answer["context"] == ["cuCtxCreate_v2", "cuCtxCreate_v3", "cuCtxCreate_v4"]
    assert answer["self"][2] == "cuGetProcAddress_v2"
    assert answer["graph"] == ["cuGraphInstantiate", "cuGraphInstantiate_v2"]
    assert answer["elapsed"] == ["cuEventElapsedTime", "cuEventElapsedTime_v2"]
    assert answer["device"] == ["cuCtxGetDevice", "cuCtxGetDevice_v2"]
    assert answer["without_status"] == 0
    assert answer["first_version"] == 500


def test_calls_before_initialisation(make_machine: MakeMachine, run_program: RunProgram) -> None:
    answer = run_program(
        make_machine(),
        """
n = c_int()
say(count=cu.status("cuDeviceGetCount", byref(n)), version=cu.status("cuDriverGetVersion", byref(n)), number=n.value, bad=cu.status("cuInit", 1))
""",
    )
    assert answer == {"count": 3, "version": 0, "number": 13000, "bad": 1}


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, [0, 1, 2, 3]), ("2,0", [2, 0]), ("1,9,0", [1]), ("3,3", []), ("", []), ("{uuid2},{short1}", [2, 1])]
)
def test_visible_devices(make_machine: MakeMachine, run_program: RunProgram, visible: str | None, expected: list[int]) -> None:
    machine = make_machine("h200x4")
    uuids = [machine.uuid(device) for device in range(4)]
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible.format(uuid2=uuids[2], short1=uuids[1][:12])}
    answer = run_program(
        machine,
        """
import uuid
code = cu.status("cuInit", 0)
n = c_int()
found = []
if code == 0:
    cu("cuDeviceGetCount", byref(n))
    for i in range(n.value):
        raw = (ctypes.c_ubyte * 16)()
        cu("cuDeviceGetUuid_v2", raw, i)
        found.append("GPU-" + str(uuid.UUID(bytes=bytes(raw))))
say(code=code, found=found)
""",
        **variables,
    )
    assert answer["code"] == (0 if expected else 100)
    assert answer["found"] == [uuids[device] for device in expected]


def test_unimplemented_calls_are_loud_and_counted(make_machine: MakeMachine, run_program: RunProgram) -> None:
    machine = make_machine()
    errors: list[str] = []
    answer = run_program(machine, "cu.open()\nsay(code=cu.status('cuCheckpointProcessLock', 1, None))", errors=errors)
    assert answer["code"] == 801
    assert any("cuCheckpointProcessLock is not implemented" in line for line in errors)
    count = machine.calls()["cuCheckpointProcessLock"]
    assert count.count == 1 and not count.implemented
    assert machine.calls()["cuInit"].implemented


def test_real_images_are_refused_loudly(make_machine: MakeMachine, run_program: RunProgram) -> None:
    errors: list[str] = []
    answer = run_program(
        make_machine(),
        "cu.open()\nm = c_void_p()\nsay(code=cu.status('cuModuleLoadData', byref(m), b'.version 8.0\\n.target sm_90'))",
        errors=errors,
    )
    assert answer["code"] == 200
    assert any("poolmeter-sim-module 1" in line for line in errors)


def test_a_forked_child_may_not_use_the_parents_driver(make_machine: MakeMachine, run_program: RunProgram) -> None:
    machine = make_machine()
    answer = run_program(
        machine,
        """
cu.open()
r, w = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(w, json.dumps([cu.status("cuInit", 0), cu.status("cuCtxSynchronize")]).encode()); os._exit(0)
os.waitpid(pid, 0)
f = cu.function(); cu.launch(f, 1000); cu("cuCtxSynchronize")
say(child=json.loads(os.read(r, 100)))
""",
    )
    assert answer["child"] == [3, 3]
    assert len(machine.truth()) == 1


def test_the_hook_side_of_the_clock_is_exported(make_machine: MakeMachine, run_program: RunProgram) -> None:
    answer = run_program(make_machine(clock="virtual"), "cu.open()\na = cu.now_ns()\ncu.sleep(3_600_000_000_000)\nsay(ns=cu.now_ns() - a)")
    assert answer["ns"] == 3_600_000_000_000


def test_no_machine_is_no_device(run_program: RunProgram, make_machine: MakeMachine) -> None:
    errors: list[str] = []
    answer = run_program(make_machine(), "say(code=cu.status('cuInit', 0))", errors=errors, POOLMETER_SIM_MACHINE="")
    assert answer["code"] == 100
    assert any("POOLMETER_SIM_MACHINE is not set" in line for line in errors)


def test_tenant_says_what_a_missing_driver_is(make_machine: MakeMachine) -> None:
    machine = make_machine()
    environment = {key: value for key, value in machine.environment().items() if key != "LD_LIBRARY_PATH"}
    from poolmeter.simulator.tenant import tenant_program

    done = subprocess.run([str(tenant_program("dlsym")), "--resolve", "dlsym"], env=environment, capture_output=True, text=True, timeout=20)
    assert done.returncode == 3
    assert "no CUDA driver" in done.stderr


def test_reports_of_a_tenant_on_a_missing_card(make_machine: MakeMachine) -> None:
    tenant = start_tenant(make_machine(), device=7)
    output, errors = tenant.communicate(timeout=20)
    assert tenant.returncode == 3
    assert "CUDA_ERROR_INVALID_DEVICE" in errors and "CUDA_ERROR_INVALID_DEVICE" in output
