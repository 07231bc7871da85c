"""The Python layout is the C one: regenerated text, offsets from a C compiler, and a golden page of hashes."""

import ctypes
import hashlib
import subprocess
from pathlib import Path

from poolmeter.pages import layout
from poolmeter.pages.generate import generate, header_path

GOLDEN = Path(__file__).parent / "golden"


def test_layout_is_generated_from_the_header() -> None:
    current = Path(layout.__file__).read_text()
    assert generate(header_path().read_text()) == current, "run python -m poolmeter.pages.generate"


def members(structure: type[ctypes.LittleEndianStructure]) -> list[str]:
    return [name for name, *_ in structure._fields_]


def test_offsets_and_sizes_are_the_compilers(tmp_path: Path) -> None:
    lines = ["#include <stdio.h>", "#include <stddef.h>", '#include "poolmeter_abi.h"', "int main(void) {"]
    for struct, structure in layout.STRUCTURES.items():
        lines.append(f'printf("{struct} %zu\\n", sizeof(struct {struct}));')
        lines += [f'printf("{struct}.{name} %zu\\n", offsetof(struct {struct}, {name}));' for name in members(structure)]
    source = tmp_path / "offsets.c"
    source.write_text("\n".join([*lines, "}"]))
    subprocess.run(["cc", f"-I{header_path().parent}", str(source), "-o", str(tmp_path / "offsets")], check=True)
    found = dict(
        line.split() for line in subprocess.run([str(tmp_path / "offsets")], capture_output=True, text=True, check=True).stdout.splitlines()
    )
    expected = {}
    for struct, structure in layout.STRUCTURES.items():
        expected[struct] = str(ctypes.sizeof(structure))
        expected |= {f"{struct}.{name}": str(getattr(structure, name).offset) for name in members(structure)}
    assert found == expected


def filled(structure: type[ctypes.LittleEndianStructure], path: str) -> bytes:
    """The structure with every scalar field set to a hash of its own path."""
    data = bytearray(ctypes.sizeof(structure))
    for name, kind in ((field[0], field[1]) for field in structure._fields_):
        place = getattr(structure, name)
        count, item = (kind._length_, kind._type_) if issubclass(kind, ctypes.Array) else (1, kind)
        size = ctypes.sizeof(item)
        if item is ctypes.c_char:
            data[place.offset : place.offset + count] = hashlib.shake_128(f"{path}.{name}".encode()).digest(count)
            continue
        for index in range(count):
            start, own = place.offset + index * size, f"{path}.{name}[{index}]"
            data[start : start + size] = (
                filled(item, own) if issubclass(item, ctypes.Structure) else hashlib.shake_128(own.encode()).digest(size)
            )
    return bytes(data)


def test_golden_pages_hold_every_field_where_it_was() -> None:
    for name in ("pm_grant", "pm_meter", "pm_meter_device", "pm_slot", "pm_counters", "pm_board"):
        golden = GOLDEN / f"{name}-{layout.ABI_MAJOR}.sha256"
        found = hashlib.sha256(filled(layout.STRUCTURES[name], name)).hexdigest()
        assert found == golden.read_text().strip(), f"a field of {name} moved, changed size or was renamed: see docs on the ABI"
