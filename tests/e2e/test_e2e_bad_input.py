"""Bad input of every kind to every verb: one sentence, exit code 2 or 3 (125 from run), and nothing left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from poolmeter.cli import main
from poolmeter.collector.segments import publish_records
from poolmeter.places import CollectorData

READERS: tuple[tuple[str, ...], ...] = (
    ("usage",),
    ("chargeback",),
    ("recommend",),
    ("history",),
    ("approve", "d"),
    ("reject", "d", "--reason", "r"),
    ("apply", "d"),
    ("apply", "--all"),
)
# What a data folder can hold instead of a store and books; None is a folder.
DAMAGE: dict[str, dict[str, bytes | None]] = {
    "nothing": {},
    "a CURRENT that is no text": {"store/CURRENT": b"\xff\xfe\x00"},
    "a CURRENT that is a folder": {"store/CURRENT": None},
    "a CURRENT that leads elsewhere": {"store/CURRENT": b"../../../etc/passwd\n"},
    "an empty CURRENT": {"store/CURRENT": b""},
    "a catalog that is a folder": {"store/CURRENT": b"catalog-7.duckdb\n", "store/catalog-7.duckdb": None, "books.sqlite": b"x" * 9000},
    "an empty catalog": {"store/CURRENT": b"catalog-7.duckdb\n", "store/catalog-7.duckdb": b"", "books.sqlite": b"x" * 9000},
    "a store that is a file": {"store": b"x"},
    "books that are a folder": {"books.sqlite": None},
    "books that are no database": {"books.sqlite": b"x" * 9000},
}


def said(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and the one sentence of a command that must fail."""
    capfd.readouterr()
    code = main(list(words))
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("poolmeter: ") and "internal error" not in err, (words, out, err)
    return code, err


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration, run folder or collector of this machine."""
    for name in list(os.environ):
        if name.startswith("POOLMETER_"):
            monkeypatch.delenv(name)
    config = tmp_path / "config.toml"
    config.write_text("[collector]\nport = 0\n")
    monkeypatch.setenv("POOLMETER_CONFIG", str(config))
    monkeypatch.setenv("POOLMETER_RUN", str(tmp_path / "no-run"))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_data_folder_that_is_none(tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name, body in DAMAGE[damage].items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        if body is None:
            (data / name).mkdir()
        else:
            (data / name).write_bytes(body)
    before = tree(data)
    for words in READERS:
        code, _ = said(capfd, *words, "--data", str(data))
        assert code in (2, 3), words
    assert tree(data) == before


def test_a_data_folder_that_is_a_file_or_absent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    before = tree(tmp_path)
    for words in READERS:
        for name in ("file", "absent", "file/below"):
            assert said(capfd, *words, "--data", str(tmp_path / name))[0] in (2, 3), (words, name)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "body",
    [
        b'[node]\nname = "caf\xe9"\n',
        b'[node]\nname = "a\\u0000b"\n',
        b'[node]\nname = "\\ud800"\n',
        b"[node]\nname = 2026-01-01\n",
        b'[[node]]\nname = "a"\n',
        b"node = 3\n",
        b'\xef\xbb\xbf[node]\nname = "a"\n',
        b"[collector]\npull_interval_s = nan\n",
        b"[collector]\ntimeout_s = inf\n",
        b"[collector]\nport = -1\n",
        b"[collector]\nport = 99999999999999999999999\n",
        b"[enforcer]\nmemory_over_commit = nan\n",
        b"[enforcer]\nmemory_over_commit = 1e400\n",
        b'[enforcer]\ncollector = "http://[::1"\n',
        b'[accounting]\ntime_zone = "../../etc/passwd"\n',
        b'[accounting]\ntime_zone = "Europe"\n',
        b"[exporter]\nsampler_timeout_s = -0.0\n",
        b"a" + b".a" * 2000 + b" = 1\n",
        None,
    ],
)
def test_a_configuration_that_is_none(tmp_path: Path, capfd: pytest.CaptureFixture[str], body: bytes | None) -> None:
    path = tmp_path / "bad.toml"
    path.mkdir() if body is None else path.write_bytes(body)
    before = tree(tmp_path)
    data = ("--data", str(tmp_path / "data"), "--config", str(path))
    for words in (("config", "check", str(path)), ("config", "show", "--config", str(path)), *((*verb, *data) for verb in READERS)):
        assert said(capfd, *words)[0] == 2, words
    for daemon in ("exporter", "collector", "enforcer", "dashboard", "up"):
        assert said(capfd, daemon, *data)[0] == 2, daemon
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "words",
    [
        *(("usage", *flags) for flags in (
            ("--from", "nope"), ("--from", "2026-13-01"), ("--from", "2026-02-30"), ("--from", "7d", "--to", "8d"), ("--from", "-7d"),
            ("--from", "2026-01-02", "--to", "2026-01-01"), ("--from", "99999999999d"), ("--from", "1e9d"), ("--from", "\u0663d"),
            ("--from", "2026-01-01T00:00:00+99:00"), ("--time-zone", "Europe"), ("--time-zone", "/etc/passwd"), ("--time-zone", "x" * 5000),
            ("--by", "tenant,tenant"), ("--by", "nope"), ("--by", ""), ("--tenant", ""), ("--tenant", "x" * 100_000), ("--output", "."),
        )),
        ("chargeback", "--plan", "."),
        ("chargeback", "--plan", "/nowhere.toml"),
        ("recommend", "--minimum-minutes", "-1"),
        *(("apply", "d", "--wait", wait) for wait in ("nan", "-1", "inf")),
        *((daemon, "--interval", "nan") for daemon in ("exporter", "collector", "enforcer")),
        *(("exporter", "--linger", value) for value in ("nan", "inf")),
        *((daemon, "--port", port) for daemon in ("exporter", "collector", "dashboard") for port in ("-1", "65536", "9" * 30)),
        *(("demo", "--seconds", value) for value in ("nan", "9", "-5", "1e99", "inf")),
        *(("simulate", "tenant", *flags) for flags in (
            ("--seconds", "nan"), ("--kernel-us", "-1"), ("--allocate", "nanG"), ("--allocate", "-1G"), ("--processes", "0"),
            ("--processes", "99999999"), ("--graph", "-1"),
        )),
        *(("allocation", "create", *flags) for flags in (
            ("--compute", "nan"), ("--compute", "inf"), ("--compute", "-1"), ("--compute", "1e9"), ("--compute", "0.00001"),
            ("--memory", "nan"), ("--memory", "-1G"), ("--memory", "1e400G"), ("--memory", "9" * 4000), ("--weight", "-1"),
            ("--weight", "9" * 5000), ("--devices", "0"), ("--tenant", ""), ("--tenant", "a\nb"), ("--tenant", "x" * 200), ("--device", ""),
            ("--tenant", "\u202e"), ("--project", " x"), ("--cpu", "-1"), ("--host-memory", "nan"), ("--class", "x"), ("--mode", "x"),
        )),
        *(("allocation", *verb) for verb in (("show", ""), ("show", "../x"), ("resize", "x", "--memory", "1G"), ("release", "x"))),
    ],
    ids=lambda words: " ".join(words)[:60].encode("unicode_escape").decode(),
)  # fmt: skip
def test_a_flag_that_cannot_be_honoured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    publish_records(CollectorData(tmp_path / "data").store, [])
    before = tree(tmp_path)
    code, _ = said(capfd, *words, "--data", str(tmp_path / "data"))
    assert code in (2, 3)
    assert tree(tmp_path) == before
    if words[:2] == ("allocation", "create"):
        assert said(capfd, "run", *words[2:], "--data", str(tmp_path / "data"), "--", "true")[0] == 125
        assert tree(tmp_path) == before


FULL = """
mkdir full && mount -t tmpfs -o size=64k,nr_inodes=64 none full || exit 77
dd if=/dev/zero of=full/fill bs=1k 2>/dev/null
mkdir full/data
run() { echo "== $1"; shift; timeout 60 "$PYTHON" -m poolmeter.cli "$@" 2>&1; echo "rc $?"; }
run collector collector --port 0 --nodes http://127.0.0.1:1 --data full/data
run exporter exporter --port 0 --data full/data --run full/run
run usage usage --data data --output full/out.csv --format csv
run up up --simulate --no-dashboard --data full/up
run demo demo --seconds 10 --data full/demo
find full -type f -size +0 ! -name fill
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    """The simulated machine is a sparse file that is mapped: on a full disk the first touch of it would end the process."""
    publish_records(CollectorData(tmp_path / "data").store, [])
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", FULL], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no file system can be mounted here")
    parts = done.stdout.split("== ")[1:]
    assert [part.split("\n")[0] for part in parts] == ["collector", "exporter", "usage", "up", "demo"]
    for part in parts[:4]:
        _, sentence, code, *_ = part.split("\n")
        assert code == "rc 3" and sentence.startswith("poolmeter: "), part
    _, sentence, code, *left = parts[4].split("\n")
    assert code == "rc 3" and "0 MiB are free on its disk, expected at least 16 MiB" in sentence
    assert [name for name in left if name] == [], "half-written files"


def test_a_run_folder_that_is_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    for daemon in (("exporter", "--port", "0"), ("enforcer",)):
        assert said(capfd, *daemon, "--data", str(tmp_path / "data"), "--run", str(tmp_path / "file"))[0] == 3
    assert not (tmp_path / "data").exists()
