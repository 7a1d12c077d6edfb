"""The search through the grid of the paper's Table 1, and the trainings that it asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.harness import trainings
from benchmarks.harness.noise_search import ALLOWED, DELTA, GRID, TUNED
from benchmarks.harness.rows.tradeoff import Epsilons, SettingOfTable, TrainingPiece
from benchmarks.harness.rows.trainings import Flags
from benchmarks.harness.settings import SMALL
from edpsgd import accounting
from edpsgd.schedules import parse_decay

MICRO_BATCHES = 8  # the paper's GPUs
LARGE_CLIP = 5.0  # of the paper's, beside 1; where most is clipped, a smaller one is a factor, which Adam undoes
TAUS = {
    "linear": (0.02, 0.05, 0.07, 0.1, 0.3, 0.5, 0.7, 0.9),
    "exponential": (0.01, 0.02, 0.05, 0.08, 0.1, 0.2, 0.35, 0.5),
}
DECAYS = ("none", "linear", "exponential")
FIRST = 3  # of GRID, where the search begins
_SMALL: Flags = {**SMALL, "epochs": 8, "batch_size": 16, "learning_rate": 1e-2}
SETTINGS: dict[tuple[str, str], Flags] = {
    **TUNED,
    ("clc", "generated"): _SMALL,
    ("clc", "generated-2"): _SMALL,
}


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
        noise = "plain"
        if self.noise_multiplier:
            noise = f"{self.decay}-z{self.noise_multiplier:g}-C{self.clip_norm:g}"
        return f"{self.task}-{self.model}-{noise}-seed{self.seed}".replace(":", "")

    @property
    def kind(self) -> str:
        """A row of the table."""
        return self.decay.partition(":")[0] if self.noise_multiplier else "plain"

    def flags(self) -> Flags:
        """Of tasks.train; the two workers' batches of plain training make eight micro-batches."""
        tuned = SETTINGS[self.model, self.task]
        size = 2 * tuned["batch_size"]
        task, is_other, _ = self.task.partition("-2")  # "generated-2" has another seed
        words: Flags = {"data_seed": int(bool(is_other))}
        if task != "generated":
            words = trainings.words(self.model)
        common: Flags = {
            "task": task,
            "model": self.model,
            "split": "random",
            "seed": self.seed,
            "tensorboard": False,
            "split_seed": self.seed,
            "precision": "bf16",
            **words,
            **tuned,
        }
        if not self.noise_multiplier:
            return {**common, "private": "off", "batch_size": size}
        return {
            **common,
            "private": "edp",
            "noise": "paper",
            "layer_scaling": "raw",
            "decay": self.decay,
            "delta": DELTA,
            "noise_multiplier": self.noise_multiplier,
            "clip_norm": self.clip_norm,
            "batch_size": size // MICRO_BATCHES,
            "micro_batches": MICRO_BATCHES,
        }

    def fields(self) -> SettingOfTable:
        """As pieces of the results file say it."""
        return {
            "model": self.model,
            "task": self.task,
            "seed": self.seed,
            "decay": self.decay,
            "noise_multiplier": self.noise_multiplier,
            "clip_norm": self.clip_norm,
        }


def epsilons(setting: Setting, share: float) -> Epsilons:
    """By the paper's formula and exactly: for the printed multiplier, and for the real one."""
    epochs = SETTINGS[setting.model, setting.task]["epochs"]
    factors = accounting.decay_factors(epochs, parse_decay(setting.decay))
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
class _Tries:
    """The trainings of a search, each with its figures.

    Args:
        train: makes a training, or knows it already.
        limit: the error rate on validation data that is allowed.
    """

    def __init__(self, train: Callable[[Setting], TrainingPiece], limit: float) -> None:
        self._train, self.limit = train, limit
        self.pieces: dict[Setting, TrainingPiece] = {}

    def passes(self, setting: Setting) -> bool:
        """Whether the model bears the noise: its error rate is allowed."""
        self.pieces[setting] = self._train(setting)
        return bool(self.pieces[setting]["validation_ser"] <= self.limit)

    def borne(self, plain: Setting, noise_multiplier: float) -> Setting | None:
        """The first clip norm with which the multiplier is borne; None if it is with neither."""
        for clip_norm in (1.0, LARGE_CLIP):
            setting = replace(plain, noise_multiplier=noise_multiplier, clip_norm=clip_norm)
            if self.passes(setting):
                return setting
        return None

    def of_kind(self, kind: str) -> dict[Setting, TrainingPiece]:
        """Those of a row of the table."""
        return {setting: piece for setting, piece in self.pieces.items() if setting.kind == kind}


def explore(model: str, task: str, train: Callable[[Setting], TrainingPiece]) -> dict[str, Setting]:
    """Goes through the paper's grid, one setting after the other; what was chosen for each row.

    First the largest z0 without decay; one that is not borne with a clip norm of 1 is tried with a
    larger norm. Then, for both decays, the smallest τ, that is the most noise, at which the next
    larger z0 is borne. Validation data decide. Where no z0 is borne, the one with the lowest error
    rate is also tried with the least decay.
    """
    plain = Setting(model, task)
    tries = _Tries(train, ALLOWED * train(plain)["validation_ser"])
    number, found = _largest_without_decay(plain, tries)
    best = found or choose(tries.pieces, tries.limit)
    has_larger = found is not None and number + 1 < len(GRID)
    for kind, taus in TAUS.items():
        decayed = [replace(best, decay=f"{kind}:{tau:g}") for tau in taus]
        is_borne = False
        if has_larger:
            larger = [replace(one, noise_multiplier=GRID[number + 1]) for one in decayed]
            is_borne = _first(larger, tries.passes)
        if not is_borne:
            tries.passes(decayed[0])
    chosen = {"plain": plain}
    for kind in DECAYS:
        chosen[kind] = choose(tries.of_kind(kind), tries.limit)
    return chosen


def _largest_without_decay(plain: Setting, tries: _Tries) -> tuple[int, Setting | None]:
    """The largest noise that is borne: its number in GRID, and the setting; 0 and None if none is."""
    number = FIRST
    found = tries.borne(plain, GRID[number])
    while found is None and number > 0:
        number -= 1
        found = tries.borne(plain, GRID[number])
    while found is not None and number + 1 < len(GRID):
        larger = tries.borne(plain, GRID[number + 1])
        if larger is None:
            break
        number, found = number + 1, larger
    return number, found


def _first(settings: Sequence[Setting], passes: Callable[[Setting], bool]) -> bool:
    """Looks for the first that passes, as all after it do; whether there is one, which the last one tells."""
    if not passes(settings[-1]):
        return False
    low, high = 0, len(settings) - 1
    while low < high:
        middle = (low + high) // 2
        if passes(settings[middle]):
            high = middle
        else:
            low = middle + 1
    return True


def choose(runs: Mapping[Setting, TrainingPiece], limit: float) -> Setting:
    """The most noise whose error rate on validation data is allowed; else the lowest error rate."""
    passed = [setting for setting, piece in runs.items() if piece["validation_ser"] <= limit]
    if passed:
        return min(passed, key=lambda setting: _exact_epsilon(runs[setting]))
    return min(runs, key=lambda setting: runs[setting]["validation_ser"])


def _exact_epsilon(piece: TrainingPiece) -> float:
    return math.inf if piece["epsilon"] is None else piece["epsilon"]["exact"]


def without_search(model: str, task: str) -> dict[str, Setting]:
    """One setting for each row."""
    found = {"plain": Setting(model, task), "none": Setting(model, task, 0, "none", 1e-3)}
    for kind, taus in TAUS.items():
        found[kind] = Setting(model, task, 0, f"{kind}:{taus[-1]:g}", 1e-3)
    return found
