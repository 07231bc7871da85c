"""Several collectors: each node has one, a dead one's are taken over and handed back, and over all roots each row counts once."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from collector_daemon import Daemon, exporters, fetch, until
from collector_fakes import DAY, EPOCH, NOW, FakeExporter, batch, records, snapshot
from hypothesis import given
from hypothesis import strategies as st
from test_collector_daemon import NOW as TODAY

from poolmeter.collector.catalog import open_catalogs, query
from poolmeter.collector.maintenance import maintain
from poolmeter.collector.now import newest
from poolmeter.collector.peers import owner
from poolmeter.collector.retention import Retention
from poolmeter.collector.state import NodeRow
from poolmeter.collector.store import Store
from poolmeter.config import parse_config
from poolmeter.errors import BadInput, Unavailable
from poolmeter.model.units import DAY_US, HOUR_US

ALL = " UNION ALL ".join(
    f"SELECT node, sequence FROM {view}" for view in ("device_minutes", "slice_minutes", "process_minutes", "event_log")
)
MEMBERS = st.lists(st.text("abcdefgh", min_size=1, max_size=4), min_size=1, max_size=6, unique=True)


@given(MEMBERS, st.integers(0, 200), st.data())
def test_a_collector_that_goes_moves_its_own_nodes_alone(members: list[str], number: int, data: st.DataObject) -> None:
    url = f"http://node-{number}:9877"
    before = owner(url, members)
    assert before in members and before == owner(url, data.draw(st.permutations(members)))
    gone = data.draw(st.sampled_from(members))
    left = [member for member in members if member != gone]
    if left and gone != before:
        assert owner(url, left) == before


def test_nodes_are_shared_evenly() -> None:
    counts = dict.fromkeys("abc", 0)
    for number in range(3000):
        counts[owner(f"http://10.0.{number // 250}.{number % 250}:9877", list(counts))] += 1
    assert all(900 < count < 1100 for count in counts.values()), counts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('member = "a"', "member names one of peers"),
        ('peers = ["a=http://h:1"]', "member names one of peers"),
        ('member = "c"\npeers = ["a=http://h:1", "b=http://h:2"]', "member names one of peers"),
        ('member = "a"\npeers = ["http://h:1"]', "expected: a name and a URL"),
        ('member = "a"\npeers = ["a=http://h:1", "a=http://h:2"]', "each name and each URL once"),
        ('member = "a"\npeers = ["a=http://h:1", "b=http://h:1/"]', "each name and each URL once"),
    ],
)
def test_wrong_peers_are_named(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        parse_config(f"[collector]\n{text}\n".encode(), "c.toml")


def test_over_several_roots_each_row_and_each_sum_counts_once(tmp_path: Path) -> None:
    every = records("n1", EPOCH, 1, 40, DAY) + records("n1", EPOCH, 41, 40, DAY + DAY_US)
    roots = [tmp_path / "a", tmp_path / "b", tmp_path / "one"]
    # The first died after it had stored 30 and acknowledged 20; the second went on from there, and a third has all of it alone.
    for root, rows, taken in ((roots[0], every[:30], NOW), (roots[1], every[20:], NOW + 5), (roots[2], every, NOW + 5)):
        with Store(root) as store:
            row = NodeRow("http://n1", "n1", EPOCH, taken, "up", None, "p", True)
            store.publish([batch(rows)], [newest(snapshot("n1", EPOCH, taken))], [row], now_us=taken)
            maintain(store, NOW + 20 * DAY_US, Retention(100))
            assert {segment.kind.value for segment in store.state.segments.values()} >= {
                "slice_hour",
                "device_hour",
                "slice_day",
                "device_day",
            }
    with open_catalogs(roots[:2]) as both:
        for sql in (
            f"SELECT * FROM ({ALL}) ORDER BY ALL",
            "SELECT day_us, node, tenant, sum(used_us), sum(records) FROM slice_days GROUP BY ALL ORDER BY ALL",
            "SELECT day_us, node, sum(busy_us), sum(records), min(day) FROM device_days GROUP BY ALL ORDER BY ALL",
            "SELECT hour_us, node, tenant, sum(used_us), sum(records) FROM slice_hours GROUP BY ALL ORDER BY ALL",
            "SELECT hour_us, node, sum(busy_us), sum(records), min(hour) FROM device_hours GROUP BY ALL ORDER BY ALL",
            "SELECT * FROM now_slices ORDER BY ALL",
            "SELECT node, taken_us FROM now_nodes ORDER BY ALL",
            "SELECT url, node, last_pull_us FROM nodes ORDER BY ALL",
            "SELECT node, uuid, last_seen_us FROM devices ORDER BY ALL",
        ):
            found = both.sql(sql).to_arrow_table().to_pylist()
            assert found == query(roots[2], sql).to_pylist() and found, sql
    with pytest.raises(BadInput, match="no store is named"):
        open_catalogs([])
    with pytest.raises(Unavailable, match="is not there"):
        open_catalogs([roots[0], tmp_path / "nothing"])


@pytest.mark.parametrize("over", [0, 1])
def test_over_several_roots_hours_and_days_count_once_when_ones_minutes_are_over(tmp_path: Path, over: int) -> None:
    every = records("n1", EPOCH, 1, 40, DAY)
    roots = [tmp_path / "a", tmp_path / "b", tmp_path / "one"]
    for number, rows in enumerate((every[:30], every[20:], every)):
        with Store(roots[number]) as store:
            store.publish([batch(rows)], now_us=NOW)
            maintain(store, DAY + 2 * DAY_US, Retention(1, 400 if number != over else 1))
            maintain(store, DAY + 3 * DAY_US, Retention(1, 400 if number != over else 1))
    assert query(roots[over], "SELECT 1 FROM slice_minutes").num_rows == 0
    with open_catalogs(roots[:2]) as both:
        for sql in (
            "SELECT day_us, node, tenant, sum(used_us), sum(records) FROM slice_days GROUP BY ALL ORDER BY ALL",
            "SELECT day_us, node, sum(busy_us), sum(records), min(day) FROM device_days GROUP BY ALL ORDER BY ALL",
            "SELECT hour_us, node, tenant, sum(used_us), sum(records) FROM slice_hours GROUP BY ALL ORDER BY ALL",
            "SELECT hour_us, node, sum(busy_us), sum(records), min(hour) FROM device_hours GROUP BY ALL ORDER BY ALL",
        ):
            found = both.sql(sql).to_arrow_table().to_pylist()
            assert found == query(roots[2], sql).to_pylist() and found, sql


async def test_a_dead_collectors_nodes_are_taken_over_and_handed_back(
    tmp_path: Path, rng: random.Random, rounds: Callable[[int, int], Iterator[int]], unused_tcp_port_factory: Callable[[], int]
) -> None:
    ports = {"a": unused_tcp_port_factory(), "b": unused_tcp_port_factory()}
    peers = ", ".join(f'"{name}=http://127.0.0.1:{port}"' for name, port in ports.items())

    async with exporters(*(f"n{number}" for number in range(6))) as fakes:
        nodes = ",".join(fake.url for fake in fakes)

        def start(name: str) -> Daemon:
            data = tmp_path / name
            data.mkdir(exist_ok=True)
            config = data / "config.toml"
            config.write_text(f'[collector]\nmember = "{name}"\npeers = [{peers}]\npeer_timeout_s = 1.0\n')
            return Daemon(data, nodes, "--config", str(config), "--port", str(ports[name]))

        made = dict.fromkeys((fake.node for fake in fakes), 0)

        def produce() -> None:
            for fake in fakes:
                count = rng.randint(1, 20)
                fake.add(records(fake.node, fake.epoch, made[fake.node] + 1, count, TODAY - 20 * HOUR_US))
                made[fake.node] += count

        def all_acknowledged() -> bool:
            return all(fake.acked_through == made[fake.node] for fake in fakes)

        running = {name: start(name) for name in ports}
        try:
            for daemon in running.values():
                await daemon.url()
            for _ in rounds(1, 60):
                produce()
                await asyncio.sleep(rng.uniform(0, 0.6))
                victim = rng.choice(list(ports))
                running[victim].kill()
                produce()
                # The other one has all nodes now.
                await until(all_acknowledged, 60)
                other = next(name for name in ports if name != victim)
                health = await fetch(f"http://127.0.0.1:{ports[other]}/v1/health")
                assert any(f"collector {victim} at" in line for line in health["warnings"])  # type: ignore[attr-defined]
                running[victim] = start(victim)
                await running[victim].url()
                produce()
                await until(all_acknowledged, 60)
            await until_shared(ports, fakes)
            for daemon in running.values():
                assert await daemon.end() == 0
        finally:
            for daemon in running.values():
                daemon.kill()
        with open_catalogs([tmp_path / name / "store" for name in ports]) as both:
            rows = dict(both.execute(f"SELECT node, list(sequence ORDER BY sequence) FROM ({ALL}) GROUP BY node").fetchall())
            assert rows == {node: list(range(1, count + 1)) for node, count in made.items()}
            assert len(both.execute("SELECT url FROM nodes").fetchall()) == len(fakes)


async def until_shared(ports: dict[str, int], fakes: list[FakeExporter]) -> None:
    """Until each node is asked by the one collector it belongs to."""
    wanted = {name: {fake.url for fake in fakes if owner(fake.url, list(ports)) == name} for name in ports}
    async with asyncio.timeout(60):
        while True:
            asked = {}
            for name, port in ports.items():
                rows = (await fetch(f"http://127.0.0.1:{port}/v1/nodes"))["rows"]
                asked[name] = {row["url"] for row in rows}  # type: ignore[attr-defined]
            if asked == wanted:
                return
            await asyncio.sleep(0.1)
