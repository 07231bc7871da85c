"""Memory of contexts on a part of the processors, by name of what is tried; prints what the hook shows as taken on the way."""

import json
import sys
from ctypes import byref, c_char, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cuda_calls import FLOAT, MIB, Array2D, Cuda

cuda = Cuda()
IMAGE = b"poolmeter-sim-module 1\nkernel spin parameter\nglobal table 4194304\n"


def done(result: int) -> None:
    assert result == 0, result


def green() -> tuple[c_void_p, c_void_p]:
    """A green context, which is current, and its context."""
    whole, part, groups = (c_char * 256)(), (c_char * 256)(), c_uint(1)
    description, made, context = c_void_p(), c_void_p(), c_void_p()
    done(cuda.DeviceGetDevResource(0, byref(whole), 1))
    done(cuda.DevSmResourceSplitByCount(byref(part), byref(groups), byref(whole), None, 0, 8))
    done(cuda.DevResourceGenerateDesc(byref(description), byref(part), 1))
    done(cuda.GreenCtxCreate(byref(made), description, 0, 1))
    done(cuda.CtxFromGreenCtx(byref(context), made))
    done(cuda.CtxSetCurrent(context))
    return made, context


def take(size: int) -> tuple[int, c_uint64]:
    at = c_uint64()
    return cuda.MemAlloc_v2(byref(at), c_size_t(size)), at


def again() -> list[int]:
    """Makes one, takes 4 MiB in it and destroys it, until it is refused; then frees the first."""
    cuda.start()
    said, first = [], None
    for _ in range(4):
        made, _ = green()
        result, at = take(4 * MIB)
        first = first or at
        done(cuda.GreenCtxDestroy(made))
        cuda.start()
        said += [result, cuda.used()]
    done(cuda.MemFree_v2(first))
    return [*said, cuda.used()]


def every() -> list[int]:
    """Takes memory of every kind that goes with a context."""
    cuda.start()
    made, _ = green()
    done(take(4 * MIB)[0])
    done(cuda.ArrayCreate_v2(byref(c_void_p()), byref(Array2D(1024, 1024, FLOAT, 1))))
    cuda.module(IMAGE)
    done(cuda.CtxSetLimit(2, c_size_t(16 * MIB)))
    said = [cuda.used()]
    done(cuda.GreenCtxDestroy(made))
    cuda.start()
    return [*said, cuda.used()]


def released() -> list[int]:
    """The primary context goes with its last reference, which is that of the program, then of the green context."""
    cuda.start()
    made, _ = green()
    done(take(4 * MIB)[0])
    done(cuda.GreenCtxDestroy(made))
    done(cuda.DevicePrimaryCtxRelease_v2(0))
    cuda.start()
    said = [cuda.used()]
    made, _ = green()
    done(take(4 * MIB)[0])
    done(cuda.DevicePrimaryCtxRelease_v2(0))
    said.append(cuda.used())
    done(cuda.GreenCtxDestroy(made))
    cuda.start()
    return [*said, cuda.used()]


def reset() -> list[int]:
    """The primary context is reset while the green one lives, which is destroyed afterwards."""
    cuda.start()
    made, _ = green()
    done(take(4 * MIB)[0])
    done(cuda.DevicePrimaryCtxReset_v2(0))
    cuda.start()
    said = [cuda.used()]
    done(take(2 * MIB)[0])
    done(cuda.GreenCtxDestroy(made))
    cuda.start()
    return [*said, cuda.used()]


def plain() -> list[int]:
    """A context that is not green has its memory for itself, and a green one that could not be destroyed keeps its."""
    cuda.start()
    made, _ = green()
    done(take(4 * MIB)[0])
    own = c_void_p()
    done(cuda.CtxCreate_v2(byref(own), 0, 0))
    done(take(8 * MIB)[0])
    said = [cuda.used()]
    done(cuda.CtxDestroy_v2(own))
    said.append(cuda.GreenCtxDestroy(made))
    cuda.start()
    return [*said, cuda.used()]


if __name__ == "__main__":
    print(json.dumps({"said": globals()[sys.argv[1]]()}))
    sys.stdout.flush()
    sys.stdin.readline()
