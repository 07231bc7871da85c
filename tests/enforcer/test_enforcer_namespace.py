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

from poolmeter.pages.grant import read_grant
from poolmeter.simulator.tenant import TenantPlan, tenant_program

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


pytestmark = [
    pytest.mark.skipif(not namespaces(), reason="needs root and mount namespaces"),
    pytest.mark.usefixtures("open_tmp_path"),
]


@pytest.fixture(scope="module")
def node(make_shared_node, tmp_path_factory: pytest.TempPathFactory):
    node = make_shared_node("alpha")
    for folder in (node.root, *node.root.parents[:3]):
        folder.chmod(0o755)
    etc = node.root / "etc"
    etc.mkdir()
    for name in ("passwd", "group", "shadow", "nsswitch.conf", "ld.so.cache", "localtime", "login.defs", "environment"):
        if Path("/etc", name).exists():
            shutil.copy(Path("/etc", name), etc / name)
    for name in ("pam.d", "security"):
        if Path("/etc", name).exists():
            shutil.copytree(Path("/etc", name), etc / name)
    return node


@pytest.fixture(scope="module")
def become_root(node) -> Path:
    """A program that any user may run as root, as sudo is."""
    source = node.root / "become.c"
    source.write_text(
        "#include <unistd.h>\nint main(int n, char **v) { (void)n; if (setgid(0) || setuid(0)) return 9; execvp(v[1], v + 1); return 8; }\n"
    )
    program = node.root / "become"
    subprocess.run(["cc", "-o", str(program), str(source)], check=True)
    program.chmod(0o4755)
    if subprocess.run(["setpriv", "--reuid", "4242", "--clear-groups", str(program), "true"], capture_output=True).returncode != 0:
        pytest.skip("programs that change to root do not do so here")
    return program


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


ROOT_TENANT = """
cd /run/poolmeter/self
echo "uid $(id -u)"
id="$POOLMETER_ALLOCATION"
for word in "printf x > grant" "chmod 666 grant && printf x > grant" "rm grant" "mv grant other" "ln -f /etc/passwd grant" "truncate -s 0 grant" \
    "umount grant" "umount -l /run/poolmeter/self" "umount -l /etc/ld.so.preload" "printf x > /etc/ld.so.preload" "rm -f /etc/ld.so.preload" \
    "mount -o remount,rw,bind grant" "mount -o remount,rw /run/poolmeter/self" "mount --bind /dev/null /etc/ld.so.preload" \
    "mount -t tmpfs none /mnt" "umount $RUN/allocations" "ls $RUN/allocations/$id" "printf x > $RUN/allocations/$id/grant" \
    "nsenter -t $OUTSIDE -m true" "chroot / true" "ls /proc/$OUTSIDE/root/etc" "mknod /tmp/poolmeter-disk b 254 0"; do
    sh -c "$word" >/dev/null 2>&1 && echo "could: $word"
done
echo done
"""


def test_whoever_becomes_root_inside_cannot_write_the_grant_nor_undo_a_mount(node, become_root: Path) -> None:
    words = ["--quiet", "--run-as", "4242", "--compute", "25", "--", str(become_root), "sh", "-c", ROOT_TENANT]
    done = run_as(node, *words, RUN=str(node.run.root), OUTSIDE=str(os.getpid()))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["uid 0", "done"]
    newest = max(node.run.retired.iterdir())
    assert read_grant(newest / "grant").devices[0].compute_ppm == 250_000


HOOKED = "grep -c /run/poolmeter/self/libpoolmeter_hook.so"


@pytest.mark.skipif(shutil.which("su") is None, reason="needs su")
def test_su_and_a_shell_started_inside_keep_the_share(node, become_root: Path) -> None:
    # su leaves nothing of the environment, and its user is another one.
    inside = f"id -un; env; cat /proc/self/maps | {HOOKED}; env -i /bin/cat /proc/self/maps | {HOOKED}; wc -c < /run/poolmeter/self/grant"
    words = ["--quiet", "--run-as", "4242", "--", str(become_root), "su", "-", "nobody", "-s", "/bin/sh", "-c", inside]
    done = run_as(node, *words)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0] == "nobody" and not any(line.startswith(("LD_PRELOAD", "POOLMETER")) for line in lines)
    assert int(lines[-3]) > 0 and int(lines[-2]) > 0 and lines[-1] == "16896"


def test_outside_nobody_sees_anything_of_it(node) -> None:
    look = "findmnt -rno TARGET | grep -E 'poolmeter|ld.so.preload'; ls /run/poolmeter/self; cat /etc/ld.so.preload; cat /proc/self/maps | grep poolmeter_hook"
    script = f'{OUTER.split("exec")[0]}set +e\n({look}) 2>/dev/null\n{{ "$@" ; }} >/dev/null\n({look}) 2>/dev/null\necho looked'
    words = ["poolmeter.cli", "run", "--quiet", "--run-as", "4242", "--", "sleep", "0.1"]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "outer", str(node.root / "etc"), sys.executable, "-m", *words],
        env={**node.environment, "POOLMETER_RUN": str(node.run.root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["looked"], done.stderr


@pytest.mark.parametrize("before", [None, b"", b"/lib/x86_64-linux-gnu/libm.so.6\n"])
def test_a_preload_file_that_was_not_there_is_gone_after_the_last_run(node, before: bytes | None) -> None:
    preload = node.root / "etc" / "ld.so.preload"
    preload.unlink(missing_ok=True)
    if before is not None:
        preload.write_bytes(before)
    # A card of its own: book and run folder end with the program.
    done = run_as(
        node, "--simulate", "--quiet", "--run-as", "4242", "--", "cat", "/etc/ld.so.preload", POOLMETER_RUN="/nonexistent", TMPDIR="/tmp"
    )
    assert done.stdout.splitlines()[0] == "/run/poolmeter/self/libpoolmeter_hook.so", done.stderr
    assert (preload.read_bytes() if preload.exists() else None) == before


@pytest.mark.usefixtures("seen_by_others")
def test_a_stripped_environment_keeps_limit_and_meter(node) -> None:
    """A tenant of the simulated card that starts with nothing but where the simulated driver is."""
    program = (
        f'exec env -i LD_LIBRARY_PATH="$LD_LIBRARY_PATH" POOLMETER_SIM_MACHINE="$POOLMETER_SIM_MACHINE" {tenant_program("gpa")}'
        f" {' '.join(TenantPlan(1000, 1.5, allocate=600 << 20).words())}"
    )
    words = ["--simulate", "--quiet", "--run-as", "4242", "--compute", "30", "--memory", "512M", "--", "sh", "-c", program]
    real = os.pathsep.join(part for part in sys.path if part)  # the simulated card's own answers, not those of the stand-in
    done = run_as(node, *words, POOLMETER_RUN="/nonexistent", TMPDIR="/tmp", PYTHONPATH=real)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["cuda_error"] == "CUDA_ERROR_OUT_OF_MEMORY"
    assert 0.2 < told["kernels"] / 1000 / told["wall_seconds"] < 0.33  # a loaded machine may keep it from using all of it
