"""The file attack_cost.json: the features of an attack."""

from __future__ import annotations

from typing import TypedDict

from benchmarks.harness.rows.common import Made


class AttackCostRow(TypedDict):
    """Seconds of prediction and of an attack's features."""

    model: str
    tags: int
    prediction: float
    features: float
    ratio: float


class AttackCost(Made):
    """The file attack_cost.json."""

    examples: int
    rows: list[AttackCostRow]
