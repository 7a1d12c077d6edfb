"""The file recipes.json: trainings whose ε alone is given, and what came of changing their recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from typing_extensions import NotRequired

from benchmarks.harness.rows.common import Made
from benchmarks.harness.rows.trainings import Flags


class AboutTraining(TypedDict):
    """Where a training belongs: to a row, to a change of the recipe, or to a unit of clipping."""

    row: NotRequired[str]
    change: NotRequired[str]
    unit: NotRequired[str]
    rate: NotRequired[float]
    epsilon: float | None
    repetition: int


class Repetition(TypedDict):
    """What one training reached; without privacy nothing is spent."""

    spent: float | None
    test_ser: float
    test_intent_accuracy: float
    test_slot_f1: float
    validation_ser: float
    clip_fraction: float | None
    seconds: float
    minutes: float


class TrainedPiece(Repetition):
    """A training, as a piece of the file."""

    about: AboutTraining
    epochs: int
    utterances: int
    precision: NotRequired[str]
    recipe: Flags


class RecipeRow(TypedDict):
    """A model and a corpus at an ε, or without privacy."""

    name: str
    title: str
    epsilon: float | None
    utterances: int
    recipe: Flags
    runs: Sequence[Repetition]


class ChangedRecipe(TypedDict):
    """A recipe of which one part is another, or to which something was added."""

    text: str
    epsilon: float
    recipe: Flags
    runs: Sequence[Repetition]


class PointOfHeads(TypedDict):
    """SER at an ε for one unit of clipping."""

    unit: str
    target: float
    epsilon: float
    test_ser: float
    test_intent_accuracy: float
    test_slot_f1: float
    recipe: Flags


class FrontierOfHeads(TypedDict):
    """SER against ε for units of every size; the plain training is that of the row."""

    model: str
    task: str
    delta: float
    batch: int
    epochs: int
    rates: Sequence[float]
    plain: dict[str, float] | None
    points: Sequence[PointOfHeads]


class TuningPiece(TypedDict):
    """The public training that encoders come from, as a piece of the file."""

    test_ser: float
    minutes: float
    tuning: Flags


class FeaturesPiece(TypedDict):
    """Hidden states that were computed once for all trainings of a corpus, as a piece of the file."""

    task: str
    encoder: str
    computed: int
    seconds: float
    minutes: float


class Recipes(Made):
    """The file recipes.json."""

    is_complete: bool
    delta: float
    rows: Sequence[RecipeRow]
    changes: Sequence[ChangedRecipe]
    frontier: FrontierOfHeads | None
    tuning: TuningPiece | None
    features: Sequence[FeaturesPiece]
