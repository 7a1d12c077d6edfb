"""What single-example units buy: error rates at ε = 1, 3 and 8 and without privacy.

    python -m benchmarks.recipes --data DIR [--only bert-snips]

`tasks.train --private example` with Poisson sampling, one process and thread for each training, several side by side.
The recipes are below, and what else was tried at ε = 8 before they were chosen on validation data. A training that is
in the file of figures is not run again, and one that was interrupted begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import results, trainings
from benchmarks.harness.results import Piece
from benchmarks.harness.settings import SMALL
from benchmarks.report.render import page

DELTA = 1e-4
EPSILONS = (1.0, 3.0, 8.0, None)
AIM = 8.0  # at which recipes are chosen
_COMMON = {"clip_norm": 1.0, "dropout": 0.0, "warmup": 0.1, "precision": "bf16"}
_BERT = {
    "freeze": "adapters:2", "batch_size": 1024, "epochs": 16, "learning_rate": 1.2e-2, "head_learning_rate": 2e-2,
    **_COMMON,
}  # fmt: skip
_CLC = {
    "hidden": 128, "layers": 1, "batch_size": 1024, "epochs": 30, "learning_rate": 1e-2, "head_learning_rate": 2e-2,
    **_COMMON,
}  # fmt: skip
_SHORT = {"batch_size": 512, "epochs": 8}
RECIPES: dict[tuple[str, str], dict[str, Any]] = {
    ("bert", "snips"): _BERT,
    ("bert", "atis"): _BERT,
    ("clc", "snips"): _CLC,
    ("clc", "atis"): {**_CLC, "batch_size": 512},
}
TRIED: tuple[tuple[str, str, dict[str, Any]], ...] = (  # instead of what the recipe says
    ("bert", "snips", {**_SHORT, "freeze": "adapters:8", "learning_rate": 2e-3, "head_learning_rate": 5e-3}),
    ("bert", "snips", {**_SHORT, "freeze": "adapters:8", "learning_rate": 5e-3, "head_learning_rate": 1e-2}),
    ("bert", "snips", {"learning_rate": 6e-3, "head_learning_rate": 1e-2}),
    ("clc", "snips", {**_SHORT, "epochs": 10, "head_learning_rate": 1e-2}),
)
REDUCED = {("clc", "generated"): {**SMALL, "batch_size": 64, "epochs": 10, "learning_rate": 1e-2}}


def settings(model: str, task: str, epsilon: float | None) -> dict[str, Any]:
    """Flags of tasks.train, but for data and output; plain training has the same epochs and batches."""
    common = {"task": task, "model": model, "split": "hash", "seed": 0, "tensorboard": False, "delta": DELTA}
    found = {**common, **recipe(model, task)}
    if task != "generated":
        found |= trainings.words(model)
    if epsilon is None:
        return {**found, "private": "off"}
    return {**found, "private": "example", "sampling": "poisson", "epsilon": epsilon}


def recipe(model: str, task: str) -> dict[str, Any]:
    """What was chosen for a model and a corpus."""
    return {**RECIPES, **REDUCED}[model, task]


def train(model: str, task: str, epsilon: float | None, data: Path | None, runs: Path) -> Piece:
    """A row of the table."""
    folder = runs / f"{model}-{task}-{epsilon or 'plain'}"
    trainings.train({**settings(model, task, epsilon), "data": data}, folder)
    return {**_scores(model, task, folder), "epsilon": epsilon, "recipe": _followed(recipe(model, task), folder)}


def attempt(number: int, data: Path | None, runs: Path) -> Piece:
    """Something else that was tried."""
    (model, task, changes), folder = TRIED[number], runs / f"tried-{number}"
    trainings.train({**settings(model, task, AIM), **changes, "data": data}, folder)
    followed = _followed({**recipe(model, task), **changes}, folder)
    return {**_scores(model, task, folder), "recipe": followed, "epsilon": AIM, "tried": True}


def _followed(recipe: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The recipe with the precision that the processor allowed."""
    return {**recipe, "precision": trainings.scores(folder)["precision"]} if "precision" in recipe else recipe


def _scores(model: str, task: str, folder: Path) -> Piece:
    found = trainings.scores(folder)
    return {"model": model, "task": task, "spent": found.pop("epsilon", None), **found}


def figures(pieces: dict[str, Piece]) -> dict[str, Any]:
    """All rows, and what else was tried."""
    order = {key: number for number, key in enumerate([*RECIPES, *REDUCED])}
    rows = sorted(pieces.values(), key=lambda row: (order[row["model"], row["task"]], row["epsilon"] or 1e9))
    tried = [row for row in rows if "tried" in row]
    chosen = [row for row in rows if "tried" not in row]
    is_complete = len(chosen) == len(RECIPES) * len(EPSILONS)
    return {"delta": DELTA, "seed": 0, "is_complete": is_complete, "rows": chosen, "tried": tried}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    flags = trainings.parse("recipes", __doc__, "bert-snips-8.0, clc-atis-plain, ...", arguments)
    kept = results.Pieces(flags.out, "recipes", figures, page, flags.command)
    works: dict[str, tuple[Callable[..., Piece], tuple[Any, ...], dict[str, Any]]] = {}
    for model, task in REDUCED if flags.reduced else RECIPES:
        for epsilon in EPSILONS:
            name = f"{model}-{task}-{epsilon or 'plain'}"
            works[name] = (train, (model, task, epsilon), settings(model, task, epsilon))
    for number, (model, task, changes) in enumerate(() if flags.reduced else TRIED):
        works[f"tried-{model}-{task}-{number}"] = (attempt, (number,), {**settings(model, task, AIM), **changes})

    def work(name: str) -> None:
        function, about, hangs_on = works[name]
        kept.get(name, partial(function, *about, flags.data, flags.runs), trainings.named(hangs_on))

    with ThreadPoolExecutor(flags.jobs) as pool:
        list(pool.map(work, results.chosen(flags, works)))
    kept.write()


if __name__ == "__main__":
    main()
