"""Asks a CUDA driver and NVML many small questions and prints the answers as JSON: `{"group": {"question": answer}}`.

The same program (this folder, run as `python conformance`) runs on a real card (its answers are kept in goldens/) and on the simulator. It
needs nothing but Python and, for NVML, nvidia-ml-py. Every group is a process of its own, so that a question that crashes a driver costs that
group only.
"""

import json
import subprocess
import sys
from typing import Any

import capture
import nvml
import objects
import work
from driver import Cuda

TOPICS = (objects, capture, work, nvml)
GROUPS = {name.removeprefix("group_"): value for topic in TOPICS for name, value in vars(topic).items() if name.startswith("group_")}


def main() -> None:
    if len(sys.argv) > 1:
        cu = Cuda()
        try:
            GROUPS[sys.argv[1]](cu)
        finally:
            print(json.dumps(cu.found))
        return
    answers: dict[str, Any] = {}
    for name in GROUPS:
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, timeout=120)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        answers[name] = json.loads(lines[-1]) if lines else {}
        if done.returncode != 0:
            answers[name]["ended with"] = done.returncode
            sys.stderr.write(f"{name}: {done.stderr[-2000:]}\n")
    print(json.dumps(answers, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
