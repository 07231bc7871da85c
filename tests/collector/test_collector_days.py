"""Keeping the store: day rollups with late rows, merges, retention."""

from pathlib import Path

from collector_fakes import DAY, EPOCH, NOW, batch, process, records, scalar, slice_, stored

from poolmeter.collector import segments
from poolmeter.collector.catalog import open_catalog, query
from poolmeter.collector.maintenance import FAN_IN, due_rollups, maintain, next_merge
from poolmeter.collector.rollup import day_select
from poolmeter.collector.segments import publish_records
from poolmeter.collector.store import Store
from poolmeter.collector.tables import DAY_SOURCES, SegmentKind
from poolmeter.model.units import DAY_US, HOUR_US, MINUTE_US


def rolled(root: Path, kind: SegmentKind) -> list[dict[str, object]]:
    view = "slice_days" if kind is SegmentKind.SLICE_DAY else "device_days"
    with open_catalog(root) as connection:
        return connection.sql(f"SELECT * FROM {view} ORDER BY ALL").to_arrow_table().to_pylist()


def from_minutes(root: Path, kind: SegmentKind) -> list[dict[str, object]]:
    source = "slice_minutes" if kind is SegmentKind.SLICE_DAY else "device_minutes"
    with open_catalog(root) as connection:
        sql = f"SELECT *, make_timestamp(day_us)::DATE AS day FROM ({day_select(kind, source)}) ORDER BY ALL"
        return connection.sql(sql).to_arrow_table().to_pylist()


def test_days_are_the_same_live_and_stored_and_take_late_rows_in(tmp_path: Path) -> None:
    late = [slice_("n1", EPOCH, 900 + n, DAY - HOUR_US + n * MINUTE_US, tenant="late", used_us=None) for n in range(3)]
    with Store(tmp_path) as store:
        for start in range(1, 401, 40):
            store.publish([batch(records("n1", EPOCH, start, 40, DAY - 60 * MINUTE_US))], now_us=NOW)
        before = {kind: rolled(tmp_path, kind) for kind in DAY_SOURCES}
        assert len(before[SegmentKind.SLICE_DAY]) == 2
        maintain(store, DAY + DAY_US + 2 * HOUR_US, 400)
        assert {segment.kind for segment in store.state.segments.values()} >= set(DAY_SOURCES)
        assert due_rollups(store.state, DAY + DAY_US + 2 * HOUR_US) == []
        assert {kind: rolled(tmp_path, kind) for kind in DAY_SOURCES} == before
        store.publish([batch(late)], now_us=NOW)
        assert {segment.day for segment in store.state.segments.values() if segment.kind is SegmentKind.SLICE_DAY} == {"2027-01-15"}
        after = rolled(tmp_path, SegmentKind.SLICE_DAY)
        unknown = [row for row in after if row["tenant"] == "late"]
        assert [(row["used_us"], row["measured_span_us"], row["records"]) for row in unknown] == [(None, 0, 3)]
        maintain(store, DAY + DAY_US + 2 * HOUR_US, 400)
        for kind in DAY_SOURCES:
            assert rolled(tmp_path, kind) == from_minutes(tmp_path, kind)
        assert rolled(tmp_path, SegmentKind.SLICE_DAY) == after


def test_a_day_of_a_large_card_does_not_overflow(tmp_path: Path) -> None:
    most = (1 << 63) - 1
    made = [slice_("n1", EPOCH, n + 1, DAY + n * MINUTE_US, memory_allocated_kib_us=most) for n in range(3)]
    publish_records(tmp_path, made, now_us=NOW)
    assert int(str(scalar(tmp_path, "SELECT memory_allocated_kib_us FROM slice_days"))) == 3 * most
    with Store(tmp_path) as store:
        maintain(store, DAY + 3 * DAY_US, 1)
    assert int(str(scalar(tmp_path, "SELECT memory_allocated_kib_us FROM slice_days"))) == 3 * most


def test_small_segments_are_merged_and_no_row_changes(tmp_path: Path) -> None:
    with Store(tmp_path, grace_s=0.0) as store:
        for n in range(FAN_IN + 1):
            store.publish([batch([slice_("n1", EPOCH, n + 1, DAY + n * MINUTE_US, used_us=n)])], now_us=NOW)
        before = query(tmp_path, "SELECT * FROM slice_minutes ORDER BY sequence")
        assert len(store.state.segments) == FAN_IN + 1
        assert maintain(store, NOW, 1) == 1
        assert [segment.level for segment in store.state.segments.values()] == [1]
        assert query(tmp_path, "SELECT * FROM slice_minutes ORDER BY sequence").equals(before)
        maintain(store, DAY + DAY_US + 2 * HOUR_US, 1)
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
            made = segments.write_segment(
                tmp_path, SegmentKind.SLICE, "2027-01-15", query(tmp_path, "SELECT * FROM slice_minutes"), "minute_us"
            )
            store.publish([batch([slice_("n1", EPOCH, 2, DAY)])], now_us=NOW)
            return [made]

        assert not store.swap(old, write_late, lambda state: len(state.segments))
        assert [sequence for _, _, sequence in stored(tmp_path)] == [1, 2]
        assert len(list(tmp_path.glob("segments/slice/*/*.parquet"))) == 2


def test_process_rows_are_forgotten_after_their_days_and_slices_are_not(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        made = [process("n1", EPOCH, 1, DAY - DAY_US), slice_("n1", EPOCH, 2, DAY - DAY_US), process("n1", EPOCH, 3, DAY)]
        store.publish([batch(made)], now_us=NOW)
        maintain(store, DAY + DAY_US - MINUTE_US, 1)
        assert scalar(tmp_path, "SELECT count(*) FROM process_minutes") == 2
        maintain(store, DAY + DAY_US, 1)
        assert query(tmp_path, "SELECT sequence FROM process_minutes").column(0).to_pylist() == [3]
        assert scalar(tmp_path, "SELECT count(*) FROM slice_minutes") == 1
        assert store.publish([batch(made)], now_us=NOW).known == 3
