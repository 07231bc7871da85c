"""Driver, device files and cards."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from poolmeter.exporter.doctor.finding import Finding, Machine, Subject, ok, problem, unknown, warning

_MISMATCH, _NOT_LOADED, _NO_PERMISSION = 18, 9, 4  # NVML_ERROR_LIB_RM_VERSION_MISMATCH, _DRIVER_NOT_LOADED, _NO_PERMISSION
_VERSION = re.compile(r"\s(\d+\.\d+(?:\.\d+)?)\s")
_FILE_VERSION = re.compile(r"\.so\.(\d+\.\d+(?:\.\d+)?)$")
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


def ask(subject: Subject, wake: bool, timeout_s: float) -> Mapping[str, Any] | Finding:
    """What the libraries say, or the finding that there is no answer; the child that asks is killed when it takes too long."""
    words = [sys.executable, "-m", "poolmeter.exporter.doctor.probe", *(["--wake"] if wake else [])]
    environment = {**os.environ, **(subject.simulated or {})}
    try:
        done = subprocess.run(words, env=environment, capture_output=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return problem("driver library", f"the driver gave no answer within {timeout_s:g} s", "nvidia-smi")
    except OSError as error:
        return unknown("driver library", f"{sys.executable}, which is to ask the driver, cannot be started: {error.strerror}")
    try:
        return dict(json.loads(done.stdout))
    except (ValueError, TypeError):
        last = done.stderr.decode(errors="replace").strip().splitlines()
        found = f"asking the driver ended with status {done.returncode}: {last[-1] if last else 'it said nothing'}"
        return problem("driver library", found, "nvidia-smi")


def kernel_version(machine: Machine) -> str | None:
    """The version of the kernel module that is loaded; None when there is none."""
    for path in (machine.proc / "driver" / "nvidia" / "version", machine.sys / "module" / "nvidia" / "version"):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        match = _VERSION.search(f" {text.splitlines()[0]} " if text else "")
        if match:
            return match[1]
    return None


def held(machine: Machine) -> bool:
    """Whether some program holds the cards already, so that asking them starts none."""
    try:
        processes = [entry for entry in os.scandir(machine.proc) if entry.name.isdigit()]
    except OSError:
        return False
    for entry in processes:
        try:
            if Path(entry.path, "comm").read_text(errors="replace").startswith("nvidia-persiste"):
                return True
            for descriptor in os.scandir(Path(entry.path, "fd")):
                if re.fullmatch(r"/dev/nvidia\d+", os.readlink(descriptor.path)):
                    return True
        except OSError:
            continue  # another user's, or gone
    return False


def findings(subject: Subject, machine: Machine, answer: Mapping[str, Any] | Finding) -> Iterator[Finding]:
    """Library, kernel module, device files and each card."""
    if isinstance(answer, Finding):
        yield answer
        answer = {}
    else:
        yield from _library(subject, machine, answer)
    if subject.simulated is None:
        yield from _module(machine)
        yield from _device_files(machine, answer)
    yield from _cards(answer)


def _library(subject: Subject, machine: Machine, answer: Mapping[str, Any]) -> Iterator[Finding]:
    nvml, cuda, init = answer.get("nvml", {}), answer.get("cuda", {}), answer.get("init")
    kernel = kernel_version(machine) if subject.simulated is None else None
    name = "driver library"
    library = file_version(nvml.get("file")) or _after_cuda(answer.get("library"))
    if "error" in nvml:
        fix = "sudo apt install libnvidia-ml1" if subject.simulated is None else "make install"
        yield problem(name, f"libnvidia-ml.so.1 is not found by the loader: {nvml['error']}", fix)
    elif init is not None and (init.get("code") == _MISMATCH or (kernel and library and kernel != library)):
        found = f"libnvidia-ml.so.1 is of version {library or 'another version'}, the loaded kernel module of {kernel or 'another one'}"
        yield problem(name, f"{found}, expected the same", "sudo reboot")
    elif init is not None and init.get("code") == _NOT_LOADED:
        yield problem(name, "libnvidia-ml.so.1 is there and says that no driver is loaded", "sudo modprobe nvidia")
    elif init is not None and init.get("code") == _NO_PERMISSION:
        yield problem(name, f"uid {os.geteuid()} may not use the driver", "ls -l /dev/nvidia*")
    elif init is not None:
        yield problem(name, f"libnvidia-ml.so.1 does not start: {init.get('error')}", "nvidia-smi")
    elif kernel and library and kernel != library:
        yield warning(name, f"libnvidia-ml.so.1 is of version {library}, the kernel module of {kernel}, expected the same", "sudo reboot")
    else:
        kind = "simulated, " if subject.simulated is not None else ""
        yield ok(name, f"libnvidia-ml.so.1 {library or '(version not told)'} ({kind}driver {answer.get('driver') or 'not told'})")
    if "error" in cuda:
        fix = "sudo apt install libcuda1" if subject.simulated is None else "make install"
        yield problem("cuda library", f"libcuda.so.1 is not found by the loader, so no program can use a card: {cuda['error']}", fix)
    else:
        yield ok("cuda library", f"libcuda.so.1 is {cuda.get('file') or 'there'}")


def file_version(path: str | None) -> str | None:
    """`580.95.05` of `…/libnvidia-ml.so.580.95.05`."""
    match = _FILE_VERSION.search(path or "")
    return match[1] if match else None


def _after_cuda(version: str | None) -> str | None:
    # NVML's own version is the CUDA major version, a dot, the driver's version.
    return version.partition(".")[2] or None if version else None


def _module(machine: Machine) -> Iterator[Finding]:
    version = kernel_version(machine)
    if version is not None:
        yield ok("kernel module", f"nvidia {version} is loaded")
    elif (machine.sys / "module" / "nvidia").exists():
        yield unknown("kernel module", "nvidia is loaded, and its version cannot be read", "cat /proc/driver/nvidia/version")
    else:
        yield problem("kernel module", "the module nvidia is not loaded", "sudo modprobe nvidia")


def _device_files(machine: Machine, answer: Mapping[str, Any]) -> Iterator[Finding]:
    name = "device files"
    numbered = sorted(path.name for path in machine.dev.glob("nvidia[0-9]*") if path.name[6:].isdigit())
    wanted = ["nvidiactl", "nvidia-uvm", *numbered]
    absent = [entry for entry in wanted if not (machine.dev / entry).exists()]
    closed = [entry for entry in wanted if entry not in absent and not os.access(machine.dev / entry, os.R_OK | os.W_OK)]
    count = answer.get("count")
    if absent:
        yield problem(
            name,
            f"{', '.join(f'/dev/{entry}' for entry in absent)} {'are' if len(absent) > 1 else 'is'} absent",
            "sudo nvidia-modprobe -u -c 0",
        )
    elif not numbered:
        yield problem(name, "there is no /dev/nvidia0, expected one file a card", "sudo nvidia-modprobe -c 0")
    elif closed:
        listed = ", ".join(f"/dev/{entry}" for entry in closed)
        yield problem(name, f"{listed} cannot be read and written by uid {os.geteuid()}", 'sudo usermod -aG video "$USER"')
    elif isinstance(count, int) and count > len(numbered):
        yield warning(name, f"{len(numbered)} /dev/nvidiaN for {count} cards", f"sudo nvidia-modprobe -c {len(numbered)}")
    else:
        yield ok(name, f"/dev/nvidiactl, /dev/nvidia-uvm and {len(numbered)} /dev/nvidiaN can be used")


def _cards(answer: Mapping[str, Any]) -> Iterator[Finding]:
    if "count" not in answer:
        return
    count, cards = answer["count"], answer.get("cards")
    if count is None:
        yield unknown("cards", "the driver does not say how many cards there are", "nvidia-smi -L")
    elif count == 0:
        yield problem("cards", "the driver knows no card", "lspci -d 10de:")
    elif cards is None:
        found = f"no program is seen to hold the {count} cards, and asking might start them; their modes were left alone"
        yield unknown("cards", found, "poolmeter doctor --wake")
    for row in cards or ():
        yield from card_findings(row)


def card_findings(row: Mapping[str, Any]) -> Iterator[Finding]:
    """One card: whether it answers, sharing mode, persistence, accounting."""
    index = row.get("index")
    name = f"card {index}"
    if row.get("error"):
        yield problem(name, f"it is lost or does not answer: {row['error']}", f"sudo nvidia-smi --gpu-reset -i {index}")
        return
    mig, mode = row.get("mig"), row.get("compute_mode")
    clients = row.get("mps_clients")
    card = " ".join(str(row[key]) for key in ("model", "uuid") if row.get(key) is not None)
    if mig and mig[0] != mig[-1]:
        yield warning(
            name, f"MIG mode is {_onoff(mig[0])} and becomes {_onoff(mig[-1])} at the next reset", f"sudo nvidia-smi --gpu-reset -i {index}"
        )
    elif mode == 2:
        yield problem(name, "compute mode is prohibited: no program may use it", f"sudo nvidia-smi -i {index} -c DEFAULT")
    elif mode in (1, 3) and clients == 0:
        found = f"compute mode is {_COMPUTE_MODES[mode]}: one program at a time, so its shares cannot run side by side"
        yield warning(name, found, f"sudo nvidia-smi -i {index} -c DEFAULT")
    elif mig and mig[0]:
        yield warning(name, "it is in MIG mode, which this version does not share out", f"sudo nvidia-smi -i {index} -mig 0")
    elif mode is None or clients is None:
        untold = [what for what, told in (("compute mode", mode), ("MPS clients", clients)) if told is None]
        yield unknown(
            name, f"{card}: the driver does not tell its {' and '.join(untold)}, and so not how it is shared", f"nvidia-smi -q -i {index}"
        )
    else:
        sharing = f"MPS ({clients} clients)" if clients else "time slicing"
        yield ok(name, f"{card}: shared by {sharing}, compute mode {_COMPUTE_MODES.get(mode, mode)}")
    persistence = row.get("persistence")
    if persistence == 0:
        found = "persistence mode is off: the card is started anew whenever its first program comes, and its energy counter begins again"
        yield warning(f"{name} persistence", found, f"sudo nvidia-smi -i {index} -pm 1")
    elif persistence is None:
        yield unknown(f"{name} persistence", "the driver does not say whether persistence mode is on")
    else:
        yield ok(f"{name} persistence", "persistence mode is on")
    accounting = row.get("accounting")
    if accounting is None:
        yield unknown(f"{name} accounting", "the driver does not say whether accounting mode is on (MIG has none)")
    else:
        told = "use of programs without the hook is exact" if accounting else "use of programs without the hook is sampled"
        yield ok(f"{name} accounting", f"accounting mode is {_onoff(accounting)}: {told}")


def _onoff(value: object) -> str:
    return "on" if value else "off"
