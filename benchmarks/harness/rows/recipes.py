"""The file recipes.json: trainings at given ε."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from typing_extensions import NotRequired

from benchmarks.harness.rows.common import Made
from benchmarks.harness.rows.trainings import Flags


class RecipeRow(TypedDict):
    """A training with single-example units, or without privacy."""

    model: str
    task: str
    epsilon: float | None
    test_ser: float
    test_intent_accuracy: float
    test_slot_f1: float
    validation_ser: float
    recipe: Flags


class RecipePiece(RecipeRow):
    """A row as a piece of the file, with the ε that was spent of the one that was given."""

    spent: float | None
    tried: NotRequired[bool]
    clip_fraction: float | None
    epochs: int
    utterances: int
    precision: NotRequired[str]
    minutes: float


class Recipes(Made):
    """The file recipes.json."""

    is_complete: NotRequired[bool]
    delta: float
    rows: Sequence[RecipeRow]
    tried: NotRequired[Sequence[RecipeRow]]
