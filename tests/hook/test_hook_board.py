"""What the limiter believes of other allocations' seats, which anybody on the device can write."""

import ctypes
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from poolmeter.pages import layout

from .conftest import ACCOUNTING, HOOK

NOW = 10**12
WHOLE = 1_000_000


class Neighbours(ctypes.Structure):
    _fields_ = (
        ("limits_ppm", ctypes.c_uint64),
        ("soft_weights", ctypes.c_uint64),
        ("active", ctypes.c_bool),
        ("owner_busy", ctypes.c_bool),
        ("starved", ctypes.c_bool),
    )


@pytest.fixture(scope="module")
def survey(tmp_path_factory: pytest.TempPathFactory):
    target = tmp_path_factory.mktemp("board") / "board.so"
    sources = [str(HOOK / f"{name}.c") for name in ("board", "clock", "pages")]
    subprocess.run(
        ["cc", "-std=gnu11", "-O1", "-fPIC", "-shared", f"-I{HOOK}", f"-I{HOOK.parent / 'abi'}", *sources, "-o", str(target)], check=True
    )
    library = ctypes.CDLL(str(target))
    library.pm_board_survey.argtypes = [ctypes.POINTER(layout.Board), ctypes.c_uint32, ctypes.c_uint64, ctypes.POINTER(Neighbours)]
    library.pm_board_survey.restype = None

    def ask(board: layout.Board) -> Neighbours:
        found = Neighbours()
        library.pm_board_survey(board, 0, NOW, found)
        return found

    return ask


def board(*seats: layout.BoardSeat) -> layout.Board:
    made = layout.Board()
    made.seats[0] = layout.BoardSeat(owner=1, busy_until_ns=NOW)
    for index, seat in enumerate(seats):
        made.seats[index + 1] = seat
    return made


def test_honest_seats_are_added_up(survey) -> None:
    hard = layout.BoardSeat(owner=2, busy_until_ns=NOW + 1, limit_ppm=300_000, weight=100)
    again = layout.BoardSeat(owner=2 | 7 << 32, busy_until_ns=NOW + 1, limit_ppm=300_000, weight=100)  # another process of it
    soft = layout.BoardSeat(owner=3, busy_until_ns=NOW + 1, soft=1, weight=50)
    found = survey(board(hard, again, soft))
    assert (found.limits_ppm, found.soft_weights, found.active, found.owner_busy, found.starved) == (300_000, 50, True, True, False)


@given(
    seats=st.lists(
        st.builds(
            layout.BoardSeat,
            owner=st.integers(1, 2**64 - 1),
            busy_until_ns=st.one_of(st.integers(NOW - 10**8, NOW + 10**9), st.integers(0, 2**64 - 1)),
            weight=st.one_of(st.integers(0, 10_000), st.integers(0, 2**64 - 1), st.just(2**64 - 100)),
            limit_ppm=st.one_of(st.integers(0, WHOLE), st.integers(0, 2**64 - 1)),
            soft=st.integers(0, 1),
            starved_until_ns=st.sampled_from([0, NOW + 1, 2**64 - 1]),
        ),
        max_size=80,
    ),
    weight=st.integers(1, 10_000),
    limit=st.integers(1, WHOLE - 1),
)
def test_a_lying_seat_takes_away_no_more_than_a_whole_card_would(survey, seats: list[layout.BoardSeat], weight: int, limit: int) -> None:
    found = survey(board(*seats))
    assert weight + found.soft_weights <= 2**32  # the division by it holds
    # As the limiter does with somebody starved, where the card gives 89 % at least.
    promised, given = found.limits_ppm + limit, 890_000
    rate = limit * given // promised if promised > given else limit
    tellers = min(len({seat.owner % 2**32 for seat in seats} - {1}), 63)
    assert rate >= limit * given // ((1 + tellers) * WHOLE)
    assert tellers != 1 or rate >= limit * 4 // 10


@pytest.fixture(scope="module")
def limiter(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("limiter") / "limiter.so"
    sources = [str(HOOK / f"{name}.c") for name in ACCOUNTING]
    face = str(Path(__file__).parent / "limiter_face.c")
    include = [f"-I{HOOK}", f"-I{HOOK.parent / 'abi'}"]
    subprocess.run(["cc", "-std=gnu11", "-O1", "-fPIC", "-shared", *include, face, *sources, "-o", str(target), "-lpthread"], check=True)
    library = ctypes.CDLL(str(target))
    library.rate.argtypes = [ctypes.POINTER(layout.Board), ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]
    library.rate.restype = ctypes.c_uint64
    return library


@example(limits=[900_000, 300_000, 300_000, 300_000])
@example(limits=[WHOLE - 1] * 64)
@given(limits=st.lists(st.integers(1, WHOLE - 1), min_size=2, max_size=64))
def test_hard_limits_that_do_not_fit_shrink_alike(limiter: ctypes.CDLL, limits: list[int]) -> None:
    given_ppm = 890_000  # of a card that nobody has learned anything of
    page = layout.Board()
    for index, limit in enumerate(limits):
        page.seats[index] = layout.BoardSeat(owner=index + 1, busy_until_ns=NOW + 1, limit_ppm=limit, starved_until_ns=NOW + 10**9)
    rates = [limiter.rate(page, index, limit, NOW) for index, limit in enumerate(limits)]
    promised = sum(limits)
    assert rates == [limit * given_ppm // promised if promised > given_ppm else limit for limit in limits]
