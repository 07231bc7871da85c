"""What broke a rule is kept within limits, and counted beyond them."""

from pathlib import Path
from typing import Any

import pytest
from collector_fakes import EPOCH, NOW, batch, device
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.collector import quarantine as module
from poolmeter.collector.catalog import query
from poolmeter.collector.quarantine import NOT_KEPT, Kept, bounded
from poolmeter.collector.store import Store
from poolmeter.model.units import DAY_US


def row(node: str, size: int, rows: int = 1, epoch: str = EPOCH) -> dict[str, Any]:
    head = {"node": node, "epoch": epoch, "sequence": 1, "minute_us": NOW, "received_us": NOW, "reason": "r"}
    return {**head, "rows": rows, "record": "x" * (size - 1) if size > 1 else None}


@given(st.lists(st.builds(row, st.sampled_from("abc"), st.integers(1, 40), st.integers(1, 3), st.sampled_from([EPOCH, "e2"])), max_size=60))
def test_nothing_is_lost_from_the_count_and_the_limits_hold(rows: list[dict[str, Any]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "ROWS_A_NODE", 5)
        patched.setattr(module, "BYTES_A_NODE", 100)
        patched.setattr(module, "BYTES_IN_ALL", 150)
        kept: dict[str, Kept] = {"a": Kept(2, 30)}
        out: list[Any] = []
        for first in range(0, len(rows), 7):
            part, kept = bounded(rows[first : first + 7], kept)
            out += part
            assert len({(one["node"], one["epoch"]) for one in part if one["reason"] == NOT_KEPT}) == sum(
                one["reason"] == NOT_KEPT for one in part
            )
        for node in "abc":
            for epoch in (EPOCH, "e2"):
                counted = [sum(one["rows"] for one in found if (one["node"], one["epoch"]) == (node, epoch)) for found in (rows, out)]
                assert counted[0] == counted[1]
        assert all(one.rows <= 5 and one.bytes <= 100 for one in kept.values()) and sum(one.bytes for one in kept.values()) <= 150
        assert all(one["record"] is None and one["sequence"] is None for one in out if one["reason"] == NOT_KEPT)
        if len(rows) <= 2 and all(len(one["record"] or "") < 20 for one in rows):
            assert out == rows


def test_the_day_of_a_hostile_node_is_bounded_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_A_NODE", 6)
    sequence = 0
    for _ in range(3):
        with Store(tmp_path) as store:
            for _ in range(2):
                bad = [device("n1", EPOCH, sequence + n, NOW, down_us=7) for n in range(1, 5)]
                sequence += 4
                assert store.publish([batch(bad)], now_us=NOW).quarantined == 4
            honest = device("n2", EPOCH, sequence, NOW, energy_uj=-1)
            assert store.publish([batch([honest], node="n2")], now_us=NOW).quarantined == 1
    told = query(
        tmp_path, "SELECT node, count(record) AS texts, sum(rows)::BIGINT AS rows FROM quarantine GROUP BY 1 ORDER BY 1"
    ).to_pylist()
    assert told == [{"node": "n1", "texts": 6, "rows": 24}, {"node": "n2", "texts": 3, "rows": 3}]
    # Known rows are not counted again, and the next day has room again.
    with Store(tmp_path) as store:
        again = [device("n1", EPOCH, n, NOW, down_us=7) for n in range(1, 5)]
        assert store.publish([batch(again)], now_us=NOW).quarantined == 0
        more = [device("n1", EPOCH, 100 + n, NOW, down_us=7) for n in range(4)]
        store.publish([batch(more)], now_us=NOW + DAY_US)
    assert query(tmp_path, "SELECT count(record) FROM quarantine WHERE node = 'n1'").column(0)[0].as_py() == 10
