"""Results files agree with themselves: tables are what follows from the pieces that were measured."""

from __future__ import annotations

import json
from functools import partial

import pytest

from benchmarks import epoch_time, lira, recipes, step_time, tradeoff
from benchmarks.harness.recipe_jobs import Extent
from benchmarks.harness.results import RESULTS, load

ROUNDS = 12  # of each row of step times, as the command of the file says


def of_epochs(pieces: dict) -> dict:
    wanted = {name: {**job, "data": None} for name, (job, *_) in epoch_time.jobs(None, False).items()}
    return epoch_time.figures(pieces, wanted)


def of_steps(pieces: dict) -> dict:
    jobs = step_time.jobs(step_time.SHAPES)
    return step_time.figures(pieces, {name: step_time.settings(job, ROUNDS) for name, job in jobs.items()})


@pytest.mark.parametrize(
    ("name", "figures", "tables"),
    [
        ("tradeoff", partial(tradeoff.figures, extent=tradeoff.Extent(), seeds=1), ("table", "frontier")),
        ("recipes", partial(recipes.figures, extent=Extent()), ("rows", "changes", "frontier")),
        ("lira", partial(lira.figures, extent=Extent(), shadows=lira.SHADOWS), ("rows",)),
        ("epoch_time", of_epochs, ("rows", "memory", "cost_model")),
        ("step_time", of_steps, ("rows",)),
    ],
)
def test_tables_follow_from_the_pieces(name, figures, tables) -> None:
    if not (RESULTS / f"{name}.json").exists():
        pytest.skip(f"benchmarks.{name} was not run yet")
    found = load(name)
    again = figures(found["pieces"])
    assert found["is_complete"] == again["is_complete"]
    for table in tables:
        assert json.dumps(again[table]) == json.dumps(found[table])
