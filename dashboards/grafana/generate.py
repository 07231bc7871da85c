"""Writes poolmeter.json beside this file: `python -m poolmeter.dashboards.grafana.generate`. A test compares the two."""

import json
from pathlib import Path

from poolmeter.dashboards.grafana.pool import pool_dashboard

FILE = Path(__file__).with_name("poolmeter.json")


def text() -> str:
    """The file's content."""
    return json.dumps(pool_dashboard(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
