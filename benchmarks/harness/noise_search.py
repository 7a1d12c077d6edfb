"""The search for the largest noise that plain training's settings bear, and the trainings it asks for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmarks.harness import trainings
from benchmarks.harness.rows.trainings import Flags, Metrics
from edpsgd import accounting
from edpsgd.schedules import parse_decay

Trainer = Callable[["Job"], Metrics]
GRID = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0]  # noise multipliers, the range of the paper
FIRST = 2
DELTA = 5e-4
ALLOWED = 1.05  # times the SER of plain training
WORKERS = 2
DECAYS = ("none", "linear:0.5", "exponential:0.35")  # τ from the paper's sets
_CLC: Flags = {"learning_rate": 1.5e-3, "batch_size": 16}
_BERT: Flags = {"learning_rate": 3e-4, "head_learning_rate": 3e-3, "batch_size": 16}
TUNED: dict[tuple[str, str], Flags] = {
    ("clc", "atis"): {**_CLC, "epochs": 8},
    ("clc", "snips"): {**_CLC, "epochs": 4},
    ("clc", "nlu-eval"): {**_CLC, "epochs": 10, "dropout": 0.5},
    ("bert", "atis"): {**_BERT, "epochs": 6},
    ("bert", "snips"): {**_BERT, "epochs": 3},
    ("bert", "nlu-eval"): {**_BERT, "epochs": 6},
}


@dataclass(frozen=True)
class Job:
    """One training."""

    model: str
    task: str
    split: str
    seed: int
    settings: Flags = field(default_factory=Flags)
    name: str = ""

    @property
    def folder(self) -> str:
        """Where it leaves its run."""
        return self.name or f"{self.task}-{self.model}-{self.split}-{self.seed}"

    def all_settings(self) -> Flags:
        """Of tasks.train, but for data and output."""
        common: Flags = {
            "task": self.task,
            "model": self.model,
            "split": self.split,
            "split_seed": self.seed,
            "seed": self.seed,
        }
        return {**common, **trainings.words(self.model), **TUNED[self.model, self.task], **self.settings}


def private(model: str, task: str, decay: str, noise: str, z: float) -> Job:
    """eDP-SGD with the settings of plain training, on the random split."""
    name = f"{task}-{model}-{noise}-{decay.partition(':')[0]}-{z:g}"
    settings: Flags = {
        "private": "edp",
        "noise": noise,
        "noise_multiplier": z,
        "decay": decay,
        "delta": DELTA,
    }
    return Job(model, task, "random", 0, settings, name)


class Search:
    """For the largest noise of GRID whose SER is at most 5 % above plain training's; one model and corpus.

    Less noise is taken to do less harm: settings with at most the noise of a run that passed, in every epoch, pass
    too, and those with at least the noise of one that failed fail. Only what this leaves open is run.

    Args:
        model: clc or bert.
        task: atis or snips.
        train: runs a job and says its last metrics.
    """

    def __init__(self, model: str, task: str, train: Trainer) -> None:
        self.model, self.task, self._train = model, task, train
        self._limit = ALLOWED * train(Job(model, task, "random", 0, {"private": "off"}))["test_ser"]
        self._tried: list[tuple[npt.NDArray[np.float64], bool]] = []

    def largest(self, decay: str, noise: str, first: int) -> int:
        """The number in GRID of the largest noise that passes; -1 if none does.

        Args:
            decay: as in tasks.train.
            noise: calibrated or paper.
            first: where in GRID to begin; it goes up while the error rate allows, and down until it does.
        """
        number = first
        while number >= 0 and not self._passes(decay, noise, GRID[number]):
            number -= 1
        if number < first:
            return number
        while number + 1 < len(GRID) and self._passes(decay, noise, GRID[number + 1]):
            number += 1
        return number

    def _passes(self, decay: str, noise: str, z: float) -> bool:
        levels = self._levels(decay, noise, z)
        for others, passed in self._tried:
            if (levels <= others).all() if passed else (levels >= others).all():
                return passed
        passed = self._train(private(self.model, self.task, decay, noise, z))["test_ser"] <= self._limit
        self._tried.append((levels, passed))
        return passed

    def epsilon(self, decay: str, noise: str, z: float) -> float:
        """What a ledger says at the end, at δ = 5e-4: every utterance is in one step of each epoch."""
        return accounting.gaussian_epsilon(self._levels(decay, noise, z), DELTA)

    def _levels(self, decay: str, noise: str, z: float) -> npt.NDArray[np.float64]:
        """The real noise multiplier of every epoch: without layer scales, paper noise is too small by 2√N."""
        factors = accounting.decay_factors(TUNED[self.model, self.task]["epochs"], parse_decay(decay))
        return z / (2 * math.sqrt(WORKERS) if noise == "paper" else 1.0) * np.array(factors)


def search_all(search: Search) -> dict[tuple[str, str], float | None]:
    """The largest noise multiplier by decay and kind of noise; None if even the smallest of GRID is too large."""
    number, found = FIRST, {}
    for decay, noise in itertools.product(DECAYS, ("calibrated", "paper")):
        number = search.largest(decay, noise, max(0, number))
        found[decay, noise] = GRID[number] if number >= 0 else None
    return found
