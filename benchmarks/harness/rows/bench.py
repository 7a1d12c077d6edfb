"""The file bench.json: minutes of the reduced versions."""

from __future__ import annotations

from typing import TypedDict

from benchmarks.harness.rows.common import Made


class BenchRow(TypedDict):
    """Minutes of a reduced benchmark."""

    name: str
    minutes: float


class Bench(Made):
    """The file bench.json."""

    rows: list[BenchRow]
