"""Every query of the Grafana dashboard and every rule, run by a real Prometheus that scrapes a real exporter on a simulated node."""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from poolmeter.dashboards.grafana import generate

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = shutil.which("prometheus")
NODE = "sim-1"
WAIT_S = 60
RATE = "10s"
DASHBOARD: dict[str, Any] = json.loads(generate.FILE.read_text(encoding="utf-8"))

# Panels whose query may find nothing on the simulated node, and why.
MAY_BE_EMPTY: dict[str, str] = {}

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian package prometheus)")


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}{path}?{query}", timeout=WAIT_S) as response:
            body = json.load(response)
        assert body["status"] == "success", body
        return body["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.get("/api/v1/query", query=expr)["result"]
        return result


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what}"
        time.sleep(0.1)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def prometheus(exporter: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Debian's Prometheus with the example's relabelling and the rules of alerts/, scraping `exporter` each second."""
    folder = tmp_path_factory.mktemp("prometheus")
    example = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    job = next(job for job in example["scrape_configs"] if job["job_name"] == "poolmeter")
    (folder / "nodes.yml").write_text(json.dumps([{"targets": [urllib.parse.urlsplit(exporter).netloc], "labels": {"node": NODE}}]))
    # A second target without the label, which nothing listens on: named by its host, down, and no trouble to the queries.
    (folder / "more.yml").write_text(json.dumps([{"targets": [f"localhost:{free_port()}"]}]))
    job |= {"scrape_timeout": "1s", "file_sd_configs": [{"files": [str(folder / "nodes.yml"), str(folder / "more.yml")]}]}
    rules = []
    for path in sorted((ROOT / "alerts/rules").glob("*.yml")):
        body = yaml.safe_load(path.read_text())
        for group in body["groups"]:
            group["interval"] = "1s"
        (folder / path.name).write_text(yaml.safe_dump(body))
        rules.append(path.name)
    config = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": rules, "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    words = [
        str(PROMETHEUS),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, cwd=folder)
    try:
        server = Prometheus(f"http://127.0.0.1:{port}")
        until(lambda: process.poll() is not None or answers(f"{server.url}/-/ready"), "Prometheus is ready")
        assert process.poll() is None, (folder / "log").read_text()
        # Six scrapes: enough for rates over ten seconds, and for each rule to have been evaluated.
        until(lambda: counted(server, f'count_over_time(up{{node="{NODE}"}}[1m])') >= 6, "six scrapes")
        yield server
    finally:
        process.terminate()
        process.wait(timeout=WAIT_S)


def counted(server: Prometheus, expr: str) -> float:
    return sum(float(sample["value"][1]) for sample in server.query(expr))


def chosen(text: str, **values: str) -> str:
    """A dashboard's query with its variables filled in, as Grafana would."""
    text = text.replace("$__rate_interval", RATE)
    for name in ("node", "pool", "tenant"):
        text = text.replace(f"${name}", values.get(name, ".*"))
    return text


def panel_queries() -> list[tuple[str, str]]:
    return [
        (f"{panel['title']} {target['refId']}", target["expr"])
        for panel in DASHBOARD["panels"]
        if panel["type"] != "row"
        for target in panel["targets"]
    ]


@pytest.mark.parametrize(("name", "expr"), panel_queries(), ids=[name for name, _ in panel_queries()])
def test_panel_query_finds_something(prometheus: Prometheus, name: str, expr: str) -> None:
    found = prometheus.query(chosen(expr))
    if name not in MAY_BE_EMPTY:
        assert found, f"{name} is empty: {chosen(expr)}"
    for sample in found:
        assert sample["value"][1] not in ("NaN", "+Inf", "-Inf"), sample


def test_lists_of_the_variables_are_not_empty(prometheus: Prometheus) -> None:
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] != "query":
            continue
        selector, label = variable["definition"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
        values = prometheus.get(f"/api/v1/label/{label}/values", **{"match[]": chosen(selector)})
        assert values, variable["definition"]
        if label == "node":
            assert values == [NODE]


def test_a_choice_of_another_node_finds_nothing(prometheus: Prometheus) -> None:
    """The variables filter: every query that names the node is empty, or says 0, for a node that does not exist."""
    for name, expr in panel_queries():
        found = prometheus.query(chosen(expr, node="no-such-node"))
        assert all(sample["value"][1] == "0" for sample in found), name


def test_a_target_without_a_node_is_named_by_its_host(prometheus: Prometheus) -> None:
    assert {sample["metric"]["node"]: sample["value"][1] for sample in prometheus.query("up")} == {NODE: "1", "localhost": "0"}


def test_rules_run_and_know_the_node(prometheus: Prometheus) -> None:
    def evaluated() -> bool:
        groups = prometheus.get("/api/v1/rules")["groups"]
        return all(rule["health"] != "unknown" for group in groups for rule in group["rules"])

    until(evaluated, "every rule was evaluated")
    for group in prometheus.get("/api/v1/rules")["groups"]:
        for rule in group["rules"]:
            assert rule["health"] == "ok", rule
    assert [sample["metric"]["node"] for sample in prometheus.query("poolmeter:node_known")] == [NODE]
    idle = prometheus.query("poolmeter:slice_idle_seconds")
    assert idle and all(sample["metric"]["tenant"] for sample in idle)
