"""The register, depreciation and the matrix: what must hold for any of them."""

import itertools
import json
from collections.abc import Callable
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path

import duckdb
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_accounting_invariants import PERIOD, Pool, pools

from poolmeter.accounting.assets.depreciation import Schedule, depreciation_report, months_after, schedule_of
from poolmeter.accounting.assets.matrix import balances, crossed, matrix_of, transfers
from poolmeter.accounting.assets.register import chosen, devices_of, list_report, node_history, show_report
from poolmeter.accounting.assets.sheet import parse_sheet, read_sheet
from poolmeter.accounting.assets.stays import Sighting, Stay, stays_of
from poolmeter.accounting.chargeback import chargeback_of
from poolmeter.accounting.dimensions import EVERYTHING
from poolmeter.books.writer import Books
from poolmeter.errors import BadInput
from poolmeter.model.units import DAY_US, MINUTE_US, split_exactly
from poolmeter.period import parse_period
from poolmeter.report import Report, as_json

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "assets.schema.json").read_text())


def fits(report: Report) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(as_json(report)))


QUICK = settings(max_examples=20, deadline=None)
START = date(2026, 1, 31)
FULL = {"uuid": "GPU-1", "model": "H200", "owner": "vision", "bought": "2026-01-31", "price": "1000.00", "currency": "EUR", "life_months": 3, "residual": "99.99"}  # fmt: skip


@QUICK
@given(pool=pools(), owners=st.dictionaries(st.sampled_from(("GPU-0", "GPU-1", "GPU-2")), st.sampled_from(("acme", "beta", "lab"))))
@pytest.mark.parametrize("basis", ["allocated", "used"])
def test_the_matrix_sums_to_the_bill(stores: Callable[..., object], basis: str, pool: Pool, owners: dict[str, str]) -> None:
    with stores(pool.records) as connection:  # type: ignore[attr-defined]
        bill = chargeback_of(connection, PERIOD, pool.plan, ("tenant",), EVERYTHING, basis)
        matrix = matrix_of(connection, PERIOD, pool.plan, owners, basis)
    fits(matrix)
    assert matrix.totals["cost"] == bill.totals["cost"]

    def sums(rows: object) -> dict[tuple[object, object], Decimal]:
        found: dict[tuple[object, object], Decimal] = {}
        for row in rows:  # type: ignore[attr-defined]
            key = (row["line"], row.get("tenant"))
            found[key] = found.get(key, Decimal(0)) + row["cost"]
        return {key: cost for key, cost in found.items() if cost}

    assert sums(matrix.rows) == sums(bill.rows)
    shared = matrix.extra["balances"]
    assert sum(row["cost"] for row in shared) == 0  # type: ignore[attr-defined]
    assert len(crossed(matrix).rows) == 2 * len({row.get("owner") for row in matrix.rows})


@given(st.dictionaries(st.tuples(st.sampled_from(("a", "b", "c", None)), st.just("usage"), st.sampled_from("abc")), st.integers(0, 1000)))
def test_transfers_are_netted_and_sum_to_nothing(amounts: dict[tuple[str | None, str, str | None], int]) -> None:
    owed = transfers(amounts)
    assert sum(balances(owed).values()) == 0
    assert len({frozenset((payer, payee)) for payer, payee, _ in owed}) == len(owed)
    assert all(amount > 0 and payer != payee for payer, payee, amount in owed)
    for team in "abc":
        got = sum(amount for (owner, _, tenant), amount in amounts.items() if owner == team != tenant)
        paid = sum(amount for (owner, _, tenant), amount in amounts.items() if tenant == team != owner and owner is not None)
        assert balances(owed).get(team, 0) == got - paid


@given(st.integers(0, 10**9), st.integers(1, 2000), st.lists(st.integers(-50, 2100), min_size=2, max_size=8))
def test_any_split_of_a_life_sums_to_price_less_residual(amount: int, days: int, cuts: list[int]) -> None:
    schedule = Schedule(START, days, amount, 7, "EUR")
    edges = [START + timedelta(days=cut) for cut in sorted([-51, *cuts, 2101])]
    assert sum(schedule.cost(first, last) for first, last in itertools.pairwise(edges)) == amount
    day = min(days, 30)
    assert [schedule.cost(START + timedelta(n), START + timedelta(n + 1)) for n in range(day)] == split_exactly(amount, [1] * days)[:day]
    assert schedule.cost(START + timedelta(days), START + timedelta(days + 1)) == 0


def test_depreciation_names_what_it_cannot_tell_and_what_is_written_off() -> None:
    assert months_after(START, 1) == date(2026, 2, 28)
    assert schedule_of(FULL).days == 89
    bare = {"uuid": "GPU-2", "owner": "vision"}
    for by in ("owner", "model", "device", "month"):
        report = depreciation_report([FULL, bare], parse_period("2026-01-01", "2026-06-01", "Europe/Vienna", 0), by)
        assert sum(row["cost"] for row in report.rows) == Decimal("900.01")  # type: ignore[misc]
        assert report.warnings == ("device GPU-2 has no bought, price, life_months, residual in the register: it is not in these sums",)
        fits(report)
    late = depreciation_report([FULL], parse_period("2026-07-01", "2026-08-01", "UTC", 0), "device")
    assert late.rows[0] == {
        "device": "GPU-1", "devices": 1, "cost": Decimal("0.00"), "currency": "EUR", "book_value": "99.99", "state": "written off",
    }  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(1, 9)), max_size=20), st.randoms())
def test_stays_cover_each_sighting_and_never_overlap(parts: list[tuple[str, int, int]], random: object) -> None:
    at, sightings = 0, []
    for node, gap, length in parts:
        sightings.append(Sighting(node, at + gap, at + gap + length))
        at += gap + length
    shuffled = list(sightings)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    stays = stays_of(shuffled)
    assert all(any(s.node == seen.node and s.start_us <= seen.start_us and seen.end_us <= s.end_us for s in stays) for seen in sightings)
    assert all(before.end_us <= after.start_us and before.node != after.node for before, after in itertools.pairwise(stays))


def test_two_nodes_that_claim_the_same_time_do_not_overlap() -> None:
    assert stays_of([Sighting("b", 5, 9), Sighting("a", 0, 7)]) == (Stay("a", 0, 7), Stay("b", 7, 9))


HEADER = "uuid,owner,bought,price,currency,life_months,residual\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("uuid,colour\nGPU-1,red\n", "1: column 'colour' is unknown"),
        ("uuid,owner,owner\n", "1: column owner is there twice"),
        ("owner\nx\n", "1: column uuid is absent"),
        (HEADER + "GPU-1,v,2026-02-30,1,EUR,1,0\n", "2: column bought: bought is '2026-02-30', expected a date"),
        (HEADER + "GPU-1,v,2026-02-03,-1,EUR,1,0\n", "2: column price: price is '-1', expected a decimal"),
        (HEADER + "GPU-1,v,2026-02-03,NaN,EUR,1,0\n", "2: column price: price is 'NaN', expected a decimal"),
        (HEADER + "GPU-1,v,2026-02-03,1.001,EUR,1,0\n", "2: column price: price is 1.001 EUR, expected at most 2 decimals"),
        (HEADER + "GPU-1,v,2026-02-03,1,EUX,1,0\n", "2: column currency: currency is 'EUX'"),
        (HEADER + "GPU-1,v,2026-02-03,1,EUR,0,0\n", "2: column life_months: life_months is 0"),
        (HEADER + "GPU-1,v,2026-02-03,1,EUR,1,2\n", "2: column residual: residual is 2 and price 1"),
        (HEADER + "GPU-1,v,,,,,\nGPU-1,v,,,,,\n", "3: column uuid: uuid is 'GPU-1', which line 2 has too"),
        (HEADER + "GPU-9,v,,,,,\n", "2: column uuid: uuid is 'GPU-9', which the store has never seen"),
        (HEADER + "GPU-1\n", "2: has 1 cells, expected 7"),
    ],
)
def test_a_fault_of_a_file_has_its_line_and_column(text: str, fault: str) -> None:
    rows, faults = parse_sheet(text, {}, {"GPU-1"})
    assert rows == []
    assert len(faults) == 1
    assert faults[0].startswith(fault)


def test_an_import_is_whole_and_the_same_again_is_no_change(tmp_path: Path) -> None:
    file = tmp_path / "cards.csv"
    with Books(tmp_path / "books.sqlite") as books:
        file.write_text(HEADER + "GPU-1,vision,2026-01-01,100.50,EUR,36,0\n" + 25 * "GPU-2,v,never,,,,\n")
        with pytest.raises(BadInput, match=r"cards.csv:3: column bought: .*; and 5 more faults: nothing was changed"):
            read_sheet(file, books.assets.list(), {"GPU-1", "GPU-2"})
        file.write_text(HEADER + "GPU-1,vision,2026-01-01,100.50,EUR,36,0\n")
        rows = read_sheet(file, books.assets.list(), {"GPU-1"})
        assert books.assets.enter(rows, "ann", "bought", dry_run=True).added == ("GPU-1",)
        assert books.assets.list() == []
        assert books.assets.enter(rows, "ann", "bought").added == ("GPU-1",)
        assert books.assets.enter(rows, "ann", "bought").unchanged == ("GPU-1",)
        # A second file with one bad row among good ones writes none of them.
        with pytest.raises(BadInput, match="asset GPU-3: residual is 5"):
            books.assets.enter([{"uuid": "GPU-1", "owner": "lab"}, {"uuid": "GPU-3", "residual": "5"}], "ann", "moved")
        assert books.assets.enter([{"uuid": "GPU-1", "owner": "lab"}], "bob", "moved").changed == ("GPU-1",)
        log = books.changes("assets")
        assert [(change.by, change.reason, change.after["owner"], change.after["price"]) for change in log] == [
            ("ann", "bought", "vision", "100.50"), ("bob", "moved", "lab", "100.50"),
        ]  # fmt: skip


TEXTS = st.none() | st.sampled_from(("vision", "lab"))


@QUICK
@given(st.lists(st.fixed_dictionaries({"uuid": st.sampled_from(("GPU-1", "GPU-2", "GPU-3")), "owner": TEXTS, "note": TEXTS}), unique_by=lambda row: row["uuid"]))  # fmt: skip
def test_any_import_twice_is_once(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str | None]]) -> None:
    with Books(tmp_path_factory.mktemp("books") / "books.sqlite") as books:
        books.assets.enter(rows, "ann", "why")
        before = (books.assets.list(), books.changes("assets"))
        again = books.assets.enter(rows, "ann", "why")
        assert (again.added, again.changed) == ((), ())
        assert (books.assets.list(), books.changes("assets")) == before


def test_the_register_is_filled_from_the_store_and_never_over_what_people_wrote() -> None:
    connection = duckdb.connect()
    connection.execute(
        "CREATE TABLE devices (uuid VARCHAR, node VARCHAR, model VARCHAR, vendor VARCHAR, first_seen_us BIGINT, last_seen_us BIGINT)"
    )
    connection.execute(
        f"INSERT INTO devices VALUES ('GPU-1', 'n2', 'H200', 'nvidia', 0, {3 * DAY_US}), ('GPU-2', 'n1', 'A100', NULL, 5, 6)"
    )
    connection.execute("CREATE TABLE device_minutes (device_uuid VARCHAR, node VARCHAR, minute_us BIGINT)")
    connection.execute(
        "CREATE TABLE device_days (device_uuid VARCHAR, node VARCHAR, day_us BIGINT, first_minute_us BIGINT, last_minute_us BIGINT)"
    )
    minutes = [("n1", DAY_US), ("n2", DAY_US + MINUTE_US), ("n1", DAY_US + 2 * MINUTE_US), ("n2", 2 * DAY_US)]
    connection.executemany("INSERT INTO device_minutes VALUES ('GPU-1', ?, ?)", minutes)
    days = [("n1", 0, 0, 0), ("n1", DAY_US, DAY_US, DAY_US + 2 * MINUTE_US), ("n2", DAY_US, DAY_US + MINUTE_US, DAY_US + MINUTE_US)]
    connection.executemany("INSERT INTO device_days VALUES ('GPU-1', ?, ?, ?, ?)", [*days, ("n2", 2 * DAY_US, 2 * DAY_US, 2 * DAY_US)])
    assert node_history(connection)["GPU-1"] == (
        Stay("n1", 0, DAY_US + MINUTE_US),
        Stay("n2", DAY_US + MINUTE_US, DAY_US + 2 * MINUTE_US),
        Stay("n1", DAY_US + 2 * MINUTE_US, DAY_US + 3 * MINUTE_US),
        Stay("n2", 2 * DAY_US, 2 * DAY_US + MINUTE_US),
    )
    devices = devices_of(connection, [{"uuid": "GPU-1", "model": "ours", "owner": "vision"}])
    assert [device["model"] for device in devices] == ["ours", "A100"]
    assert "vendor" not in devices[1]
    assert [device["uuid"] for device in chosen(devices, {"owner": None}, ("owner",))] == ["GPU-2"]
    fits(list_report(devices))
    fits(show_report(devices[0]))
    assert list_report(devices).totals == {"devices": 2}
    assert len(show_report(devices[0]).rows) == 4
