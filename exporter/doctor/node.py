"""Hook, pages, folders, and how this machine names processes."""

import os
import shlex
import socket
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from poolmeter.errors import PoolmeterError, Unavailable
from poolmeter.exporter.allocations import AllocationFolders, AllocationReading
from poolmeter.exporter.doctor.finding import Finding, Machine, Subject, ok, problem, unknown, warning
from poolmeter.native import native_path
from poolmeter.pages import layout
from poolmeter.pages.access import open_page
from poolmeter.places import NodeRun

_HOST_PID_NAMESPACE = 0xEFFFFFFC  # include/linux/proc_ns.h: PROC_PID_INIT_INO
_SHOWN = 3


def hook_findings() -> Iterator[Finding]:
    """Whether the hook library is there and a program can be started with it."""
    try:
        hook = native_path("libpoolmeter_hook.so")
        native_path("libpoolmeter_pages.so")
    except Unavailable as error:
        yield problem("hook", str(error), "make install")
        return
    if any(char in str(hook) for char in " :"):
        yield problem("hook", f"{hook} cannot be preloaded, expected a path without spaces and colons", "make install")
        return
    try:
        done = subprocess.run(["/bin/true"], env={"LD_PRELOAD": str(hook)}, capture_output=True, timeout=10, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield unknown("hook", f"{hook} could not be tried: {error}", f"LD_PRELOAD={hook} /bin/true")
        return
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode != 0 or "cannot be preloaded" in said:
        why = said.splitlines()[0] if said else f"a program with it ended with status {done.returncode}"
        yield problem("hook", f"{hook} cannot be loaded: {why}", "make install")
    else:
        yield ok("hook", f"{hook} can be loaded (pages of ABI {layout.ABI_MAJOR}.{layout.ABI_MINOR})")


def run_findings(subject: Subject) -> Iterator[Finding]:
    """Run folder, enforcer, and every allocation's pages."""
    run = NodeRun(subject.run)
    if not run.root.exists():
        yield warning("run folder", f"{run.root} is absent: no enforcer has run here", "sudo systemctl enable --now poolmeter-enforcer")
        return
    found, trouble = AllocationFolders(run).read()
    if trouble is not None:
        yield unknown("run folder", f"{trouble}, so nothing is known of allocations", "sudo poolmeter doctor")
    yield from _permissions(run, found)
    yield _enforcer(run)
    yield from _pages(found)


def _permissions(run: NodeRun, found: Mapping[str, AllocationReading]) -> Iterator[Finding]:
    name = "permissions"
    open_to_all: list[str] = []
    checked = 0
    folders = [folder for folder in (run.root, run.allocations, run.retired) if folder.exists()]
    pages = [reading.folder / "grant" for reading in found.values() if not reading.retired]
    for path in (*folders, *pages):
        try:
            mode = path.lstat().st_mode
        except OSError:
            continue
        checked += 1
        if mode & 0o022 and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
            open_to_all.append(str(path))
    if open_to_all:
        shown = ", ".join(open_to_all[:_SHOWN])
        more = f" and {len(open_to_all) - _SHOWN} more" if len(open_to_all) > _SHOWN else ""
        yield problem(
            name,
            f"{shown}{more} can be written by others: tenants could change their own limits",
            f"sudo chmod go-w {shlex.quote(open_to_all[0])}",
        )
    else:
        yield ok(name, f"{checked} folders and grants under {run.root} can be written by their owner alone")


def _enforcer(run: NodeRun) -> Finding:
    fix = "sudo systemctl restart poolmeter-enforcer"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
        asked.settimeout(2)
        try:
            asked.connect(str(run.socket))
        except FileNotFoundError:
            return warning("enforcer", f"{run.socket} is absent: no enforcer runs here, so no share can be made or changed", fix)
        except PermissionError:
            return unknown("enforcer", f"{run.socket} cannot be opened by uid {os.geteuid()}", "sudo poolmeter doctor")
        except OSError as error:
            return problem("enforcer", f"nobody answers at {run.socket}: {error.strerror or error}", fix)
    return ok("enforcer", f"it answers at {run.socket}")


def _pages(found: Mapping[str, AllocationReading]) -> Iterator[Finding]:
    readings = list(found.values())
    versions: dict[str, int] = {}
    sound = 0
    for reading in readings:
        for page, magic in (("grant", layout.GRANT_MAGIC), ("meter", layout.METER_MAGIC)):
            version = page_version(reading.folder / page, magic)
            if version is not None:
                versions[version] = versions.get(version, 0) + 1
        if not reading.faults:
            sound += 1
            continue
        why = "; ".join(reading.faults)
        foreign = any("ABI version" in fault for fault in reading.faults)
        denied = any("cannot be opened by uid" in fault or "Permission denied" in fault for fault in reading.faults)
        name = f"pages of {reading.id}"
        if foreign:
            yield problem(
                name, f"{why}: its programs were started by another version", f"poolmeter allocation release {shlex.quote(reading.id)}"
            )
        elif reading.tampered is not None:
            yield problem(name, f"torn or foreign: {why}", f"poolmeter allocation release {shlex.quote(reading.id)}")
        elif denied:
            yield unknown(name, why, "sudo poolmeter doctor")
        else:
            yield warning(name, why, f"poolmeter allocation show {shlex.quote(reading.id)}")
    used = ", ".join(f"{count} of ABI {version}" for version, count in sorted(versions.items())) or "none"
    yield ok("pages", f"{sound} of {len(readings)} allocations are sound; pages: {used}")
    yield from _faults(readings)


def _faults(readings: list[AllocationReading]) -> Iterator[Finding]:
    for reading in readings:
        if reading.meter is None:
            continue
        faults = sum(reading.meter.hook_faults(uuid) for uuid in reading.meter.device_uuids)
        if faults:
            tenant = f" of {reading.allocation.labels.tenant}" if reading.allocation else ""
            found = f"the hook counted {faults} faults of its own in {reading.id}{tenant}: what it could not meter is not on the bill"
            yield warning("hook faults", found, f"poolmeter allocation show {shlex.quote(reading.id)}")


def page_version(path: Path, magic: int) -> str | None:
    """`1.0` of a grant or meter page, also of one that this version cannot read; None when it is neither or cannot be opened."""
    try:
        with open_page(path) as descriptor:
            head = os.pread(descriptor, layout.Meter.abi_minor.offset + 4, 0)
    except (PoolmeterError, OSError):
        return None
    if len(head) < layout.Meter.abi_minor.offset + 4 or int.from_bytes(head[:8], "little") != magic:
        return None
    major, minor = (int.from_bytes(head[at : at + 4], "little") for at in (layout.Meter.abi_major.offset, layout.Meter.abi_minor.offset))
    return f"{major}.{minor}"


def machine_findings(machine: Machine) -> Iterator[Finding]:
    """Control groups and pid namespace: what attribution of processes needs."""
    groups = machine.sys / "fs" / "cgroup"
    if (groups / "cgroup.controllers").exists():
        yield ok("cgroup", f"version 2 at {groups}")
    elif (groups / "unified" / "cgroup.controllers").exists():
        yield ok("cgroup", f"versions 1 and 2 (hybrid) at {groups}")
    elif (groups / "memory").exists() or (groups / "devices").exists() or (groups / "cpu").exists():
        yield ok("cgroup", f"version 1 at {groups}")
    else:
        yield unknown(
            "cgroup", f"{groups} holds no control groups, so containers and jobs cannot be told apart", "findmnt -t cgroup,cgroup2"
        )
    try:
        inode = os.stat(machine.proc / "self" / "ns" / "pid").st_ino
    except OSError:
        yield unknown("pid namespace", "it cannot be asked which pid namespace this is")
    else:
        if inode == _HOST_PID_NAMESPACE:
            yield ok("pid namespace", "this is the host's: every process can be seen")
        else:
            found = "this is a container's: programs outside of it cannot be named"
            yield warning("pid namespace", found, "docker run --pid=host …")
    options = next((line.split()[3] for line in _mounts(machine) if line.split()[1:2] == ["/proc"]), "")
    hidden = next(
        (option for option in options.split(",") if option.startswith("hidepid=") and option not in ("hidepid=0", "hidepid=off")), None
    )
    if hidden and os.geteuid() != 0:
        found = f"/proc is mounted with {hidden}: processes of other users cannot be seen by uid {os.geteuid()}"
        yield warning("proc", found, "sudo mount -o remount,hidepid=0 /proc")


def _mounts(machine: Machine) -> list[str]:
    try:
        return (machine.proc / "mounts").read_text(errors="replace").splitlines()
    except OSError:
        return []
