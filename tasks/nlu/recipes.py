"""The recommended settings of a private training: what an ε alone stands for.

tasks/recipes.yaml holds them, each row as it was measured.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from edpsgd import files
from edpsgd.ledger.guarantee import format_epsilon
from tasks.common.flags import load_yaml
from tasks.common.workers import Workers
from tasks.nlu.configuration import Config

TABLE = Path(__file__).parents[1] / "recipes.yaml"


@dataclass(frozen=True)
class Recipe:
    """A row of the table.

    Attributes:
        model: bert or clc.
        epsilon: where it was chosen.
        utterances: how many were trained on there.
        sampling_rate: the share of them in a step, over all workers.
        steps: of the whole training.
        settings: further ones, by the names of Config.
    """

    model: str
    epsilon: float
    utterances: int
    sampling_rate: float
    steps: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    def distance(self, epsilon: float, utterances: int) -> float:
        """How far its ε times utterances are from those of a training, as a logarithm."""
        return abs(math.log(epsilon * utterances / (self.epsilon * self.utterances)))


@dataclass(frozen=True)
class Choice:
    """What a training follows.

    Attributes:
        config: its settings, complete.
        recipe: where they come from.
        changed: names of settings that the user chose otherwise.
    """

    config: Config
    recipe: Recipe
    changed: Collection[str]

    def text(self, utterances: int) -> str:
        """Which recipe it is, and why."""
        recipe, config = self.recipe, self.config
        reach = f"ε = {format_epsilon(config.epsilon or 0.0)} on {utterances} utterances"
        origin = f"ε = {recipe.epsilon:g} on {recipe.utterances}"
        lines = [
            f"recipe of tasks/recipes.yaml for {recipe.model} and {reach}, the nearest being {origin}:",
            f"  {config.batch_size} utterances of a worker in a step on average, {config.epochs} epochs, "
            f"{config.optimizer}, learning rate {config.learning_rate:g}, δ = {config.delta:g}",
            "  features are frozen, and linear heads are trained: what is little takes little noise",
        ]
        if self.changed:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(self.changed))
            lines.append(f"  changed by {flags}")
        return "\n".join(lines)


def is_wanted(chosen: Collection[str]) -> bool:
    """Whether settings ask for an ε, and nothing is said of how to reach it."""
    return "epsilon" in chosen and not {"private", "noise_multiplier"} & set(chosen)


def chosen_beside(flags: argparse.Namespace) -> Collection[str] | None:
    """The settings that a command line names beside a recipe; None if it wants none, or goes on with a run."""
    return flags.given if is_wanted(flags.given) and flags.resume is None else None


def by_recipe(config: Config, chosen: Collection[str], utterances: int, team: Workers) -> Config:
    """The settings of a job as ``follow`` completes them; worker 0 says which recipe it is."""
    choice = team.together(lambda: follow(config, chosen, utterances, team.collective.size))
    if team.is_first:
        print(choice.text(utterances), flush=True)
    return choice.config


def follow(config: Config, chosen: Collection[str], utterances: int, workers: int) -> Choice:
    """Completes settings by the recipe that is recommended for them.

    Args:
        config: the settings, of which ``epsilon`` is one.
        chosen: names of those that the user has given, which stay as they are.
        utterances: of the training set.
        workers: who share a step.
    """
    if "optimizer" in chosen and "learning_rate" not in chosen:
        raise ValueError("--optimizer needs another learning rate than the recipe's: give --learning-rate too")
    if config.epsilon is None:
        raise ValueError(f"epsilon must be given where a recipe is to follow, got {config.epsilon!r}")
    model = _model(config, chosen)
    recipe = nearest(model, config.epsilon, utterances)
    wanted = {**_common_settings(), **recipe.settings, "model": model, "delta": usual_delta(utterances)}
    wanted["batch_size"] = max(1, round(recipe.sampling_rate * utterances / workers))
    open_settings = {name: value for name, value in wanted.items() if name not in chosen}
    completed = replace(config, **open_settings)
    if "epochs" not in chosen:
        steps_per_epoch = math.ceil(utterances / (completed.batch_size * workers))
        completed = replace(completed, epochs=max(1, round(recipe.steps / steps_per_epoch)))
    changed = [name for name in chosen if name in wanted or name == "epochs"]
    return Choice(completed, recipe, [name for name in changed if name != "model"])


def _model(config: Config, chosen: Collection[str]) -> str:
    """The kind of model: as given, or as what it is to read words with says."""
    if "model" in chosen or config.init_from is not None:
        model = config.model
    else:
        model = "clc" if config.pretrained is None else "bert"
    needed = {"bert": config.pretrained or config.init_from, "clc": config.vectors}
    if needed[model] is None:
        raise ValueError(
            "a recipe trains heads on features that are there: give --pretrained NAME_OR_FOLDER, a Hugging Face "
            "encoder (bert), or --vectors FILE, of words (clc); or say --private example and all settings yourself"
        )
    return model


def expectation(config: Config, workers: int) -> str | None:
    """What error a training with micro-batches has to expect at its ε; None where that is not the question.

    Args:
        config: the settings.
        workers: who share a step.
    """
    if config.private != "edp" or config.epsilon is None:
        return None
    frontier = _content()["frontier"]
    rows: dict[int, list[float | None]] = frontier["micro_batches"]
    number = workers * config.micro_batches
    nearest_number = min(rows, key=lambda one: abs(math.log(one / number)))
    place = _nearest_place(frontier["epsilons"], config.epsilon)
    error = rows[nearest_number][place]
    expected = "more than 95" if error is None else f"{error:g}"
    return (
        f"  note: {number} clipped gradients in a step are few for ε = {format_epsilon(config.epsilon)}. With "
        f"{nearest_number} at ε = {frontier['epsilons'][place]:g}, a small CLC on SNIPS\n"
        f"        has {expected} % errors (SER), with single examples {frontier['examples'][place]:g} %. "
        "--epsilon without --private trains with these"
    )


def _nearest_place(values: Sequence[float], wanted: float) -> int:
    """The place of the value that is nearest by ratio."""
    return min(range(len(values)), key=lambda place: abs(math.log(values[place] / wanted)))


def nearest(model: str, epsilon: float, utterances: int) -> Recipe:
    """The recipe of a model whose ε times utterances are nearest.

    Example:
        >>> nearest("bert", 8.0, 6500).epsilon, nearest("bert", 1.0, 50_000).epsilon
        (8.0, 8.0)
    """
    rows = [recipe for recipe in table() if recipe.model == model]
    return min(rows, key=lambda recipe: recipe.distance(epsilon, utterances))


def usual_delta(utterances: int) -> float:
    """The largest power of ten that is not above one over the number of utterances.

    Example:
        >>> usual_delta(6500), usual_delta(1000), usual_delta(1001)
        (0.0001, 0.001, 0.0001)
    """
    digits = len(str(max(1, utterances) - 1))
    return float(f"1e-{digits}")


@cache
def table() -> tuple[Recipe, ...]:
    """All rows."""
    own = {item.name for item in fields(Recipe)}
    found = []
    for row in _content()["recipes"]:
        described = {name: value for name, value in row.items() if name in own}
        settings = {name: value for name, value in row.items() if name not in own}
        found.append(Recipe(**{**described, "epsilon": float(row["epsilon"])}, settings=settings))
    return tuple(found)


def _common_settings() -> dict[str, Any]:
    """Those of every recipe, by the names of Config."""
    return dict(_content()["settings"])


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = load_yaml(files.read_text(TABLE))
    return content
