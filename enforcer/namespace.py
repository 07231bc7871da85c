"""A private mount namespace for a program: its grant and meter at /run/poolmeter/self, and an ld.so.preload of its own.

What a shell can drop (`env -i`, su, ssh) drops nothing here, and nobody outside sees any of it. Needs root; the program itself runs
as another user without the capabilities that could undo the mounts. Only in a process that is about to become the program.
"""

import contextlib
import ctypes
import os
import pwd
from pathlib import Path

from poolmeter.errors import Unavailable

SELF = Path("/run/poolmeter/self")
PRELOAD = Path("/etc/ld.so.preload")
MADE = "preload-made"  # in the run folder: the machine had no PRELOAD before us

_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_PR_CAPBSET_DROP = 24
# linux/capability.h: what could write the grant, undo a mount, enter another namespace or read another's memory.
_DROPPED = {
    "DAC_OVERRIDE": 1,
    "DAC_READ_SEARCH": 2,
    "FOWNER": 3,
    "LINUX_IMMUTABLE": 9,
    "SYS_MODULE": 16,
    "SYS_RAWIO": 17,
    "SYS_CHROOT": 18,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "MKNOD": 27,
    "BPF": 39,
    "CHECKPOINT_RESTORE": 40,
}

_libc = ctypes.CDLL(None, use_errno=True)


def enter() -> None:
    """Gives this process mounts of its own, with an empty /run/poolmeter/self. Raises OSError where that is not permitted."""
    _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    _mount(None, Path("/"), None, _MS_REC | _MS_PRIVATE)
    for folder in (SELF.parent, SELF):
        if not folder.exists():
            folder.mkdir()
            folder.chmod(0o755)  # whatever the umask: the program's user must get through
    _mount("poolmeter", SELF, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=256k,mode=0755")


def bind(folder: Path, hook: Path) -> Path:
    """Shows the allocation of `folder` at /run/poolmeter/self and preloads `hook` into whatever runs; where the hook is then.

    Raises Unavailable: by then the allocation is promised, and running without its limits is not what was asked for.
    """
    try:
        _bind_file(folder / "grant", SELF / "grant", read_only=True)
        _bind_file(folder / "meter", SELF / "meter", read_only=False)
        library = SELF / hook.name
        # The program's user may not be able to reach the place it was installed to.
        _bind_file(hook, library, read_only=True)
        # Boards, by which the hooks of a device tell each other that it is busy; next to the allocations they belong to.
        (SELF / "devices").mkdir(exist_ok=True)
        _mount(str(folder.parent.parent / "devices"), SELF / "devices", None, _MS_BIND)
        if not PRELOAD.exists():
            # A mount point is needed; empty, it means nothing to everybody else.
            (folder.parent.parent / MADE).touch()
            PRELOAD.touch()
            PRELOAD.chmod(0o644)
        others = PRELOAD.read_text().split()
        own = SELF / "ld.so.preload"
        own.write_text("\n".join([str(library), *(name for name in others if name != str(library))]) + "\n")
        own.chmod(0o644)
        _mount(str(own), PRELOAD, None, _MS_BIND)
        _mount(None, PRELOAD, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY)
        _mount(None, SELF, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
        for hidden in (folder.parent, folder.parent.parent / "retired"):
            # Whoever becomes root inside (sudo) still owns the pages by their other names, where they can be written.
            _mount("poolmeter", hidden, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_RDONLY, "size=4k,mode=0755")
    except OSError as error:
        raise Unavailable(f"allocation {folder.name} cannot be bound to {SELF}: {error}") from None
    return library


def leave_no_preload(run_root: Path) -> bool:
    """Removes the empty PRELOAD that `bind` made for this run folder; whether it did. To be called with no allocation in force.

    It stays while any process has it mounted over: removing a mount point takes the mounts on it along, in every namespace.
    """
    try:
        if not (run_root / MADE).exists() or PRELOAD.is_symlink() or PRELOAD.stat().st_size:
            return False
        if any(_mounted_in(table) for table in Path("/proc").glob("[0-9]*/mountinfo")):
            return False
        PRELOAD.unlink()
        (run_root / MADE).unlink()
    except OSError:
        return False
    return True


def _mounted_in(table: Path) -> bool:
    try:
        return f" {PRELOAD} " in table.read_text()
    except OSError:
        return False  # it has just ended


def become(uid: int) -> dict[str, str]:
    """Makes this process the user's, for good, without the capabilities that could undo the mounts; HOME and USER for it.

    Raises Unavailable when the kernel does not let it.
    """
    try:
        for number in _DROPPED.values():
            # A kernel without the newest ones says EINVAL: what it does not have cannot be used.
            with contextlib.suppress(OSError):
                _check(_libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0), "prctl")
        try:
            account = pwd.getpwuid(uid)
        except KeyError:
            sudo_gid = os.environ.get("SUDO_GID", "")
            os.setgroups([])
            os.setgid(int(sudo_gid) if sudo_gid.isdecimal() else uid)
            os.setuid(uid)
            return {}
        os.initgroups(account.pw_name, account.pw_gid)
        os.setgid(account.pw_gid)
        os.setuid(uid)
        return {"HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name}
    except OSError as error:
        raise Unavailable(f"the program cannot be run as uid {uid}: {error.strerror}") from None


def _bind_file(source: Path, target: Path, read_only: bool) -> None:
    target.touch(mode=0o644)
    _mount(str(source), target, None, _MS_BIND)
    if read_only:
        _mount(None, target, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY)


def _mount(source: str | None, target: Path, kind: str | None, flags: int, data: str | None = None) -> None:
    outcome = _libc.mount(
        None if source is None else os.fsencode(source),
        os.fsencode(target),
        None if kind is None else kind.encode(),
        ctypes.c_ulong(flags),
        None if data is None else data.encode(),
    )
    _check(outcome, f"mount {target}")


def _check(outcome: int, what: str) -> None:
    if outcome != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
