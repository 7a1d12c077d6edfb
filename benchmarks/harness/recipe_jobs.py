"""Command lines of benchmarks.recipes: rows of the table, what is left out of a recipe or added, units of clipping.

Flags name what is on a machine by words (MINILM, PUBLIC, SCHEMA), for which benchmarks.recipes puts places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from benchmarks.harness import trainings
from benchmarks.harness.rows.recipes import AboutTraining
from benchmarks.harness.rows.trainings import Flags
from benchmarks.harness.tradeoff_rows import UNITS
from tasks.nlu import configuration, recipes
from tasks.nlu.configuration import Config

DELTA = 1e-4
EPSILONS = (1.0, 3.0, 8.0, None)
MINILM, PUBLIC, SCHEMA = "MiniLM", "the public training", "the schema of the corpus"

# how rows without privacy are trained: chosen on validation data of SNIPS
PLAIN: Flags = {"optimizer": "adam", "learning_rate": 0.003, "batch_size": 64, "epochs": 10}

# the training of the whole encoder on public data
TUNING: Flags = {
    "task": "nlu-eval", "private": "off", "model": "bert", "pretrained": MINILM, "epochs": 6, "batch_size": 32,
    "learning_rate": 4e-4, "head_learning_rate": 4e-3, "precision": "bf16", "seed": 0, "tensorboard": False,
}  # fmt: skip

# utterances that are trained on: which recipe is nearest hangs on that
UTTERANCES = {"snips": 6548, "atis": 2655, "nlu-eval": 4955, "generated": 80}

_ARCHITECTURE = ("model", "freeze", "features", "window", "transitions", "zero_heads", "dropout")
_OF_RECIPES = (
    *_ARCHITECTURE, "private", "sampling", "clip_norm", "optimizer", "momentum", "learning_rate",
    "head_learning_rate", "intent_weight", "schedule", "warmup", "batch_size", "micro_batches", "epochs",
)  # fmt: skip


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        title: what it is called.
        flags: beside ε and δ.
        has_kept_states: whether trainings read hidden states that were computed once.
    """

    title: str
    flags: Flags
    has_kept_states: bool = True


ROWS = {
    "snips": Row("BERT (MiniLM), SNIPS, nothing else public", {"task": "snips", "pretrained": MINILM}),
    "snips-public": Row(
        "BERT (MiniLM), SNIPS, with schema and public tuning",
        {"task": "snips", "labels": SCHEMA, "init_from": PUBLIC, "model": "bert"},
    ),
    "atis": Row("BERT (MiniLM), ATIS, with schema", {"task": "atis", "pretrained": MINILM, "labels": SCHEMA}),
    "nlu-eval": Row(
        "BERT (MiniLM), NLU-EVAL, with schema", {"task": "nlu-eval", "pretrained": MINILM, "labels": SCHEMA}
    ),
    "clc-snips": Row("CLC, SNIPS", {"task": "snips", "vectors": MINILM}, has_kept_states=False),
}
_SMALL: Flags = {"task": "generated", "examples": 160}
SMALL_ROWS = {
    "generated": Row("BERT (MiniLM), generated", {**_SMALL, "pretrained": MINILM}),
    "generated-public": Row(
        "BERT (MiniLM), generated, with schema and public tuning",
        {**_SMALL, "labels": SCHEMA, "init_from": PUBLIC, "model": "bert"},
    ),
}

LEFT_OUT: dict[str, tuple[str, Flags]] = {
    "layers": ("the last layer alone, without neighbours", {"features": "layers:6", "window": 0}),
    "neighbours": ("without neighbours", {"window": 0}),
    "pieces": ("without a word's own pieces", {"features": "layers:3,6"}),
    "fixed-transitions": ("trained transitions", {"transitions": "trained"}),
    "zero-heads": ("heads that begin at random", {"zero_heads": False}),
    "sgd": ("Adam", {"optimizer": "adam", "learning_rate": 0.02}),
    "fall": ("a constant learning rate", {"schedule": "constant"}),
    "no-dropout": ("dropout 0.1", {"dropout": 0.1}),
    "large-batches": ("as many steps at q = 0.06", {}),  # flags that hang on ε: see _in_small_batches
}
ADDED: dict[str, tuple[str, Flags]] = {
    "schema": ("with schema", {"labels": SCHEMA}),
    "tuning": ("with public tuning", {"init_from": PUBLIC, "model": "bert"}),
}
SMALL_RATE = 0.06  # of sampling

BATCH, EPOCHS = 1024, 16  # of micro-batches as units: utterances of a step on average
RATES = (1.0, 0.13)  # learning rates of which the better one on validation data counts


@dataclass(frozen=True)
class Extent:
    """How much is run.

    Attributes:
        rows: of the table, by name.
        repetitions: of each of its trainings.
        epsilons: of the table.
        changed: the row whose recipe is changed, and whose units are varied.
        with_all: the row that has all that may be added to it.
        changed_at: the ε of changed recipes.
        changed_repetitions: of each changed recipe.
        changes: names in LEFT_OUT and ADDED.
        units: of clipping, as names of UNITS.
        units_at: the ε of units.
        batch: utterances of a step, in micro-batches.
        tuning: the public training.
    """

    rows: Mapping[str, Row] = field(default_factory=lambda: ROWS)
    repetitions: int = 3
    epsilons: Sequence[float | None] = EPSILONS
    changed: str = "snips"
    with_all: str = "snips-public"
    changed_at: Sequence[float] = (8.0, 1.0)
    changed_repetitions: int = 1
    changes: Sequence[str] = (*LEFT_OUT, *ADDED)
    units: Sequence[str] = tuple(UNITS)
    units_at: Sequence[float] = (1.0, 10.0, 1e2, 1e3, 1e4, 1e5)
    batch: int = BATCH
    tuning: Mapping[str, object] = field(default_factory=lambda: cast(Mapping[str, object], TUNING))


REDUCED = Extent(
    rows=SMALL_ROWS,
    repetitions=1,
    epsilons=(8.0, None),
    changed="generated",
    with_all="generated-public",
    changed_at=(8.0,),
    changes=("pieces", "large-batches", "schema"),
    units=("4", "example"),
    units_at=(10.0,),
    batch=64,
    tuning={**TUNING, **_SMALL, "data_seed": 1, "epochs": 1, "precision": "fp32"},
)


class Job(NamedTuple):
    """A training that is to be there.

    Attributes:
        about: what its piece says of it.
        flags: of tasks.train, but for data, states and output.
        hangs_on: these, and what follows from them; a piece with another one is made again.
        kept_states_of: the encoder whose hidden states it reads, if they are computed once.
    """

    about: AboutTraining
    flags: Flags
    hangs_on: dict[str, object]
    kept_states_of: str | None


# -------------------------------------------------------------------- which there are


def jobs(extent: Extent) -> dict[str, Job]:
    """All trainings by name, in the order in which they are best run: those of the public encoder come last."""
    found = {**_rows(extent), **_changes(extent), **_units(extent)}
    by_encoder = sorted(found, key=lambda name: "init_from" in found[name].flags)
    return {name: found[name] for name in by_encoder}


def _rows(extent: Extent) -> dict[str, Job]:
    found = {}
    for name, row in extent.rows.items():
        for epsilon in extent.epsilons:
            flags = plain(row) if epsilon is None else private(row, epsilon)
            for repetition in range(extent.repetitions):
                about: AboutTraining = {"row": name, "epsilon": epsilon, "repetition": repetition}
                key = f"{name}-{_of(epsilon)}-{repetition}"
                found[key] = _job(about, flags, extent, row.has_kept_states)
    return found


def _changes(extent: Extent) -> dict[str, Job]:
    """One part of the recipe is another, or something is added; all others are equal."""
    found = {}
    row = extent.rows[extent.changed]
    for change in extent.changes:
        for epsilon in extent.changed_at:
            flags = changed(row, change, epsilon)
            for repetition in range(extent.changed_repetitions):
                about: AboutTraining = {"change": change, "epsilon": epsilon, "repetition": repetition}
                word = "with" if change in ADDED else "without"
                # other layers than the recipe's are computed in the training itself
                is_kept = row.has_kept_states and "features" not in flags
                found[f"{word}-{change}-{_of(epsilon)}-{repetition}"] = _job(about, flags, extent, is_kept)
    return found


def _units(extent: Extent) -> dict[str, Job]:
    """Micro-batches and single examples, on the same features and with the same heads."""
    found = {}
    row = extent.rows[extent.changed]
    for unit in extent.units:
        for epsilon in extent.units_at:
            name = f"frontier-{unit}-{_of(epsilon)}"
            about: AboutTraining = {"unit": unit, "epsilon": epsilon, "repetition": 0}
            if UNITS[unit] is None:
                found[name] = _job(about, private(row, epsilon), extent, row.has_kept_states)
                continue
            for rate in RATES:
                flags = in_units(row, unit, epsilon, rate, extent.batch)
                found[f"{name}-{rate:g}"] = _job({**about, "rate": rate}, flags, extent, row.has_kept_states)
    return found


def _of(epsilon: float | None) -> str:
    return "plain" if epsilon is None else f"{epsilon:g}"


def _job(about: AboutTraining, flags: Flags, extent: Extent, has_kept_states: bool) -> Job:
    hangs_on: dict[str, object] = {**flags}
    if recipes.is_wanted(flags):
        hangs_on["recipe"] = resolved(flags)
    encoder = None
    if "init_from" in flags:
        hangs_on["public"] = dict(extent.tuning)
        encoder = PUBLIC
    elif "pretrained" in flags:
        encoder = MINILM
    return Job(about, {**flags, "tensorboard": False}, hangs_on, encoder if has_kept_states else None)


# -------------------------------------------------------------------- their flags


def private(row: Row, epsilon: float) -> Flags:
    """The bare ε: all else is the recipe's."""
    return {**row.flags, "epsilon": epsilon, "delta": DELTA}


def plain(row: Row) -> Flags:
    """The same model without privacy, in a plain training of its own."""
    recipe = resolved(private(row, 8.0))
    model = {name: value for name, value in recipe.items() if name in _ARCHITECTURE}
    return cast(Flags, {**row.flags, **model, **PLAIN, "private": "off"})


def changed(row: Row, change: str, epsilon: float) -> Flags:
    """The recipe but for one part, or with something added."""
    flags = private(row, epsilon)
    if change in ADDED:
        added = cast(Flags, {**flags, **ADDED[change][1]})
        if "init_from" in added:
            del added["pretrained"]
        return added
    if change == "large-batches":
        return {**flags, **_in_small_batches(resolved(flags), UTTERANCES[flags["task"]])}
    return cast(Flags, {**flags, **LEFT_OUT[change][1]})


def _in_small_batches(recipe: Flags, utterances: int) -> Flags:
    """As many steps as a recipe has, at a small sampling rate."""
    batch = max(1, round(SMALL_RATE * utterances))
    steps = recipe["epochs"] * math.ceil(utterances / recipe["batch_size"])
    return {"batch_size": batch, "epochs": max(1, round(steps / math.ceil(utterances / batch)))}


def in_units(row: Row, unit: str, epsilon: float, rate: float, batch: int = BATCH) -> Flags:
    """Micro-batches as units of clipping, on two workers' worth of them in one process."""
    number = UNITS[unit]
    if number is None:
        raise ValueError(f"unit must be a number of micro-batches, got {unit!r}")
    flags = private(row, epsilon)
    of_units: Flags = {"private": "edp", "micro_batches": number, "batch_size": batch // number, "epochs": EPOCHS}
    return {**flags, **resolved(flags), **of_units, "learning_rate": rate}


def resolved(flags: Flags) -> Flags:
    """What a training whose ε alone is given follows, as flags."""
    config, parsed = configuration.parse(trainings.flags({**flags, "data": "DIR"}))
    choice = recipes.follow(config, parsed.given, UTTERANCES[flags["task"]], workers=1)
    return recipe_of(choice.config)


def recipe_of(config: Config) -> Flags:
    """The settings of a run that a recipe is about, as flags; those that have no effect are left out."""
    found = {name: getattr(config, name) for name in _OF_RECIPES}
    unused = {name for name, value in found.items() if value is None}
    if config.private == "off":
        unused |= {"sampling", "clip_norm"}
    if config.optimizer != "sgd":
        unused.add("momentum")
    if config.micro_batches == 1:
        unused.add("micro_batches")
    return cast(Flags, {name: value for name, value in found.items() if name not in unused})
