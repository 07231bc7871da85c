"""The register of devices on every back end: written whole, changed by field, in the log."""

from pathlib import Path

import pytest

from poolmeter.books.writer import Books
from poolmeter.errors import BadInput


def test_rows_are_entered_whole_and_fields_apart(place: Path | str) -> None:
    with Books(place) as books:
        row = {
            "uuid": "GPU-1",
            "owner": "größer",
            "class": "NVIDIA/CUDA/H200",
            "weight": "1.250",
            "weight_source": "list",
            "life_months": 36,
        }
        assert books.assets.enter([row], "ann", "why").added == ("GPU-1",)
        assert books.assets.enter([row], "ann", "why").unchanged == ("GPU-1",)
        assert books.assets.enter([{"uuid": "GPU-1", "owner": None}], "bob", "sold").changed == ("GPU-1",)
        (found,) = books.assets.list()
        assert (found["owner"], found["class"], found["weight"], found["price"]) == (None, "NVIDIA/CUDA/H200", "1.250", None)
        with pytest.raises(BadInput, match="asset GPU-3: life_months is 0"):
            books.assets.enter([{"uuid": "GPU-2"}, {"uuid": "GPU-3", "life_months": 0}], "ann", "why")
        assert [(change.by, change.key, change.reason) for change in books.changes("assets")] == [
            ("ann", "GPU-1", "why"), ("bob", "GPU-1", "sold"),
        ]  # fmt: skip
