"""Records keep every value through Arrow and JSON; foreign and broken input is refused by name."""

import contextlib
import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolmeter import arrow, now
from poolmeter.errors import DataError
from poolmeter.model import decision, snapshot
from poolmeter.model.allocation import Allocation
from poolmeter.model.now import NOW_FIELDS, NOW_PARTS, NOW_TYPES, NOW_VERSION, now_columns, wide_now_columns
from poolmeter.model.plain import canonical_json, from_plain, to_plain
from poolmeter.model.usage import RECORD_TYPES, RecordKind, UsageRecord, kind_of
from poolmeter.model.wire import SCHEMA_VERSION, record_from, wire_columns

GOLDEN = Path(__file__).parent / "golden"


def any_record(kind: RecordKind) -> st.SearchStrategy[UsageRecord]:
    return typing.cast(st.SearchStrategy[UsageRecord], st.builds(RECORD_TYPES[kind], **columns(RECORD_TYPES[kind])))


def columns(record_type: type) -> dict[str, st.SearchStrategy[Any]]:
    base: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**63 - 1),
        str: st.text(st.characters(exclude_categories=["Cs"])),
        bool: st.booleans(),
    }
    found = {}
    for name, hint in typing.get_type_hints(record_type).items():
        parts = typing.get_args(hint) or (hint,)
        found[name] = st.one_of(*[st.none() if part is type(None) else base[part] for part in parts])
    return found


@given(st.lists(st.sampled_from(list(RecordKind)).flatmap(any_record), max_size=8))
def test_records_survive_arrow(records: list[UsageRecord]) -> None:
    rows = arrow.from_bytes(arrow.to_bytes(arrow.to_table(records))).to_pylist()
    assert [record_from(RecordKind(row["kind"]), row) for row in rows] == records
    assert [kind_of(record).value for record in records] == [row["kind"] for row in rows]


@given(st.binary(max_size=400))
def test_noise_is_refused(body: bytes) -> None:
    with pytest.raises(DataError):
        arrow.from_bytes(body)


@given(st.data())
def test_a_damaged_stream_is_refused_or_read(data: st.DataObject) -> None:
    body = bytearray(arrow.to_bytes(arrow.to_table([data.draw(any_record(RecordKind.EVENT))])))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DataError):
        arrow.from_bytes(bytes(body))


def test_another_major_version_is_refused() -> None:
    table = arrow.to_table([]).replace_schema_metadata({arrow.METADATA_KEY: b"2.0"})
    with pytest.raises(DataError, match=r"2\.0, expected 1\.x"):
        arrow.from_bytes(arrow.to_bytes(table))


def test_a_newer_minor_version_with_more_columns_is_read() -> None:
    import pyarrow as pa

    table = arrow.to_table([]).append_column("later", pa.array([], pa.int64()))
    table = table.replace_schema_metadata({arrow.METADATA_KEY: b"1.9"})
    assert arrow.from_bytes(arrow.to_bytes(table)).schema.names == [column.name for column in wire_columns()]


def test_the_wire_is_what_the_golden_file_of_this_version_says() -> None:
    """A changed column is a new version: add a golden file, keep the old one readable."""
    found = [dataclasses.asdict(column) for column in wire_columns()]
    golden = GOLDEN / f"wire-{SCHEMA_VERSION}.json"
    assert json.loads(golden.read_text()) == found


@st.composite
def any_snapshot(draw: st.DrawFn) -> snapshot.Snapshot:
    def parts(record_type: type) -> Any:
        return st.lists(st.builds(record_type, **columns_of_part(record_type)), max_size=3).map(tuple)

    head = {name: draw(kind) for name, kind in columns_of_part(snapshot.Snapshot).items()}
    return snapshot.Snapshot(**head, **{field: draw(parts(NOW_TYPES[name])) for name, field in NOW_FIELDS.items()})


def columns_of_part(record_type: type) -> dict[str, st.SearchStrategy[Any]]:
    hints = typing.get_type_hints(record_type)
    scalar = {name for name, hint in hints.items() if {*typing.get_args(hint), hint} & {int, str, bool}}
    scalar -= {name for name, hint in hints.items() if typing.get_origin(hint) is tuple}
    stand_in = dataclasses.make_dataclass("StandIn", [(name, hints[name]) for name in scalar])
    return columns(stand_in)


@given(any_snapshot())
def test_the_newest_snapshot_survives_arrow(made: snapshot.Snapshot) -> None:
    tables = now.now_tables(made)
    found = now.from_bytes(now.to_bytes(tables), made.node)
    assert {name: table.to_pylist() for name, table in found.items()} == {name: table.to_pylist() for name, table in tables.items()}
    for name, field in NOW_FIELDS.items():
        keys = [column.name for column in now_columns(name)[2:]]
        assert [[row[key] for key in keys] for row in found[name].to_pylist()] == [
            [getattr(part, key) for key in keys] for part in getattr(made, field)
        ]


def test_the_snapshots_wire_is_what_the_golden_files_say() -> None:
    """A changed column is a new version: add golden files, keep the old ones readable."""
    assert json.loads((GOLDEN / f"now-{NOW_VERSION}.json").read_text()) == [dataclasses.asdict(column) for column in wide_now_columns()]
    for path in GOLDEN.glob("now-*.arrow"):
        tables = now.from_bytes(path.read_bytes(), "golden")
        assert {name: table.num_rows for name, table in tables.items()} == dict.fromkeys(NOW_PARTS, 1)
        assert tables["now_slices"].column("tenant").to_pylist() == ["tenant"]


GOOD = snapshot.Snapshot(
    node="n", epoch="e", sequence=1, taken_us=2, simulated=False,
    sources=(snapshot.SourceHealth(source="nvml", ok=True, at_us=1, duration_us=1),),
)  # fmt: skip


@given(st.data())
def test_a_damaged_snapshot_is_refused_or_read(data: st.DataObject) -> None:
    body = bytearray(now.to_bytes(now.now_tables(GOOD)))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DataError):
        now.from_bytes(bytes(body[: data.draw(st.sampled_from([len(body), len(body) - 9, len(body) // 2]))]), "n")


def test_a_foreign_snapshot_is_refused_by_name() -> None:
    import pyarrow as pa

    wide = now.widened("now_nodes", now.now_tables(GOOD)["now_nodes"])

    def refused(table: pa.Table, node: str = "n") -> str:
        with pytest.raises(DataError) as caught:
            now.from_bytes(arrow.to_bytes(table), node)
        return str(caught.value)

    assert "expected 'm'" in refused(wide, "m")
    assert "2.0, expected 1.x" in refused(wide.replace_schema_metadata({now.METADATA_KEY: b"2.0"}))
    assert "column part is there 0 times" in refused(wide.drop_columns(["part"]))
    assert "column tenant is there 2 times" in refused(wide.append_column("tenant", wide.column("tenant")))
    assert "column sequence is string" in refused(wide.set_column(wide.column_names.index("sequence"), "sequence", pa.array(["1"])))
    assert "0 rows of its node" in refused(wide.slice(0, 0))
    assert "2 rows of its node" in refused(pa.concat_tables([wide, wide]).combine_chunks())
    assert "holds 1 nulls in now_nodes" in refused(wide.set_column(wide.column_names.index("epoch"), "epoch", pa.nulls(1, pa.utf8())))
    assert "parts ['card']" in refused(wide.set_column(0, pa.field("part", pa.utf8(), False), pa.array(["card"])))
    newer = wide.append_column("later", pa.array([1])).replace_schema_metadata({now.METADATA_KEY: b"1.9"})
    assert now.from_bytes(arrow.to_bytes(newer), "n")["now_nodes"].column("epoch").to_pylist() == ["e"]


ALLOCATION = {
    "id": "a-1",
    "labels": {"tenant": "t"},
    "mode": "hook",
    "slices": [{"device_uuid": "GPU-1", "promise_ppm": 300_000, "memory_bytes": 5}],
    "state": "active",
    "generation": 1,
    "created_us": 7,
    "changed_us": 8,
}


def test_plain_form_round_trips() -> None:
    allocation = from_plain(Allocation, ALLOCATION)
    assert from_plain(Allocation, json.loads(canonical_json(allocation))) == allocation
    empty = snapshot.Snapshot(node="n", epoch="e", sequence=0, taken_us=1, simulated=False)
    assert from_plain(snapshot.Snapshot, to_plain(empty)) == empty
    event = decision.JournalEvent(sequence=1, at_us=2, kind="refused", demand={"devices": 2})
    assert from_plain(decision.JournalEvent, to_plain(event)) == event


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"generation": "1"}, "generation"),
        ({"mode": "magic"}, "mode"),
        ({"slices": 3}, "slices"),
        ({"slices": [{}]}, r"slices\[0\]"),
        ({"labels": {}}, "tenant"),
        ({"created_us": True}, "created_us"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(DataError, match=named):
        from_plain(Allocation, {**ALLOCATION, **change})
