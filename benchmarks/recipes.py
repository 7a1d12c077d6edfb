"""What single-example units buy: error rates at ε = 1, 3 and 8 and without privacy.

    python -m benchmarks.recipes --data DIR [--only bert-snips]

`tasks.train --private example` with Poisson sampling, one process and thread for each training, several side by side.
The recipes are below. A training that is in the file of figures is not run again, and one that was interrupted begins
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import results, trainings

DELTA = 1e-4
_CONDITIONS = (
    "ε is for adding or removing one utterance; it holds if the seed is secret, which it is not here, and if examples "
    "lie in all batches as in those that were compared with autograd."
)
EPSILONS = (1.0, 3.0, 8.0, None)
NAMES = {"clc": "CLC", "bert": "BERT (MiniLM)", "atis": "ATIS", "snips": "SNIPS", "generated": "generated"}
_BERT = {
    "freeze": "adapters:4", "batch_size": 512, "epochs": 20, "learning_rate": 2e-3, "head_learning_rate": 5e-3,
    "clip_norm": 1.0, "dropout": 0.0, "warmup": 0.1,
}  # fmt: skip
_CLC = {"batch_size": 512, "epochs": 20, "learning_rate": 3e-3, "clip_norm": 1.0, "dropout": 0.0, "warmup": 0.1}
SMALL = {"examples": 1200, "hidden": 32, "layers": 1, "dimension": 16, "dropout": 0.0}  # of the reduced benchmarks
RECIPES: dict[tuple[str, str], dict[str, Any]] = {
    ("bert", "snips"): _BERT,
    ("bert", "atis"): _BERT,
    ("clc", "snips"): _CLC,
    ("clc", "atis"): _CLC,
}


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


def train(model: str, task: str, epsilon: float | None, data: Path | None, runs: Path) -> dict[str, Any]:
    """A row of the table."""
    folder = runs / f"{model}-{task}-{epsilon or 'plain'}"
    trainings.train({**settings(model, task, epsilon), "data": data}, folder)
    found = trainings.scores(folder)
    about = {"model": model, "task": task, "recipe": recipe(model, task), "spent": found.pop("epsilon", None)}
    return {**about, **found, "epsilon": epsilon}


def figures(pieces: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All rows."""
    order = {key: number for number, key in enumerate([*RECIPES, *REDUCED])}
    rows = sorted(pieces.values(), key=lambda row: (order[row["model"], row["task"]], row["epsilon"] or 1e9))
    return {"delta": DELTA, "seed": 0, "rows": rows}


def page(found: dict[str, Any]) -> str:
    """The figures, to read."""
    rows = [
        (NAMES[row["model"]], NAMES[row["task"]], f"{row['epsilon']:g}" if row["epsilon"] else "no privacy",
         f"{row['test_ser']:.2f}", f"{100 - row['test_intent_accuracy']:.2f}", f"{row['test_slot_f1']:.2f}",
         f"{row['validation_ser']:.2f}")
        for row in found["rows"]
    ]  # fmt: skip
    lines = ["# What single-example units buy", "", results.made(found), ""]
    lines += [f"δ = {found['delta']:g}, hash split, Poisson sampling, one seed. {_CONDITIONS}", ""]
    head = ("model", "corpus", "ε", "SER", "intent error, %", "slot F1", "SER on validation data")
    lines += results.table(head, rows)
    lines += ["", "The recipes, as flags of `python -m tasks.train --private example --sampling poisson`:", ""]
    recipes = {(row["model"], row["task"]): row["recipe"] for row in found["rows"]}
    for (model, task), flags in recipes.items():
        lines.append(f"- {NAMES[model]}, {NAMES[task]}: `{' '.join(trainings.flags(flags))}`")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    flags = trainings.parse("recipes", __doc__, "names with this, as bert-snips-8.0", arguments)
    kept = results.Pieces(flags.out, "recipes", figures, page, flags.command, flags.anew)
    works = {
        f"{model}-{task}-{epsilon or 'plain'}": (model, task, epsilon)
        for model, task in (REDUCED if flags.reduced else RECIPES)
        for epsilon in EPSILONS
        if flags.only in f"{model}-{task}-{epsilon or 'plain'}"
    }

    def work(name: str) -> None:
        kept.get(name, partial(train, *works[name], flags.data, flags.runs), recipe(*works[name][:2]))

    with ThreadPoolExecutor(flags.jobs) as pool:
        list(pool.map(work, works))
    kept.write()


if __name__ == "__main__":
    main()
