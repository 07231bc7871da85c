"""What is published works: the wheel in an environment of its own, far from the tree; the sdist builds the same wheel and serves make."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).parent / "uv"


def done(*words: str | Path, cwd: Path | None = None, timeout: float = 110) -> str:
    # Nothing of this environment: no source tree on the path, no settings.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("POOLMETER_", "PYTHON", "VIRTUAL_ENV"))}
    found = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert found.returncode == 0, f"{words}: {found.stdout[-2000:]}{found.stderr[-2000:]}"
    return found.stdout


def build(kind: str, tree: Path, out: Path) -> Path:
    done(UV, "build", kind, "--no-build-isolation", "--python", sys.executable, "--out-dir", out, tree)
    (made,) = out.glob("*.tar.gz" if kind == "--sdist" else "*.whl")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("--wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_runs_the_demo_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    done(UV, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv")
    done(UV, "pip", "install", "--quiet", "--python", python, "--require-hashes", "-r", ROOT / "requirements" / "run.txt")
    done(UV, "pip", "install", "--quiet", "--python", python, "--no-deps", wheel)
    poolmeter = tmp_path / "venv" / "bin" / "poolmeter"
    assert "editable" not in done(UV, "pip", "list", "--python", python).split("poolmeter", 1)[1].split("\n")[0]
    assert done(poolmeter, "--version", cwd=tmp_path).startswith("poolmeter 0.")
    said = json.loads(done(poolmeter, "demo", "--seconds", "10", "--format", "json", "--data", tmp_path / "data", cwd=tmp_path))
    assert said["schema"] == "poolmeter.demo/1" and len(said["rows"]) >= 4
    billed = {row["tenant"]: row for row in said["rows"]}
    assert any(float(row["billed_device_seconds"]) > 1 for row in billed.values())


def test_the_sdist_serves_make_and_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build("--sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    tree = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert sorted(path.name for path in tree.iterdir() if path.name.startswith("-")) == []
    # Copies in place of links, until make is called there.
    assert not (tree / "src" / "poolmeter" / "exporter").is_symlink()
    again = build("--wheel", tree, tmp_path / "again")
    done(tree / "tools" / "links.sh")
    for component in ("exporter", "collector", "accounting", "enforcer", "simulator", "dashboards", "alerts"):
        link = tree / "src" / "poolmeter" / component
        assert link.is_symlink() and link.resolve() == tree / component
    done("make", "-n", "-C", tree, "install")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())


def test_a_copy_that_was_changed_is_not_thrown_away(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "links.sh").write_bytes((ROOT / "tools" / "links.sh").read_bytes())
    for folder in ("exporter", "src/poolmeter/exporter"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text(f"# {folder}\n")
    words = ["sh", str(tmp_path / "tools" / "links.sh")]
    found = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert found.returncode == 2 and "src/poolmeter/exporter/a.py is not the same as exporter/a.py" in found.stderr
    (tmp_path / "src/poolmeter/exporter/a.py").write_text("# exporter\n")
    found = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert found.returncode == 2 and "src/poolmeter/collector is no link and no folder" in found.stderr
    assert (tmp_path / "src/poolmeter/exporter").is_symlink()
