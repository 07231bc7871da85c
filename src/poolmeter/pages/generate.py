"""Generates `layout.py` from `enforcer/native/abi/poolmeter_abi.h`: `python -m poolmeter.pages.generate [--check]`."""

import argparse
import re
import sys
from pathlib import Path

_SCALARS = {"uint64_t": "ctypes.c_uint64", "uint32_t": "ctypes.c_uint32", "int64_t": "ctypes.c_int64", "char": "ctypes.c_char"}
_DEFINE = re.compile(r"^#define PM_(\w+) (0x[0-9a-f]+|\d+)\b")
_STRUCT = re.compile(r"^struct (pm_\w+) \{$")
_MEMBER = re.compile(r"^(?:struct )?(\w+) (\w+)(?:\[(\d+)\])?;$")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


def header_path() -> Path:
    """The ABI header of this source tree."""
    return Path(__file__).resolve().parents[3] / "enforcer" / "native" / "abi" / "poolmeter_abi.h"


def class_name(struct: str) -> str:
    """`pm_grant_device` -> `GrantDevice`."""
    return "".join(part.capitalize() for part in struct.removeprefix("pm_").split("_"))


def _number(text: str) -> str:
    return f"0x{text[2:].upper()}" if text.startswith("0x") else text


def generate(header: str) -> str:
    """The text of `layout.py` for the text of the header; raises ValueError for a line outside the header's dialect."""
    constants: list[str] = []
    classes: list[str] = []
    names: list[str] = []
    members: list[str] | None = None
    text = _COMMENT.sub("", header)
    for line in (raw.strip() for raw in text.splitlines()):
        if members is None:
            if define := _DEFINE.match(line):
                constants.append(f"{define[1]} = {_number(define[2])}")
            elif struct := _STRUCT.match(line):
                members = []
                names.append(struct[1])
            continue
        if line == "};":
            body = "".join(f"        {member},\n" for member in members)
            classes.append(f"class {class_name(names[-1])}(ctypes.LittleEndianStructure):\n    _fields_ = (\n{body}    )\n")
            members = None
        elif line:
            member = _MEMBER.match(line)
            if member is None:
                raise ValueError(f"struct {names[-1]} holds {line!r}, expected a member of the header's dialect")
            kind = _SCALARS.get(member[1]) or class_name(member[1])
            members.append(f'("{member[2]}", {kind}{f" * {member[3]}" if member[3] else ""})')
    table = "".join(f'    "{name}": {class_name(name)},\n' for name in names)
    return (
        '"""Layout of the grant, meter and board pages. Generated from poolmeter_abi.h by poolmeter.pages.generate: do not edit."""\n\n'
        "import ctypes\n\n"
        + "\n".join(constants)
        + "\n\n\n"
        + "\n\n".join(classes)
        + f"\n\nSTRUCTURES: dict[str, type[ctypes.LittleEndianStructure]] = {{\n{table}}}\n"
    )


def main() -> int:
    """Writes layout.py, or with --check says whether it is current (exit status 1 when not)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when layout.py is not current")
    arguments = parser.parse_args()
    target = Path(__file__).with_name("layout.py")
    text = generate(header_path().read_text())
    if arguments.check:
        return 0 if target.exists() and target.read_text() == text else 1
    target.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
