"""The table of what a program holds, against a dictionary; and that all of a context goes in a time that grows with its number."""

import ctypes
import subprocess
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .conftest import HOOK

CLASS = 0


class Holding(ctypes.Structure):
    """struct pm_holding."""

    _fields_ = (
        ("key", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("other", ctypes.c_uint64),
        ("device", ctypes.c_uint32),
        ("kind", ctypes.c_uint16),
        ("uses", ctypes.c_uint16),
        ("note", ctypes.c_uint64),
    )


class Table:
    """A table of the library's."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.at = ctypes.c_void_p(library.pm_pointers_create())
        self.found = Holding()

    def put(self, key: int, size: int, other: int) -> None:
        assert self.library.pm_pointers_put(self.at, CLASS, ctypes.byref(Holding(key=key, bytes=size, other=other, uses=1)))

    def take(self, key: int) -> int | None:
        return self.found.bytes if self.library.pm_pointers_take(self.at, CLASS, ctypes.c_uint64(key), ctypes.byref(self.found)) else None

    def take_any(self, other: int, cursor: ctypes.c_size_t) -> tuple[int, int] | None:
        found = self.library.pm_pointers_take_any(self.at, CLASS, ctypes.c_uint64(other), ctypes.byref(cursor), ctypes.byref(self.found))
        return (self.found.key, self.found.bytes) if found else None


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("pointers") / "pointers.so"
    command = ["cc", "-std=gnu11", "-O2", "-fPIC", "-shared", f"-I{HOOK}", str(HOOK / "pointers.c"), "-o", str(target), "-lpthread"]
    subprocess.run(command, check=True)
    found = ctypes.CDLL(str(target))
    found.pm_pointers_create.restype = ctypes.c_void_p
    for name in ("put", "take", "take_any"):
        getattr(found, f"pm_pointers_{name}").restype = ctypes.c_bool
    return found


keys = st.integers(1, 1 << 20)
changes = st.lists(st.tuples(st.booleans(), keys, st.integers(1, 3)), max_size=6)


@given(held=st.lists(st.tuples(keys, st.integers(1, 3)), max_size=400), meanwhile=st.lists(changes, max_size=60))
def test_all_of_one_context_goes_whatever_comes_and_goes_meanwhile(
    library: ctypes.CDLL, held: list[tuple[int, int]], meanwhile: list[list[tuple[bool, int, int]]]
) -> None:
    table, model, cursor = Table(library), dict[int, tuple[int, int]](), ctypes.c_size_t()

    def put(key: int, other: int) -> None:
        table.put(key, key * 3, other)
        model[key] = (key * 3, other)

    for key, other in held:
        put(key, other)
    for step in [*meanwhile, *[[]] * 1000]:
        found = table.take_any(1, cursor)
        if found is None:
            break
        assert model.pop(found[0]) == (found[1], 1)
        for comes, key, other in step:  # nothing new of the context that goes
            if comes and key not in model:
                put(key, 2 if other == 1 else other)
            elif not comes:
                assert table.take(key) == model.pop(key, (None,))[0]
    assert not [key for key, (_, other) in model.items() if other == 1]
    assert all(table.take(key) == size for key, (size, _) in model.items())


def test_a_context_with_very_many_allocations_goes_in_a_moment(library: ctypes.CDLL) -> None:
    table, cursor, count = Table(library), ctypes.c_size_t(), 400_000
    for index in range(count):
        table.put(0x7F0000000000 + (index << 9), 512, 1)
    began = time.process_time()
    for _ in range(count):
        assert table.take_any(1, cursor)
    assert table.take_any(1, cursor) is None
    assert time.process_time() - began < 30  # nearly all of it the calls from here; minutes where each looks from the front
