"""Writes the parts of the simulated driver that follow from cuda.h: call numbers, loud stubs, per-thread variants, the symbol table.

Usage: generate.py --cc CC --include DIR --nvml-names FILE --out DIR SOURCE...

Every `cu*` function that cuda.h declares (all versions) gets a number. Those that no SOURCE defines become stubs that print their name and
return CUDA_ERROR_NOT_SUPPORTED; `X_ptsz`/`X_ptds` whose X is defined become wrappers that run X on the per-thread default stream.
cudaTypedefs.h says with which CUDA version each variant came, which is what cuGetProcAddress chooses by.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

DECLARATION = re.compile(r"\bCUresult\s+(cu[A-Z]\w*)\s*\(([^;{]*?)\)\s*;")
DEFINITION = re.compile(r"^CUresult CUDAAPI (cu[A-Z]\w*)\(", re.MULTILINE)
NVML_DEFINITION = re.compile(r"^(?:nvmlReturn_t |const char \*|CARD_[A-Z_]+\()(nvml[A-Z]\w*)[(,)]", re.MULTILINE)
TYPEDEF = re.compile(r"\bPFN_(cu[A-Z][A-Za-z0-9]*)_v(\d+)(_ptsz|_ptds)?\b")


def preprocess(cc: list[str], include: Path, header: str) -> str:
    """The text of `header` after the preprocessor, with every version of every function declared."""
    text = f"#define __CUDA_API_VERSION_INTERNAL\n#include <{header}>\n"
    done = subprocess.run([*cc, "-E", "-P", "-x", "c", f"-I{include}", "-"], input=text, capture_output=True, text=True, check=True)
    return done.stdout


def declarations(text: str) -> dict[str, str]:
    """Function name -> parameter text, for every `cu*` function declared in the preprocessed cuda.h."""
    found: dict[str, str] = {}
    for name, params in DECLARATION.findall(text):
        found[name] = " ".join(params.split())
    return found


def split_suffix(name: str) -> tuple[str, int, str]:
    """`cuMemcpyHtoD_v2_ptds` -> ("cuMemcpyHtoD", 2, "_ptds"); no version is 1, no suffix is ""."""
    suffix = ""
    for tail in ("_ptsz", "_ptds"):
        if name.endswith(tail):
            name, suffix = name[: -len(tail)], tail
    version = 1
    if match := re.search(r"_v(\d+)$", name):
        name, version = name[: match.start()], int(match.group(1))
    return name, version, suffix


def argument_names(params: str) -> list[str]:
    """The names in a parameter list such as `CUdevice *device, int ordinal`."""
    if params in ("", "void"):
        return []
    names = []
    for part in params.split(","):
        match = re.search(r"(\w+)\s*(\[[^\]]*\])?\s*$", part)
        if match is None:
            raise SystemExit(f"generate.py: the parameter {part!r} has no name")
        names.append(match.group(1))
    return names


def symbol_rows(names: dict[str, str], typedefs: str) -> list[tuple[str, int, str, str]]:
    """(name asked for, CUDA version it came with, "" | "_ptsz" | "_ptds", symbol): the n-th version of a name is its n-th variant."""
    versions: dict[tuple[str, str], set[int]] = {}
    for base, number, suffix in TYPEDEF.findall(typedefs):
        versions.setdefault((base, suffix), set()).add(int(number))
    variants: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name in names:
        base, version, suffix = split_suffix(name)
        variants.setdefault((base, suffix), []).append((version, name))
    rows = []
    for (base, suffix), found in sorted(variants.items()):
        came = sorted(versions.get((base, suffix), set()))
        if len(came) != len(found):
            raise SystemExit(f"generate.py: {base}{suffix} has {len(found)} variants in cuda.h and {len(came)} versions in cudaTypedefs.h")
        rows += [(base, number, suffix, name) for number, (_, name) in zip(came, sorted(found), strict=True)]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cc", required=True)
    parser.add_argument("--include", type=Path, required=True)
    parser.add_argument("--nvml-names", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("sources", type=Path, nargs="+")
    args = parser.parse_args()
    cc = [word for word in args.cc.split(";") if word]

    cuda = declarations(preprocess(cc, args.include, "cuda.h"))
    typedefs = preprocess(cc, args.include, "cudaTypedefs.h")
    nvml = args.nvml_names.read_text().split()
    text = "".join(source.read_text() for source in args.sources)
    defined = set(DEFINITION.findall(text))
    nvml_defined = set(NVML_DEFINITION.findall(text))
    if unknown := sorted(defined - set(cuda)):
        raise SystemExit(f"generate.py: cuda.h does not declare {', '.join(unknown)}")
    nvml = sorted(set(nvml) | nvml_defined)

    wrappers: list[str] = []
    stubs: list[str] = []
    for name, params in sorted(cuda.items()):
        if name in defined:
            continue
        base = re.sub(r"_pt[sd][sz]$", "", name)
        if base != name and base in defined:
            call = ", ".join(argument_names(params))
            wrappers.append(
                f"CUresult CUDAAPI {name}({params}) {{\n    ENTER({name});\n    thread_state.per_thread_default++;\n"
                f"    CUresult rc = {base}({call});\n    thread_state.per_thread_default--;\n    return rc;\n}}\n"
            )
        else:
            stubs.append(f'CUresult CUDAAPI {name}({params}) {{ return sim_unimplemented(CALL_{name}, "{name}"); }}\n')

    every = sorted(cuda) + nvml
    args.out.mkdir(parents=True, exist_ok=True)
    calls = "".join(f"    CALL_{name},\n" for name in every)
    write(
        args.out / "calls.h",
        "#ifndef POOLMETER_SIM_CALLS_H\n#define POOLMETER_SIM_CALLS_H\nenum sim_call_number {\n" + calls + "    CALL_COUNT\n};\n#endif\n",
    )
    known = defined | {re.match(r"CUresult CUDAAPI (\w+)", wrapper).group(1) for wrapper in wrappers} | nvml_defined  # type: ignore[union-attr]
    listed = "".join(f'    {{"{name}", {int(name in known)}}},\n' for name in every)
    write(
        args.out / "call_names.c",
        '#include "call_names.h"\nconst struct sim_call_name sim_call_names[] = {\n' + listed + "};\n"
        f"const unsigned sim_call_count = {len(every)};\n",
    )
    write(
        args.out / "call_names.h",
        "struct sim_call_name {\n    const char *name;\n    int implemented;\n};\n"
        "extern const struct sim_call_name sim_call_names[];\nextern const unsigned sim_call_count;\n",
    )
    quiet = '#pragma GCC diagnostic ignored "-Wunused-parameter"\n#pragma GCC diagnostic ignored "-Wdeprecated-declarations"\n'
    write(args.out / "cuda_stubs.c", '#include "state.h"\n' + quiet + "".join(stubs))
    write(args.out / "cuda_per_thread.c", '#include "state.h"\n' + quiet + "".join(wrappers))
    rows = "".join(
        f'    {{"{base}", {version}, {int(suffix != "")}, "{name}", (void *)(uintptr_t){name}}},\n'
        for base, version, suffix, name in symbol_rows(cuda, typedefs)
    )
    write(
        args.out / "cuda_symbols_table.c",
        '#include "state.h"\n#include "symbols.h"\n'
        + quiet
        + "const struct sim_symbol sim_symbols[] = {\n"
        + rows
        + "};\nconst unsigned sim_symbol_count = sizeof sim_symbols / sizeof sim_symbols[0];\n",
    )
    nvml_stubs = "".join(
        f'__attribute__((visibility("default"))) int {name}(void);\nint {name}(void) {{ return nvml_unimplemented(CALL_{name}, "{name}"); }}\n'
        for name in nvml
        if name not in nvml_defined
    )
    write(args.out / "nvml_stubs.c", '#include "nvml_state.h"\n' + nvml_stubs)


def write(path: Path, text: str) -> None:
    """Writes only what changed, so that a rebuild compiles only what changed."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


if __name__ == "__main__":
    main()
