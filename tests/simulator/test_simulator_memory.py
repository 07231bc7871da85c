"""Memory of the simulated libcuda: what is counted, and what the host never sees."""

from .conftest import MakeMachine, RunProgram


def test_memory_kinds_are_counted_once_and_returned(make_machine: MakeMachine, run_program: RunProgram) -> None:
    machine = make_machine()
    answer = run_program(
        machine,
        """
cu.open()
MIB = 1 << 20
def free():
    a, b = c_size_t(), c_size_t(); cu("cuMemGetInfo_v2", byref(a), byref(b)); return a.value
base = free()
found = {}
def took(name): found[name] = (base - free()) // MIB
p, q, pitch = c_uint64(), c_uint64(), c_size_t()
cu("cuMemAlloc_v2", byref(p), c_size_t(10 * MIB)); took("alloc"); cu("cuMemFree_v2", p)
cu("cuMemAllocPitch_v2", byref(p), byref(pitch), c_size_t(1000), c_size_t(4096), 4); took("pitch"); cu("cuMemFree_v2", p)
cu("cuMemAllocManaged", byref(p), c_size_t(10 * MIB), 1); took("managed"); cu("cuMemFree_v2", p)
s = cu.stream()
cu("cuMemAllocAsync", byref(p), c_size_t(10 * MIB), s); took("async"); cu("cuMemFreeAsync", p, s); took("cached"); cu("cuStreamSynchronize", s); took("synced")
class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]
class Prop(ctypes.Structure):
    _fields_ = [("type", c_int), ("handles", c_int), ("location", Location), ("win", c_void_p), ("flags", ctypes.c_ubyte * 8)]
class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", c_int)]
prop = Prop(1, 0, Location(1, 0)); h, va = c_uint64(), c_uint64()
cu("cuMemCreate", byref(h), c_size_t(8 * MIB), byref(prop), c_uint64(0)); took("create")
cu("cuMemAddressReserve", byref(va), c_size_t(64 * MIB), c_size_t(0), c_uint64(0), c_uint64(0))
cu("cuMemMap", va, c_size_t(8 * MIB), c_size_t(0), h, c_uint64(0)); took("mapped")
closed = cu.status("cuMemsetD8_v2", va, 7, c_size_t(16))
cu("cuMemSetAccess", va, c_size_t(8 * MIB), byref(Access(Location(1, 0), 3)), c_size_t(1))
cu("cuMemsetD8_v2", va, 7, c_size_t(16)); back = ctypes.create_string_buffer(16); cu("cuMemcpyDtoH_v2", back, va, c_size_t(16))
cu("cuMemRelease", h); took("released_mapped"); cu("cuMemUnmap", va, c_size_t(8 * MIB)); took("unmapped"); cu("cuMemAddressFree", va, c_size_t(64 * MIB))
class Shape(ctypes.Structure):
    _fields_ = [("w", c_size_t), ("h", c_size_t), ("format", c_int), ("channels", c_uint)]
array = c_void_p(); cu("cuArrayCreate_v2", byref(array), byref(Shape(1024, 1024, 0x20, 4))); took("array"); cu("cuArrayDestroy", array)
m = c_void_p(); cu("cuModuleLoadData", byref(m), b"poolmeter-sim-module 1\\nglobal table 4194304\\n"); took("global"); cu("cuModuleUnload", m)
host_prop = Prop(1, 0, Location(2, 0)); cu("cuMemCreate", byref(h), c_size_t(8 * MIB), byref(host_prop), c_uint64(0)); took("host"); cu("cuMemRelease", h)
found["bad_device"] = cu.status("cuMemCreate", byref(h), c_size_t(8 * MIB), byref(Prop(1, 0, Location(1, 9))), c_uint64(0))
took("end")
say(closed=closed, back=list(back.raw), **found)
""",
    )
    assert answer.pop("back") == [7] * 16
    assert answer == {
        "alloc": 10, "pitch": 4, "managed": 10, "async": 32, "cached": 32, "synced": 0, "create": 8, "mapped": 8, "closed": 1, "released_mapped": 8,
        "unmapped": 0, "array": 16, "global": 4, "host": 0, "bad_device": 101, "end": 0,
    }  # fmt: skip
    (truth,) = machine.truth()
    assert truth.memory == 0 and truth.memory_peak == 32 << 20


def test_eighty_gigabytes_take_no_memory_of_the_host(make_machine: MakeMachine, run_program: RunProgram) -> None:
    answer = run_program(
        make_machine("h200x4"),
        """
import resource
cu.open()
p = cu.allocate(80 << 30)
cu("cuMemsetD8_v2", p, 1, c_size_t(80 << 30)); cu("cuCtxSynchronize")
back = ctypes.create_string_buffer(4); cu("cuMemcpyDtoH_v2", back, p, c_size_t(4))
say(kib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, back=list(back.raw), over=cu.status("cuMemAlloc_v2", byref(c_uint64()), c_size_t(70 << 30)))
""",
    )
    assert answer["kib"] < 1_000_000
    assert answer["back"] == [1, 1, 1, 1]
    assert answer["over"] == 2


def test_exported_memory_is_let_go_when_it_is_freed(make_machine: MakeMachine, run_program: RunProgram) -> None:
    """No descriptor of it is kept, its handle opens nothing from then on, and who has it open keeps its bytes."""
    answer = run_program(
        make_machine(clock="real"),
        """
import subprocess
cu.open()
s, handle, spare = cu.stream(), ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
def descriptors(): return len(os.listdir("/proc/self/fd"))
def export(out, at): cu("cuIpcGetMemHandle", out, at)
IMPORTER = '''
import ctypes, sys
from ctypes import byref, c_size_t, c_uint64
from poolmeter.simulator.driver import Driver
cu = Driver(); cu.open()
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]
def opened(line):
    at = c_uint64()
    return cu.status("cuIpcOpenMemHandle_v2", byref(at), Handle.from_buffer_copy(bytes.fromhex(line)), 1), at
code, at = opened(sys.stdin.readline()); print(code, flush=True)
late, _ = opened(sys.stdin.readline())
back = ctypes.create_string_buffer(4); cu("cuMemcpyDtoH_v2", back, at, c_size_t(4))
print(late, list(back.raw), flush=True)
'''
before = descriptors()
for _ in range(20):
    p = cu.allocate(4096); export(spare, p); export(spare, p); cu("cuMemFree_v2", p)
freed = descriptors() - before
for _ in range(20):
    p = c_uint64(); cu("cuMemAllocAsync", byref(p), c_size_t(4096), s)
    cu("cuMemPoolExportPointer", spare, p); cu("cuMemFreeAsync", p, s)
pooled = descriptors() - before
for _ in range(20):
    made = c_void_p(); cu("cuCtxCreate_v2", byref(made), 0, 0)
    export(spare, cu.allocate(4096)); cu("cuCtxDestroy_v2", made)
dropped = descriptors() - before
with subprocess.Popen([sys.executable, "-c", IMPORTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as importer:
    def ask():
        print(handle.raw.hex(), file=importer.stdin, flush=True)
        return importer.stdout.readline().strip()
    p = cu.allocate(4096); cu("cuMemsetD8_v2", p, 7, c_size_t(4)); export(handle, p)
    first = ask()
    cu("cuMemFree_v2", p)
    export(spare, cu.allocate(4096))  # it may have the number that the descriptor had
    second = ask()
say(freed=freed, pooled=pooled, dropped=dropped, first=first, second=second)
""",
    )
    assert answer == {"freed": 0, "pooled": 0, "dropped": 0, "first": "0", "second": "1 [7, 7, 7, 7]"}
