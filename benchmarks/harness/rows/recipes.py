"""The file recipes.json: trainings at given ε."""

from __future__ import annotations

from typing import Any, TypedDict

from typing_extensions import NotRequired

from benchmarks.harness.rows.common import Made


class RecipeRow(TypedDict):
    """A training with single-example units, or without privacy."""

    model: str
    task: str
    epsilon: float | None
    test_ser: float
    test_intent_accuracy: float
    test_slot_f1: float
    validation_ser: float
    recipe: dict[str, Any]


class Recipes(Made):
    """The file recipes.json."""

    is_complete: NotRequired[bool]
    delta: float
    rows: list[RecipeRow]
    tried: NotRequired[list[RecipeRow]]
