"""The section on trainings with single-example units at small ε."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness.rows.recipes import RecipeRow, Recipes
from benchmarks.harness.trainings import flags
from benchmarks.report import plots
from benchmarks.report.blocks import Block, Plots, Table, epsilon, number, place
from benchmarks.report.conditions import ONE_PASS, SECRET


def recipes(found: Recipes) -> Iterator[Block]:
    """Small ε, with single examples."""
    tried = found.get("tried", [])
    not_complete = "" if found.get("is_complete", True) else " Not complete: rows are missing."
    condition = f"{SECRET}, and {ONE_PASS}"
    yield Plots(
        f"SER by ε at δ = {found['delta']:g} for adding or removing one utterance, {condition}; none is training "
        "without privacy.",
        plots.recipes(found),
    )
    yield Table[RecipeRow](
        f"What single examples reach on test data at small ε and δ = {found['delta']:g}. BERT is MiniLM. Hash split, "
        f"Poisson sampling, one seed. ε is for adding or removing one utterance, {condition}. It does not cover the "
        f"choice of the settings.{not_complete}",
        found["rows"],
        {
            "model, corpus": place,
            "ε": lambda row: epsilon(row["epsilon"]),
            "SER": lambda row: number(row["test_ser"]),
            "intent accuracy, %": lambda row: number(row["test_intent_accuracy"]),
            "slot F1, %": lambda row: number(row["test_slot_f1"]),
            "validation SER": lambda row: number(row["validation_ser"]),
        },
    )
    yield Table[RecipeRow](
        "The settings, as flags of `python -m tasks.train --private example --sampling poisson`.",
        list({(row["model"], row["task"]): row for row in found["rows"]}.values()),
        {"model, corpus": place, "settings": _flags},
    )
    aims = ", ".join(dict.fromkeys(f"{row['epsilon']:g}" for row in tried))
    yield Table[RecipeRow](
        f"What else was tried. Settings were chosen by SER on validation data of SNIPS at ε = {aims}, among these and "
        "a few that were stopped early; ATIS has the same settings, but for CLC's batch.",
        tried,
        {"model, corpus": place, "validation SER": lambda row: number(row["validation_ser"]), "settings": _flags},
    )


def _flags(row: RecipeRow) -> str:
    return f"`{' '.join(flags(row['recipe']))}`"
