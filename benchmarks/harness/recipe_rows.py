"""From the pieces of recipes to the tables of its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, get_type_hints

from benchmarks.harness import results
from benchmarks.harness.recipe_jobs import ADDED, DELTA, EPOCHS, LEFT_OUT, RATES, Extent, Job, jobs
from benchmarks.harness.results import Piece
from benchmarks.harness.rows.recipes import (
    ChangedRecipe,
    FeaturesPiece,
    FrontierOfHeads,
    PointOfHeads,
    RecipeRow,
    Recipes,
    Repetition,
    TrainedPiece,
    TuningPiece,
)

WHOLE, BOTH = "the recipe as it is", "with schema and public tuning"


def figures(pieces: dict[str, Piece], extent: Extent) -> Recipes:
    """All tables, as far as they were run."""
    wanted = jobs(extent)
    trained = [cast(TrainedPiece, pieces[name]) for name in wanted if name in pieces]
    features = [_only(FeaturesPiece, piece) for piece in pieces.values() if "computed" in piece]
    return {
        "delta": DELTA,
        "is_complete": is_complete(pieces, wanted),
        "rows": _rows(trained, extent),
        "changes": _changes(trained, extent),
        "frontier": _frontier(trained, extent),
        "tuning": cast(TuningPiece, _only(TuningPiece, pieces["public"])) if "public" in pieces else None,
        "features": cast(list[FeaturesPiece], features),
    }


def is_complete(pieces: Mapping[str, Piece], wanted: Mapping[str, Job]) -> bool:
    """Whether every training is there, by the recipe that holds now."""
    return not results.missing(pieces, {name: job.hangs_on for name, job in wanted.items()})


def _rows(trained: Sequence[TrainedPiece], extent: Extent) -> list[RecipeRow]:
    found: list[RecipeRow] = []
    for name, row in extent.rows.items():
        for epsilon in extent.epsilons:
            same = _of_row(trained, name, epsilon)
            if same:
                first = same[0]
                about = {"name": name, "title": row.title, "epsilon": epsilon, "utterances": first["utterances"]}
                runs = [_repetition(one) for one in same]
                found.append(cast(RecipeRow, {**about, "recipe": first["recipe"], "runs": runs}))
    return found


def _of_row(trained: Sequence[TrainedPiece], name: str, epsilon: float | None) -> list[TrainedPiece]:
    return [one for one in trained if one["about"].get("row") == name and one["about"]["epsilon"] == epsilon]


def _changes(trained: Sequence[TrainedPiece], extent: Extent) -> list[ChangedRecipe]:
    """For each ε: the recipe, what was left out of it, and what was added, each alone and both."""
    found: list[ChangedRecipe] = []
    texts = {name: text for name, (text, _) in {**LEFT_OUT, **ADDED}.items()}
    for epsilon in extent.changed_at:
        groups = {WHOLE: _of_row(trained, extent.changed, epsilon)}
        for change in extent.changes:
            about = [one for one in trained if one["about"].get("change") == change]
            groups[texts[change]] = [one for one in about if one["about"]["epsilon"] == epsilon]
        groups[BOTH] = _of_row(trained, extent.with_all, epsilon)
        for text, same in groups.items():
            if same:
                runs = [_repetition(one) for one in same]
                found.append({"text": text, "epsilon": epsilon, "recipe": same[0]["recipe"], "runs": runs})
    return found


def _repetition(piece: TrainedPiece) -> Repetition:
    return cast(Repetition, _only(Repetition, piece))


def _only(form: type[Any], piece: Mapping[str, Any]) -> dict[str, Any]:
    """Of a piece, what a form names: without settings and machine."""
    names = get_type_hints(form)
    return {name: value for name, value in piece.items() if name in names}


def _frontier(trained: Sequence[TrainedPiece], extent: Extent) -> FrontierOfHeads | None:
    """Of the learning rates of a point, the one that is better on validation data."""
    points: list[PointOfHeads] = []
    for unit in extent.units:
        of_unit = [one for one in trained if one["about"].get("unit") == unit]
        for target in extent.units_at:
            tried = [one for one in of_unit if one["about"]["epsilon"] == target]
            if tried:
                points.append(_point(unit, target, min(tried, key=lambda one: one["validation_ser"])))
    if not points:
        return None
    plain = [one["test_ser"] for one in _of_row(trained, extent.changed, None)]
    return {
        "model": points[0]["recipe"]["model"],
        "task": extent.rows[extent.changed].flags["task"],
        "delta": DELTA,
        "batch": extent.batch,
        "epochs": EPOCHS,
        "rates": RATES,
        "plain": {"test_ser": sum(plain) / len(plain)} if plain else None,
        "points": points,
    }


def _point(unit: str, target: float, best: TrainedPiece) -> PointOfHeads:
    return {
        "unit": unit,
        "target": target,
        "epsilon": best["spent"] or target,
        "test_ser": best["test_ser"],
        "test_intent_accuracy": best["test_intent_accuracy"],
        "test_slot_f1": best["test_slot_f1"],
        "recipe": best["recipe"],
    }
