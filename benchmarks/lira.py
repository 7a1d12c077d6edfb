"""Membership inference on trainings of benchmarks.recipes: `python -m benchmarks.lira --data DIR [--shadows 64]`.

LiRA with 64 shadow models, each trained like the target on its own part of the corpus, on the recipe for SNIPS at ε = 8
and 1, and without privacy. Target and shadows read the hidden states of the frozen encoder that benchmarks.recipes
keeps; a shadow that is trained is not trained again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from benchmarks.harness import results, trainings
from benchmarks.harness.recipe_jobs import DELTA, REDUCED, Extent, Job, jobs
from benchmarks.harness.results import Piece
from benchmarks.harness.rows.lira import Lira, LiraPiece
from benchmarks.recipes import Trainer
from benchmarks.report.render import page
from mia.attack import Attacker
from mia.candidates import open_run
from mia.metrics import evaluate

EPSILONS = (None, 8.0, 1.0)
SHADOWS = 64


def targets(extent: Extent) -> dict[str, Job]:
    """The first repetition of each training that is attacked."""
    found = {}
    for name, job in jobs(extent).items():
        about = job.about
        is_first = about.get("row") == extent.changed and about["repetition"] == 0
        if is_first and about["epsilon"] in EPSILONS:
            found[name] = job
    return found


def attack(folder: Path, data: Path | None, epsilon: float | None, shadows: int, at_once: int) -> Mapping[str, object]:
    """LiRA on a run.

    Args:
        folder: of the run; shadows go beside it.
        data: the folder of the corpora.
        epsilon: that it was trained for.
        shadows: how many.
        at_once: how many are trained at a time.
    """
    started = time.monotonic()
    run = open_run(folder, None if data is None else str(data))
    attacker = Attacker(run, Path(f"{folder}-mia"))
    scores = attacker.with_shadows("lira", shadows, at_once)
    known = ~np.isnan(scores)
    report = evaluate(scores[known], attacker.about.members[known])
    metrics = trainings.scores(folder)
    return {
        **report.to_json(),
        "epsilon": epsilon,
        "spent": metrics.get("epsilon"),
        "shadows": shadows,
        "test_ser": metrics["test_ser"],
        "near_duplicates": attacker.about.near_duplicates,
        "minutes": (time.monotonic() - started) / 60,
    }


def figures(pieces: dict[str, Piece], extent: Extent, shadows: int) -> Lira:
    """A line for each training."""
    wanted = targets(extent)
    hangs_on = {name: _hangs_on(job, shadows) for name, job in wanted.items()}
    rows = [cast(LiraPiece, pieces[name]) for name in wanted if name in pieces]
    return {
        "delta": DELTA,
        "title": extent.rows[extent.changed].title,
        "is_complete": not results.missing(pieces, hangs_on),
        "rows": sorted(rows, key=lambda row: row["epsilon"] or np.inf),
    }


def _hangs_on(job: Job, shadows: int) -> dict[str, object]:
    return {**job.hangs_on, "shadows": shadows}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    flags = trainings.parse("lira", __doc__, "snips-8, snips-plain", arguments, runs="recipes", shadows=SHADOWS)
    torch.set_num_threads(1)  # of attacks, which run beside trainings
    extent = REDUCED if flags.reduced else Extent()
    all_figures: Callable[[dict[str, Piece]], Mapping[str, Any]] = partial(
        figures, extent=extent, shadows=flags.shadows
    )
    kept = results.Pieces(flags.out, "lira", all_figures, page, flags.command)
    trainer = Trainer(lambda name, work, hangs_on: work(), flags.data, flags.runs, extent.tuning)
    todo = targets(extent)
    for name in results.chosen(flags, todo):
        job = todo[name]

        def work(name: str = name, job: Job = job) -> Mapping[str, object]:
            folder = trainer.folder(name, job)
            return attack(folder, flags.data, job.about["epsilon"], flags.shadows, flags.jobs)

        kept.get(name, work, _hangs_on(job, flags.shadows))
    kept.write()


if __name__ == "__main__":
    main()
