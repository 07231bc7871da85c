"""A Numba kernel of a fixed amount of arithmetic: each element of an array, `rounds` times."""

from typing import Any

import numpy
from numba import cuda


@cuda.jit  # type: ignore[untyped-decorator]
def _rounds(values: Any, rounds: int) -> None:
    at = cuda.grid(1)
    if at < values.size:
        value = values[at]
        for _ in range(rounds):
            value = value * numpy.float32(0.999) + numpy.float32(0.0005)
        values[at] = value


def launch(state: Any, rounds: int) -> None:
    """Work on `state` (float32, on the card) in place; returns at once."""
    _rounds[(state.size + 255) // 256, 256](state, rounds)
