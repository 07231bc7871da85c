"""The bucket's arithmetic: no nanosecond is lost or made, whatever the order of calls and however many call at once."""

import ctypes
import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolmeter.pages.layout import UNLIMITED, Bucket

from .conftest import HOOK

BURST, QUANTUM, WHOLE = 20_000_000, 2_000_000, 1_000_000
HERE = Path(__file__).parent
INCLUDE = [f"-I{HOOK}", f"-I{HOOK.parent / 'abi'}"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("bucket") / "bucket.so"
    sources = [str(HOOK / "bucket.c"), str(HERE / "bucket_face.c")]
    subprocess.run(["cc", "-std=gnu11", "-O1", "-fPIC", "-shared", *INCLUDE, *sources, "-o", str(target)], check=True)
    found = ctypes.CDLL(str(target))
    pointer, u64, i64 = ctypes.POINTER(Bucket), ctypes.c_uint64, ctypes.c_int64
    found.pm_bucket_refill.argtypes, found.pm_bucket_refill.restype = [pointer, u64, u64, i64], i64
    found.pm_bucket_adopt.argtypes, found.pm_bucket_adopt.restype = [pointer, u64, u64, u64], None
    found.pm_bucket_wait.argtypes, found.pm_bucket_wait.restype = [i64, i64, u64], u64
    found.pm_bucket_forgive.argtypes, found.pm_bucket_forgive.restype = [pointer], None
    found.take.argtypes, found.take.restype = [pointer, i64], None
    return found


steps = st.lists(
    st.one_of(
        st.tuples(st.just("refill"), st.integers(0, 50_000_000), st.integers(1, 2)),
        st.tuples(st.just("take"), st.integers(-5_000_000, 40_000_000), st.just(0)),
        st.tuples(st.just("adopt"), st.sampled_from([1, 10_000, 300_000, 999_999, WHOLE, UNLIMITED]), st.integers(0, 3)),
        st.tuples(st.just("forgive"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(rate=st.sampled_from([1, 7, 100_000, 333_333, 500_000, 999_999, WHOLE]), steps=steps)
def test_the_balance_is_what_came_in_less_what_was_charged(library: ctypes.CDLL, rate: int, steps: list[tuple[str, int, int]]) -> None:
    bucket, now, charged = Bucket(), 5_000_000_000, 0
    bucket.last_refill_ns = now
    for name, value, more in steps:
        before = bucket.balance_ns
        if name == "refill":
            now += value
            since, most = now - bucket.last_refill_ns, BURST if more == 1 else QUANTUM
            income = since * rate // WHOLE
            library.pm_bucket_refill(bucket, rate, now, most)
            assert bucket.balance_ns == max(before, min(before + income, most))
            # Time that has not made a whole nanosecond is kept for the next refill.
            assert (now - bucket.last_refill_ns) * rate < WHOLE + rate
        elif name == "take":
            library.take(bucket, value)
            charged += value
            assert bucket.balance_ns == before - value
        elif name == "adopt":
            old, known = bucket.limit_ppm, bucket.generation
            library.pm_bucket_adopt(bucket, known + more, value, now)
            fresh = more > 0 and value < WHOLE and (known == 0 or old >= WHOLE)
            assert bucket.balance_ns == (QUANTUM if fresh else before)
            assert bucket.limit_ppm == (value if more > 0 else old)
        else:
            library.pm_bucket_forgive(bucket)
            assert bucket.balance_ns == max(before, 0)
        assert (bucket.balance_ns - bucket.refilled_ns + bucket.charged_ns) % 2**64 == 0
        assert bucket.charged_ns == charged % 2**64


@given(times=st.lists(st.integers(1, 2_000_000), min_size=1, max_size=200), rate=st.integers(1, WHOLE))
def test_many_small_refills_bring_what_one_brings(library: ctypes.CDLL, times: list[int], rate: int) -> None:
    many, one, begin, now = Bucket(balance_ns=-(10**12)), Bucket(balance_ns=-(10**12)), 10**9, 10**9
    many.last_refill_ns = one.last_refill_ns = begin
    for step in times:
        now += step
        library.pm_bucket_refill(many, rate, now, BURST)
    library.pm_bucket_refill(one, rate, now, BURST)
    # A refill rounds the time that it uses up to a nanosecond: never more comes in, and less than a nanosecond each goes.
    assert one.balance_ns - len(times) * rate / WHOLE - 1 <= many.balance_ns <= one.balance_ns
    assert one.balance_ns + 10**12 <= (now - begin) * rate / WHOLE


@given(balance=st.integers(-(10**11), 10**9), enough=st.integers(-1, 10**9), rate=st.integers(1, WHOLE))
def test_after_the_wait_there_is_enough(library: ctypes.CDLL, balance: int, enough: int, rate: int) -> None:
    wait = library.pm_bucket_wait(balance, enough, rate)
    bucket = Bucket(balance_ns=balance, last_refill_ns=1)
    assert library.pm_bucket_refill(bucket, rate, 1 + wait, 10**15) >= enough
    if wait:
        assert library.pm_bucket_refill(Bucket(balance_ns=balance, last_refill_ns=1), rate, wait, 10**15) <= enough
    assert library.pm_bucket_wait(balance, enough, 0) == (0 if balance >= enough else 2**64 - 1)


def test_a_time_of_before_the_restart_stops_nothing(library: ctypes.CDLL) -> None:
    bucket = Bucket(balance_ns=-1_000_000, last_refill_ns=10**18)
    library.pm_bucket_refill(bucket, 500_000, 10**9, BURST)
    assert library.pm_bucket_refill(bucket, 500_000, 10**9 + 4_000_000, BURST) == 1_000_000


@pytest.mark.parametrize("sanitizer", ["thread", "undefined"])
def test_threads_at_one_bucket(tmp_path: Path, sanitizer: str) -> None:
    target = tmp_path / "threads"
    sources = [str(HOOK / "bucket.c"), str(HERE / "bucket_threads.c")]
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    subprocess.run(["cc", *flags, *INCLUDE, *sources, "-o", str(target), "-lpthread"], check=True)
    done = subprocess.run([str(target), "4", "20000"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    end = json.loads(done.stdout)
    assert end["balance_ns"] == end["refilled_ns"] - end["charged_ns"]
