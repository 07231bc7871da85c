"""The recommender: its rule, what it reads, what it enters in the books, and the commands around it."""

import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.accounting.collector_api import collector_url
from poolmeter.accounting.recommend.decision_store import ApiStore, DecisionStore, FileStore, open_store
from poolmeter.accounting.recommend.evidence import read_inputs
from poolmeter.accounting.recommend.memory_limit import (
    GRANULE_BYTES,
    Inputs,
    Settings,
    SliceEvidence,
    input_hash,
    obstacle,
    propose,
    target_bytes,
)
from poolmeter.accounting.recommend.proposals import enter
from poolmeter.books.writer import Books
from poolmeter.cli import main
from poolmeter.clock import SystemClock
from poolmeter.collector.api import ApiState, create_app
from poolmeter.collector.segments import publish_records
from poolmeter.collector.store import Store
from poolmeter.config import CollectorSection
from poolmeter.errors import BadInput, Refused, Unavailable
from poolmeter.model.decision import Decision, DecisionState
from poolmeter.model.snapshot import SliceSnapshot, Snapshot
from poolmeter.model.units import GIB, MINUTE_US
from poolmeter.model.usage import EventRecord
from poolmeter.places import CollectorData
from poolmeter.tokens import make_token, read_token

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/reference/decisions.schema.json").read_text())

NOW = 1_790_000_000_000_000
SETTINGS = Settings(headroom_percent=30, resident_percent=10, dead_band_percent=15, minimum_minutes=10, expires_hours=24)
SLICE = SliceEvidence(
    node="n1", allocation_id="a1", device_uuid="GPU-1", tenant="acme", generation=4, state="active", taken_us=NOW, limit_bytes=40 * GIB,
    resident_bytes=6 * GIB, peak_bytes=10 * GIB, denied_allocations=0, minutes=30, unknown_minutes=0, completeness_ppm=1_000_000, tampered=False,
)  # fmt: skip


def inputs(*slices: SliceEvidence, now_us: int = NOW) -> Inputs:
    return Inputs(now_us=now_us, window_start_us=NOW - 7 * 86_400_000_000, slices=slices)


def test_a_limit_far_above_its_peak_comes_down() -> None:
    (decision,) = propose(inputs(SLICE), SETTINGS)
    assert (decision.memory_bytes, decision.memory_before_bytes) == (13 * GIB, 40 * GIB)
    assert (decision.node, decision.generation, decision.sequence, decision.signature) == ("n1", 4, 0, None)
    assert decision.expires_us - decision.created_us == 24 * 3_600_000_000 and decision.created_us == NOW
    assert decision.input_hash == input_hash(SLICE, inputs(SLICE), SETTINGS) and len(decision.input_hash) == 64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"denied_allocations": 1}, "1 allocations were refused"),
        ({"denied_allocations": None}, "refused allocations are unknown"),
        ({"state": "unknown"}, "state is unknown"),
        ({"state": "suspended"}, "state is suspended"),
        ({"unknown_minutes": 1}, "1 of its minutes are unknown"),
        ({"completeness_ppm": 899_999}, "completeness is 899999 ppm"),
        ({"limit_bytes": None}, "no memory limit is in force"),
        ({"peak_bytes": None}, "is unknown, or it has used none yet"),
        ({"peak_bytes": 0}, "is unknown, or it has used none yet"),
        ({"resident_bytes": None}, "is unknown"),
        ({"tampered": True}, "its page was tampered with"),
        ({"minutes": 9}, "9 minutes are recorded, expected 10"),
        ({"taken_us": NOW - 301_000_000}, "its newest snapshot is 301 s old"),
        ({"peak_bytes": 30 * GIB}, "within the dead band"),
        ({"resident_bytes": 40 * GIB}, "within the dead band"),
        ({"limit_bytes": 8 * GIB}, "within the dead band"),
    ],
)
def test_it_says_nothing_when_it_does_not_know(change: dict[str, Any], words: str) -> None:
    changed = replace(SLICE, **change)
    assert words in str(obstacle(changed, NOW, SETTINGS))
    assert propose(inputs(changed), SETTINGS) == []


@given(
    peak=st.integers(1, 200 * GIB),
    resident=st.integers(0, 200 * GIB),
    limit=st.integers(1, 200 * GIB),
    headroom=st.integers(0, 1000),
    margin=st.integers(0, 1000),
    band=st.integers(0, 100),
)
def test_a_target_covers_peak_and_resident_and_only_lowers(
    peak: int, resident: int, limit: int, headroom: int, margin: int, band: int
) -> None:
    settings = replace(SETTINGS, headroom_percent=headroom, resident_percent=margin, dead_band_percent=band)
    evidence = replace(SLICE, peak_bytes=peak, resident_bytes=resident, limit_bytes=limit)
    target = target_bytes(evidence, settings)
    assert target is not None and target % GRANULE_BYTES == 0
    assert target * 100 >= peak * (100 + headroom) and target * 100 >= resident * (100 + margin)
    assert (target - GRANULE_BYTES) * 100 < max(peak * (100 + headroom), resident * (100 + margin))
    for decision in propose(inputs(evidence), settings):
        assert decision.memory_bytes == target and target * 100 < limit * (100 - band)


def test_replay_is_exact_and_order_does_not_matter() -> None:
    slices = [replace(SLICE, allocation_id=f"a{n}", peak_bytes=(n + 1) * GIB) for n in range(20)]
    first = propose(inputs(*slices), SETTINGS)
    random.Random(1).shuffle(slices)
    assert propose(inputs(*slices), SETTINGS) == first and len({decision.id for decision in first}) == len(first) == 20
    assert propose(inputs(*slices, now_us=NOW + 1), SETTINGS)[0].id != first[0].id


def test_one_decision_per_allocation_the_one_that_frees_most() -> None:
    other = replace(SLICE, device_uuid="GPU-2", peak_bytes=2 * GIB, resident_bytes=0)
    (decision,) = propose(inputs(SLICE, other), SETTINGS)
    assert decision.device_uuid == "GPU-2"


# ---- the books, behind the file and behind the API ----


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A collector's API over a data folder, and its URL."""
    data = CollectorData(tmp_path / "data")
    with Store(data.store) as opened, Books(data.books) as books:
        server = uvicorn.Server(
            uvicorn.Config(create_app(ApiState(opened, books, read_token(make_token(data.root)))), port=0, log_config=None, lifespan="off")
        )
        thread = threading.Thread(target=server.run)
        thread.start()
        deadline = time.monotonic() + 10
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.005)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        try:
            yield data.root, url
        finally:
            server.should_exit = True
            thread.join(10)


@pytest.fixture(params=["file", "api"])
def decisions(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DecisionStore]:
    if request.param == "api":
        folder, url = request.getfixturevalue("served")
        yield ApiStore(url, read_token(make_token(folder)))
        return
    with Books(tmp_path / "books.sqlite") as books:
        yield FileStore(books)


def now() -> int:
    return SystemClock().wall_us()


def fresh(**changes: Any) -> Decision:
    at = now()
    return propose(inputs(replace(SLICE, taken_us=at, **changes), now_us=at), SETTINGS)[0]


def test_the_same_proposal_changes_nothing(decisions: DecisionStore) -> None:
    first = enter(decisions, [fresh()], now())
    assert first.new == (first.standing[0].decision.id,) and first.standing[0].decision.sequence == 1
    again = enter(decisions, [fresh()], now())
    assert again.new == () and [entry.decision for entry in again.standing] == [first.standing[0].decision]
    assert len(decisions.list()) == 1 and decisions.get(first.new[0]).decision == first.standing[0].decision


def test_a_newer_proposal_supersedes_an_open_one(decisions: DecisionStore) -> None:
    old = enter(decisions, [fresh()], now()).new[0]
    entered = enter(decisions, [fresh(peak_bytes=12 * GIB)], now())
    assert entered.superseded == (old,)
    before = decisions.get(old)
    assert (before.decision.state, before.state_reason) == (DecisionState.REJECTED, f"superseded by {entered.new[0]}")
    # What was superseded may be said again.
    assert enter(decisions, [fresh()], now()).superseded == entered.new
    assert [entry.decision.sequence for entry in decisions.list()] == [1, 2, 3]


def test_approved_and_rejected_decisions_are_respected(decisions: DecisionStore) -> None:
    first = enter(decisions, [fresh()], now()).new[0]
    moved = decisions.move(first, DecisionState.APPROVED, "ann")
    assert (moved.decision.state, moved.decided_by) == (DecisionState.APPROVED, "ann")
    assert enter(decisions, [fresh(peak_bytes=12 * GIB)], now()).new == ()
    other = enter(decisions, [fresh(allocation_id="a2")], now()).new[0]
    assert decisions.move(other, DecisionState.REJECTED, "ann", "it grows at night").state_reason == "it grows at night"
    assert enter(decisions, [fresh(allocation_id="a2")], now()) == enter(decisions, [], now())
    assert enter(decisions, [fresh(allocation_id="a2", generation=6)], now()).new
    with pytest.raises(Refused, match="is rejected and cannot become approved"):
        decisions.move(other, DecisionState.APPROVED, "ann")
    for call in (lambda: decisions.get("d-none"), lambda: decisions.move("d-none", DecisionState.APPROVED, "ann")):
        with pytest.raises(BadInput, match="decision 'd-none' is not in the books"):
            call()


def test_a_running_collector_is_found_and_a_stranger_is_not(served: tuple[Path, str], tmp_path: Path) -> None:
    data, url = served
    port = int(url.rsplit(":", 1)[1])
    section = CollectorSection(port=port)
    assert collector_url(data, section) == url
    other = tmp_path / "other"
    publish_records(CollectorData(other).store, [])
    publish_records(CollectorData(other).store, [])
    assert collector_url(other, section) is None
    other.joinpath("up.json").write_text(json.dumps({"urls": {"collector": url}}))
    assert collector_url(other, CollectorSection(port=0)) == url
    other.joinpath("up.json").write_text(json.dumps({"urls": {"collector": "http://127.0.0.1:1"}}))
    with open_store(other, CollectorSection(port=0)) as chosen:
        assert isinstance(chosen, FileStore)
    with open_store(data, section) as chosen:
        assert isinstance(chosen, ApiStore)
    with pytest.raises(Unavailable, match="does not answer"):
        ApiStore("http://127.0.0.1:1").list()


# ---- evidence and commands, over a real store ----


def slice_snapshot(tenant: str, device: str = "GPU-1", **changes: Any) -> SliceSnapshot:
    values: dict[str, Any] = {
        "allocation_id": f"a-{tenant}", "device_uuid": device, "tenant": tenant, "mode": "hook", "state": "active", "used_basis": "hook",
        "generation": 2, "enforcement": "cooperative", "promise_ppm": 500_000, "memory_promise_bytes": 40 * GIB, "created_us": 1,
        "origin": "o", "memory_limit_bytes": 40 * GIB, "memory_used_bytes": 6 * GIB, "memory_peak_bytes": 9 * GIB, "denied_allocations_total": 0,
    }  # fmt: skip
    return SliceSnapshot(**{**values, **changes})


@pytest.fixture
def data(tmp_path: Path, minutes: Any) -> Path:
    """Twelve minutes up to now: acme is far below its limit, beta was refused memory, gamma's page was tampered with."""
    at = now()
    first = (at - 13 * MINUTE_US) // MINUTE_US
    from_start = first - (minutes.key(0, "n1", 1)["minute_us"] // MINUTE_US)
    for minute in range(from_start, from_start + 12):
        minutes.device(minute, allocated_us=30_000_000)
        for tenant, denied in (("acme", 0), ("beta", int(minute == from_start)), ("gamma", 0)):
            minutes.slice(minute, tenant, 10_000_000, 5_000_000, memory_peak_bytes=10 * GIB, denied_allocations=denied)
    minutes.records.append(
        EventRecord(**minutes.key(from_start, "n1", MINUTE_US), event="tampered", at_us=first * MINUTE_US + 5, allocation_id="a-gamma")
    )
    slices = (
        *(slice_snapshot(tenant) for tenant in ("acme", "beta", "gamma")),
        slice_snapshot("new", created_us=at, memory_peak_bytes=GIB),
    )
    snapshot = Snapshot(
        node="n1", epoch=minutes.records[0].epoch, sequence=len(minutes.records), taken_us=at, simulated=True, slices=slices
    )
    publish_records(CollectorData(tmp_path / "data").store, minutes.records, [snapshot])
    return tmp_path / "data"


def test_evidence_of_a_store(data: Path) -> None:
    found = {evidence.tenant: evidence for evidence in read_inputs(CollectorData(data).store, 7, now()).slices}
    acme = found["acme"]
    assert (acme.limit_bytes, acme.peak_bytes, acme.resident_bytes, acme.minutes) == (40 * GIB, 10 * GIB, 6 * GIB, 12)
    assert (acme.denied_allocations, acme.tampered, acme.completeness_ppm, acme.generation) == (0, False, 1_000_000, 2)
    assert found["beta"].denied_allocations == 1 and found["gamma"].tampered
    new = found["new"]
    assert (new.minutes, new.peak_bytes, new.denied_allocations, new.completeness_ppm) == (0, GIB, 0, None)


def run(capfd: pytest.CaptureFixture[str], data: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    status = main([*words, "--data", str(data), "--format", "json"])
    out, err = capfd.readouterr()
    body = json.loads(out) if out else {}
    if body:
        jsonschema.validate(body, SCHEMA)
        assert body["schema"] == f"poolmeter.{words[0]}/1"
    return status, body, err


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No collector anywhere: whatever listens on the default port is not asked."""
    config = tmp_path / "alone.toml"
    config.write_text("[collector]\nport = 0\n")
    monkeypatch.setenv("POOLMETER_CONFIG", str(config))


@pytest.mark.usefixtures("alone")
def test_commands_without_a_collector(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, body, err = run(capfd, data, "recommend", "--why")
    assert status == 0 and [row["allocation"] for row in body["rows"]] == ["a-acme"] and body["schema"] == "poolmeter.recommend/1"
    assert "a-beta GPU-1: 1 allocations were refused" in err and "a-gamma GPU-1: its page was tampered with" in err
    (row,) = body["rows"]
    assert (row["state"], row["memory_bytes"], row["sequence"]) == ("proposed", 13 * GIB, 1)
    assert [r["id"] for r in run(capfd, data, "recommend")[1]["rows"]] == [row["id"]]
    more = run(capfd, data, "recommend", "--minimum-minutes", "0")[1]["rows"]
    assert [r["allocation"] for r in more] == ["a-acme", "a-new"] and more[0]["id"] == row["id"]

    status, body, _ = run(capfd, data, "apply", "--all", "--dry-run")
    assert status == 0 and len(body["rows"]) == 2 and {r["state"] for r in body["rows"]} == {"proposed"}
    status, body, _ = run(capfd, data, "reject", more[1]["id"], "--reason", "it has just begun")
    assert status == 0 and body["rows"][0]["state_reason"] == "it has just begun"
    assert run(capfd, data, "approve", more[1]["id"])[0] == 1
    assert run(capfd, data, "approve", "d-none")[::2] == (
        2,
        "poolmeter: decision 'd-none' is not in the books, expected an id of poolmeter history\n",
    )
    status, body, err = run(capfd, data, "apply", row["id"])
    assert status == 3 and body["rows"][0]["state"] == "approved" and "no collector serves" in err
    assert [r["state"] for r in run(capfd, data, "history")[1]["rows"]] == ["approved", "rejected"]
    assert [r["id"] for r in run(capfd, data, "history", "--state", "approved")[1]["rows"]] == [row["id"]]


@pytest.mark.parametrize(("outcome", "expected"), [("applied", 0), ("refused", 1), (None, 1)])
def test_apply_waits_for_the_enforcers_word(
    data: Path,
    served: tuple[Path, str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    outcome: str | None,
    expected: int,
) -> None:
    folder, url = served
    config = tmp_path / "config.toml"
    config.write_text(f"[collector]\nport = {url.rsplit(':', 1)[1]}\n")
    monkeypatch.setenv("POOLMETER_CONFIG", str(config))
    with open_store(folder, CollectorSection(port=int(url.rsplit(":", 1)[1]))) as store:
        decision_id = enter(store, [fresh()], now()).new[0]

    def enforcer() -> None:
        with Books(CollectorData(folder).books) as books:
            deadline = time.monotonic() + 20
            while books.get(decision_id).decision.state is not DecisionState.APPROVED and time.monotonic() < deadline:
                time.sleep(0.02)
            if outcome is not None:
                books.record_outcome(decision_id, "n1", outcome, "the grant has moved on", now())

    thread = threading.Thread(target=enforcer)
    thread.start()
    status, body, _ = run(capfd, folder, "apply", decision_id, "--wait", "20" if outcome else "0.5")
    thread.join(20)
    assert status == expected and body["rows"][0]["state"] == (outcome or "approved")
    if outcome:
        assert body["rows"][0]["outcome_reason"] == "the grant has moved on"
    else:
        assert body["warnings"] == [f"no outcome after 0.5 s: {decision_id}"]


@pytest.mark.usefixtures("alone")
def test_one_refusal_does_not_stop_the_others(data: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run(capfd, data, "recommend", "--minimum-minutes", "0")[1]["rows"]
    approve = Books.transition

    def transition(books: Books, decision_id: str, *rest: Any) -> Any:
        if decision_id == rows[0]["id"]:
            approve(books, decision_id, DecisionState.REJECTED, "somebody else")
        return approve(books, decision_id, *rest)

    monkeypatch.setattr(Books, "transition", transition)
    status, body, _ = run(capfd, data, "apply", "--all", "--wait", "0")
    assert status == 3 and [row["state"] for row in body["rows"]] == ["rejected", "approved"]
    assert body["warnings"] == [f"decision {rows[0]['id']} is rejected and cannot become approved, expected no further change"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["apply"], 2, "one of the arguments ID --all is required"),
        (["apply", "d-1", "--all"], 2, "not allowed with argument"),
        (["apply", "--all", "--wait", "-1"], 2, "--wait is -1, expected 0 to 86400 seconds"),
        (["reject", "d-1", "--reason", " "], 2, "--reason is empty"),
        (["recommend", "--minimum-minutes", "-1"], 2, "--minimum-minutes is -1"),
        (["recommend", "--data", "/nonexistent/folder"], 3, "is not there"),
    ],
)
def test_bad_words_are_one_sentence(data: Path, capfd: pytest.CaptureFixture[str], words: list[str], status: int, sentence: str) -> None:
    found = main([words[0], "--data", str(data), *words[1:]])
    out, err = capfd.readouterr()
    assert (found, out) == (status, "") and sentence in err and err.count("\n") == 1


@pytest.mark.usefixtures("alone")
def test_the_column_order_is_the_documented_one(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", "--data", str(data), "--format", "csv"]) == 0
    header = capfd.readouterr().out.splitlines()[0]
    page = (Path(__file__).parents[2] / "docs" / "reference" / "decisions.md").read_text()
    assert header.split(",") == [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("words", [["history"], ["approve", "x"], ["apply", "--all"]])
def test_a_mistyped_folder_is_no_empty_history_and_stays_empty(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mistyped"
    assert main([*words, "--data", str(folder)]) == 3
    assert "books" in capsys.readouterr().err
    assert not folder.exists()
