"""What the figures on a real card share: an allocation without daemons, a program under its hook, its counters, a table of results."""

import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poolmeter.native import native_path
from poolmeter.pages.grant import DeviceGrant, Grant, write_grant
from poolmeter.pages.meter import DeviceCounters, create_meter, read_meter

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Card:
    """The card that is measured."""

    uuid: str
    model: str
    driver: str
    memory_bytes: int


def card() -> Card:
    """The first card of this machine, by NVML."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    found = Card(
        pynvml.nvmlDeviceGetUUID(handle),
        pynvml.nvmlDeviceGetName(handle),
        pynvml.nvmlSystemGetDriverVersion(),
        pynvml.nvmlDeviceGetMemoryInfo(handle).total,
    )
    pynvml.nvmlShutdown()
    return found


@dataclass
class Share:
    """An allocation on one card: its folder, and what its programs counted."""

    folder: Path
    uuid: str

    def environment(self) -> dict[str, str]:
        """The variables that put a program under the hook, in this allocation."""
        return {**os.environ, "LD_PRELOAD": str(native_path("libpoolmeter_hook.so")), "POOLMETER_ALLOCATION_DIR": str(self.folder)}

    def counters(self) -> DeviceCounters:
        """Everything counted so far: live, dead and folded slots."""
        reading = read_meter(self.folder / "meter")
        total = reading.retired.get(self.uuid, DeviceCounters())
        for slot in reading.slots:
            if self.uuid in slot.devices:
                total = total + slot.devices[self.uuid]
        return total


@contextmanager
def share(uuid: str, compute_ppm: int | None = None, memory_bytes: int | None = None, name: str = "a-measure") -> Iterator[Share]:
    """A fresh allocation in a folder of its own."""
    root = Path(tempfile.mkdtemp(prefix="poolmeter-share-"))
    folder = root / "allocations" / name
    folder.mkdir(parents=True)
    (root / "devices").mkdir()
    devices = (DeviceGrant(uuid=uuid, compute_ppm=compute_ppm, memory_bytes=memory_bytes),)
    write_grant(folder / "grant", Grant(allocation_id=name, devices=devices))
    create_meter(folder / "meter", [uuid], allocation_id=name)
    try:
        yield Share(folder, uuid)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def start(words: Sequence[str], environment: Mapping[str, str], log: Path | None = None) -> "subprocess.Popen[str]":
    """A program whose last line of output is a JSON object; what it says on stderr goes to `log` where one is given."""
    if log is None:
        return subprocess.Popen(list(words), env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with log.open("w") as file:
        return subprocess.Popen(list(words), env=dict(environment), stdout=subprocess.PIPE, stderr=file, text=True)


def finish(process: "subprocess.Popen[str]", timeout_s: float = 300) -> dict[str, Any]:
    """The JSON object of its last line; what it said instead when there is none."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return {"failed": f"did not end within {timeout_s:.0f} s", "stderr": (err or "")[-500:]}
    lines = out.strip().splitlines()
    if process.returncode != 0 or not lines:
        return {"failed": f"status {process.returncode}", "stdout": out[-300:], "stderr": (err or "")[-500:]}
    try:
        result: dict[str, Any] = json.loads(lines[-1])
    except ValueError:
        return {"failed": "no JSON", "stdout": out[-300:], "stderr": (err or "")[-500:]}
    return result


def spin_program() -> Path:
    """The CUDA tenant, built by nvcc when it is not there."""
    target = ROOT / "build" / "spin"
    source = ROOT / "benchmarks" / "native" / "spin.cu"
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        target.parent.mkdir(exist_ok=True)
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        subprocess.run([nvcc, "-O2", "-std=c++17", "-arch=native", "-o", str(target), str(source)], check=True)
    return target


def build_native() -> None:
    """Build the native parts with CMake where no installed package brings them."""
    if os.environ.get("POOLMETER_NATIVE"):
        return
    prefix = ROOT / "build" / "prefix"
    for words in (
        ["cmake", "-S", str(ROOT), "-B", str(ROOT / "build" / "card"), "-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_INSTALL_PREFIX={prefix}"],
        ["cmake", "--build", str(ROOT / "build" / "card"), "-j8"],
        ["cmake", "--install", str(ROOT / "build" / "card")],
    ):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    os.environ["POOLMETER_NATIVE"] = str(prefix / "poolmeter" / "native")


class Results:
    """Figures of one call: JSON lines as they come, a Markdown table at the end, both named by date and card."""

    def __init__(self, folder: Path, name: str, found: Card) -> None:
        self.card = found
        self.name = name
        stamp = datetime.datetime.now(datetime.UTC)
        self.head = {
            "date": stamp.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "card": found.model,
            "driver": found.driver,
            "command": " ".join([Path(sys.executable).name, *sys.argv]),
        }
        self.path = folder / f"{stamp:%Y-%m-%d}-{found.model.split()[-1].lower()}-{name}"
        self.rows: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.path.with_suffix(".jsonl").write_text(json.dumps(self.head) + "\n")

    def add(self, section: str, **row: Any) -> None:
        """Keep and print one row at once, so that a call that is cut short loses nothing."""
        self.rows.append({"section": section, **row})
        line = json.dumps(self.rows[-1])
        with self.path.with_suffix(".jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def table(self) -> None:
        """Write the Markdown table."""
        out = [f"# {self.name}", ""] + [f"- {key}: {value}" for key, value in self.head.items()]
        for section in dict.fromkeys(row["section"] for row in self.rows):
            rows = [{k: v for k, v in row.items() if k != "section"} for row in self.rows if row["section"] == section]
            columns = list(dict.fromkeys(key for row in rows for key in row))
            out += ["", f"## {section}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
            out += [f"| {' | '.join(_text(row.get(column)) for column in columns)} |" for row in rows]
        self.path.with_suffix(".md").write_text("\n".join(out) + "\n")


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).replace("|", "/").split("\n"))


def median_ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """Median of the ratios of alternating pairs."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def left(began: float, budget_s: float) -> float:
    """Seconds left of a call's time."""
    return budget_s - (time.monotonic() - began)
