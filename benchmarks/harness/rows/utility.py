"""The file utility.json: run folders of trainings with and without privacy."""

from __future__ import annotations

from typing import TypedDict

from benchmarks.harness.rows.common import Made
from benchmarks.harness.rows.trainings import Flags, Metrics


class Split(TypedDict, total=False):
    """How a corpus was split, in utterances; the shares are of the test set."""

    train: int
    validation: int
    test: int
    repaired: int
    skipped: int
    left_out: int
    near_duplicates: int
    near_duplicate_share: float
    exact_duplicates: int
    exact_duplicate_share: float
    workers: int


class UtilityRun(TypedDict):
    """A complete run folder."""

    name: str
    settings: Flags
    metrics: Metrics
    data: Split


class Utility(Made):
    """The file utility.json."""

    workers: int
    runs: list[UtilityRun]
