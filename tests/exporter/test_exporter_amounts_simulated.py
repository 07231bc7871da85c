"""Amounts on the simulated card, beside what the simulator knows to be true."""

import contextlib
import time
from pathlib import Path

import pytest
from exporter_fakes import GIB
from test_exporter_simulated import Watched

from poolmeter.model.usage import DeviceRecord, ProcessRecord, SliceRecord
from poolmeter.simulator.configuration import parse_machine
from poolmeter.simulator.machine import Machine
from poolmeter.vendors.nvidia_card import SELDOM_US

pytestmark = pytest.mark.timeout(120)


def made(tmp_path: Path, head: str = "", card: str = "") -> Machine:
    config = parse_machine(f'[machine]\nname="amounts"\n{head}\n[[card]]\nmemory="16GiB"\n{card}\n', "amounts.toml")
    return Machine.create(config, tmp_path / "machine.sim")


def test_energy_adds_up_to_what_the_board_drew(tmp_path: Path) -> None:
    with contextlib.closing(made(tmp_path)) as machine:
        watched = Watched(tmp_path, machine)
        before = machine.device_truth(0)
        _, first = watched.allocate("a", 250_000, 4 * GIB)
        _, second = watched.allocate("b", 500_000, 4 * GIB)
        children = [watched.tenant(env, "--kernel-us", "1000", "--seconds", "3", "--sync-every", "8") for env in (first, second)]
        stranger = watched.tenant(machine.environment(), "--kernel-us", "1000", "--seconds", "3", "--sync-every", "8")
        for child in (*children, stranger):
            child.communicate(timeout=60)
        watched.settle()
        told, deadline = watched.snapshot().devices[0].energy_uj_total, time.monotonic() + 3 * SELDOM_US / 1e6
        while watched.snapshot().devices[0].energy_uj_total == told:  # it is asked now and then
            assert time.monotonic() < deadline
            time.sleep(0.01)
        watched.end()
        machine.advance()
        after = machine.device_truth(0)
        records = watched.spool.read(None, 0).records
        watched.close()
    cards = [record for record in records if isinstance(record, DeviceRecord)]
    parts = [record for record in records if isinstance(record, SliceRecord)]
    board = sum(record.energy_uj or 0 for record in cards)
    assert board == pytest.approx((after.energy_mj - before.energy_mj) * 1000, rel=0.01)
    slices = sum(part.energy_uj or 0 for part in parts)
    assert 0 < slices < board  # a stranger worked as well, and a quarter is nobody's
    used = sum(part.used_us or 0 for part in parts)
    total = used + sum((r.unaccounted_us or 0) + (r.switch_overhead_us or 0) for r in cards)
    truth = (after.busy_ns + after.switched_ns - before.busy_ns - before.switched_ns) / 1000
    assert total == pytest.approx(truth, rel=0.03) and total <= sum(card.span_us for card in cards)


def bases_of(folder: Path, driver: str) -> set[str | None]:
    """What the records of a program of three seconds go by on a card with accounting, whose sum is the truth."""
    folder.mkdir()
    with contextlib.closing(made(folder, f'driver_version="{driver}"', "accounting=true")) as machine:
        watched = Watched(folder, machine)
        child = watched.tenant(machine.environment(), "--kernel-us", "2000", "--seconds", "3", "--allocate", "256MiB")
        child.communicate(timeout=60)
        watched.settle()
        watched.end()
        machine.advance()
        truth = machine.device_truth(0).busy_ns / 1000
        calls = machine.calls()
        records = watched.spool.read(None, 0).records
        watched.close()
    mine = [record for record in records if isinstance(record, ProcessRecord)]
    assert sum(record.used_us or 0 for record in mine) == pytest.approx(truth, rel=0.1)
    assert not any(name.startswith("nvmlDeviceSet") for name in calls)
    return {record.used_basis for record in mine if record.used_us}


@pytest.mark.parametrize(("driver", "basis"), [("615.10", "accounting"), ("580.95", "mixed")])
def test_accounting_is_used_where_it_is_on(tmp_path: Path, driver: str, basis: str) -> None:
    found: set[str | None] = set()
    for attempt in range(4):
        # On the older driver the answer comes once the program has ended, at times after its record was closed by samples alone.
        found |= bases_of(tmp_path / str(attempt), driver)
        if found - {"sampled"}:
            break
    assert found and set() < found - {"sampled"} <= {basis, "accounting"}


def test_accounting_that_is_off_is_not_asked_and_not_switched_on(tmp_path: Path) -> None:
    with contextlib.closing(made(tmp_path, 'driver_version="615.10"')) as machine:
        watched = Watched(tmp_path, machine)
        child = watched.tenant(machine.environment(), "--kernel-us", "2000", "--seconds", "1")
        child.communicate(timeout=60)
        time.sleep(0.5)
        calls = {name for name, count in machine.calls().items() if count.count}
        watched.end()
        watched.close()
        assert not machine.setting("accounting", 0)
    assert not any("AccountingStats" in name or "SetAccounting" in name for name in calls)
