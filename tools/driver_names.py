"""Writes the names of every function that a cuda.h declares, all versions: `tools/driver_names.py INCLUDE_FOLDER > tests/hook/cuda-X.Y.txt`.

The newest header comes with the newest nvidia-cuda-runtime wheel (`pip download --no-deps nvidia-cuda-runtime`), in nvidia/cu13/include. The
header itself is not ours to keep; the names are compared with docs/reference/entry-points.md by a test.
"""

import re
import subprocess
import sys
from pathlib import Path

DECLARATION = re.compile(r"\bCUresult\s+(cu[A-Z]\w*)\s*\(")


def names(include: Path) -> list[str]:
    """The functions, sorted. `include`: the folder of cuda.h. Raises CalledProcessError when it cannot be preprocessed."""
    text = "#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>\n"
    done = subprocess.run(["cc", "-E", "-P", "-x", "c", f"-I{include}", "-"], input=text, capture_output=True, text=True, check=True)
    return sorted(set(DECLARATION.findall(done.stdout)))


if __name__ == "__main__":
    print("\n".join(names(Path(sys.argv[1]))))
