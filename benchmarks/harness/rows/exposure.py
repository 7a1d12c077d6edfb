"""The file exposure.json: ranks of a canary."""

from __future__ import annotations

from typing import TypedDict

from benchmarks.harness.rows.common import Made


class CanaryRank(TypedDict):
    """One canary among random suffixes."""

    seconds: float
    processor_seconds: float
    rank: int
    exposure: float


class Exposure(Made):
    """The file exposure.json."""

    threads: int
    parameters: int
    suffixes: int
    chunk: int
    grown: int
    unseen: CanaryRank
    learned: CanaryRank
