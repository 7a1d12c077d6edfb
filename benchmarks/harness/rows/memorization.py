"""The file memorization.json: what language models know by heart."""

from __future__ import annotations

from typing import Any, TypedDict

from typing_extensions import NotRequired

from benchmarks.harness.rows.common import Made


class MemorizationRow(TypedDict):
    """A language model and the canaries that it knows."""

    tables: list[int]
    name: str
    is_iid: bool
    batch: int
    steps: int
    flags: list[str]
    test_accuracy: float
    test_perplexity: float
    seconds: float
    epsilon: NotRequired[float]
    memorised: dict[str, Any]


class Memorization(Made):
    """The file memorization.json."""

    scale: dict[str, Any]
    delta: float
    rows: list[MemorizationRow]
