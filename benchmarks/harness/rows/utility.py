"""The file utility.json: run folders of trainings with and without privacy."""

from __future__ import annotations

from typing import Any, TypedDict

from benchmarks.harness.rows.common import Made


class UtilityRun(TypedDict):
    """A complete run folder."""

    name: str
    settings: dict[str, Any]
    metrics: dict[str, Any]
    data: dict[str, Any]


class Utility(Made):
    """The file utility.json."""

    workers: int
    runs: list[UtilityRun]
