"""Every query of the Grafana dashboard and every rule, run by a real Prometheus that scrapes the real exporters of a simulated pool."""

import json
import os
import shutil
import signal
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
from poolmeter.demo_tenants import Tenants
from poolmeter.pool import Pool, simulated_nodes

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = shutil.which("prometheus")
NODES = ("node-a", "node-b")
WAIT_S = 60
RATE = "10s"
DASHBOARD: dict[str, Any] = json.loads(generate.FILE.read_text(encoding="utf-8"))

# Queries that may find nothing yet, and why. `make long` waits for them.
MINUTE = "counted when a minute is closed, which can take a minute from the start of the pool"
MAY_BE_EMPTY = {"Where the pool's device time goes B": MINUTE, "Switching by card A": MINUTE, "Energy by tenant A": MINUTE}
LONG = os.environ.get("POOLMETER_LONG") == "1"

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


def until(true: Callable[[], bool], what: str, seconds: float = WAIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
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
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """The simulated pool with its tenants at work, as `poolmeter up --simulate` has it."""
    data = tmp_path_factory.mktemp("pool")
    pool = Pool(data, simulated_nodes(data, NODES))
    tenants = Tenants(pool, None, time.monotonic)
    pool.start()
    try:
        tenants.start()
        yield pool
    finally:
        tenants.stop()
        pool.stop()


@pytest.fixture(scope="module")
def prometheus(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Debian's Prometheus with the example's relabelling and the rules of alerts/, scraping the exporters each second."""
    folder = tmp_path_factory.mktemp("prometheus")
    example = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    job = next(job for job in example["scrape_configs"] if job["job_name"] == "poolmeter")
    urls = {node: str(pool.daemons[f"exporter:{node}"].url) for node in NODES}
    targets = [{"targets": [urllib.parse.urlsplit(url).netloc], "labels": {"node": node}} for node, url in urls.items()]
    (folder / "nodes.yml").write_text(json.dumps(targets))
    # One more target, without the label, which nothing listens on: named by its host, down, and no trouble to the queries.
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
        # Two of the hooked tenants run kernels, and for some seconds: enough for rates, and for each rule to have been evaluated.
        working = "count(rate(poolmeter_slice_busy_seconds_total[10s]) > 0)"
        until(lambda: counted(server, working) >= 2 and counted(server, "count_over_time(up[1m])") >= 18, "tenants at work")
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


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("name", "expr"), panel_queries(), ids=[name for name, _ in panel_queries()])
def test_panel_query_finds_something(prometheus: Prometheus, name: str, expr: str) -> None:
    if name in MAY_BE_EMPTY and LONG:
        until(lambda: bool(prometheus.query(chosen(expr))), f"{name} finds something", 2 * WAIT_S)
    found = prometheus.query(chosen(expr))
    if name not in MAY_BE_EMPTY:
        assert found, f"{name} is empty: {chosen(expr)}"
    for sample in found:
        assert sample["value"][1] not in ("NaN", "+Inf", "-Inf"), sample


def test_the_exceptions_are_queries_of_the_dashboard() -> None:
    assert MAY_BE_EMPTY.keys() <= dict(panel_queries()).keys()


def test_lists_of_the_variables_are_not_empty(prometheus: Prometheus) -> None:
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] != "query":
            continue
        selector, label = variable["definition"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
        values = prometheus.get(f"/api/v1/label/{label}/values", **{"match[]": chosen(selector)})
        assert values, variable["definition"]
        if label == "node":
            assert values == list(NODES)


def test_a_choice_of_another_node_finds_nothing(prometheus: Prometheus) -> None:
    """The variables filter: every query that names the node is empty, or says 0, for a node that does not exist."""
    for name, expr in panel_queries():
        found = prometheus.query(chosen(expr, node="no-such-node"))
        assert all(sample["value"][1] == "0" for sample in found), name


def test_a_target_without_a_node_is_named_by_its_host(prometheus: Prometheus) -> None:
    assert {sample["metric"]["node"]: sample["value"][1] for sample in prometheus.query("up")} == {
        **dict.fromkeys(NODES, "1"),
        "localhost": "0",
    }


def test_rules_run_and_know_the_node(prometheus: Prometheus) -> None:
    def evaluated() -> bool:
        groups = prometheus.get("/api/v1/rules")["groups"]
        return all(rule["health"] != "unknown" for group in groups for rule in group["rules"])

    until(evaluated, "every rule was evaluated")
    for group in prometheus.get("/api/v1/rules")["groups"]:
        for rule in group["rules"]:
            assert rule["health"] == "ok", rule
    assert {sample["metric"]["node"] for sample in prometheus.query("poolmeter:node_known")} == set(NODES)
    idle = prometheus.query("poolmeter:slice_idle_seconds")
    assert idle and all(sample["metric"]["tenant"] for sample in idle)


def test_an_exporter_that_hangs_leaves_the_last_known_state(prometheus: Prometheus, pool: Pool) -> None:
    """What promtool shows on invented series, on real ones: nothing is known of the node, and its slices stand still."""

    def idle() -> dict[str, float]:
        samples = prometheus.query(f'poolmeter:slice_idle_seconds{{node="{NODES[0]}"}}')
        return {sample["metric"]["tenant"]: float(sample["value"][1]) for sample in samples}

    def known() -> set[str]:
        return {sample["metric"]["node"] for sample in prometheus.query("poolmeter:node_known")}

    assert known() == set(NODES) and {"vision", "research"} <= idle().keys()
    process = pool.daemons[f"exporter:{NODES[0]}"].process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    try:
        until(lambda: known() == {NODES[1]}, "the node is not known any more")
        first = idle()
        evaluated = time.monotonic() + 3
        until(lambda: time.monotonic() > evaluated, "three more evaluations")
        assert idle() == first and {"vision", "research"} <= first.keys()
    finally:
        process.send_signal(signal.SIGCONT)
    until(lambda: known() == set(NODES) and idle()["research"] > first["research"], "the node is known again and time goes on")
