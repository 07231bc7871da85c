"""Where SQLite's write-ahead log is safe: it needs shared memory between processes, so not on a network file system."""

from pathlib import Path

from poolmeter.errors import BadInput

NETWORK_TYPES = frozenset(
    {
        "afs", "beegfs", "ceph", "cifs", "coda", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "smb2", "smb3",
        "smbfs", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs",
    }
)  # fmt: skip


def parse_mounts(text: str) -> list[tuple[str, str]]:
    """(mount point, type) of each line of /proc/self/mountinfo, in order."""
    out = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        words, rest = before.split(" "), after.split(" ")
        if len(words) > 4 and rest[0]:
            # The kernel writes blanks and backslashes of a path as octal escapes.
            point = words[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
            out.append((point, rest[0]))
    return out


def filesystem_of(path: Path, mounts: list[tuple[str, str]]) -> str | None:
    """Type of the file system that `path` (absolute, resolved) lies on; the last of equal mount points is on top."""
    best: tuple[int, str] | None = None
    for point, kind in mounts:
        if path.is_relative_to(point) and (best is None or len(point) >= best[0]):
            best = (len(point), kind)
    return best[1] if best else None


def refuse_network(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> None:
    """Raises BadInput when `path` lies on a network file system."""
    try:
        mounts = parse_mounts(mountinfo.read_text("utf-8", "surrogateescape"))
    except OSError:
        return
    found = filesystem_of(path.resolve(), mounts)
    if found in NETWORK_TYPES:
        raise BadInput(f"books {path} lie on a network file system ({found}), expected a local disk")
