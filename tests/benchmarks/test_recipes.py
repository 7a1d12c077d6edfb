"""The recipes fit all units of the frontier."""

from __future__ import annotations

import pytest

from benchmarks import recipes
from benchmarks.harness.tradeoff_rows import UNITS
from benchmarks.tradeoff import REDUCED


@pytest.mark.parametrize(("model", "task"), [*recipes.RECIPES, *REDUCED.pairs])
def test_recipes(model, task) -> None:
    """All units of the frontier divide the batch, and plain training differs in nothing but privacy."""
    private, plain = recipes.settings(model, task, 8.0), recipes.settings(model, task, None)
    assert all(private["batch_size"] % (number or 1) == 0 for number in UNITS.values())
    assert (private["private"], private["sampling"], private["epsilon"]) == ("example", "poisson", 8.0)
    assert {**private, **plain} == {**private, "private": "off"}
