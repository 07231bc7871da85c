"""What an exporter may send: headers, Arrow bodies, snapshots; hostile ones cost bounded memory and one sentence."""

import json

import numpy as np
import pyarrow as pa
import pytest
from collector_fakes import records, snapshot
from hypothesis import given
from hypothesis import strategies as st

from poolmeter import arrow
from poolmeter.collector.bodies import parse_answer, parse_snapshot, refuse_compressed
from poolmeter.collector.now import newest
from poolmeter.errors import DataError
from poolmeter.model.plain import to_plain

EPOCH = "0b8f1c1e-5a55-4c59-9a55-0d6a4a2c7b11"
DAY = 1_799_971_200_000_000
HEADERS = {
    "X-Poolmeter-Node": "n1",
    "X-Poolmeter-Epoch": EPOCH,
    "X-Poolmeter-Last-Sequence": "8",
    "X-Poolmeter-More": "false",
}
TABLE = arrow.to_table(records("n1", EPOCH, 1, 8, DAY))
BODY = arrow.to_bytes(TABLE)


def test_a_good_answer_is_read_whole() -> None:
    answer = parse_answer(HEADERS, BODY)
    assert (answer.node, answer.epoch, answer.last_sequence, answer.more) == ("n1", EPOCH, 8, False)
    assert answer.table.equals(TABLE)
    assert parse_answer(HEADERS | {"X-Poolmeter-More": "1"}, BODY).more


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Poolmeter-Node", ""),
        ("X-Poolmeter-Node", "../etc"),
        ("X-Poolmeter-Node", "n" * 300),
        ("X-Poolmeter-Epoch", "epoch"),
        ("X-Poolmeter-Last-Sequence", "-1"),
        ("X-Poolmeter-Last-Sequence", str(1 << 62)),
        ("X-Poolmeter-Last-Sequence", "1e3"),
        ("X-Poolmeter-More", "perhaps"),
    ],
)
def test_a_wrong_header_is_named(name: str, value: str) -> None:
    with pytest.raises(DataError, match=name):
        parse_answer(HEADERS | {name: value}, BODY)
    with pytest.raises(DataError, match=f"{name} is absent"):
        parse_answer({key: text for key, text in HEADERS.items() if key != name}, BODY)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_compressed_body_is_refused_before_it_is_unpacked(codec: str) -> None:
    bomb = pa.table({"sequence": pa.array(np.zeros(4_000_000, np.int64))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, bomb.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(bomb)
    body = bytes(sink.getvalue())
    assert len(body) < 300_000
    before = pa.total_allocated_bytes()
    with pytest.raises(DataError, match="compressed Arrow batches"):
        parse_answer(HEADERS, body)
    assert pa.total_allocated_bytes() - before < 1_000_000


def test_a_compressed_dictionary_is_refused_too() -> None:
    table = pa.table({"kind": pa.array(["device"] * 1000).dictionary_encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match="compressed"):
        refuse_compressed(bytes(sink.getvalue()))


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"a": [1]}),
        TABLE.drop_columns(["sequence"]),
        TABLE.set_column(3, "sequence", pa.array([str(n) for n in range(8)])),
        TABLE.set_column(3, "sequence", pa.array([None] * 8, pa.int64())),
        TABLE.replace_schema_metadata({"poolmeter.schema": "2.0"}),
        TABLE.replace_schema_metadata(None),
        TABLE.append_column("busy_us", TABLE.column("busy_us")),
    ],
)
def test_another_schema_is_refused(table: pa.Table) -> None:
    with pytest.raises(DataError):
        parse_answer(HEADERS, arrow.to_bytes(table))


def test_a_newer_minor_version_is_read_without_its_news() -> None:
    newer = TABLE.append_column("novelty", pa.array([1] * 8)).replace_schema_metadata({"poolmeter.schema": "1.9"})
    assert parse_answer(HEADERS, arrow.to_bytes(newer)).table.equals(TABLE)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_in_one_sentence(body: bytes) -> None:
    with pytest.raises(DataError):
        parse_answer(HEADERS, body)


@given(st.data())
def test_a_damaged_body_is_read_right_or_refused(data: st.DataObject) -> None:
    damaged = bytearray(BODY)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, min(len(BODY) - 1, 6000)))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(BODY), len(BODY) - 9, len(BODY) // 2, 10]))
    try:
        parse_answer(HEADERS, bytes(damaged[:cut])).table.validate(full=True)
    except DataError as error:
        assert "\n" not in str(error)


def test_a_snapshot_is_this_nodes_and_fits_the_store() -> None:
    plain = to_plain(snapshot("n1", EPOCH, DAY))
    parsed = parse_snapshot(json.dumps(plain).encode(), "n1")
    assert parsed == snapshot("n1", EPOCH, DAY)
    assert newest(parsed).tables["now_slices"].num_rows == 1
    assert parse_snapshot(json.dumps({"snapshot": plain, "schema": "x"}).encode(), "n1") == parsed
    with pytest.raises(DataError, match="expected 'n2'"):
        parse_snapshot(json.dumps(plain).encode(), "n2")
    for body in (b"", b"[]", b"{", b"\xff", b"[" * 100_000, json.dumps({**plain, "taken_us": "now"}).encode()):
        with pytest.raises(DataError):
            parse_snapshot(body, "n1")
    for change in ({"taken_us": 1 << 70}, {"pool": "\ud800"}):
        with pytest.raises(DataError, match="cannot be stored"):
            newest(parse_snapshot(json.dumps({**plain, **change}).encode(), "n1"))
