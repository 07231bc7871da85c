"""The compute limit against the simulator's truth: shares, sharing, live changes, soft allocations, debt, suspension."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from poolmeter.native import native_path
from poolmeter.pages import layout
from poolmeter.pages.grant import DeviceGrant, Grant, write_grant
from poolmeter.pages.meter import DeviceCounters, create_meter, read_meter
from poolmeter.simulator.machine import Machine
from poolmeter.simulator.tenant import TenantPlan, tenant_program

from .test_hook_lengths import PROGRAM


@dataclass
class Card:
    """A simulated card and the allocations on it."""

    machine: Machine
    root: Path

    @property
    def uuid(self) -> str:
        return self.machine.uuid(0)

    def grant(self, name: str, percent: float | None, soft: bool = False, weight: int = 100, suspended: bool = False) -> None:
        """Makes the allocation's grant say so, now."""
        compute = None if percent is None else round(percent * 10_000)
        device = DeviceGrant(self.uuid, compute, soft=soft, weight=weight)
        write_grant(self.root / "allocations" / name / "grant", Grant(name, (device,), suspended=suspended))

    def allocation(self, name: str, percent: float | None, soft: bool = False, weight: int = 100) -> Path:
        folder = self.root / "allocations" / name
        folder.mkdir(parents=True)
        (self.root / "devices").mkdir(exist_ok=True)
        self.grant(name, percent, soft, weight)
        create_meter(folder / "meter", [self.uuid])
        return folder

    def start(self, folder: Path, *words: str) -> "subprocess.Popen[str]":
        hook = {"LD_PRELOAD": str(native_path("libpoolmeter_hook.so")), "POOLMETER_ALLOCATION_DIR": str(folder)}
        return subprocess.Popen(words, env=self.machine.environment() | hook, stdout=subprocess.PIPE, text=True)

    def tenant(self, folder: Path, plan: TenantPlan) -> "subprocess.Popen[str]":
        return self.start(folder, str(tenant_program(plan.resolve)), *plan.words())

    def share(self, process: "subprocess.Popen[str]") -> float:
        """Percent of the card's time that the tenant had, when it has ended."""
        reports = [json.loads(line) for line in process.communicate(timeout=60)[0].splitlines()]
        assert process.returncode == 0 and all(report["cuda_error"] is None for report in reports)
        self.machine.advance()
        pids = {report["pid"] for report in reports}
        busy = sum(truth.busy_ns for truth in self.machine.truth() if truth.pid in pids)
        return 100 * busy / 1e9 / max(report["wall_seconds"] for report in reports)

    def busy_ns(self) -> int:
        self.machine.advance()
        return sum(truth.busy_ns for truth in self.machine.truth())

    def counters(self, folder: Path) -> DeviceCounters:
        return read_meter(folder / "meter").total(self.uuid)


@pytest.fixture
def card(tmp_path: Path) -> Iterator[Callable[..., Card]]:
    machines: list[Machine] = []

    def make(clock: str = "virtual", participants: int | None = None) -> Card:
        machines.append(Machine.create("single", tmp_path / f"machine-{len(machines)}", clock=clock, participants=participants))
        return Card(machines[-1], tmp_path / f"node-{len(machines)}")

    yield make
    for machine in machines:
        machine.close()


def bucket(folder: Path) -> layout.Bucket:
    """The bucket of the page's first device, as it lies in the file."""
    page = (folder / "meter").read_bytes()
    return layout.MeterDevice.from_buffer_copy(page, layout.Meter.from_buffer_copy(page).devices_offset).bucket


PLANS = {
    "50us": TenantPlan(50, 2.0),
    "1ms": TenantPlan(1000, 2.0),
    "20ms-sync": TenantPlan(20000, 4.0, sync_every=1),
    "graph": TenantPlan(50, 2.0, graph=20),
    "1ms-sync": TenantPlan(1000, 2.0, sync_every=1),
    "streams": TenantPlan(1000, 2.0, streams=4),
    "overlapping-streams": TenantPlan(200, 2.0, streams=4, blocks=33),
}


@pytest.mark.parametrize("percent", [10, 25, 50, 75, 90])
@pytest.mark.parametrize("plan", PLANS)
def test_the_share_is_the_limit_and_what_limits_is_what_is_billed(card: Callable[..., Card], plan: str, percent: int) -> None:
    here = card()
    folder = here.allocation("a", percent)
    assert here.share(here.tenant(folder, PLANS[plan])) == pytest.approx(percent, abs=1.0)
    counters, account = here.counters(folder), bucket(folder)
    assert counters.throttle_waits > 0 and counters.throttled_ns > 0
    assert account.balance_ns == account.refilled_ns - account.charged_ns
    assert account.waiters == 0
    # What a process keeps to itself before it touches the shared line is all that the two may differ by.
    assert abs(account.charged_ns - counters.busy_ns) <= 50_000


def test_without_a_limit_nothing_waits_and_no_account_is_kept(card: Callable[..., Card]) -> None:
    for percent in (None, 100.0):
        here = card()
        folder = here.allocation("a", percent)
        assert here.share(here.tenant(folder, TenantPlan(1000, 0.3))) > 99
        assert here.counters(folder).throttle_waits == 0 and bucket(folder).charged_ns == 0


@pytest.mark.parametrize(
    "mine, theirs", [(TenantPlan(1000, 1.5, streams=4), 5000), (TenantPlan(1000, 1.5, streams=8, sync_every=16), 1000)]
)
def test_many_streams_beside_a_neighbour_pay_for_their_own_time(card: Callable[..., Card], mine: TenantPlan, theirs: int) -> None:
    here = card(participants=2)
    folders = [here.allocation(name, None) for name in "ab"]
    tenants = [here.tenant(folder, plan) for folder, plan in zip(folders, (mine, TenantPlan(theirs, 1.5)), strict=True)]
    for tenant in tenants:
        here.share(tenant)
    truth = {record.pid: record.busy_ns for record in here.machine.truth()}
    for folder, tenant in zip(folders, tenants, strict=True):
        assert here.counters(folder).busy_ns == pytest.approx(truth[tenant.pid], rel=0.08)


@pytest.mark.parametrize("us", [50, 1000])
@pytest.mark.parametrize("limits", [(25, 55), (30, 70), (20, 30, 50), (25, 25, 50)], ids=str)
def test_tenants_side_by_side_each_get_their_limit_of_what_the_card_gives(
    card: Callable[..., Card], us: int, limits: tuple[int, ...]
) -> None:
    shares = []
    for granted in (None, *limits)[: len(limits)], limits:
        here = card(participants=len(limits))
        folders = [here.allocation(f"a{n}", None if granted[0] is None else limit) for n, limit in enumerate(limits)]
        tenants = [here.tenant(folder, TenantPlan(us, 3.0)) for folder in folders]
        shares.append([here.share(tenant) for tenant in tenants])
    gives = sum(shares[0]) / 100
    scale = min(1.0, gives / (sum(limits) / 100))
    assert shares[1] == pytest.approx([limit * scale for limit in limits], abs=3.0)


@pytest.mark.parametrize("us", [50, 1000])
def test_processes_of_one_allocation_share_one_limit(card: Callable[..., Card], us: int) -> None:
    here = card(participants=4)
    folder = here.allocation("a", 40)
    assert here.share(here.tenant(folder, TenantPlan(us, 2.0, processes=4))) == pytest.approx(40, abs=2.0)


@pytest.mark.parametrize("us", [50, 1000])
def test_a_soft_one_takes_what_an_owner_leaves_and_no_more(card: Callable[..., Card], us: int) -> None:
    duty = TenantPlan(10000, 3.0, sync_every=1, gap_us=10000)
    here = card()
    alone = here.share(here.tenant(here.allocation("owner", 90), duty))
    here = card(participants=2)
    owner = here.tenant(here.allocation("owner", 90), duty)
    soft = here.tenant(here.allocation("soft", 5, soft=True, weight=10), TenantPlan(us, 3.0))
    assert here.share(owner) >= 0.95 * alone
    assert here.share(soft) >= 0.6 * (100 - alone)


def test_a_soft_one_alone_has_the_card_and_several_go_by_weight(card: Callable[..., Card]) -> None:
    here = card()
    assert here.share(here.tenant(here.allocation("soft", 5, soft=True), TenantPlan(1000, 1.0))) > 98
    here = card(participants=2)
    tenants = [here.tenant(here.allocation(f"soft{w}", 5, soft=True, weight=w), TenantPlan(1000, 3.0)) for w in (100, 300)]
    light, heavy = (here.share(tenant) for tenant in tenants)
    assert light == pytest.approx(25, abs=3) and 2.3 < heavy / light < 3.7


def test_a_hard_one_stays_at_its_limit_beside_an_idle_owner(card: Callable[..., Card]) -> None:
    here = card(participants=2)
    idle = here.tenant(here.allocation("idle", 70), TenantPlan(100, 2.0, sync_every=1, gap_us=50000))
    hard = here.tenant(here.allocation("hard", 30), TenantPlan(1000, 2.0))
    assert here.share(hard) == pytest.approx(30, abs=1) and here.share(idle) < 1


def test_launches_of_an_unknown_length_run_up_no_debt_of_seconds(card: Callable[..., Card]) -> None:
    here = card()
    folder = here.allocation("a", 10)
    # 50 at once, each 400 times what an unknown launch is taken for: three are ahead of the first measurement at most.
    assert here.start(folder, sys.executable, "-c", PROGRAM, "stream", "0", "20000000:50").wait(60) == 0
    assert 50 * 20 / 0.1 - 1000 < here.machine.advance() / 1e6 < 50 * 20 / 0.1 + 1000
    assert here.counters(folder).busy_ns == pytest.approx(1_000_000_000, rel=0.02)


def test_one_long_kernel_is_paid_back_by_the_short_ones_after_it(card: Callable[..., Card]) -> None:
    here = card()
    folder = here.allocation("a", 40)
    assert here.start(folder, sys.executable, "-c", PROGRAM, "stream", "0", "400000000:1", "50000:8000").wait(60) == 0
    took_ms = here.machine.advance() / 1e6
    assert took_ms == pytest.approx((400 + 400) / 0.4, rel=0.04)


def test_captures_go_on_beside_a_thread_that_is_held(card: Callable[..., Card]) -> None:
    here = card("real")
    folder = here.allocation("a", 20)
    done = here.start(folder, str(native_path("bin/poolmeter-exercise-program")), "capture")
    assert json.loads(done.communicate(timeout=60)[0])["other_launches"] > 0 and done.returncode == 0
    assert here.counters(folder).throttled_ns > 0


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_new_limit_and_a_suspension_bite_while_the_program_runs(card: Callable[..., Card]) -> None:
    here = card("real")
    folder = here.allocation("a", 5)
    tenant = here.tenant(folder, TenantPlan(500, 0))

    def share_over(seconds: float) -> float:
        before, began = here.busy_ns(), time.monotonic_ns()
        time.sleep(seconds)
        return 100 * (here.busy_ns() - before) / (time.monotonic_ns() - began)

    until(lambda: here.counters(folder).launches > 20)
    assert share_over(0.8) < 9
    here.grant("a", 60)
    time.sleep(0.2)
    assert share_over(0.5) > 25  # a loaded machine may keep the program from using all of its 60
    here.grant("a", 60, suspended=True)
    time.sleep(0.2)
    assert share_over(0.3) == 0
    here.grant("a", None)
    until(lambda: share_over(0.1) > 70)
    here.grant("a", 5)
    time.sleep(0.5)
    assert share_over(0.8) < 9
    tenant.terminate()
    tenant.communicate()
    assert tenant.returncode == 0
