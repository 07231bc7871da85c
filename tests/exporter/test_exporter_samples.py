"""Utilisation samples under outages and a clock that is set: what is counted was used, what no sample covers is said, and counting goes on."""

import types
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import pynvml as real
import pytest
from amounts_fakes import Pool
from exporter_binding import error, sample, use
from exporter_fakes import CARD, SECOND
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.model.allocation import Mode
from poolmeter.model.units import MINUTE_US
from poolmeter.model.usage import DeviceRecord, SliceRecord
from poolmeter.vendors.nvidia_accounting import Accounting
from poolmeter.vendors.nvidia_use import Listed, Use
from poolmeter.vendors.nvml import Nvml
from poolmeter.vendors.reading import ProcessReading

HOUR = 3600 * SECOND
PID = 7
CODES = {name: getattr(real, name) for name in dir(real) if name.startswith("NVML")}


@dataclass
class Driver:
    """A card with one program, sampled every `period_us` into a buffer by a driver that may stop; times of the wall clock, which is set."""

    period_us: int
    monotonic_us: int = 5 * HOUR
    ahead_us: int = 400_000 * HOUR  # wall less monotonic time
    sampling: bool = True
    fails: bool = False
    true_us: int = 0
    unsampled_us: int = 0
    _busy_us: int = 0
    _since_us: int = 5 * HOUR
    _buffer: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=100))

    @property
    def wall_us(self) -> int:
        return self.monotonic_us + self.ahead_us

    def work(self, us: int, percent: int) -> None:
        """Time passes with the card busy so much."""
        end = self.monotonic_us + us
        while self.monotonic_us < end:
            step = min(end, self._since_us + self.period_us) - self.monotonic_us
            self.monotonic_us += step
            self.true_us += step * percent // 100
            self._busy_us += step * percent // 100
            if self.monotonic_us - self._since_us >= self.period_us:
                if self.sampling:
                    self._buffer.append((self.wall_us, self._busy_us * 100 // self.period_us))
                else:
                    self.unsampled_us += self.period_us
                self._since_us, self._busy_us = self.monotonic_us, 0

    def samples(self, handle: object, kind: int, last: int) -> tuple[int, list[object]]:
        found = [sample(at, value) for at, value in self._buffer if at > last]
        if self.fails:
            raise error(real.NVML_ERROR_TIMEOUT)
        if not found:
            raise error(real.NVML_ERROR_NOT_FOUND)
        return 1, found

    def uses(self, handle: object, last: int) -> list[object]:
        found = [(at, value) for at, value in self._buffer if at > last]
        if self.fails:
            raise error(real.NVML_ERROR_TIMEOUT)
        if not any(value for _, value in found):
            raise error(real.NVML_ERROR_NOT_FOUND)
        mean = sum(value for _, value in found) // len(found)
        return [use(max(at for at, value in found if value), PID, mean)]


class Reader:
    """Reads a driver's card as the sampler does."""

    def __init__(self, driver: Driver, proc: Path) -> None:
        (proc / str(PID)).mkdir(exist_ok=True)
        (proc / str(PID) / "stat").write_bytes(b"7 (cuda) S 1 5 5 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 99 1 1")
        binding = types.SimpleNamespace(**CODES, nvmlDeviceGetSamples=driver.samples, nvmlDeviceGetProcessUtilization=driver.uses)
        self.driver, self.use = driver, Use(Nvml(binding), proc)
        self.read()

    def read(self, utilization_ppm: int | None = None) -> None:
        clock = types.SimpleNamespace(time_ns=lambda: self.driver.wall_us * 1000, monotonic_ns=lambda: self.driver.monotonic_us * 1000)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("poolmeter.vendors.nvidia_use.time", clock)
            self.use.device(0, utilization_ppm, [])
            self.use.integrate(0, {PID: Listed()}, None, [])

    @property
    def busy_us(self) -> int:
        return self.use.busy_us or 0

    @property
    def process_us(self) -> int:
        return self.use.processes[PID].total_us if PID in self.use.processes else 0


STEP = st.tuples(
    st.integers(0, 100),
    st.one_of(st.integers(1, 3 * SECOND), st.integers(1, 3 * 60 * SECOND)),
    st.sampled_from(["read", "read", "read", "nobody reads", "no samples", "fails"]),
    st.one_of(st.just(0), st.just(0), st.integers(-2 * SECOND, 2 * SECOND), st.integers(-2 * HOUR, 2 * HOUR)),
)


@given(st.sampled_from([166_667, SECOND]), st.lists(STEP, max_size=12))
def test_no_outage_and_no_clock_makes_time_busy_that_was_not(
    tmp_path_factory: pytest.TempPathFactory, period_us: int, steps: list[tuple[int, int, str, int]]
) -> None:
    driver = Driver(period_us)
    driver.work(10 * SECOND, 0)
    reader = Reader(driver, tmp_path_factory.mktemp("proc"))
    start, slack = driver.true_us, 4 * SECOND
    for percent, us, what, clock_us in steps:
        driver.sampling, driver.fails = what != "no samples", what == "fails"
        driver.work(us, percent)
        driver.ahead_us += clock_us
        if what != "nobody reads":
            reader.read()
        # A sample late by a few periods is that of the time since the one before.
        slack += 3 * SECOND if what == "no samples" else 0
        assert reader.busy_us <= driver.true_us - start + slack
        assert reader.process_us <= driver.true_us - start + slack
    # Whatever came before, it counts again at once.
    driver.sampling, driver.fails = True, False
    for seconds in (3, 20):
        before = reader.busy_us
        for _ in range(seconds):
            driver.work(SECOND, 100)
            reader.read()
    assert 19 * SECOND <= reader.busy_us - before <= 21 * SECOND
    # A program's mean is of all in the driver's buffer that is newer than the last look: right again once nothing in it lies ahead.
    for seconds in (110, 20):
        processes = reader.process_us
        for _ in range(seconds):
            driver.work(SECOND, 100)
            reader.read()
    assert 18 * SECOND <= reader.process_us - processes <= 21 * SECOND


def test_while_nothing_is_told_the_busy_time_is_not_known(tmp_path: Path) -> None:
    driver = Driver(SECOND)
    reader = Reader(driver, tmp_path)
    for _ in range(10):
        driver.work(SECOND, 50)
        reader.read()
    counted = reader.busy_us
    driver.sampling = False
    known = []
    for _ in range(60):
        driver.work(SECOND, 50)
        reader.read()
        known.append(reader.use.known)
    assert known == [True] * 3 + [False] * 57 and reader.busy_us == counted
    driver.sampling = True
    driver.work(SECOND, 50)
    reader.read()
    # The sample is of its own second; of the minute before nothing is known.
    assert reader.use.known and reader.busy_us == counted + SECOND // 2 and reader.use.unmeasured_us == 60 * SECOND


def test_a_card_that_samples_only_while_it_works_is_idle_meanwhile(tmp_path: Path) -> None:
    driver = Driver(SECOND)
    reader = Reader(driver, tmp_path)
    driver.sampling = False
    for _ in range(60):
        driver.work(SECOND, 0)
        reader.read(0)
        assert reader.use.known and reader.busy_us == 0
    driver.sampling = True
    for second in range(1, 4):
        driver.work(SECOND, 100)
        reader.read(1_000_000)
        assert reader.busy_us <= second * SECOND and reader.use.unmeasured_us == 0
    assert reader.busy_us >= 2 * SECOND


def test_an_ended_hour_does_not_age_a_context_whose_clock_was_set(tmp_path: Path) -> None:
    stats = real.c_nvmlAccountingStats_v2_t(isRunning=1, sampleCount=10, sumGpuUtil=50_000, time=0, startTime=0)
    binding = types.SimpleNamespace(**CODES, nvmlDeviceGetAccountingStats_v2=lambda *_: stats)
    accounting, driver = Accounting(Nvml(binding)), Driver(SECOND)
    stats.startTime = driver.wall_us
    found = []
    for step_us in (0, HOUR, 0, -2 * HOUR, 0):
        driver.work(10 * SECOND, 50)
        driver.ahead_us += step_us
        clock = types.SimpleNamespace(time_ns=lambda: driver.wall_us * 1000, monotonic_ns=lambda: driver.monotonic_us * 1000)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("poolmeter.vendors.nvidia_accounting.time", clock)
            (reading,) = accounting.add(0, True, [ProcessReading(pid=PID, start_ticks=99)])
        found.append(reading.accounted_us_total)
    assert found == [5 * SECOND * count for count in range(1, 6)]


def test_time_that_no_sample_covers_is_said_and_not_billed() -> None:
    pool = Pool()
    pool.allocate("w", Mode.WHOLE, 1_000_000, meter=False)
    for second in range(1, 61):
        # At 20 s samples come back after an hour of which the exporter, too, could see nothing; from 40 s on ticks are slow.
        pool.change(busy_us_total=min(second, 10) * SECOND, unmeasured_us_total=HOUR if second >= 20 else 0)
        pool.step()
    for _ in range(6):
        pool.change(busy_us_total=10 * SECOND, unmeasured_us_total=pool.readings[CARD].unmeasured_us_total + 2 * SECOND)
        pool.integrator._live_us = MINUTE_US  # an exporter that looks every ten seconds
        pool.step(10 * SECOND)
    first, second_ = [record for record in pool.records if isinstance(record, SliceRecord)]
    assert first.used_us == 10 * SECOND and first.completeness_ppm == 1_000_000 * 59 // 60
    assert second_.used_us == 0 and second_.completeness_ppm == 1_000_000 * 48 // 60
    cards = [record for record in pool.records if isinstance(record, DeviceRecord)]
    assert [card.completeness_ppm for card in cards] == [first.completeness_ppm, second_.completeness_ppm]


def test_a_slice_that_lives_by_samples_says_what_they_do_not_cover() -> None:
    pool = Pool()
    pool.allocate("a", Mode.TIMESLICE, 500_000, meter=False)
    pool.allocate("b", Mode.TIMESLICE, 500_000)
    pool.owners |= {11: "a", 12: "a"}
    for second in range(1, 61):
        pool.processes(*(ProcessReading(pid=pid, start_ticks=pid, busy_us_total=second * 1000) for pid in (11, 12)))
        pool.change(busy_us_total=second * 2000, unmeasured_us_total=SECOND // 2 if second >= 20 else 0)
        pool.step()
    found = {record.allocation_id: record for record in pool.records if isinstance(record, SliceRecord)}
    assert (found["a"].used_us, found["a"].completeness_ppm) == (120_000, 1_000_000 - 500_000 // 60 - 1)
    assert found["b"].completeness_ppm == 1_000_000  # by the hook


def test_busy_time_that_runs_far_ahead_of_the_clock_is_given_up() -> None:
    pool = Pool()
    pool.allocate("w", Mode.WHOLE, 1_000_000, meter=False)
    pool.change(busy_us_total=0)
    pool.step()
    pool.change(busy_us_total=541 * SECOND)
    for _ in range(20 * 60):
        pool.step()
    used = sum(record.used_us or 0 for record in pool.records if isinstance(record, SliceRecord))
    assert used <= 33 * SECOND and used == (pool.ledger.devices[CARD].busy_us_total or 0)
