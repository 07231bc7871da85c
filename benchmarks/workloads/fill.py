"""Allocates device memory in equal pieces through the driver API until it is refused. One JSON line.

`--via alloc|async|managed|vmm` chooses the call. Needs nothing but libcuda.
"""

import argparse
import ctypes
import json

OUT_OF_MEMORY = 2


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", Location),
        ("attributes", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--piece", type=int, default=2 << 20)
    parser.add_argument("--via", default="alloc")
    parser.add_argument("--most", type=int, default=100_000)
    args = parser.parse_args()
    cuda = ctypes.CDLL("libcuda.so.1")
    size = ctypes.c_size_t

    def call(name: str, *arguments: object) -> None:
        status = getattr(cuda, name)(*arguments)
        if status:
            raise SystemExit(f"{name} returned {status}")

    call("cuInit", 0)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    free, total, shown = size(), size(), size()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    call("cuDeviceTotalMem_v2", ctypes.byref(shown), device)
    properties = Properties(type=1, location=Location(1, device.value))
    pieces, status = 0, 0
    while pieces < args.most:
        pointer = ctypes.c_uint64()
        if args.via == "alloc":
            status = cuda.cuMemAlloc_v2(ctypes.byref(pointer), size(args.piece))
        elif args.via == "async":
            status = cuda.cuMemAllocAsync(ctypes.byref(pointer), size(args.piece), None)
        elif args.via == "managed":
            status = cuda.cuMemAllocManaged(ctypes.byref(pointer), size(args.piece), 1)
        else:
            status = cuda.cuMemCreate(ctypes.byref(pointer), size(args.piece), ctypes.byref(properties), ctypes.c_uint64(0))
        if status:
            break
        pieces += 1
    after = size()
    call("cuMemGetInfo_v2", ctypes.byref(after), ctypes.byref(total))
    print(
        json.dumps(
            {
                "pieces": pieces,
                "bytes": pieces * args.piece,
                "status": status,
                "free_before": free.value,
                "total": total.value,
                "device_total": shown.value,
                "free_after": after.value,
            }
        )
    )


main()
