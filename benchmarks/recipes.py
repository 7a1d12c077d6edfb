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
from typing import NamedTuple, cast

from benchmarks.harness import results, trainings
from benchmarks.harness.results import Piece
from benchmarks.harness.rows.recipes import RecipePiece, Recipes
from benchmarks.harness.rows.trainings import Flags
from benchmarks.harness.settings import SMALL
from benchmarks.report.render import page

DELTA = 1e-4
EPSILONS = (1.0, 3.0, 8.0, None)
AIM = 8.0  # at which recipes are chosen
_COMMON: Flags = {"clip_norm": 1.0, "dropout": 0.0, "warmup": 0.1, "precision": "bf16"}
_BERT: Flags = {
    "freeze": "adapters:2", "batch_size": 1024, "epochs": 16, "learning_rate": 1.2e-2, "head_learning_rate": 2e-2,
    **_COMMON,
}  # fmt: skip
_CLC: Flags = {
    "hidden": 128, "layers": 1, "batch_size": 1024, "epochs": 30, "learning_rate": 1e-2, "head_learning_rate": 2e-2,
    **_COMMON,
}  # fmt: skip
_SHORT: Flags = {"batch_size": 512, "epochs": 8}
RECIPES: dict[tuple[str, str], Flags] = {
    ("bert", "snips"): _BERT,
    ("bert", "atis"): _BERT,
    ("clc", "snips"): _CLC,
    ("clc", "atis"): {**_CLC, "batch_size": 512},
}
TRIED: tuple[tuple[str, str, Flags], ...] = (  # instead of what the recipe says
    ("bert", "snips", {**_SHORT, "freeze": "adapters:8", "learning_rate": 2e-3, "head_learning_rate": 5e-3}),
    ("bert", "snips", {**_SHORT, "freeze": "adapters:8", "learning_rate": 5e-3, "head_learning_rate": 1e-2}),
    ("bert", "snips", {"learning_rate": 6e-3, "head_learning_rate": 1e-2}),
    ("clc", "snips", {**_SHORT, "epochs": 10, "head_learning_rate": 1e-2}),
)
REDUCED: dict[tuple[str, str], Flags] = {
    ("clc", "generated"): {**SMALL, "batch_size": 64, "epochs": 10, "learning_rate": 1e-2},
}


class Work(NamedTuple):
    """A training that is to be there.

    Attributes:
        make: trains, unless it was done.
        hangs_on: its settings; a piece with other ones is made again.
    """

    make: Callable[[], RecipePiece]
    hangs_on: Flags


def settings(model: str, task: str, epsilon: float | None) -> Flags:
    """Flags of tasks.train, but for data and output; plain training has the same epochs and batches."""
    common: Flags = {
        "task": task,
        "model": model,
        "split": "hash",
        "seed": 0,
        "tensorboard": False,
        "delta": DELTA,
    }
    found: Flags = {**common, **recipe(model, task)}
    if task != "generated":
        found = {**found, **trainings.words(model)}
    if epsilon is None:
        return {**found, "private": "off"}
    return {**found, "private": "example", "sampling": "poisson", "epsilon": epsilon}


def recipe(model: str, task: str) -> Flags:
    """What was chosen for a model and a corpus."""
    return {**RECIPES, **REDUCED}[model, task]


def train(model: str, task: str, epsilon: float | None, data: Path | None, runs: Path) -> RecipePiece:
    """A row of the table."""
    folder = runs / f"{model}-{task}-{epsilon or 'plain'}"
    trainings.train({**settings(model, task, epsilon), "data": data}, folder)
    return _piece(model, task, folder, epsilon, recipe(model, task))


def attempt(number: int, data: Path | None, runs: Path) -> RecipePiece:
    """Something else that was tried."""
    model, task, changes = TRIED[number]
    folder = runs / f"tried-{number}"
    trainings.train({**settings(model, task, AIM), **changes, "data": data}, folder)
    followed: Flags = {**recipe(model, task), **changes}
    return {**_piece(model, task, folder, AIM, followed), "tried": True}


def _piece(model: str, task: str, folder: Path, epsilon: float | None, followed: Flags) -> RecipePiece:
    """A complete training, with the recipe that it followed in the precision of its processor."""
    found = trainings.scores(folder)
    if "precision" in followed:
        followed = {**followed, "precision": found["precision"]}
    return {
        "model": model,
        "task": task,
        "spent": found.get("epsilon"),
        "test_ser": found["test_ser"],
        "test_intent_accuracy": found["test_intent_accuracy"],
        "test_slot_f1": found["test_slot_f1"],
        "validation_ser": found["validation_ser"],
        "clip_fraction": found["clip_fraction"],
        "epochs": found["epochs"],
        "utterances": found["utterances"],
        "precision": found["precision"],
        "minutes": found["minutes"],
        "epsilon": epsilon,
        "recipe": followed,
    }


def figures(pieces: dict[str, Piece]) -> Recipes:
    """All rows, and what else was tried."""
    order = {key: number for number, key in enumerate([*RECIPES, *REDUCED])}
    rows = [cast(RecipePiece, piece) for piece in pieces.values()]
    rows.sort(key=lambda row: (order[row["model"], row["task"]], row["epsilon"] or 1e9))
    chosen = [row for row in rows if "tried" not in row]
    return {
        "delta": DELTA,
        "seed": 0,
        "is_complete": len(chosen) == len(RECIPES) * len(EPSILONS),
        "rows": chosen,
        "tried": [row for row in rows if "tried" in row],
    }


def works(is_reduced: bool, data: Path | None, runs: Path) -> dict[str, Work]:
    """By name: all trainings."""
    found: dict[str, Work] = {}
    for model, task in REDUCED if is_reduced else RECIPES:
        for epsilon in EPSILONS:
            name = f"{model}-{task}-{epsilon or 'plain'}"
            make = partial(train, model, task, epsilon, data, runs)
            found[name] = Work(make, settings(model, task, epsilon))
    if not is_reduced:
        for number, (model, task, changes) in enumerate(TRIED):
            make = partial(attempt, number, data, runs)
            hangs_on: Flags = {**settings(model, task, AIM), **changes}
            found[f"tried-{model}-{task}-{number}"] = Work(make, hangs_on)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    flags = trainings.parse("recipes", __doc__, "bert-snips-8.0, clc-atis-plain, ...", arguments)
    kept = results.Pieces(flags.out, "recipes", figures, page, flags.command)
    todo = works(flags.reduced, flags.data, flags.runs)

    def work(name: str) -> None:
        kept.get(name, todo[name].make, trainings.named(todo[name].hangs_on))

    with ThreadPoolExecutor(flags.jobs) as pool:
        list(pool.map(work, results.chosen(flags, todo)))
    kept.write()


if __name__ == "__main__":
    main()
