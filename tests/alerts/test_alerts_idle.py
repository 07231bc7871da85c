"""The idle rule under promtool: fires when known idle; a state that is not known neither fires nor resolves it."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "alerts" / "rules"
PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian package prometheus)")

KEY = {"node": "n1", "uuid": "GPU-1"}
MINUTES = 240
Value = Callable[[int], int | None]  # a sample at a minute, or none
DOWN, UP = 80, 150  # the minutes between which nothing is known


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROMTOOL or "promtool", *words], capture_output=True, text=True, timeout=60)


def series(name: str, value: Value, hidden: bool = False, **labels: str) -> dict[str, str]:
    """One series, a sample a minute; None: not served, and Prometheus marks it stale. `hidden`: not served between DOWN and UP."""
    texts: list[str] = []
    for minute in range(MINUTES):
        number = None if hidden and DOWN <= minute < UP else value(minute)
        before = texts[-1] if texts else "_"
        texts.append(str(number) if number is not None else "_" if before in ("_", "stale") else "stale")
    text = ",".join(f'{key}="{label}"' for key, label in labels.items())
    return {"series": f"{name}{{{text}}}", "values": " ".join(texts)}


def health(hidden: bool = False, fails: bool = False, old: bool = False) -> list[dict[str, str]]:
    """Both sources of node n1; between DOWN and UP they are not served, or the hook's fails, or its data grows old."""

    def inside(minute: int) -> bool:
        return DOWN <= minute < UP

    out = []
    for source in ("allocations", "hook"):
        bad = source == "hook"
        labels = {"node": "n1", "source": source}
        out.append(series("poolmeter_collect_success", lambda m, bad=bad: int(not (bad and fails and inside(m))), hidden, **labels))
        collected = series(
            "poolmeter_last_collect_timestamp_seconds",
            lambda m, bad=bad: 60 * (DOWN - 2 if bad and old and inside(m) else m),
            hidden,
            **labels,
        )
        out.append(collected)
    return out


def slices(hidden: bool = False, unknown: bool = False, frozen: bool = False, released: bool = False) -> list[dict[str, str]]:
    """`early` ran at minute 0 and at minute 140, `late` at minute 30 alone: its hour ends at minute 90, inside the gap.

    Between DOWN and UP: hidden (no series), unknown (a state, no measurements), frozen (the last values go on being served).
    released: no series from DOWN on.
    """

    def life(value: Value) -> Value:
        return lambda m: None if released and m >= DOWN else value(m)

    def last_kernel(first: int, then: int) -> Value:
        return lambda m: 60 * (then if m >= then and not (frozen and DOWN <= m < UP) else first)

    out = []
    for allocation, tenant, first, then in (("early", "ada", 0, 140), ("late", "bob", 0, 30)):
        labels = {**KEY, "allocation": allocation}
        out.append(series("poolmeter_slice_info", life(lambda _: 1), hidden, **labels, tenant=tenant))
        out.append(series("poolmeter_slice_state", life(lambda _: 1), hidden or unknown, **labels, state="held"))
        if unknown:
            out.append(series("poolmeter_slice_state", lambda m: 1 if DOWN <= m < UP else None, **labels, state="unknown"))
        name = "poolmeter_slice_last_activity_timestamp_seconds"
        out.append(series(name, life(last_kernel(first, then)), hidden or unknown, **labels))
    return out


# Ways of not knowing, between DOWN and UP.
UNKNOWNS = {
    "exporter down": [*health(hidden=True), *slices(hidden=True)],
    "source failing": [*health(fails=True), *slices(hidden=True)],
    "source failing, old values still served": [*health(fails=True), *slices(frozen=True)],
    "data old": [*health(old=True), *slices(frozen=True)],
    "state unknown": [*health(), *slices(unknown=True)],
}


def firing(minute: int, *allocations: str) -> dict[str, object]:
    """At that minute exactly these slices fire."""
    return {
        "expr": 'count by (allocation) (ALERTS{alertname="PoolmeterSliceIdle", alertstate="firing"})',
        "eval_time": f"{minute}m",
        "exp_samples": [{"labels": f'{{allocation="{name}"}}', "value": 1} for name in allocations],
    }


def run(folder: Path, input_series: list[dict[str, str]], expected: list[dict[str, object]], rules: Path = RULES / "idle.yml") -> str:
    """ "" when promtool agrees, else what it says."""
    body = {
        "rule_files": [str(rules)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": input_series, "promql_expr_test": expected}],
    }
    path = folder / "case.yml"
    path.write_text(yaml.safe_dump(body, sort_keys=False))
    result = promtool("test", "rules", str(path))
    return "" if result.returncode == 0 else result.stdout + result.stderr


# A kernel at minute 140 shows only when the node is known again at 150; `late` has then been idle for two hours.
WHILE_UNKNOWN = [firing(m, "early") for m in (DOWN + 2, 91, 100, 141, UP - 1)]
EXPECTED = [
    firing(59),
    firing(62, "early"),
    firing(DOWN - 1, "early"),
    *WHILE_UNKNOWN,
    firing(UP + 1, "late"),
    firing(202, "early", "late"),
]


@pytest.mark.parametrize("case", UNKNOWNS)
def test_unknown_neither_fires_nor_resolves(tmp_path: Path, case: str) -> None:
    assert run(tmp_path, UNKNOWNS[case], EXPECTED) == ""


def test_the_same_slices_when_known_all_along(tmp_path: Path) -> None:
    known = [firing(62, "early"), firing(91 + 1, "early", "late"), firing(141, "late"), firing(202, "early", "late")]
    assert run(tmp_path, [*health(), *slices()], known) == ""


def test_without_the_memory_the_alert_would_resolve(tmp_path: Path) -> None:
    """The cases can fail: a rule that forgets its last known value is caught by each of them that hides the series."""
    rules = yaml.safe_load((RULES / "idle.yml").read_text())
    held = next(rule for rule in rules["groups"][0]["rules"] if rule.get("record") == "poolmeter:slice_idle_seconds")
    held["expr"] = "poolmeter:slice_idle_seconds:known"
    forgetful = tmp_path / "idle.yml"
    forgetful.write_text(yaml.safe_dump(rules))
    for name, case in UNKNOWNS.items():
        assert "FAILED" in run(tmp_path, case, EXPECTED, forgetful), name


def test_a_released_slice_resolves(tmp_path: Path) -> None:
    """Released while known, or while the exporter was down: gone as soon as the node is known not to have it."""
    known = [firing(DOWN - 1, "early"), firing(DOWN + 1), firing(UP + 1)]
    assert run(tmp_path, [*health(), *slices(released=True)], known) == ""
    down = [firing(DOWN - 1, "early"), firing(DOWN + 1, "early"), firing(UP - 1, "early"), firing(UP + 1)]
    assert run(tmp_path, [*health(hidden=True), *slices(released=True)], down) == ""


def test_unknown_for_long_is_said(tmp_path: Path) -> None:
    def says(minute: int, *nodes: str) -> dict[str, object]:
        return {
            "expr": 'count by (node) (ALERTS{alertname="PoolmeterNodeUnknown", alertstate="firing"})',
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": f'{{node="{node}"}}', "value": 1} for node in nodes],
        }

    assert run(tmp_path, UNKNOWNS["exporter down"], [says(DOWN - 1), says(DOWN + 5), says(DOWN + 13, "n1"), says(UP + 1)]) == ""


def test_cases_with_labels_classes_and_texts() -> None:
    result = promtool("test", "rules", str(Path(__file__).with_name("idle_test.yml")))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", sorted(RULES.glob("*.yml")), ids=lambda path: path.name)
def test_rules_pass_promtool(path: Path) -> None:
    result = promtool("check", "rules", str(path))
    assert result.returncode == 0, result.stdout + result.stderr
