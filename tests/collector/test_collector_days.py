"""Keeping the store: rollups with late rows, merges, retention by tier."""

from pathlib import Path

import pytest
from collector_fakes import DAY, EPOCH, NOW, batch, device, event, process, records, scalar, slice_, stored
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from poolmeter.collector import segments
from poolmeter.collector.audit import audit
from poolmeter.collector.catalog import open_catalog, query
from poolmeter.collector.maintenance import FAN_IN, due_rollups, maintain, next_merge
from poolmeter.collector.retention import Retention
from poolmeter.collector.rollup import rollup_select
from poolmeter.collector.segments import publish_records
from poolmeter.collector.store import Store
from poolmeter.collector.tables import ROLLUPS, VIEWS, SegmentKind
from poolmeter.config import parse_config
from poolmeter.errors import BadInput
from poolmeter.model.units import DAY_US, HOUR_US, MINUTE_US
from poolmeter.model.usage import RecordKind

VIEW_OF = {kind: view for view, (kind, _, _) in VIEWS.items() if kind in ROLLUPS}


def rolled(root: Path, kind: SegmentKind) -> list[dict[str, object]]:
    with open_catalog(root) as connection:
        return connection.sql(f"SELECT * FROM {VIEW_OF[kind]} ORDER BY ALL").to_arrow_table().to_pylist()


def from_minutes(root: Path, kind: SegmentKind) -> list[dict[str, object]]:
    source = f"{ROLLUPS[kind].source.value}_minutes"
    _, derived, expression = VIEWS[VIEW_OF[kind]]
    with open_catalog(root) as connection:
        sql = f"SELECT *, {expression} AS {derived.name} FROM ({rollup_select(kind, source)}) ORDER BY ALL"
        return connection.sql(sql).to_arrow_table().to_pylist()


def test_days_are_the_same_live_and_stored_and_take_late_rows_in(tmp_path: Path) -> None:
    late = [slice_("n1", EPOCH, 900 + n, DAY - HOUR_US + n * MINUTE_US, tenant="late", used_us=None) for n in range(3)]
    with Store(tmp_path) as store:
        for start in range(1, 401, 40):
            store.publish([batch(records("n1", EPOCH, start, 40, DAY - 60 * MINUTE_US))], now_us=NOW)
        before = {kind: rolled(tmp_path, kind) for kind in ROLLUPS}
        assert len(before[SegmentKind.SLICE_DAY]) == 2
        maintain(store, DAY + DAY_US + 2 * HOUR_US, Retention(400))
        assert {segment.kind for segment in store.state.segments.values()} >= set(ROLLUPS)
        assert due_rollups(store.state, DAY + DAY_US + 2 * HOUR_US) == []
        assert {kind: rolled(tmp_path, kind) for kind in ROLLUPS} == before
        store.publish([batch(late)], now_us=NOW)
        assert {segment.day for segment in store.state.segments.values() if segment.kind is SegmentKind.SLICE_DAY} == {"2027-01-15"}
        after = rolled(tmp_path, SegmentKind.SLICE_DAY)
        unknown = [row for row in after if row["tenant"] == "late"]
        assert [(row["used_us"], row["measured_span_us"], row["records"]) for row in unknown] == [(None, 0, 3)]
        maintain(store, DAY + DAY_US + 2 * HOUR_US, Retention(400))
        for kind in ROLLUPS:
            assert rolled(tmp_path, kind) == from_minutes(tmp_path, kind)
        assert rolled(tmp_path, SegmentKind.SLICE_DAY) == after


def test_a_day_of_a_large_card_does_not_overflow(tmp_path: Path) -> None:
    most = (1 << 63) - 1
    made = [slice_("n1", EPOCH, n + 1, DAY + n * MINUTE_US, memory_allocated_kib_us=most) for n in range(3)]
    publish_records(tmp_path, made, now_us=NOW)
    assert int(str(scalar(tmp_path, "SELECT memory_allocated_kib_us FROM slice_days"))) == 3 * most
    with Store(tmp_path) as store:
        maintain(store, DAY + 3 * DAY_US, Retention())
    assert int(str(scalar(tmp_path, "SELECT memory_allocated_kib_us FROM slice_days"))) == 3 * most


def test_small_segments_are_merged_and_no_row_changes(tmp_path: Path) -> None:
    with Store(tmp_path, grace_s=0.0) as store:
        for n in range(FAN_IN + 1):
            store.publish([batch([slice_("n1", EPOCH, n + 1, DAY + n * MINUTE_US, used_us=n)])], now_us=NOW)
        before = query(tmp_path, "SELECT * FROM slice_minutes ORDER BY sequence")
        assert len(store.state.segments) == FAN_IN + 1
        assert maintain(store, NOW, Retention()) == 1
        assert [segment.level for segment in store.state.segments.values()] == [1]
        assert query(tmp_path, "SELECT * FROM slice_minutes ORDER BY sequence").equals(before)
        maintain(store, DAY + DAY_US + 2 * HOUR_US, Retention())
        own = [segment for segment in store.state.segments.values() if segment.kind is SegmentKind.SLICE]
        assert len(own) == 1 and own[0].rows == FAN_IN + 1
        assert query(tmp_path, "SELECT * FROM slice_minutes ORDER BY sequence").equals(before)
        store.sweep()
        assert len(list(tmp_path.glob("segments/slice/*/*.parquet"))) == 1
        assert next_merge(store.state, DAY + 9 * DAY_US) is None


def test_a_merge_whose_ground_changed_is_dropped(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.publish([batch([slice_("n1", EPOCH, 1, DAY)])], now_us=NOW)
        old = list(store.state.segments.values())

        def write_late() -> list[segments.Segment]:
            made = segments.write_segment(tmp_path, SegmentKind.SLICE, "2027-01-15", query(tmp_path, "SELECT * FROM slice_minutes"))
            store.publish([batch([slice_("n1", EPOCH, 2, DAY)])], now_us=NOW)
            return [made]

        assert not store.swap(old, write_late, lambda state: len(state.segments))
        assert [sequence for _, _, sequence in stored(tmp_path)] == [1, 2]
        assert len(list(tmp_path.glob("segments/slice/*/*.parquet"))) == 2


def test_process_rows_are_forgotten_after_their_days_and_slices_are_not(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        made = [process("n1", EPOCH, 1, DAY - DAY_US), slice_("n1", EPOCH, 2, DAY - DAY_US), process("n1", EPOCH, 3, DAY)]
        store.publish([batch(made)], now_us=NOW)
        maintain(store, DAY + DAY_US - MINUTE_US, Retention())
        assert scalar(tmp_path, "SELECT count(*) FROM process_minutes") == 2
        maintain(store, DAY + DAY_US, Retention())
        assert query(tmp_path, "SELECT sequence FROM process_minutes").column(0).to_pylist() == [3]
        assert scalar(tmp_path, "SELECT count(*) FROM slice_minutes") == 1
        assert store.publish([batch(made)], now_us=NOW).known == 3


@settings(max_examples=max(5, settings.default.max_examples // 12), phases=(Phase.generate,))
@given(st.data())
def test_no_tier_is_dropped_before_a_coarser_one_tells_the_same(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever is pulled late and whenever upkeep runs: the days' sums are those of every row that was taken as good."""
    root = tmp_path_factory.mktemp("store")
    keep = Retention(process_days=1, minute_days=3, hour_days=5, quarantine_days=400)
    good = 0
    sequence = 1
    with Store(root, grace_s=0.0) as store:
        today = DAY
        for _ in range(data.draw(st.integers(2, 5))):
            if data.draw(st.booleans()):
                day = today - DAY_US * data.draw(st.integers(0, 7))
                made = [slice_("n1", EPOCH, sequence + n, day + n * HOUR_US, used_us=7) for n in range(3)]
                done = store.publish([batch(made, now=today + DAY_US)], now_us=today)
                sequence += 3
                good += done.rows.get(RecordKind.SLICE, 0)
                assert done.rows.get(RecordKind.SLICE, 0) + done.quarantined == 3
                assert store.publish([batch(made, now=today + DAY_US)], now_us=today).quarantined == 0
            today += DAY_US * data.draw(st.integers(0, 4))
            for _ in range(3):  # rolled up, then the minutes, then the hours let go
                maintain(store, today, keep)
            assert int(str(scalar(root, "SELECT coalesce(sum(records), 0) FROM slice_days"))) == good
            assert int(str(scalar(root, "SELECT coalesce(sum(used_us), 0) FROM slice_days"))) == 7 * good
            oldest = scalar(root, "SELECT min(minute_us) FROM slice_minutes")
            assert oldest is None or int(str(oldest)) >= today - (1 + keep.minute_days) * DAY_US
            kept = scalar(root, "SELECT coalesce(sum(records), 0) FROM slice_hours")
            day_sum = f"SELECT coalesce(sum(records), 0) FROM slice_days WHERE day_us + {(1 + keep.hour_days) * DAY_US} > {today}"
            assert kept == scalar(root, day_sum)
    assert audit(root).problems == []


def test_a_row_too_late_for_its_minutes_is_quarantined_by_day_with_its_reason(tmp_path: Path) -> None:
    keep = Retention(minute_days=3)
    with Store(tmp_path) as store:
        store.publish([batch([slice_("n1", EPOCH, 1, DAY), device("n1", EPOCH, 2, DAY), event("n1", EPOCH, 3, DAY)])], now_us=NOW)
        for _ in range(2):  # rolled up, and only then let go
            maintain(store, DAY + 5 * DAY_US, keep)
        assert {segment.kind for segment in store.state.segments.values()} == set(ROLLUPS)
        late = [
            slice_("n1", EPOCH, 4, DAY),
            device("n1", EPOCH, 5, DAY),
            slice_("n1", EPOCH, 6, DAY + DAY_US),
            process("n1", EPOCH, 7, DAY),
        ]
        done = store.publish([batch(late)], now_us=DAY + 5 * DAY_US)
        assert (done.quarantined, done.rows) == (2, {RecordKind.SLICE: 1, RecordKind.PROCESS: 1})
        assert store.publish([batch(late)], now_us=DAY + 5 * DAY_US).known == 4
    rows = query(tmp_path, "SELECT sequence, reason, record FROM quarantine ORDER BY 1").to_pylist()
    assert [row["sequence"] for row in rows] == [4, 5]
    assert all("kept no more" in row["reason"] and '"tenant": "t1"' in row["record"] for row in rows[:1])
    assert scalar(tmp_path, "SELECT records FROM slice_days WHERE day = '2027-01-15'") == 1


def test_a_late_row_beside_a_retirement_keeps_the_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row drops the rollups just when the minutes they tell of are to go."""
    keep = Retention(minute_days=3)
    with Store(tmp_path) as store:
        store.publish([batch([slice_("n1", EPOCH, 1, DAY)])], now_us=NOW)
        maintain(store, DAY + 2 * DAY_US, keep)
        real = store.swap

        def late(*words: object) -> bool:
            store.publish([batch([slice_("n1", EPOCH, 2, DAY)])], now_us=NOW)
            monkeypatch.undo()
            return real(*words)  # type: ignore[arg-type]

        monkeypatch.setattr(store, "swap", late)
        maintain(store, DAY + 5 * DAY_US, keep)
        assert scalar(tmp_path, "SELECT sum(records) FROM slice_days") == 2
        maintain(store, DAY + 5 * DAY_US, keep)
        assert scalar(tmp_path, "SELECT count(*) FROM slice_minutes") == 0
        assert scalar(tmp_path, "SELECT sum(records) FROM slice_days") == 2


def test_hours_are_not_kept_shorter_than_minutes() -> None:
    with pytest.raises(BadInput, match=r"collector.hour_days is 10, expected: minute_days \(20\) or more"):
        parse_config(b"[collector]\nminute_days = 20\nhour_days = 10\n", "c.toml")
    with pytest.raises(BadInput, match=r"collector.hour_days is 731, expected: minute_days \(800\)"):
        parse_config(b"[collector]\nminute_days = 800\n", "c.toml")
