"""The section on trainings whose ε alone is given: the table, what each part of a recipe is for, units of clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.harness.recipe_jobs import PUBLIC
from benchmarks.harness.rows.recipes import (
    ChangedRecipe,
    FeaturesPiece,
    FrontierOfHeads,
    PointOfHeads,
    RecipeRow,
    Recipes,
    TuningPiece,
)
from benchmarks.harness.rows.trainings import Flags
from benchmarks.harness.trainings import flags
from benchmarks.report import plots
from benchmarks.report.blocks import Block, Plots, Table, Text, epsilon, mean, number
from benchmarks.report.conditions import ONE_PASS, SECRET_HERE
from benchmarks.report.drawing import shown
from benchmarks.report.plots import unit_name

_NOT_COVERED = (
    "It does not cover the choice of the recipes on validation data of SNIPS. Schemas are what `tasks.schema` reads "
    "from the training utterances and stand for lists that developers have: ε does not cover them either."
)


def recipes(found: Recipes) -> Iterator[Block]:
    """Small ε, with single examples."""
    not_complete = "" if found["is_complete"] else " Not complete: trainings are missing, or have an older recipe."
    condition = f"{SECRET_HERE}, and {ONE_PASS}"
    yield Plots(
        f"SER by ε at δ = {found['delta']:g} for adding or removing one utterance, {condition}; means over "
        "repetitions. None is training without privacy.",
        plots.recipes(found),
    )
    yield Table[RecipeRow](
        f"What `python -m tasks.train --epsilon X` reaches on test data at δ = {found['delta']:g}, by the recipes of "
        f"tasks/recipes.yaml; hash split. Means over repetitions, with the lowest and the highest. ε is for adding or "
        f"removing one utterance, {condition}. {_NOT_COVERED} None is the same model without privacy, with settings "
        f"of its own. Seconds are those of the training with one thread, beside others on the same machine, hidden "
        f"states being computed already.{not_complete}",
        found["rows"],
        {
            "model, corpus": lambda row: row["title"],
            "ε": lambda row: epsilon(row["epsilon"]),
            "SER": lambda row: mean([run["test_ser"] for run in row["runs"]]),
            "intent accuracy, %": lambda row: mean([run["test_intent_accuracy"] for run in row["runs"]]),
            "slot F1, %": lambda row: mean([run["test_slot_f1"] for run in row["runs"]]),
            "validation SER": lambda row: mean([run["validation_ser"] for run in row["runs"]]),
            "clipped, %": _clipped,
            "seconds": lambda row: number(max(run["seconds"] for run in row["runs"]), 0),
            "repetitions": lambda row: str(len(row["runs"])),
        },
    )
    yield _settings(found)
    yield _changes(found, condition)
    if found["frontier"] is not None:
        yield from _frontier(found["frontier"], condition)
    yield _features(found)
    if found["tuning"] is not None:
        yield _of_tuning(found["tuning"])


def _settings(found: Recipes) -> Block:
    return Table[RecipeRow](
        "The settings that they followed, as flags of `python -m tasks.train`.",
        found["rows"],
        {
            "training": _with_budget,
            "utterances": lambda row: str(row["utterances"]),
            "settings": lambda row: _as_flags(row["recipe"]),
        },
    )


def _changes(found: Recipes, condition: str) -> Block:
    """What each part of a recipe gives."""
    return Table[ChangedRecipe](
        f"What each part of the recipe is for: one part at a time is another, or something is added, all others are "
        f"equal. SER on test data, at ε and δ = {found['delta']:g} as in the first table, for adding or removing one "
        f"utterance, {condition}. The last layer alone and trained transitions of the CRF change the number of "
        "parameters too. Where there are several repetitions: means, with the lowest and the highest.",
        found["changes"],
        {
            "recipe": lambda row: row["text"],
            "ε": lambda row: epsilon(row["epsilon"]),
            "SER": lambda row: mean([run["test_ser"] for run in row["runs"]]),
            "validation SER": lambda row: mean([run["validation_ser"] for run in row["runs"]]),
            "repetitions": lambda row: str(len(row["runs"])),
        },
    )


def _features(found: Recipes) -> Block:
    return Table[FeaturesPiece](
        "Hidden states that are computed once, one utterance at a time with one thread, and read by all trainings of "
        "an encoder and a corpus.",
        found["features"],
        {
            "corpus": lambda row: shown(row["task"]),
            "encoder": lambda row: "tuned on public data" if row["encoder"] == PUBLIC else row["encoder"],
            "utterances": lambda row: str(row["computed"]),
            "seconds": lambda row: number(row["seconds"], 0),
        },
    )


def _with_budget(row: RecipeRow) -> str:
    budget = "without privacy" if row["epsilon"] is None else f"ε = {row['epsilon']:g}"
    return f"{row['title']}, {budget}"


def _clipped(row: RecipeRow) -> str:
    shares = [run["clip_fraction"] for run in row["runs"] if run["clip_fraction"] is not None]
    return mean([100 * share for share in shares]) if shares else "–"


def _frontier(about: FrontierOfHeads, condition: str) -> Iterator[Block]:
    """The same heads, with micro-batches as units of clipping."""
    plain = "" if about["plain"] is None else f" Without privacy: {about['plain']['test_ser']:.2f}."
    rates = " and ".join(f"{rate:g}" for rate in about["rates"])
    columns: dict[str, Callable[[PointOfHeads], str]] = {
        "unit": lambda one: unit_name(one["unit"]),
        "ε": lambda one: epsilon(one["epsilon"]),
        "SER": lambda one: number(one["test_ser"]),
        "intent accuracy, %": lambda one: number(one["test_intent_accuracy"]),
        "slot F1, %": lambda one: number(one["test_slot_f1"]),
        "learning rate": lambda one: f"{one['recipe']['learning_rate']:g}",
    }
    yield Plots(
        f"SER against ε for micro-batches (K per worker) and single examples, linear heads on frozen features; one "
        f"repetition. ε is at δ = {about['delta']:g}, for adding or removing one utterance, on the conditions of the "
        "table below.",
        plots.frontier(about),
    )
    yield Table[PointOfHeads](
        f"SER at ε, δ = {about['delta']:g}, of linear heads on frozen features, {shown(about['model'])}, "
        f"{shown(about['task'])}, by units of clipping; one repetition.{plain} K is the number of micro-batches on "
        f"each of two workers, here 2·K in one process, of {about['batch']} utterances together on average, for "
        f"{about['epochs']} epochs, with the better of the learning rates {rates} on validation data; single examples "
        f"follow the recipe. ε is for adding or removing one utterance, {SECRET_HERE}; for single examples also "
        f"{ONE_PASS}. It does not cover the choice of settings.",
        about["points"],
        columns,
    )


def _of_tuning(tuning: TuningPiece) -> Text:
    return Text(
        f"The public training, of the whole encoder: `python -m tasks.train {' '.join(flags(tuning['tuning']))}`, "
        f"{tuning['minutes']:.0f} minutes. Its SER on the test data of that corpus is {tuning['test_ser']:.2f}."
    )


def _as_flags(recipe: Flags) -> str:
    return f"`{' '.join(flags(recipe))}`"
