"""The allocation verbs: the same answers in every format, one sentence and the right status for every mistake."""

import argparse
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest

from poolmeter import cli
from poolmeter.enforcer.commands import _COLUMNS
from poolmeter.enforcer.nodes import KnownNode, nodes_of_pool
from poolmeter.enforcer.run import Run
from poolmeter.errors import BadInput
from poolmeter.pages import layout
from poolmeter.places import NodeRun


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


class Here:
    """Commands run in this process: the imports of twenty processes are most of their time."""

    def __init__(self, node, capsys: pytest.CaptureFixture[str]) -> None:
        self.run = node.run
        self._capsys = capsys

    def poolmeter(self, *words: str) -> Done:
        options = () if "--run" in words else ("--run", str(self.run.root))
        self._capsys.readouterr()
        status = cli.main([*words, *options])
        return Done(status, *self._capsys.readouterr())


@pytest.fixture(scope="module")
def daemon(make_shared_node):
    return make_shared_node("alpha")


@pytest.fixture
def node(daemon, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(daemon, capsys)


@pytest.fixture
def allocation(node):
    """One allocation, as `create --format json` tells it."""
    done = node.poolmeter(
        *("allocation", "create", "--tenant", "acme", "--project", "vision", "--class", "training", "--compute", "25", "--format", "json")
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)["rows"][0]
    yield row
    node.poolmeter("allocation", "release", row["allocation"])


def test_create_tells_the_promise_and_the_folder(node, allocation) -> None:
    assert allocation["node"] == "alpha"
    assert (allocation["tenant"], allocation["project"], allocation["class"]) == ("acme", "vision", "training")
    assert (allocation["promise_percent"], allocation["compute_limit_percent"]) == (25, 25)
    assert allocation["memory_bytes"] == 20 << 30
    assert "user" not in allocation and "decision" not in allocation
    assert (node.run.allocations / allocation["allocation"] / "grant").is_file()


def test_list_is_one_answer_in_all_formats(node, allocation, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = json.loads(node.poolmeter("allocation", "list", "--format", "json").stdout)["rows"]
    assert rows == [allocation]
    table = node.poolmeter("allocation", "list").stdout
    assert allocation["allocation"] in table and "acme" in table
    for fmt in ("parquet", "arrow"):
        assert node.poolmeter("allocation", "list", "--format", fmt, "--output", str(tmp_path / fmt)).returncode == 0
    assert pq.read_table(tmp_path / "parquet").column("allocation").to_pylist() == [allocation["allocation"]]
    with pa.ipc.open_file(io.BytesIO((tmp_path / "arrow").read_bytes())) as file:
        assert file.read_all().column("memory_bytes").to_pylist() == [20 << 30]
    header, row = node.poolmeter("allocation", "list", "--format", "csv").stdout.splitlines()
    assert dict(zip(header.split(","), row.split(","), strict=True))["allocation"] == allocation["allocation"]


def test_json_is_what_its_schema_says(node, allocation) -> None:
    schema = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "allocations.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    for words in (["list"], ["show", allocation["allocation"]], ["resize", allocation["allocation"], "--compute", "12.5"]):
        done = node.poolmeter("allocation", *words, "--format", "json")
        jsonschema.validate(json.loads(done.stdout), schema)
    assert set(_COLUMNS) == set(schema["properties"]["rows"]["items"]["properties"])
    reference = (Path(__file__).parents[2] / "docs" / "reference" / "allocation-options.md").read_text()
    assert " ".join(_COLUMNS) in " ".join(reference.split())


def test_every_option_is_in_the_reference() -> None:
    reference = (Path(__file__).parents[2] / "docs" / "reference" / "allocation-options.md").read_text()
    parser = argparse.ArgumentParser()
    Run().configure(parser)
    options = {option for action in parser._actions for option in action.option_strings if option.startswith("--")} - {"--help"}
    assert {option for option in options if f"`{option}" not in reference} == set()


def test_show_and_resize(node, allocation) -> None:
    name = allocation["allocation"]
    done = node.poolmeter("allocation", "resize", name, "--compute", "50", "--memory", "8G", "--device", "0", "--format", "json")
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["compute_limit_percent"], row["memory_bytes"], row["generation"]) == (50, 8 << 30, 4)
    shown = json.loads(node.poolmeter("allocation", "show", name, "--format", "json").stdout)
    assert shown["rows"] == [row]
    assert shown["totals"]["processes"] == 0 and shown["totals"]["folder"].endswith(name)
    assert shown["totals"]["hook_faults"] == 0


def test_show_says_what_a_hook_could_not_do_and_what_a_meter_cannot_say(node) -> None:
    (row,) = json.loads(node.poolmeter("allocation", "create", "--compute", "1", "--format", "json").stdout)["rows"]
    meter = node.run.allocations / row["allocation"] / "meter"
    with meter.open("r+b") as file:
        file.seek(layout.Meter.faults.offset)
        file.write((3).to_bytes(8, "little"))
    words = ("allocation", "show", row["allocation"], "--format", "json")
    assert json.loads(node.poolmeter(*words).stdout)["totals"]["hook_faults"] == 3
    os.truncate(meter, 100)
    told = json.loads(node.poolmeter(*words).stdout)
    assert told["totals"].get("hook_faults") is None and str(meter) in told["warnings"][0]
    assert node.poolmeter("allocation", "release", row["allocation"]).returncode == 0


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["create", "--compute", "0"], 2, "percentage above 0"),
        (["create", "--memory", "lots"], 2, "expected a number of bytes"),
        (["create", "--device", "0", "--devices", "2"], 2, "not allowed with"),
        (["create", "--device", "9"], 2, "expected one of this node"),
        (["create", "--devices", "5"], 1, "4 of 4 have room"),
        (["create", "--mode", "mps"], 1, "expected hook or whole"),
        (["create", "--node", "nowhere"], 2, "expected one of alpha"),
        (["show", "nonsense"], 2, "allocation id is 'nonsense'"),
        (["show", "a-0000000000-0123456789ab"], 1, "not on this node"),
        (["resize", "a-0000000000-0123456789ab", "--compute", "10"], 1, "not on this node"),
        (["resize", "a-0000000000-0123456789ab", "--compute", "0"], 2, "percentage above 0"),
        (["resize", "a-0000000000-0123456789ab", "--compute", "101"], 2, "at most 100"),
        (["release", "a-0000000000-0123456789ab"], 1, "not on this node"),
        (["list", "--run", "/nonexistent"], 3, "no enforcer answers at /nonexistent/enforcer.sock"),
    ],
)
def test_mistakes_are_one_sentence_with_the_right_status(node, words: list[str], status: int, told: str) -> None:
    done = node.poolmeter("allocation", *words)
    assert (done.returncode, done.stdout) == (status, "")
    assert told in done.stderr and done.stderr.count("\n") == 1


def test_a_resize_beyond_the_card_is_refused_and_one_without_limits_is_a_mistake(node, allocation) -> None:
    done = node.poolmeter("allocation", "resize", allocation["allocation"], "--memory", "81G")
    assert done.returncode == 1 and "the card has 80.0 GiB" in done.stderr
    assert node.poolmeter("allocation", "resize", allocation["allocation"]).returncode == 2


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["--name", "bad name!"], 2, "--name is 'bad name!'"),
        (["--simulate"], 2, "POOLMETER_SIM_MACHINE is not set"),
        (["--run", "/proc/nothing"], 3, "run folder /proc/nothing cannot be used"),
        (["--data", "/proc/nothing", "--run", "{tmp}/other"], 3, "journal /proc/nothing/events.jsonl cannot be opened"),
    ],
)
def test_an_enforcer_that_cannot_start_says_why(daemon, words: list[str], status: int, told: str, tmp_path: Path) -> None:
    done = daemon.poolmeter("enforcer", *(word.format(tmp=tmp_path) for word in words))
    assert done.returncode == status
    assert told in done.stderr and done.stderr.count("\n") == 1


# ---- several nodes -------------------------------------------------------------------------------------------------


def test_a_pool_of_two_nodes_is_one_place(make_node, tmp_path: Path) -> None:
    alpha, beta = make_node("alpha", count=1), make_node("beta", count=2)
    data = tmp_path / "pool"
    data.mkdir()
    nodes = [{"name": item.run.root.parent.name, "run": str(item.run.root)} for item in (alpha, beta)]
    (data / "up.json").write_text(json.dumps({"urls": {}, "nodes": nodes}))

    def pool(*words: str):
        return alpha.poolmeter(*words, POOLMETER_DATA=str(data), POOLMETER_RUN=str(tmp_path / "empty"))

    def create(*words: str) -> dict[str, object]:
        done = pool("allocation", "create", "--format", "json", *words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["rows"][0]

    assert create("--compute", "60")["node"] == "alpha"
    second = create("--compute", "60")
    assert second["node"] == "beta"
    assert create("--devices", "2", "--compute", "10")["node"] == "beta"
    assert create("--device", "GPU-beta-1", "--compute", "10")["node"] == "beta"
    assert create("--node", "beta", "--compute", "10")["node"] == "beta"
    # A demand that another node met was not refused; one that nobody met is told once.
    assert "refused" not in alpha.journal.read_text() + beta.journal.read_text()
    refused = pool("allocation", "create", "--devices", "3")
    assert refused.returncode == 1 and "of 2 have room" in refused.stderr
    assert (alpha.journal.read_text() + beta.journal.read_text()).count('"kind":"refused"') == 1
    listed = json.loads(pool("allocation", "list", "--format", "json").stdout)["rows"]
    assert [row["node"] for row in listed] == ["alpha", "beta", "beta", "beta", "beta", "beta"]
    assert len(json.loads(pool("allocation", "list", "--node", "alpha", "--format", "json").stdout)["rows"]) == 1
    assert pool("allocation", "resize", str(second["allocation"]), "--compute", "61").returncode == 0
    alpha.kill()
    partly = json.loads(pool("allocation", "list", "--format", "json").stdout)
    assert len(partly["rows"]) == 5 and "no enforcer answers" in partly["warnings"][0]
    assert pool("allocation", "release", str(second["allocation"])).returncode == 0
    done = pool("run", "--quiet", "--compute", "5", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert done.stdout.startswith("GPU-beta-")


def test_a_pool_file_that_is_none_is_bad_input(tmp_path: Path) -> None:
    assert nodes_of_pool(tmp_path / "up.json") == ()
    (tmp_path / "up.json").write_text('{"nodes":[{"name":"a"}]}')
    with pytest.raises(BadInput, match="expected what poolmeter up wrote"):
        nodes_of_pool(tmp_path / "up.json")
    (tmp_path / "up.json").write_text('{"nodes":[{"name":"a","run":"/x"}]}')
    assert nodes_of_pool(tmp_path / "up.json") == (KnownNode(NodeRun(Path("/x")), "a"),)
