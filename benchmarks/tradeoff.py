"""Privacy and utility, the paper's Table 1, and the frontier that it does not show.

    python -m benchmarks.tradeoff --data DIR [--only atis] [--seeds 3]

Table 1 is the published algorithm as printed: its noise, scales by the raw norms of the first step, eight
micro-batches, here in one process instead of on eight GPUs, which gives the same sums. The noise is the largest of the
paper's grid whose error rate on validation data is at most 5 % above that of plain training. ε is what the paper's
formula makes of the printed multiplier, and what it is for the noise that was really added. The frontier is calibrated
noise: error rate against ε for units from one per worker to one per example, all layers of a small CLC being trained,
with equal settings and epochs.

Trainings run side by side with one thread each. One that is in the file of figures is not run again, and one that was
interrupted begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch

from benchmarks.harness import frontier_settings, results, trainings
from benchmarks.harness.grid_search import MICRO_BATCHES, Setting, epsilons, explore, without_search
from benchmarks.harness.noise_search import DELTA
from benchmarks.harness.published import CHANGES
from benchmarks.harness.results import Piece
from benchmarks.harness.rows.common import Interval
from benchmarks.harness.rows.tradeoff import (
    AttackPiece,
    MeasuredTraining,
    PlaceOnFrontier,
    PointPiece,
    Tradeoff,
    TrainingPiece,
)
from benchmarks.harness.tradeoff_rows import UNITS, USELESS, frontier_figures, table_rows
from benchmarks.membership import SHADOW, shadow_attack
from benchmarks.report.render import page
from edpsgd import Ledger
from mia.candidates import open_run

EPSILONS = (1.0, 10.0, 1e2, 1e3, 1e4, 1e5, 1e6)
SHADOWS = {**SHADOW, "generated": "generated-2"}


@dataclass(frozen=True)
class Extent:
    """How much is run.

    Attributes:
        pairs: models and corpora of Table 1.
        has_search: whether to go through the grid; else there is one setting for each row.
        frontier: model and corpus of the frontier.
        epsilons: of the frontier.
    """

    pairs: Sequence[tuple[str, str]] = tuple(CHANGES)
    has_search: bool = True
    frontier: tuple[str, str] = ("clc", "snips")
    epsilons: Sequence[float] = EPSILONS


REDUCED = Extent([("clc", "generated")], False, ("clc", "generated"), (10.0, 1e4))


class Trainer:
    """Runs trainings and attacks, each once.

    Args:
        get: that of the results file: a piece that it has, or what the given work finds.
        data: the folder of the corpora.
        runs: where run folders go.
    """

    def __init__(self, get: Callable[..., Piece], data: Path | None, runs: Path) -> None:
        self._get, self._data, self._runs = get, data, runs

    def train(self, setting: Setting) -> TrainingPiece:
        """A training of Table 1, with its ε."""
        work = partial(self._train, setting)
        return cast(TrainingPiece, self._get(setting.name, work, trainings.named(setting.flags())))

    def _train(self, setting: Setting) -> MeasuredTraining:
        folder = self._folder(setting)
        found: MeasuredTraining = {
            "table": setting.fields(),
            **trainings.scores(folder),
            "epsilon": None,
            "real_share": None,
        }
        if setting.noise_multiplier:
            share = _real_share(setting, folder)
            found["real_share"] = share
            found["epsilon"] = epsilons(setting, share)
        return found

    def attack(self, setting: Setting) -> AttackPiece:
        """The paper's attack on a training of Table 1; its shadow is the plain training on another corpus."""
        work = partial(self._attack, setting)
        return cast(AttackPiece, self._get(f"attack-{setting.name}", work, trainings.named(setting.flags())))

    def _attack(self, setting: Setting) -> AttackPiece:
        run = open_run(self._folder(setting), None if self._data is None else str(self._data))
        score = trainings.scores(run.folder)["test_ser"]
        if score != self.train(setting)["test_ser"]:  # the run was gone, and came out otherwise on another machine
            self._get(setting.name, partial(self._train, setting), trainings.named(setting.flags()), again=True)
        shadow = self._folder(Setting(setting.model, SHADOWS[setting.task], setting.seed))
        report, _ = shadow_attack(run, shadow)
        grid = np.linspace(0, 1, 101)
        curve = np.interp(grid, report.fpr, report.tpr)
        roc = [[round(float(x), 2), round(float(y), 4)] for x, y in zip(grid, curve, strict=True)]
        auc: Interval = {"value": report.auc.value, "low": report.auc.low, "high": report.auc.high}
        return {"auc": auc, "roc": roc, "test_ser": score}

    def _folder(self, setting: Setting) -> Path:
        """Of a complete run: after a move to another machine it is trained again, with the same seed."""
        folder = self._runs / setting.name
        trainings.train({**setting.flags(), "data": self._data}, folder)
        return folder

    def frontier(self, model: str, task: str, unit: str, epsilon: float | None) -> PointPiece:
        """A point of the frontier; without ε, plain training."""
        name = f"frontier-{task}-{model}-" + ("plain" if epsilon is None else f"{unit}-{epsilon:g}")
        settings = frontier_settings.settings(model, task, epsilon)
        place: PlaceOnFrontier = {
            "model": model,
            "task": task,
            "batch": settings["batch_size"],
            "delta": settings["delta"],
            "unit": unit,
            "target": epsilon,
        }
        number = UNITS[unit]
        if epsilon is not None and number is not None:
            # the batch of the recipe, in larger units than its single examples
            settings["private"] = "edp"
            settings["micro_batches"] = number
            settings["batch_size"] //= number

        def work() -> Mapping[str, object]:
            trainings.train({**settings, "data": self._data}, self._runs / name)
            return {"frontier": place, **trainings.scores(self._runs / name)}

        return cast(PointPiece, self._get(name, work, trainings.named(settings)))


def _real_share(setting: Setting, folder: Path) -> float:
    """The multiplier that the noise really had in the first epoch, over the printed one."""
    events = [event for event in Ledger.read(folder / "ledger.jsonl").events if event.kind == "gradients"]
    return (events[0].noise_multiplier or 0.0) / setting.noise_multiplier


def one_corpus(model: str, task: str, trainer: Trainer, seeds: int, has_search: bool) -> None:
    """All rows of the table for a model and a corpus, with attacks; further seeds for what was chosen."""
    chosen = explore(model, task, trainer.train) if has_search else without_search(model, task)
    for setting in chosen.values():
        for seed in range(seeds):
            again = replace(setting, seed=seed)
            trainer.train(again)
            trainer.attack(again)


def one_unit(unit: str, epsilons: Sequence[float], point: Callable[[str, float], PointPiece]) -> None:
    """The frontier of one unit, from the largest ε down; what is below one that is useless is not run."""
    for epsilon in sorted(epsilons, reverse=True):
        if point(unit, epsilon)["test_ser"] > USELESS:
            break


def works(trainer: Trainer, extent: Extent, seeds: int) -> dict[str, Callable[[], object]]:
    """By name: all that is to be done, in parts that may run side by side."""
    point = partial(trainer.frontier, *extent.frontier)
    found: dict[str, Callable[[], object]] = {}
    for model, task in extent.pairs:
        found[f"{model}-{task}"] = partial(one_corpus, model, task, trainer, seeds, extent.has_search)
    found["frontier-plain"] = partial(point, "example", None)
    for unit in UNITS:
        found[f"frontier-{unit}"] = partial(one_unit, unit, extent.epsilons, point)
    return found


# -------------------------------------------------------------------- the figures


def figures(pieces: dict[str, Piece], extent: Extent, seeds: int) -> Tradeoff:
    """Table and frontier, as far as they were run."""
    table = list(table_rows(pieces, [*CHANGES, *REDUCED.pairs]))
    are_attacked = all(run["auc"] is not None for row in table for run in row["runs"])
    return {
        "is_complete": are_attacked and is_complete(pieces, extent, seeds),
        "delta": DELTA,
        "micro_batches": MICRO_BATCHES,
        "layer_scaling": "raw",
        "table": table,
        "frontier": frontier_figures(pieces),
    }


def is_complete(pieces: dict[str, Piece], extent: Extent, seeds: int) -> bool:
    """Whether all that is to be done, gone through again, asks for nothing that is not there."""

    def get(key: str, _: object, settings: Mapping[str, object]) -> Piece:
        if results.missing(pieces, {key: settings}):
            raise KeyError(key)
        return pieces[key]

    try:
        for work in works(Trainer(get, None, Path()), extent, seeds).values():
            work()
    except KeyError:
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    flags = trainings.parse("tradeoff", __doc__, "clc-atis, bert-snips, frontier-16, ...", arguments, seeds=1)
    torch.set_num_threads(1)  # of attacks, which run beside trainings
    extent = REDUCED if flags.reduced else Extent()
    all_figures = partial(figures, extent=extent, seeds=flags.seeds)
    kept = results.Pieces(flags.out, "tradeoff", all_figures, page, flags.command)
    todo = works(Trainer(kept.get, flags.data, flags.runs), extent, flags.seeds)
    with ThreadPoolExecutor(flags.jobs) as pool:
        list(pool.map(lambda name: todo[name](), results.chosen(flags, todo)))
    kept.write()


if __name__ == "__main__":
    main()
