"""Root mode: a program of another user in mounts of its own cannot lose, widen or leave its share.

All of it happens in an outer mount namespace with copies of /run and /etc, so that nothing of the machine is touched.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OUTER = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 run /run
mount --bind "$1" /etc
shift
exec "$@"
"""

TENANT = """
cd /run/poolmeter/self
echo "uid $(id -u)"
echo "capabilities $(grep CapEff /proc/self/status | cut -f2)"
for word in "echo x > grant" "rm grant" "umount /run/poolmeter/self/grant" "umount /run/poolmeter/self" "echo x > ld.so.preload" "mv meter other"; do
    sh -c "$word" 2>/dev/null && echo "could: $word"
done
: >> meter && echo "meter can be written"
touch devices/board && echo "board can be made"
echo "preloaded $(env -i /bin/cat /proc/self/maps | grep -c /run/poolmeter/self/libpoolmeter_hook.so)"
ls "$RUN/allocations" "$RUN/retired" | grep -c a- && echo "could: see other allocations"
echo "folder $POOLMETER_ALLOCATION_DIR"
"""


def namespaces() -> bool:
    words = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    return os.geteuid() == 0 and shutil.which("unshare") is not None and subprocess.run(words, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not namespaces(), reason="needs root and mount namespaces")


@pytest.fixture(scope="module")
def node(make_shared_node, tmp_path_factory: pytest.TempPathFactory):
    node = make_shared_node("alpha")
    for folder in (node.root, *node.root.parents[:3]):
        folder.chmod(0o755)
    etc = node.root / "etc"
    etc.mkdir()
    for name in ("passwd", "group", "nsswitch.conf", "ld.so.cache", "localtime"):
        if Path("/etc", name).exists():
            shutil.copy(Path("/etc", name), etc / name)
    return node


def run_as(node, *words: str, umask: str = "022", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            "unshare",
            "-m",
            "sh",
            "-c",
            f"umask {umask}\n{OUTER}",
            "outer",
            str(node.root / "etc"),
            sys.executable,
            "-m",
            "poolmeter.cli",
            "run",
            *words,
        ],
        env={**node.environment, "POOLMETER_RUN": str(node.run.root), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_tenant_cannot_lose_widen_or_leave_its_share(node) -> None:
    done = run_as(node, "--run-as", "4242", "--compute", "25", "--", "sh", "-c", TENANT, RUN=str(node.run.root))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "could" not in done.stdout
    assert lines[:2] == ["uid 4242", "capabilities 0000000000000000"]
    assert lines[2:4] == ["meter can be written", "board can be made"]
    assert lines[5:] == ["0", "folder /run/poolmeter/self"]
    assert int(lines[4].removeprefix("preloaded ")) > 0
    assert " (root)\n" in done.stderr
    (*_, created, _) = map(json.loads, node.journal.read_text().splitlines())
    assert (created["allocation"]["enforcement"], created["allocation"]["owner_uid"]) == ("root", 0)
    assert (node.root / "etc" / "ld.so.preload").read_bytes() == b""  # outside nothing is preloaded


def test_a_tight_umask_does_not_keep_the_program_from_its_hook(node) -> None:
    (node.root / "etc" / "ld.so.preload").unlink(missing_ok=True)
    done = run_as(
        node, "--quiet", "--run-as", "4242", "--", "sh", "-c", "cat /etc/ld.so.preload; wc -c < /run/poolmeter/self/grant", umask="077"
    )
    assert done.stdout.split() == ["/run/poolmeter/self/libpoolmeter_hook.so", "16896"], done.stderr


def test_the_caller_of_sudo_is_the_user(node) -> None:
    done = run_as(node, "--quiet", "--", "sh", "-c", "id -u; id -g", SUDO_UID="4243", SUDO_GID="4244")
    assert done.stdout == "4243\n4244\n"


def test_what_was_preloaded_before_stays(node) -> None:
    preload = node.root / "etc" / "ld.so.preload"
    preload.write_text("/lib/x86_64-linux-gnu/libm.so.6\n")
    try:
        done = run_as(node, "--quiet", "--run-as", "4242", "--", "cat", "/etc/ld.so.preload")
        assert done.stdout.split() == ["/run/poolmeter/self/libpoolmeter_hook.so", "/lib/x86_64-linux-gnu/libm.so.6"]
    finally:
        preload.write_text("")


def test_a_program_that_stays_root_is_cooperative(node) -> None:
    done = run_as(node, "--", "true")
    assert " (cooperative)\n" in done.stderr


def test_where_mounts_are_not_permitted_it_is_cooperative_and_says_so(node) -> None:
    words = [sys.executable, "-m", "poolmeter.cli", "run", "--run-as", "4242", "--", "sh", "-c", 'id -u; echo "$LD_PRELOAD"']
    drop = shutil.which("capsh")
    if drop is None:
        pytest.skip("needs capsh")
    done = subprocess.run(
        [drop, "--drop=cap_sys_admin", "--", "-c", 'exec "$@"', "sh", *words],
        env={**node.environment, "POOLMETER_RUN": str(node.run.root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert " (cooperative)\n" in done.stderr
    uid, preload = done.stdout.splitlines()
    assert uid == "4242" and preload.endswith("libpoolmeter_hook.so")
