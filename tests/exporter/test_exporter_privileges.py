"""What the exporter can do as whom: as a user of no rights, with the one capability that the reference names, as root."""

import configparser
import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import pytest
from exporter_fakes import GIB, Node
from prometheus_client.parser import text_string_to_metric_families

from poolmeter.errors import Refused, Unavailable
from poolmeter.exporter.control import ControlSocket, ask
from poolmeter.simulator.machine import Machine

NOBODY = 65534
ROOT = os.geteuid() == 0
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def run(tmp_path: Path, machine: Machine, request: pytest.FixtureRequest) -> Path:
    """A run folder with an allocation on the machine's first card, with the modes that the enforcer gives as root."""
    if ROOT:
        request.getfixturevalue("open_tmp_path")
    uuid = machine.uuid(0)
    node = Node(tmp_path / "node", uuid)
    node.create("a", memory=2 * GIB, uuids=(uuid,))
    node.meters["a"].attach()
    node.meters["a"].count(uuid, busy_ns=5_000_000, memory=GIB)
    node.close()
    node.run.allocations.chmod(0o711)
    node.run.retired.chmod(0o711)
    return node.run.root


def service(unit: str) -> dict[str, str]:
    """What the [Service] section of a systemd unit sets, each name once."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign, assignment]  # the case of names counts
    parser.read_string(unit)
    return dict(parser["Service"])


def interpreter(folder: Path, user: int | None) -> tuple[str, dict[str, str]]:
    """A Python that a user can run, and its environment: this one, else the distribution's of the same version with this one's packages."""
    if user is None:
        return sys.executable, {}
    same = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({sysconfig.get_path('purelib')!r})\n")
    site.chmod(0o755)
    for python, environment in ((sys.executable, {}), (same, {"PYTHONPATH": str(site)})):
        with contextlib.suppress(OSError):
            asked = [python, "-c", "import poolmeter.exporter.daemon"]
            tried = subprocess.run(
                asked, env={**os.environ, **environment}, user=user, group=user, extra_groups=[], capture_output=True, check=False
            )
            if tried.returncode == 0:
                return python, environment
    pytest.skip(f"no Python here that user {user} can run with these packages")


def look(tmp_path: Path, machine: Machine, run: Path, *before: str, user: int | None = None) -> tuple[int, dict[str, Any], str]:
    """Exit code, samples by name of one page, and stderr, of an exporter under `before` (setpriv) or as a user."""
    python, more = interpreter(tmp_path, user)
    words = [python, "-m", "poolmeter.cli", "exporter", "--once", "--simulate", "--run", str(run), "--data", str(tmp_path / "data")]
    environment = {**os.environ, **more, "POOLMETER_SIM_MACHINE": str(machine.file), "HOME": "/nonexistent", "TMPDIR": "/tmp"}
    as_user: dict[str, Any] = {"user": user, "group": user, "extra_groups": []} if user is not None else {}
    ended = subprocess.run([*before, *words], env=environment, capture_output=True, text=True, timeout=60, check=False, **as_user)
    found: dict[str, Any] = {}
    for family in text_string_to_metric_families(ended.stdout):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return ended.returncode, found, ended.stderr


def success(found: dict[str, Any]) -> dict[str, float]:
    return {dict(labels)["source"]: value for labels, value in found["poolmeter_collect_success"].items()}


def test_a_user_of_no_rights_sees_the_cards_and_says_what_it_does_not_see(tmp_path: Path, machine: Machine, run: Path) -> None:
    """What cannot be read is absent and its source is marked; nothing of it is 0, and the cards are there all the same."""
    if not ROOT:
        (run / "allocations").chmod(0o311)  # the owner, too, may not list it
    code, found, said = look(tmp_path, machine, run, user=NOBODY if ROOT else None)
    assert code == 1 and "sources failed: allocations (folder" in said and "cannot be listed: Permission denied" in said
    assert success(found)["allocations"] == 0 and success(found)["nvml"] == 1
    assert len(found["poolmeter_device_up"]) == 2 and "poolmeter_device_power_watts" in found
    assert not [name for name in found if name.startswith("poolmeter_slice_")]
    (run / "allocations").chmod(0o711)


def test_a_meter_that_may_not_be_read_is_no_meter_of_zeros(tmp_path: Path, machine: Machine, run: Path) -> None:
    (run / "allocations").chmod(0o755)
    (run / "retired").chmod(0o755)
    (run / "allocations" / "a" / "meter").chmod(0o600 if ROOT else 0)
    code, found, said = look(tmp_path, machine, run, user=NOBODY if ROOT else None)
    assert code == 1 and "hook (" in said and "meter" in said and success(found)["hook"] == 0 and success(found)["allocations"] == 1
    assert len(found["poolmeter_slice_info"]) == 1 and len(found["poolmeter_slice_promise_ratio"]) == 1
    assert not {"poolmeter_slice_busy_seconds_total", "poolmeter_slice_memory_used_bytes", "poolmeter_slice_processes"} & found.keys()
    states = {dict(labels)["state"]: value for labels, value in found["poolmeter_slice_state"].items()}
    assert states["unknown"] == 1


def test_folders_that_are_not_the_tests_keep_their_modes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    tmp_path.parent.chmod(0o700)  # as pytest makes it; a test before may have opened it
    before = [folder.stat().st_mode for folder in tmp_path.parents]
    with pytest.raises(pytest.skip.Exception, match="is closed to other users"):
        request.getfixturevalue("open_tmp_path")
    assert [folder.stat().st_mode for folder in tmp_path.parents] == before


@pytest.mark.skipif(not ROOT or shutil.which("setpriv") is None, reason="needs root and setpriv (Debian: util-linux)")
def test_one_capability_is_enough_to_read_everything(tmp_path: Path, machine: Machine, run: Path) -> None:
    capability = [
        "--inh-caps",
        "-all,+dac_read_search",
        "--ambient-caps",
        "-all,+dac_read_search",
        "--bounding-set",
        "-all,+dac_read_search",
    ]
    words = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "--no-new-privs", *capability]
    can = subprocess.run([*words, "true"], capture_output=True, check=False)
    if can.returncode != 0:
        pytest.skip(f"capabilities cannot be given here: {can.stderr.decode()}")
    (run / "allocations" / "a" / "meter").chmod(0o600)
    code, found, said = look(tmp_path, machine, run, *words)
    assert code == 0, said
    assert (
        set(success(found).values()) == {1.0} and "poolmeter_slice_memory_used_bytes" in found and "poolmeter_device_power_watts" in found
    )


@pytest.mark.skipif(not ROOT, reason="needs root, to be two users")
def test_another_user_may_not_release_the_cards(tmp_path: Path, run: Path) -> None:
    control = ControlSocket(run / "exporter.sock", lambda: None)
    python, environment = interpreter(tmp_path, NOBODY)
    words = [python, "-m", "poolmeter.cli", "exporter", "release", "--run", str(run)]
    options: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "env": {**os.environ, **environment}}
    for mode, said in ((0o600, "expected root or whoever runs the exporter"), (0o666, f"user {NOBODY} may not control the exporter")):
        (run / "exporter.sock").chmod(mode)
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, **options)
        assert ended.returncode == 1 and said in ended.stderr, ended.stderr
    assert control.requests.empty()
    control.close()
    with pytest.raises((Refused, Unavailable)):
        ask(run / "exporter.sock", {"verb": "resume"})


def test_it_writes_where_it_is_told_to_and_nowhere_else(tmp_path: Path, machine: Machine, run: Path) -> None:
    """A look changes nothing under the run folder, and leaves no data folder."""

    def listing() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_mode, path.stat().st_size) for path in sorted(run.rglob("*"))}

    before = listing()
    look(tmp_path, machine, run)
    assert listing() == before and not (tmp_path / "data").exists()


def test_the_reference_names_what_the_unit_gives() -> None:
    """The unit starts the exporter as root with fewer rights, and the page's block is what makes it a user of its own."""
    top = Path(__file__).parents[2]
    page = (top / "docs" / "reference" / "exporter-privileges.md").read_text()
    assert "Root is the default of the unit in `deploy/systemd/`, under `NoNewPrivileges` and a read-only system." in page
    unit = service(top.joinpath("deploy", "systemd", "poolmeter-exporter.service").read_text())
    assert unit["NoNewPrivileges"] == "yes" and unit["ProtectSystem"] == "strict"
    assert not {"User", "DynamicUser", "AmbientCapabilities", "CapabilityBoundingSet"} & unit.keys()
    (block,) = re.findall(r"```ini\n# /etc/systemd/system/poolmeter-exporter\.service\.d/user\.conf\n(.*?)```", page, re.DOTALL)
    capability = "CAP_DAC_READ_SEARCH"
    assert service(block) == {"User": "poolmeter", "AmbientCapabilities": capability, "CapabilityBoundingSet": capability}
