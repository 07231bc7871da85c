"""The deployment examples are accepted by the tools that will read them."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ALERTMANAGER = DEPLOY / "alertmanager" / "alertmanager.yml"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(words), capture_output=True, text=True, timeout=60)


def tool(name: str, package: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian package {package})")
    return path


def test_prometheus_takes_its_configuration_and_rules() -> None:
    result = run(tool("promtool", "prometheus"), "check", "config", str(DEPLOY / "prometheus" / "prometheus.yml"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "idle.yml" in result.stdout


def test_the_example_target_names_its_node() -> None:
    targets = yaml.safe_load((DEPLOY / "prometheus" / "nodes" / "example.yml").read_text())
    assert all(target["targets"] and target["labels"]["node"] for target in targets)


def test_alertmanager_takes_its_configuration() -> None:
    result = run(tool("amtool", "prometheus-alertmanager"), "check-config", str(ALERTMANAGER))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        (["alertname=PoolmeterSliceIdle", "tenant=ada", "node=n1"], "tenants"),
        (["alertname=PoolmeterNodeUnknown", "node=n1"], "operators"),
        (["alertname=SomethingElse"], "operators"),
    ],
)
def test_alerts_reach_who_they_are_for(labels: list[str], receiver: str) -> None:
    words = ["config", "routes", "test", f"--config.file={ALERTMANAGER}", f"--verify.receivers={receiver}", *labels]
    result = run(tool("amtool", "prometheus-alertmanager"), *words)
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_the_alertmanager_names_exists() -> None:
    """A renamed alert would leave its route and its inhibition without effect, and no tool says so."""
    groups = yaml.safe_load((DEPLOY.parent / "alerts" / "rules" / "idle.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    text = ALERTMANAGER.read_text()
    assert alerts and all(f'"{alert}"' in text for alert in alerts)


@pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda path: path.name)
def test_units_are_valid_and_name_commands_that_exist(unit: Path, tmp_path: Path) -> None:
    from poolmeter.cli import find

    lines = unit.read_text().splitlines()
    command = next(line for line in lines if line.startswith("ExecStart=")).removeprefix("ExecStart=").split()
    assert command[0] == "/opt/poolmeter/.venv/bin/poolmeter"
    entry, _ = find(command[1:])
    assert entry is not None and entry.target is not None
    # The verifier wants a program that is there.
    copy = tmp_path / unit.name
    copy.write_text("\n".join("ExecStart=/bin/true" if line.startswith("ExecStart=") else line for line in lines) + "\n")
    result = run(tool("systemd-analyze", "systemd"), "verify", str(copy))
    assert result.returncode == 0 and not [line for line in result.stderr.splitlines() if unit.name in line], result.stderr


@pytest.mark.parametrize("path", sorted((DEPLOY / "grafana").rglob("*.yml")), ids=lambda path: path.parent.name)
def test_grafana_provisioning_is_well_formed(path: Path) -> None:
    body = yaml.safe_load(path.read_text())
    assert body["apiVersion"] == 1
    assert isinstance(body.get("datasources") or body.get("providers"), list)
