"""Sizes, percentages, exact splits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolmeter.errors import BadInput
from poolmeter.model.units import GIB, format_size, parse_percent, parse_size, split_exactly


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512M", 512 << 20),
        ("40GiB", 40 * GIB),
        ("1.5G", 3 * GIB // 2),
        ("1k", 1024),
        ("2 TB", 2 << 40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1e9", "nan", "12Q", "1.0001K", "G", "1 2", "0x10", "١٢"[:0] + "one"])
def test_bad_sizes_are_named(text: str) -> None:
    with pytest.raises(BadInput, match="--memory is"):
        parse_size(text, "--memory")


@pytest.mark.parametrize(("text", "ppm"), [("100", 1_000_000), ("30", 300_000), ("30%", 300_000), ("0.0001", 1), ("12.5", 125_000)])
def test_percentages(text: str, ppm: int) -> None:
    assert parse_percent(text) == ppm


@pytest.mark.parametrize("text", ["0", "0.0", "101", "100.0001", "-5", "nan", "inf", "", "3,5", "0.00001", "1e1"])
def test_bad_percentages_are_named(text: str) -> None:
    with pytest.raises(BadInput, match="--compute is"):
        parse_percent(text, "--compute")


@given(st.integers(0, 10**15), st.lists(st.integers(0, 10**9), max_size=20))
def test_splits_sum_exactly_and_stay_in_proportion(total: int, weights: list[int]) -> None:
    parts = split_exactly(total, weights)
    scale = sum(weights)
    assert sum(parts) == (total if scale else 0)
    for part, weight in zip(parts, weights, strict=True):
        assert scale == 0 or abs(part * scale - total * weight) < scale
        assert weight > 0 or part == 0


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**6), min_size=1, max_size=9), st.integers(1, 1000))
def test_scaling_weights_changes_no_split(total: int, weights: list[int], factor: int) -> None:
    assert split_exactly(total, weights) == split_exactly(total, [weight * factor for weight in weights])


def test_negative_splits_are_refused() -> None:
    with pytest.raises(ValueError):
        split_exactly(-1, [1])
    with pytest.raises(ValueError):
        split_exactly(1, [1, -1])


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (40 * GIB, "40.0 GiB"), (3 << 40, "3.0 TiB")])
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_size(size) == text
