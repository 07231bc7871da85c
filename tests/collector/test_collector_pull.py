"""Pulling: pages, acknowledgements, failures of one node, hostile nodes, tokens; against a fake exporter over real HTTP."""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pyarrow as pa
import pytest
from collector_fakes import FakeExporter, device, event, records, snapshot

from poolmeter import now
from poolmeter.books.writer import Books
from poolmeter.clock import ManualClock
from poolmeter.collector import publisher as publisher_module
from poolmeter.collector import pull as pull_module
from poolmeter.collector import store as store_module
from poolmeter.collector.catalog import query
from poolmeter.collector.check import Checked, Expected
from poolmeter.collector.events import take_outcomes
from poolmeter.collector.now import newest
from poolmeter.collector.publisher import Publisher, Update
from poolmeter.collector.pull import NodePuller, PullSettings
from poolmeter.collector.pullers import Names, Pullers
from poolmeter.collector.state import NodeRow
from poolmeter.collector.store import Batch, Store
from poolmeter.errors import Unavailable
from poolmeter.model.decision import Decision, DecisionState
from poolmeter.model.units import DAY_US, HOUR_US, MINUTE_US

DAY = 1_799_971_200_000_000
NOW = DAY + 12 * HOUR_US
ALL = (
    "SELECT node, sequence FROM device_minutes UNION ALL SELECT node, sequence FROM slice_minutes "
    "UNION ALL SELECT node, sequence FROM process_minutes UNION ALL SELECT node, sequence FROM event_log"
)


@dataclass
class Rig:
    """A store, a publisher and pullers on fakes."""

    store: Store
    publisher: Publisher
    session: aiohttp.ClientSession
    names: Names = field(default_factory=lambda: Names({}))
    outcomes: Callable[[Batch], object] = lambda _: None
    token: str | None = None
    timeout_s: float = 5.0

    def puller(self, exporter: FakeExporter, row: NodeRow | None = None) -> NodePuller:
        settings = PullSettings("collector", self.token, 0.2, self.timeout_s)
        new = row or NodeRow(exporter.url, None, None, None, "new")
        return NodePuller(new, self.session, self.publisher, settings, ManualClock(NOW), self.names.claim, self.outcomes)

    def stored(self, node: str = "n1") -> list[int]:
        return sorted(row["sequence"] for row in query(self.store.root, f"SELECT * FROM ({ALL}) WHERE node = ?", [node]).to_pylist())


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    with Store(tmp_path / "store") as store:
        publisher = Publisher(store)
        task = asyncio.create_task(publisher.run())
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            yield Rig(store, publisher, session)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def exporter() -> AsyncIterator[FakeExporter]:
    fake = await FakeExporter().start()
    yield fake
    await fake.stop()


async def test_a_pull_takes_every_page_and_acknowledges_what_is_stored(rig: Rig, exporter: FakeExporter) -> None:
    exporter.page = 7
    exporter.add(records("n1", exporter.epoch, 1, 30, DAY))
    puller = rig.puller(exporter)
    assert await puller.pull()
    assert rig.stored() == list(range(1, 31)) and exporter.acked == list(range(1, 31))
    assert exporter.asked == [None, *(f"{exporter.epoch},{n}" for n in (7, 14, 21, 28))]
    row = puller.status.row
    assert (row.node, row.state, row.reason, row.last_sequence, row.pool, row.simulated) == ("n1", "up", None, 30, "p", True)
    assert puller.status.lag_us == NOW - (DAY + 7 * MINUTE_US)
    assert query(rig.store.root, "SELECT node, source FROM now_sources").to_pylist() == [{"node": "n1", "source": "nvml"}]


async def test_rows_whose_acknowledgement_failed_come_again_and_are_stored_once(rig: Rig, exporter: FakeExporter) -> None:
    exporter.add(records("n1", exporter.epoch, 1, 8, DAY))
    exporter.fail_acks = 503
    puller = rig.puller(exporter)
    assert not await puller.pull()
    assert puller.status.row.state == "failing" and "/v1/ack answered 503" in (puller.status.row.reason or "")
    assert rig.stored() == list(range(1, 9)) and exporter.acked == []
    exporter.fail_acks = None
    exporter.add(records("n1", exporter.epoch, 9, 4, DAY + HOUR_US))
    assert await puller.pull()
    assert rig.stored() == list(range(1, 13)) and exporter.acked == list(range(1, 13))


def full_disk(_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_nothing_is_acknowledged_when_the_store_cannot_be_written(
    rig: Rig, exporter: FakeExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter.add(records("n1", exporter.epoch, 1, 8, DAY))
    puller = rig.puller(exporter)
    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "_commit", full_disk)
        assert not await puller.pull()
    assert exporter.acked == [] and rig.stored() == []
    assert "No space left on device" in (rig.store.trouble or "") and "No space left" in (puller.status.row.reason or "")
    assert await puller.pull()
    assert rig.store.trouble is None and exporter.acked == list(range(1, 9)) == rig.stored()


async def test_a_new_spool_is_read_from_its_beginning(rig: Rig, exporter: FakeExporter) -> None:
    exporter.add(records("n1", exporter.epoch, 1, 8, DAY))
    puller = rig.puller(exporter)
    assert await puller.pull()
    exporter.epoch, exporter.acked_through = "0b8f1c1e-5a55-4c59-9a55-0d6a4a2c7b11", 0
    exporter.spool = records("n1", exporter.epoch, 1, 4, DAY + HOUR_US)
    assert await puller.pull()
    assert rig.stored() == [*[n for n in range(1, 5) for _ in (0, 1)], 5, 6, 7, 8]
    assert exporter.asked[-2:] == [exporter.asked[-2], None] and exporter.acked_through == 4


async def test_bad_rows_are_acknowledged_and_stop_no_good_ones(rig: Rig, exporter: FakeExporter) -> None:
    exporter.add(
        [device("n1", exporter.epoch, 1, DAY), device("n1", exporter.epoch, 2, DAY, down_us=1), device("n1", exporter.epoch, 3, DAY)]
    )
    puller = rig.puller(exporter)
    assert await puller.pull()
    assert rig.stored() == [1, 3] and exporter.acked == [1, 2, 3] and puller.status.quarantined == 1
    assert query(rig.store.root, "SELECT rows FROM quarantine").column(0).to_pylist() == [1]


async def test_one_nodes_failure_delays_no_other(rig: Rig, exporter: FakeExporter) -> None:
    rig.timeout_s = 0.5
    hanging = await FakeExporter("n2", hang=True).start()
    try:
        exporter.add(records("n1", exporter.epoch, 1, 4, DAY))
        slow, good = rig.puller(hanging), rig.puller(exporter)
        waiting = asyncio.create_task(slow.pull())
        assert await good.pull()
        assert not waiting.done() and rig.stored() == [1, 2, 3, 4]
        assert not await waiting
        assert slow.status.row.state == "failing" and slow.status.failures_in_a_row == 1
    finally:
        await hanging.stop()


@pytest.mark.parametrize("status", [302, 401, 404, 500])
async def test_an_error_status_is_named(rig: Rig, exporter: FakeExporter, status: int) -> None:
    exporter.fail = status
    puller = rig.puller(exporter)
    assert not await puller.pull()
    assert f"/v1/usage answered {status}, expected 200" in (puller.status.row.reason or "")
    assert query(rig.store.root, "SELECT state, node FROM nodes").to_pylist() == [{"state": "failing", "node": None}]


async def test_the_token_is_sent_and_missed(rig: Rig, exporter: FakeExporter) -> None:
    exporter.token = "secret"
    exporter.add(records("n1", exporter.epoch, 1, 4, DAY))
    assert not await rig.puller(exporter).pull()
    rig.token = "secret"
    assert await rig.puller(exporter).pull()
    assert exporter.acked == [1, 2, 3, 4]


async def test_another_name_than_before_and_a_name_of_another_are_refused(rig: Rig, exporter: FakeExporter) -> None:
    thief = await FakeExporter("n1").start()
    try:
        exporter.add(records("n1", exporter.epoch, 1, 4, DAY))
        thief.add(records("n1", thief.epoch, 1, 4, DAY))
        honest, other = rig.puller(exporter), rig.puller(thief)
        assert await honest.pull()
        assert not await other.pull()
        assert other.status.row.state == "refused" and "already does" in (other.status.row.reason or "")
        assert thief.acked == [] and rig.stored() == [1, 2, 3, 4]
        exporter.node = "n3"
        exporter.add(records("n3", exporter.epoch, 5, 2, DAY))
        assert not await honest.pull()
        assert honest.status.row.state == "refused" and "answers as node 'n3', expected 'n1' as before" in (honest.status.row.reason or "")
        assert rig.stored("n3") == [] and exporter.acked == [1, 2, 3, 4]
    finally:
        await thief.stop()


async def test_hostile_bodies_are_bounded_and_named(rig: Rig, exporter: FakeExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module, "USAGE_LIMIT", 100_000)
    exporter.add(records("n1", exporter.epoch, 1, 4, DAY))
    puller = rig.puller(exporter)
    for body, headers, reason in [
        (b"x" * 200_000, {}, "more than 100000 bytes"),
        (b"not arrow", {}, "usage body"),
        (b"\x1f\x8b" + b"0" * 50, {"Content-Encoding": "gzip"}, "Content-Encoding 'gzip'"),
        (None, {"X-Poolmeter-Epoch": "x"}, "X-Poolmeter-Epoch"),
    ]:
        exporter.body, exporter.headers = body, headers
        assert not await puller.pull()
        assert reason in (puller.status.row.reason or ""), puller.status.row.reason
    exporter.body, exporter.headers = None, {}
    assert await puller.pull()
    assert rig.stored() == [1, 2, 3, 4]


async def test_an_answer_scattered_over_thousands_of_days_is_refused(rig: Rig, exporter: FakeExporter) -> None:
    exporter.add([device("n1", exporter.epoch, n + 1, DAY - n * DAY_US) for n in range(401)])
    puller = rig.puller(exporter)
    assert not await puller.pull()
    assert "records of 401 days, expected at most 400" in (puller.status.row.reason or "")
    assert not list(rig.store.root.glob("segments/*/*/*"))


async def test_a_broken_snapshot_stops_no_usage(rig: Rig, exporter: FakeExporter) -> None:
    exporter.old, exporter.snapshot_body = True, b'{"node": "n2"}'
    exporter.add(records("n1", exporter.epoch, 1, 4, DAY))
    puller = rig.puller(exporter)
    assert await puller.pull()
    assert exporter.acked == [1, 2, 3, 4] and puller.status.row.state == "up"
    assert "no snapshot" in (puller.status.row.reason or "")


async def test_outcomes_of_decisions_reach_the_books_before_the_acknowledgement(rig: Rig, exporter: FakeExporter, tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    with Books(tmp_path / "books.sqlite", clock) as books:
        wanted = Decision("d1", "n1", "a1", "GPU-1", 1, 0, NOW, NOW + HOUR_US, "rule", "why", "00", memory_bytes=5)
        books.add_decisions([wanted])
        books.transition("d1", DecisionState.APPROVED, "ann")
        other = event("n1", exporter.epoch, 1, DAY, event="decision", decision_id="d9", outcome="applied")
        told = event("n1", exporter.epoch, 2, DAY, event="decision", decision_id="d1", outcome="applied", reason="done")
        exporter.add([other, told])
        calls = []

        def dying(batch: Batch) -> None:
            calls.append(len(exporter.acked))
            raise Unavailable("the books are gone")

        rig.outcomes = dying
        first = rig.puller(exporter)
        assert not await first.pull()
        assert calls == [0] and exporter.acked == [] and rig.stored() == [1, 2]
        # The next collector finds the rows stored already, and still tells the books.
        rig.outcomes = lambda batch: take_outcomes(books, batch)
        assert await rig.puller(exporter, first.status.row).pull()
        assert books.get("d1").decision.state is DecisionState.APPLIED
        assert exporter.acked == [1, 2] and rig.stored() == [1, 2]


async def test_pulls_that_end_together_share_a_publication(rig: Rig) -> None:
    fakes = [await FakeExporter(f"n{n}").start() for n in range(6)]
    try:
        for fake in fakes:
            fake.add(records(fake.node, fake.epoch, 1, 4, DAY))
        before = rig.store.state.generation
        assert all(await asyncio.gather(*(rig.puller(fake).pull() for fake in fakes)))
        assert rig.store.state.generation - before < 6
        assert [rig.stored(fake.node) for fake in fakes] == [[1, 2, 3, 4]] * 6
    finally:
        for fake in fakes:
            await fake.stop()


async def test_what_one_node_sent_keeps_no_other_out(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = [await FakeExporter(f"n{n}").start() for n in range(4)]
    try:
        for fake in fakes:
            fake.add(records(fake.node, fake.epoch, 1, 4, DAY))
        real = rig.store.publish

        def choking(batches: list[Batch], *rest: object, **more: object) -> object:
            if any(batch.node == "n2" for batch in batches):
                raise Unavailable("store cannot take this")
            return real(batches, *rest, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(rig.store, "publish", choking)
        assert sorted(await asyncio.gather(*(rig.puller(fake).pull() for fake in fakes))) == [False, True, True, True]
        assert [len(rig.stored(fake.node)) for fake in fakes] == [4, 4, 0, 4] == [len(fake.acked) for fake in fakes]
    finally:
        for fake in fakes:
            await fake.stop()


async def test_records_that_break_a_rule_itself_keep_no_other_out(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = [await FakeExporter(f"n{n}").start() for n in range(4)]
    try:
        for fake in fakes:
            fake.add(records(fake.node, fake.epoch, 1, 4, DAY))
        real = publisher_module.check_together

        def choking(answers: list[tuple[pa.Table, Expected]]) -> list[Checked]:
            if any(expected.node == "n2" for _, expected in answers):
                raise ZeroDivisionError("nobody thought of this")
            return real(answers)

        with monkeypatch.context() as patched:
            patched.setattr(publisher_module, "check_together", choking)
            pullers = [rig.puller(fake) for fake in fakes]
            assert sorted(await asyncio.gather(*(puller.pull() for puller in pullers))) == [False, True, True, True]
        assert "cannot be checked: ZeroDivisionError" in (pullers[2].status.row.reason or "")
        assert [len(rig.stored(fake.node)) for fake in fakes] == [4, 4, 0, 4] == [len(fake.acked) for fake in fakes]
        assert await pullers[2].pull() and rig.stored("n2") == [1, 2, 3, 4]
    finally:
        for fake in fakes:
            await fake.stop()


async def test_publications_keep_their_distance_unless_more_is_waiting(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        publisher = Publisher(store, gap_s=3600.0)
        task = asyncio.create_task(publisher.run())
        rows = [NodeRow(f"http://n{n}", f"n{n}", None, NOW, "up") for n in range(4)]
        async with asyncio.timeout(30):
            await publisher.publish(Update(rows[0]))
            waiting = [asyncio.create_task(publisher.publish(Update(row))) for row in rows[1:3]]
            await asyncio.sleep(0.05)
            assert publisher.publications == 1 and not any(one.done() for one in waiting)
            await publisher.publish(Update(rows[3], urgent=True))
            await asyncio.gather(*waiting)
            assert publisher.publications == 2
            last = asyncio.create_task(publisher.publish(Update(rows[0])))
            await asyncio.sleep(0)
            publisher.hurry()
            await last
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_failing_node_is_asked_less_often(rig: Rig, exporter: FakeExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    real = asyncio.sleep

    async def short(seconds: float) -> None:
        if seconds > 0.05:
            waits.append(seconds)
        await real(0)

    exporter.fail = 500
    puller = rig.puller(exporter)
    monkeypatch.setattr(pull_module.asyncio, "sleep", short)
    task = asyncio.create_task(puller.run(0))
    async with asyncio.timeout(20):
        while len(waits) < 5:
            await real(0.01)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert max(waits) <= 0.2 * 8 * 1.1 and waits[3] > waits[0]


async def test_nodes_that_are_gone_are_forgotten_in_time_and_beyond_a_number(rig: Rig) -> None:
    rows = {f"http://g{n}": NodeRow(f"http://g{n}", f"g{n}", None, NOW - n * HOUR_US, "gone", "moved") for n in range(6)}
    rows["http://up"] = NodeRow("http://up", "up", None, NOW - 9 * HOUR_US, "up")
    rig.store.publish(nodes=list(rows.values()))
    pullers = Pullers(rows, rig.session, rig.publisher, PullSettings("collector", None, 0.2, 5.0), ManualClock(NOW), lambda _: None)

    async def left() -> set[str]:
        await rig.publisher.publish(Update(rows["http://up"]))
        return {row["node"] for row in query(rig.store.root, "SELECT node FROM nodes").to_pylist()}

    pullers.forget_gone(NOW - 4 * HOUR_US, 10)
    assert await left() == {"g0", "g1", "g2", "g3", "g4", "up"}
    pullers.forget_gone(NOW - 100 * HOUR_US, 2)
    assert await left() == {"g0", "g1", "up"}
    # What is forgotten once is no rule for ever: its row may come again.
    rig.store.publish(nodes=[rows["http://g5"]])
    assert await left() == {"g0", "g1", "g5", "up"}
    # One that never answered leaves no line.
    pullers.add("http://127.0.0.1:9")
    await pullers.remove("http://127.0.0.1:9", gone="named no more")
    assert await left() == {"g0", "g1", "g5", "up"}


async def test_nodes_come_and_go_while_it_runs(rig: Rig, exporter: FakeExporter) -> None:
    other = await FakeExporter("n2").start()
    moved = await FakeExporter("n1", epoch=exporter.epoch).start()
    settings = PullSettings("collector", None, 0.2, 5.0)
    pullers = Pullers({}, rig.session, rig.publisher, settings, ManualClock(NOW), lambda _: None)

    def states() -> dict[str, str]:
        return {row["url"]: row["state"] for row in query(rig.store.root, "SELECT url, state FROM nodes").to_pylist()}

    async def acked(fake: FakeExporter, last: int) -> None:
        async with asyncio.timeout(30):
            while fake.acked_through < last:
                await asyncio.sleep(0.01)

    try:
        exporter.add(records("n1", exporter.epoch, 1, 4, DAY))
        await pullers.assign([exporter.url])
        await acked(exporter, 4)
        other.add(records("n2", other.epoch, 1, 4, DAY))
        await pullers.assign([exporter.url, other.url])
        await acked(other, 4)
        assert pullers.urls == {exporter.url, other.url} and states() == {exporter.url: "up", other.url: "up"}
        # The node leaves one address for another: its name is free again, its rows go on where they were.
        await pullers.remove(exporter.url, gone="discovery names it no more")
        assert states() == {exporter.url: "gone", other.url: "up"}
        assert query(rig.store.root, "SELECT node FROM now_nodes").column(0).to_pylist() == ["n2"]
        moved.add(records("n1", exporter.epoch, 3, 4, DAY))
        await pullers.assign([moved.url, other.url])
        await acked(moved, 6)
        assert rig.stored() == [1, 2, 3, 4, 5, 6]
        asked = len(exporter.asked)
        await pullers.assign([exporter.url, moved.url])
        async with asyncio.timeout(30):
            while states().get(exporter.url) != "refused":
                await asyncio.sleep(0.01)
        assert len(exporter.asked) > asked and other.url not in states()
    finally:
        await pullers.stop()
        for fake in (other, moved):
            await fake.stop()


async def test_an_old_exporters_snapshot_is_asked_for_as_a_page(rig: Rig, exporter: FakeExporter) -> None:
    exporter.old = True
    assert await rig.puller(exporter).pull()
    assert exporter.json_snapshots == 1
    assert query(rig.store.root, "SELECT node, memory_limit_bytes FROM now_slices").to_pylist() == [
        {"node": "n1", "memory_limit_bytes": 1 << 30}
    ]


@pytest.mark.parametrize(
    ("behind", "said"),
    [
        (b"", "none was taken yet"),
        (b"\xff" * 40, "no snapshot: usage body"),
        (now.to_bytes(now.now_tables(snapshot("n2", "e", 1))), "snapshot is of node 'n2', expected 'n1'"),
    ],
)
async def test_a_wrong_snapshot_behind_the_records_keeps_no_record_out(rig: Rig, exporter: FakeExporter, behind: bytes, said: str) -> None:
    exporter.arrow_snapshot = behind
    exporter.add(records("n1", exporter.epoch, 1, 4, DAY))
    puller = rig.puller(exporter)
    assert await puller.pull()
    assert exporter.acked == [1, 2, 3, 4] and exporter.json_snapshots == 0
    assert said in (puller.status.row.reason or "")
    assert query(rig.store.root, "SELECT node FROM now_nodes").num_rows == 0


async def test_many_snapshots_are_written_apart_from_publications(
    rig: Rig, exporter: FakeExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "NOW_INLINE", 0)
    assert await rig.puller(exporter).pull()
    async with asyncio.timeout(30):
        while query(rig.store.root, "SELECT node FROM now_slices").column(0).to_pylist() != ["n1"]:
            await asyncio.sleep(0.01)
    assert not rig.store.now_waits
    assert [segment.kind.value for segment in rig.store.state.segments.values()] == ["now"]


async def test_newest_snapshots_that_are_damaged_keep_no_collector_from_starting(rig: Rig, exporter: FakeExporter) -> None:
    exporter.add(records("n1", exporter.epoch, 1, 4, DAY))
    assert await rig.puller(exporter).pull()
    root = rig.store.root
    (segment,) = [found for found in rig.store.state.segments.values() if found.kind.value == "now"]
    rig.store.close()
    (root / segment.file).write_bytes(b"torn")
    with Store(root) as again:
        assert again.state.now == {} and rig.stored() == [1, 2, 3, 4]
        again.publish([], [newest(snapshot("n1", exporter.epoch, NOW))])
        assert query(root, "SELECT node FROM now_nodes").column(0).to_pylist() == ["n1"]
    rig.store = Store(root)
