"""`poolmeter token …` and `poolmeter books log`, as people call them."""

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from books_decisions import decision
from books_places import KINDS, Places, Server
from jsonschema import Draft202012Validator

from poolmeter.accounting.recommend.decision_store import open_store
from poolmeter.books.postgres import Postgres
from poolmeter.books.writer import Books
from poolmeter.cli import main
from poolmeter.clock import SystemClock
from poolmeter.config import load_config
from poolmeter.model.decision import DecisionState
from poolmeter.places import CollectorData
from poolmeter.pool import NodePlan, Pool

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
Call = Callable[..., tuple[int, Any, str]]


@pytest.fixture(params=KINDS)
def data(request: pytest.FixtureRequest, tmp_path: Path, postgres: Callable[[], Server], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder whose books are of either kind, chosen by the configuration."""
    folder = tmp_path / "data"
    folder.mkdir()
    config = tmp_path / "config.toml"
    config.write_text("")
    if request.param is Postgres:
        config.write_text(f'[collector]\nbooks = "{Places(Postgres, tmp_path, postgres).ready()}"\n')
    else:
        Books(CollectorData(folder).books).close()
    monkeypatch.setenv("POOLMETER_CONFIG", str(config))
    monkeypatch.setenv("POOLMETER_DATA", str(folder))
    return folder


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Exit code, JSON that fits its schema, and stderr of a command."""

    def run(*words: str) -> tuple[int, Any, str]:
        code = main([*words, "--format", "json"])
        said = capsys.readouterr()
        found = json.loads(said.out) if said.out else None
        if found is not None:
            name = {"token": "tokens", "tokens": "tokens", "changes": "changes"}[found["schema"].split(".")[1].split("/")[0]]
            schema = json.loads((REFERENCE / f"{name}.schema.json").read_text())
            Draft202012Validator.check_schema(schema)
            Draft202012Validator(schema).validate(found)
        return code, found, said.err

    return run


def test_a_token_from_its_making_to_its_end(data: Path, call: Call) -> None:
    code, made, _ = call("token", "create", "--name", "screen", "--role", "tenant", "--tenant", "vision", "--days", "3", "--reason", "wall")
    assert code == 0
    (row,) = made["rows"]
    assert (row["name"], row["role"], row["tenant"]) == ("screen", "tenant", "vision") and row["expires"] > row["created"]
    config = load_config(None).collector
    with Books(config.books or CollectorData(data).books) as books:
        found = books.tokens.find(row["token"])
        assert found is not None and found.id == row["id"] and found.expires_us is not None
        assert found.expires_us - found.created_us in range(3 * 86_400_000_000 - 10_000_000, 3 * 86_400_000_000 + 1)
    code, listed, _ = call("token", "list")
    assert code == 0 and listed["totals"] == {"tokens": 1} and "token" not in listed["rows"][0]
    assert "last_used" in listed["rows"][0] and row["token"].rpartition("_")[2] not in json.dumps(listed)
    code, ended, _ = call("token", "revoke", row["id"], "--reason", "taken down")
    assert code == 0 and ended["rows"][0]["revoked"]
    assert call("token", "revoke", row["id"])[0] == 1
    code, log, _ = call("books", "log", "--subject", f"tokens/{row['id']}")
    assert code == 0 and [(entry["number"], entry["reason"]) for entry in log["rows"]] == [(1, "wall"), (2, "taken down")]
    assert log["rows"][1]["before"] == {} and list(log["rows"][1]["after"]) == ["revoked_us"]


def test_the_log_tells_who_did_what(data: Path, call: Call) -> None:
    with open_store(data, load_config(None).collector) as store:
        now = SystemClock().wall_us()
        store.add([decision(1, expires_us=now + 3_600_000_000), decision(2, expires_us=now + 3_600_000_000)])
        store.move("d1", DecisionState.APPROVED, "ann", "looks right")
    code, log, _ = call("books", "log", "--subject", "decisions")
    assert code == 0 and log["totals"] == {"changes": 3} and "from" not in log
    first, _, third = log["rows"]
    assert "before" not in first and first["after"]["memory_bytes"] == 1 << 30 and "signature" not in first["after"]
    assert (third["by"], third["key"], third["reason"], third["before"]) == ("ann", "d1", "looks right", {"state": "proposed"})
    assert third["after"] == {
        "state": "approved",
        "state_reason": "looks right",
        "decided_by": "ann",
        "decided_at_us": third["after"]["decided_at_us"],
    }
    assert [entry["number"] for entry in call("books", "log", "--limit", "1")[1]["rows"]] == [3]
    assert len(call("books", "log", "--from", "1d")[1]["rows"]) == 3
    assert call("books", "log", "--to", "2020-01-01")[1]["rows"] == []
    assert call("books", "log", "--subject", "decisions/d2")[1]["totals"] == {"changes": 1}


def test_every_format_prints(data: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    for fmt in ("table", "csv", "arrow", "parquet"):
        assert main(["token", "create", "--name", fmt, "--role", "admin", "--format", fmt]) == 0
        assert main(["books", "log", "--format", fmt]) == 0
    assert b"change" in capfdbinary.readouterr().out


def test_a_file_with_a_token_is_its_owners(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "token.json"
    assert main(["token", "create", "--name", "a", "--role", "admin", "--format", "json", "--output", str(out)]) == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ("token create --name a --role tenant", 2, "expected a tenant with that role"),
        ("token create --name a --role node --tenant t", 2, "expected no tenant with that role"),
        ("token create --name a --role king", 2, "invalid choice: 'king'"),
        ("token create --name a --role admin --days 0", 2, "--days is 0, expected 1 to 3660"),
        ("token revoke nobody", 2, "token 'nobody' is not in the books"),
        ("books log --subject plans", 2, "--subject is 'plans', expected decisions, tokens or assets"),
        ("books log --limit 0", 2, "--limit is 0, expected 1 or more"),
        ("books log --from tomorrow", 2, "--from is 'tomorrow'"),
        ("token list --data /nowhere/at/all", 3, "books /nowhere/at/all/books.sqlite are not there"),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call, words: str, code: int, sentence: str
) -> None:
    monkeypatch.setenv("POOLMETER_DATA", str(tmp_path))
    (tmp_path / "config.toml").write_text("")
    monkeypatch.setenv("POOLMETER_CONFIG", str(tmp_path / "config.toml"))
    Books(CollectorData(tmp_path).books).close()
    found, out, said = call(*words.split())
    assert (found, out) == (code, None) and sentence in said and said.count("\n") == 1
    with Books(CollectorData(tmp_path).books) as books:
        assert books.changes() == []


def test_a_simulated_pool_leaves_the_configured_books_alone(tmp_path: Path) -> None:
    simulated = Pool(tmp_path, (NodePlan("n1", tmp_path, tmp_path, tmp_path / "machine"),))
    real = Pool(tmp_path, (NodePlan("n1", tmp_path, tmp_path),))
    assert "--local-books" in simulated._collector([]).arguments
    assert "--local-books" not in real._collector([]).arguments
