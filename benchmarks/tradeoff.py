"""Privacy and utility, the paper's Table 1, and the frontier that it does not show.

    python -m benchmarks.tradeoff --data DIR [--only atis] [--seeds 3]

Table 1 is the published algorithm as printed: its noise, scales by the raw norms of the first step, eight
micro-batches, here in one process instead of on eight GPUs, which gives the same sums. The noise is the largest of the
paper's grid whose error rate on validation data is at most 5 % above that of plain training. ε is what the paper's
formula makes of the printed multiplier, and what it is for the noise that was really added. The frontier is calibrated
noise: error rate against ε for units from one per worker to one per example, with the recipe of benchmarks.recipes and
equal epochs.

Trainings run side by side with one thread each. One that is in the file of figures is not run again, and one that was
interrupted begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import recipes
from benchmarks.harness import results, trainings
from benchmarks.harness.noise_search import ALLOWED, DELTA, GRID, TUNED
from benchmarks.harness.published import ATTACK_AUCS, CHANGES, ERROR_RATES
from benchmarks.harness.results import Piece
from benchmarks.harness.rows.tradeoff import Epsilons, Frontier, FrontierPoint, Published, TableRow, TableRun
from benchmarks.membership import SHADOW, shadow_attack
from benchmarks.report.render import page
from edpsgd import Ledger, accounting
from edpsgd.schedules import parse_decay
from mia.candidates import open_run

MICRO_BATCHES = 8  # the paper's GPUs
LARGE_CLIP = 5.0  # of the paper's, beside 1; where most is clipped, a smaller one is a factor, which Adam undoes
TAUS = {
    "linear": (0.02, 0.05, 0.07, 0.1, 0.3, 0.5, 0.7, 0.9),
    "exponential": (0.01, 0.02, 0.05, 0.08, 0.1, 0.2, 0.35, 0.5),
}
UNITS = {"1": 2, "4": 8, "16": 32, "example": None}  # by K: micro-batches of two workers
EPSILONS = (1.0, 10.0, 1e2, 1e3, 1e4, 1e5, 1e6)
DECAYS = ("none", "linear", "exponential")
USELESS = 95.0  # SER: with less ε than that takes, next to nothing is learned

FIRST = 3  # of GRID, where the search begins

_SMALL = {**recipes.SMALL, "epochs": 8, "batch_size": 16, "learning_rate": 1e-2}
SETTINGS = {**TUNED, ("clc", "generated"): _SMALL, ("clc", "generated-2"): _SMALL}
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


@dataclass(frozen=True)
class Setting:
    """One training of Table 1; without noise it is the plain one."""

    model: str
    task: str
    seed: int = 0
    decay: str = "none"
    noise_multiplier: float = 0.0
    clip_norm: float = 1.0

    @property
    def name(self) -> str:
        """As a key of the pieces, and as a folder."""
        noise = f"{self.decay}-z{self.noise_multiplier:g}-C{self.clip_norm:g}" if self.noise_multiplier else "plain"
        return f"{self.task}-{self.model}-{noise}-seed{self.seed}".replace(":", "")

    @property
    def kind(self) -> str:
        """A row of the table."""
        return self.decay.partition(":")[0] if self.noise_multiplier else "plain"

    def flags(self) -> dict[str, Any]:
        """Of tasks.train; the two workers' batches of plain training make eight micro-batches."""
        tuned, (task, is_other, _) = dict(SETTINGS[self.model, self.task]), self.task.partition("-2")
        size = 2 * tuned.pop("batch_size")
        words: dict[str, Any] = {"data_seed": int(bool(is_other))}
        if task != "generated":
            words = dict(trainings.words(self.model))
        common = {"task": task, "model": self.model, "split": "random", "seed": self.seed, "tensorboard": False}
        common |= {"split_seed": self.seed, "precision": "bf16", **words, **tuned}
        if not self.noise_multiplier:
            return {**common, "private": "off", "batch_size": size}
        return {
            **common, "private": "edp", "noise": "paper", "layer_scaling": "raw", "decay": self.decay, "delta": DELTA,
            "noise_multiplier": self.noise_multiplier, "clip_norm": self.clip_norm,
            "batch_size": size // MICRO_BATCHES, "micro_batches": MICRO_BATCHES,
        }  # fmt: skip


class Trainer:
    """Runs trainings and attacks, each once.

    Args:
        get: that of the results file: a piece that it has, or what the given work finds.
        data: the folder of the corpora.
        runs: where run folders go.
    """

    def __init__(self, get: Callable[..., Piece], data: Path | None, runs: Path) -> None:
        self._get, self._data, self._runs = get, data, runs

    def train(self, setting: Setting) -> Piece:
        """A training of Table 1, with its ε."""
        return self._get(setting.name, partial(self._train, setting), trainings.named(setting.flags()))

    def _train(self, setting: Setting) -> Piece:
        folder = self._folder(setting)
        found: Piece = {"table": vars(setting), **trainings.scores(folder), "epsilon": None, "real_share": None}
        if setting.noise_multiplier:
            share = _real_share(setting, folder)
            found |= {"real_share": share, "epsilon": epsilons(setting, share)}
        return found

    def attack(self, setting: Setting) -> Piece:
        """The paper's attack on a training of Table 1; its shadow is the plain training on another corpus."""
        return self._get(f"attack-{setting.name}", partial(self._attack, setting), trainings.named(setting.flags()))

    def _attack(self, setting: Setting) -> Piece:
        run = open_run(self._folder(setting), None if self._data is None else str(self._data))
        score = trainings.scores(run.folder)["test_ser"]
        if score != self.train(setting)["test_ser"]:  # the run was gone, and came out otherwise on another machine
            self._get(setting.name, partial(self._train, setting), trainings.named(setting.flags()), again=True)
        shadow = self._folder(Setting(setting.model, SHADOWS[setting.task], setting.seed))
        report, _ = shadow_attack(run, shadow)
        grid = np.linspace(0, 1, 101)
        curve = np.interp(grid, report.fpr, report.tpr)
        roc = [[round(float(x), 2), round(float(y), 4)] for x, y in zip(grid, curve, strict=True)]
        return {"auc": report.auc._asdict(), "roc": roc, "test_ser": score}

    def _folder(self, setting: Setting) -> Path:
        """Of a complete run: after a move to another machine it is trained again, with the same seed."""
        folder = self._runs / setting.name
        trainings.train({**setting.flags(), "data": self._data}, folder)
        return folder

    def frontier(self, model: str, task: str, unit: str, epsilon: float | None) -> Piece:
        """A point of the frontier; without ε, plain training."""
        name = f"frontier-{task}-{model}-" + ("plain" if epsilon is None else f"{unit}-{epsilon:g}")
        settings = recipes.settings(model, task, epsilon)
        about = {"model": model, "task": task, "batch": settings["batch_size"], "delta": settings["delta"]}
        number = UNITS[unit]
        if epsilon is not None and number is not None:  # the recipe's batch in larger units than its single examples
            settings |= {"private": "edp", "micro_batches": number, "batch_size": settings["batch_size"] // number}

        def work() -> Piece:
            trainings.train({**settings, "data": self._data}, self._runs / name)
            return {"frontier": {**about, "unit": unit, "target": epsilon}, **trainings.scores(self._runs / name)}

        return self._get(name, work, trainings.named(settings))


def _real_share(setting: Setting, folder: Path) -> float:
    """The multiplier that the noise really had in the first epoch, over the printed one."""
    events = [event for event in Ledger.read(folder / "ledger.jsonl").events if event.kind == "gradients"]
    return (events[0].noise_multiplier or 0.0) / setting.noise_multiplier


def epsilons(setting: Setting, share: float) -> Epsilons:
    """By the paper's formula and exactly: for the printed multiplier, and for the real one."""
    factors = accounting.decay_factors(SETTINGS[setting.model, setting.task]["epochs"], parse_decay(setting.decay))
    printed = [setting.noise_multiplier * factor for factor in factors]
    real = [share * z for z in printed]

    def zcdp(noise: Sequence[float]) -> float:
        return accounting.zcdp_epsilon(accounting.zcdp_rho(noise), DELTA)

    return {
        "claimed_zcdp": zcdp(printed),
        "claimed_exact": accounting.gaussian_epsilon(printed, DELTA),
        "zcdp": zcdp(real),
        "exact": accounting.gaussian_epsilon(real, DELTA),
    }


# -------------------------------------------------------------------- the search


def explore(model: str, task: str, train: Callable[[Setting], Piece]) -> dict[str, Setting]:
    """Goes through the paper's grid, one setting after the other; what was chosen for each row.

    First the largest z0 without decay; one that is not borne with a clip norm of 1 is tried with a larger norm. Then,
    for both decays, the smallest τ, that is the most noise, at which the next larger z0 is borne. Validation data
    decide. Where no z0 is borne, the one with the lowest error rate is also tried with the least decay.
    """
    plain, tried = Setting(model, task), dict[Setting, Piece]()
    limit = ALLOWED * train(plain)["validation_ser"]

    def passes(setting: Setting) -> bool:
        tried[setting] = train(setting)
        return bool(tried[setting]["validation_ser"] <= limit)

    def borne(z: float) -> Setting | None:
        settings = (replace(plain, noise_multiplier=z, clip_norm=clip) for clip in (1.0, LARGE_CLIP))
        return next(filter(passes, settings), None)

    number = FIRST
    while (found := borne(GRID[number])) is None and number > 0:
        number -= 1
    while found is not None and number + 1 < len(GRID) and (more := borne(GRID[number + 1])) is not None:
        number, found = number + 1, more
    best = found or choose(tried, limit)
    for kind, taus in TAUS.items():
        decayed = [replace(best, decay=f"{kind}:{tau:g}") for tau in taus]
        larger = GRID[number + 1 : number + 2] if found else ()
        if not any(_first([replace(one, noise_multiplier=z) for one in decayed], passes) for z in larger):
            passes(decayed[0])
    kinds = {kind: {s: piece for s, piece in tried.items() if s.kind == kind} for kind in DECAYS}
    return {"plain": plain, **{kind: choose(runs, limit) for kind, runs in kinds.items()}}


def _first(settings: Sequence[Setting], passes: Callable[[Setting], bool]) -> bool:
    """Looks for the first that passes, as all after it do; whether there is one, which the last one tells."""
    if not passes(settings[-1]):
        return False
    low, high = 0, len(settings) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(settings[middle]) else (middle + 1, high)
    return True


def choose(runs: Mapping[Setting, Piece], limit: float) -> Setting:
    """The most noise whose error rate on validation data is allowed; else the lowest error rate."""
    passed = [setting for setting, piece in runs.items() if piece["validation_ser"] <= limit]
    if passed:
        return min(passed, key=lambda setting: runs[setting]["epsilon"]["exact"])
    return min(runs, key=lambda setting: runs[setting]["validation_ser"])


def without_search(model: str, task: str) -> dict[str, Setting]:
    """One setting for each row."""
    noisy = {kind: f"{kind}:{taus[-1]:g}" for kind, taus in TAUS.items()}
    private = {kind: Setting(model, task, 0, decay, 1e-3) for kind, decay in {"none": "none", **noisy}.items()}
    return {"plain": Setting(model, task), **private}


def one_corpus(model: str, task: str, trainer: Trainer, seeds: int, has_search: bool) -> None:
    """All rows of the table for a model and a corpus, with attacks; further seeds for what was chosen."""
    chosen = explore(model, task, trainer.train) if has_search else without_search(model, task)
    for setting in chosen.values():
        for seed in range(seeds):
            again = replace(setting, seed=seed)
            trainer.train(again)
            trainer.attack(again)


def one_unit(unit: str, epsilons: Sequence[float], point: Callable[[str, float], Piece]) -> None:
    """The frontier of one unit, from the largest ε down; what is below one that is useless is not run."""
    for epsilon in sorted(epsilons, reverse=True):
        if point(unit, epsilon)["test_ser"] > USELESS:
            break


def works(trainer: Trainer, extent: Extent, seeds: int) -> dict[str, Callable[[], object]]:
    """By name: all that is to be done, in parts that may run side by side."""
    point = partial(trainer.frontier, *extent.frontier)
    return {
        **{
            f"{model}-{task}": partial(one_corpus, model, task, trainer, seeds, extent.has_search)
            for model, task in extent.pairs
        },
        "frontier-plain": partial(point, "example", None),
        **{f"frontier-{unit}": partial(one_unit, unit, extent.epsilons, point) for unit in UNITS},
    }


# -------------------------------------------------------------------- the figures


def figures(pieces: dict[str, Piece], extent: Extent, seeds: int) -> dict[str, Any]:
    """Table and frontier, as far as they were run."""
    table = list(_rows(pieces))
    are_attacked = all(run["auc"] is not None for row in table for run in row["runs"])
    return {
        "is_complete": are_attacked and is_complete(pieces, extent, seeds),
        "delta": DELTA,
        "micro_batches": MICRO_BATCHES,
        "layer_scaling": "raw",
        "table": table,
        "frontier": _frontier(pieces),
    }


def is_complete(pieces: dict[str, Piece], extent: Extent, seeds: int) -> bool:
    """Whether all that is to be done, gone through again, asks for nothing that is not there."""

    def get(key: str, _: object, settings: Mapping[str, Any]) -> Piece:
        if results.missing(pieces, {key: settings}):
            raise KeyError(key)
        return pieces[key]

    try:
        for work in works(Trainer(get, None, Path()), extent, seeds).values():
            work()
    except KeyError:
        return False
    return True


def _rows(pieces: dict[str, Piece]) -> Iterator[TableRow]:
    """One for each model, corpus and decay that was run; further seeds of what was chosen belong to it."""
    runs = {Setting(**piece["table"]): piece for piece in pieces.values() if "table" in piece}
    for model, task in [*CHANGES, *REDUCED.pairs]:
        ours = {setting: piece for setting, piece in runs.items() if (setting.model, setting.task) == (model, task)}
        plain = Setting(model, task)
        if plain not in ours:
            continue
        limit = ALLOWED * ours[plain]["validation_ser"]
        for kind in ("plain", *DECAYS):
            tried = {setting: piece for setting, piece in ours.items() if setting.kind == kind and setting.seed == 0}
            if tried:
                best = plain if kind == "plain" else choose(tried, limit)
                same = [setting for setting in ours if replace(setting, seed=0) == best]
                row = _row(best, [(setting, ours[setting]) for setting in same], pieces, list(tried.values()))
                row["is_allowed"] = ours[best]["validation_ser"] <= limit
                yield row


def _precision(piece: Piece) -> str:
    return str(piece.get("precision", "bf16"))


def _row(
    setting: Setting, runs: Sequence[tuple[Setting, Piece]], pieces: dict[str, Piece], tried: Sequence[Piece]
) -> TableRow:
    settings: dict[str, Any] = {name: runs[0][1][name] for name in ("epochs", "utterances")}
    if setting.kind != "plain":
        tau = float(setting.decay.partition(":")[2] or 0) or None
        settings |= {"decay": setting.decay, "tau": tau, "layer_scaling": "raw"}
        settings |= {"noise_multiplier": setting.noise_multiplier, "clip_norm": setting.clip_norm}
    found: list[TableRun] = []
    settings["precision"] = ", ".join(sorted({_precision(run) for _, run in runs}))
    processor = ", ".join(dict.fromkeys(run["machine"]["processor"] for _, run in runs))
    for one, run in runs:
        attack = pieces.get(f"attack-{one.name}", {})
        is_same = attack.get("test_ser") == run["test_ser"]  # else the model was trained again, on another machine
        found.append(
            {
                "seed": one.seed,
                "validation_ser": run["validation_ser"],
                "test_ser": run["test_ser"],
                "epsilon": run["epsilon"],
                "real_share": run["real_share"],
                "clip_fraction": run["clip_fraction"],
                "auc": attack["auc"] if is_same else None,
                "roc": attack["roc"] if is_same else None,
            }
        )
    return {
        "model": setting.model,
        "task": setting.task,
        "decay": setting.kind,
        "settings": settings,
        "runs": found,
        "paper": _published(setting.model, setting.task, setting.kind),
        "processor": processor,
        "tried": len(tried),
        "precisions_tried": sorted({_precision(piece) for piece in tried}),
    }


def _published(model: str, task: str, kind: str) -> Published | None:
    """The paper's figures of a row, computed from the changes that it prints."""
    if (model, task) not in CHANGES:
        return None
    ser, auc = ERROR_RATES[model, task], ATTACK_AUCS[model, task] / 100
    if kind == "plain":
        return {"ser": ser, "auc": auc, "log10_epsilon": None}
    of_ser, of_auc, power = CHANGES[model, task][kind]
    return {
        "ser": round(ser * (1 + of_ser / 100), 1),
        "auc": round(auc * (1 + of_auc / 100), 3),
        "log10_epsilon": power,
    }


def _frontier(pieces: dict[str, Piece]) -> Frontier | None:
    points = [piece for piece in pieces.values() if "frontier" in piece]
    if not points:
        return None
    order = list(UNITS)
    points.sort(key=lambda piece: (order.index(piece["frontier"]["unit"]), piece["frontier"]["target"] or 0.0))
    about, first = points[0]["frontier"], points[0]
    plain = [point for point in points if point["frontier"]["target"] is None]
    return {
        "model": about["model"],
        "task": about["task"],
        "batch": about["batch"],
        "delta": about["delta"],
        "epochs": first["epochs"],
        "utterances": first["utterances"],
        "layers": first["settings"]["layers"],
        "hidden": first["settings"]["hidden"],
        "useless": USELESS,
        "seed": 0,
        "command": "python -m benchmarks.tradeoff --data DIR --only frontier",
        "plain": {"test_ser": plain[0]["test_ser"]} if plain else None,
        "points": [_point(point) for point in points if point["frontier"]["target"] is not None],
    }


def _point(point: Piece) -> FrontierPoint:
    return {
        "unit": point["frontier"]["unit"],
        "target": point["frontier"]["target"],
        "epsilon": point["epsilon"],
        "test_ser": point["test_ser"],
        "test_intent_accuracy": point["test_intent_accuracy"],
        "test_slot_f1": point["test_slot_f1"],
    }


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
