"""Two programs that share memory over a socket: `sharing_program.py exporter|importer SOCKET`, one JSON object out."""

import json
import os
import socket
import sys
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cuda_calls import (
    MIB,
    AllocationProp,
    Cuda,
    ExternalBuffer,
    ExternalHandle,
    IpcHandle,
    Location,
    PoolProps,
)

cuda = Cuda()


def exporter(path: str) -> dict[str, int]:
    """Makes memory in four ways and hands it to whoever connects; frees it when the other is done."""
    cuda.start()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    a, pooled, handle, pool = c_uint64(), c_uint64(), c_uint64(), c_void_p()
    prop = AllocationProp(1, 1, Location(1, 0))
    props = PoolProps(type=1, handle_types=1, location=Location(1, 0))
    assert cuda.MemAlloc_v2(byref(a), c_size_t(4 * MIB)) == 0
    assert cuda.MemCreate(byref(handle), c_size_t(2 * MIB), byref(prop), c_uint64(0)) == 0
    assert cuda.MemPoolCreate(byref(pool), byref(props)) == 0
    assert cuda.MemAllocFromPoolAsync(byref(pooled), c_size_t(MIB), pool, None) == 0
    assert cuda.MemsetD8_v2(a, 42, c_size_t(16)) == 0
    ipc, point, memory_fd, pool_fd = (c_char * 64)(), (c_char * 64)(), c_int(), c_int()
    assert cuda.IpcGetMemHandle(byref(ipc), a) == 0
    assert cuda.MemPoolExportPointer(byref(point), pooled) == 0
    assert cuda.MemExportToShareableHandle(byref(memory_fd), handle, 1, c_uint64(0)) == 0
    assert cuda.MemPoolExportToShareableHandle(byref(pool_fd), pool, 1, c_uint64(0)) == 0
    said = {"exported": cuda.used()}
    connection, _ = listener.accept()
    socket.send_fds(connection, [ipc.raw + point.raw], [memory_fd.value, pool_fd.value])
    connection.recv(1)
    said["while_imported"] = cuda.used()
    again = c_uint64()
    assert cuda.MemImportFromShareableHandle(byref(again), c_void_p(memory_fd.value), 1) == 0
    said["own_import"] = cuda.used()
    assert cuda.MemRelease(again) == 0
    said["own_import_released"] = cuda.used()
    assert cuda.MemFree_v2(a) == cuda.MemFreeAsync(pooled, None) == cuda.MemRelease(handle) == 0
    said["freed"] = cuda.used()
    return said


def importer(path: str) -> dict[str, int]:
    """Imports it all; what is given back must change no account."""
    cuda.start()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    data, descriptors, _, _ = socket.recv_fds(connection, 1000, 2)
    memory_fd, pool_fd = descriptors
    ipc, point = (c_char * 64).from_buffer_copy(data[:64]), (c_char * 64).from_buffer_copy(data[64:128])
    cuda.IpcOpenMemHandle_v2.argtypes = [c_void_p, IpcHandle, c_uint]
    at, pointer, handle, pool, mapped = c_uint64(), c_uint64(), c_uint64(), c_void_p(), c_uint64()
    said = {"own": 0}
    own = c_uint64()
    assert cuda.MemAlloc_v2(byref(own), c_size_t(8 * MIB)) == 0
    said["open"] = cuda.IpcOpenMemHandle_v2(byref(at), IpcHandle.from_buffer_copy(ipc.raw), 1)
    byte = (c_char * 1)()
    said["read"] = cuda.MemcpyDtoH_v2(byte, at, c_size_t(1))
    said["byte"] = byte.raw[0]
    said["import_memory"] = cuda.MemImportFromShareableHandle(byref(handle), c_void_p(memory_fd), 1)
    said["import_pool"] = cuda.MemPoolImportFromShareableHandle(byref(pool), c_void_p(pool_fd), 1, c_uint64(0))
    said["import_pointer"] = cuda.MemPoolImportPointer(byref(pointer), pool, byref(point))
    said["alloc_from_imported"] = cuda.MemAllocFromPoolAsync(byref(mapped), c_size_t(MIB), pool, None)
    external = ExternalHandle(type=1, fd=os.dup(memory_fd), size=2 * MIB)
    memory = c_void_p()
    said["import_external"] = cuda.ImportExternalMemory(byref(memory), byref(external))
    said["external_buffer"] = cuda.ExternalMemoryGetMappedBuffer(byref(mapped), memory, byref(ExternalBuffer(0, 2 * MIB, 0)))
    said["imported"] = cuda.used()
    said["free_opened"] = cuda.MemFree_v2(at)
    said["close"] = cuda.IpcCloseMemHandle(at)
    said["close_twice"] = cuda.IpcCloseMemHandle(at)
    said["release"] = cuda.MemRelease(handle)
    said["free_pointer"] = cuda.MemFreeAsync(pointer, None)
    said["free_buffer"] = cuda.MemFree_v2(mapped)
    said["destroy_external"] = cuda.DestroyExternalMemory(memory)
    said["given_back"] = cuda.used()
    said["free_own"] = cuda.MemFree_v2(own)
    said["end"] = cuda.used()
    connection.send(b"x")
    return said


if __name__ == "__main__":
    print(json.dumps({"exporter": exporter, "importer": importer}[sys.argv[1]](sys.argv[2])))
