"""Time of an epoch, the paper's Table 2: SGD, eDP-SGD, smaller units, vanilla DP-SGD, and Opacus where it can run.

    python -m benchmarks.epoch_time --data DIR [--only clc]

Two Horovod workers with one thread each, 32 utterances per worker and step, real and generated corpora. All contenders
of a model live in one process and take turns on every batch of the epoch, so that a slow moment of the machine hits
them alike. Slow contenders make some steps only, spread over the epoch, and their epoch is extrapolated; so are the
epochs over a million utterances, and those of peers. The epoch over a hundred thousand is measured in parts, with
smaller units in some of its steps: until all of them are there, it is extrapolated too. What is in the file of figures
is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import edpsgd
from benchmarks.harness import on_workers, results
from benchmarks.harness.contenders import PEERS, SLOW, Batch, Contender, Sizes, make, take_turns
from benchmarks.harness.epoch_rows import (
    BATCH,
    MANY,
    MODELS,
    OURS,
    PART_WARM_UP,
    WARM_UP,
    WORKERS,
    Times,
    figures,
    generated,
    in_portions,
)
from benchmarks.harness.results import Piece
from benchmarks.harness.rows.common import Peak
from benchmarks.harness.rows.epoch_time import AboutEpoch, AboutMemory, AboutParts, EpochJob, TimedParts, TimedSteps
from benchmarks.report.render import page
from benchmarks.step_time import peak, step_parts
from models.bert import BertInputs
from tasks.nlu import new_model as run
from tasks.nlu.configuration import Config
from tasks.nlu.dataset import load
from tasks.nlu.example_batches import Examples
from tasks.nlu.samplers import make_batches

FEW, SLOW_STEPS, PEER_STEPS = 8, 6, 12  # few utterances in a step of the reduced version
PARTS, SAMPLE = 4, 120  # of the epoch over MANY; of smaller units, some of its steps
CORPORA = {"atis": "ATIS", "snips": "SNIPS", "nlu-eval": "NLU-EVAL"}
GENERATED = (10_000, MANY)


# -------------------------------------------------------------------- what the workers run


class Epoch:
    """The training set of a corpus in batches of one worker, and what a model for it must know."""

    def __init__(self, model: str, task: str, examples: int, data: str | None, batch: int) -> None:
        config = Config(
            task=task, data=data, model=model, split="random", vocabulary="training-set", batch_size=batch,
            examples=examples, private="off", seed=0,
        )  # fmt: skip
        self._config, self._collective = config, edpsgd.distributed.launchers.resolve("horovod")
        self.size = batch
        self._load(config, is_whole=task == "generated")
        self._drawn: dict[int, list[list[int]]] = {}
        self.utterances, self.steps = len(self._train), self._number(0)

    def _load(self, config: Config, is_whole: bool) -> None:
        read = load(config, None, 0)
        rows = np.arange(len(read.corpus)) if is_whole else read.rows.train
        parts = run.build(config, read.corpus, rows)
        if isinstance(parts.inputs, BertInputs):
            words = len(parts.inputs.tokenizer)
        else:
            words = len(parts.inputs.vectors.words) + 1
        self.sizes = Sizes(words, len(parts.labels.intents), len(parts.labels.tags))
        self._train = Examples(read.corpus, rows, parts.inputs.table(read.corpus.words), parts.labels, self.size)

    def _number(self, turn: int) -> int:
        """Draws the batches of a pass; of how many steps all workers have utterances."""
        config = replace(self._config, seed=turn)
        self._drawn[turn] = [rows for rows in make_batches(config, len(self._train), self._collective) if rows]
        return min(self._collective.gather(len(self._drawn[turn])))

    def batch(self, step: int, turn: int = 0, is_single: bool = True) -> tuple[Batch, list[Batch]]:
        """The utterances of a step, longest first; together and, if they are wanted, one by one."""
        if turn not in self._drawn:
            self._number(turn)
        [rows] = self._train.sorted_parts(self._drawn[turn][step])
        return self._train.batch(rows), [self._train.batch([row]) for row in rows] if is_single else []


def measure(
    model: str, task: str, examples: int, data: str | None, batch: int, folder: Path, what: str, **job: Any
) -> TimedSteps | Peak | TimedParts:
    """On one worker: what the job asks for."""
    epoch = Epoch(model, task, examples, data, batch)
    if what == "times":
        return _times(model, epoch, folder, **job)
    if what == "memory":
        return _memory(model, epoch, folder, **job)
    return _parts(model, epoch, folder, **job)


def _times(
    model: str, epoch: Epoch, folder: Path, is_peer: bool, passes: int, most: int | None, part: int, parts: int
) -> TimedSteps:
    """Seconds of every step that a contender made; each pass is the first epoch of a training."""
    names = PEERS if is_peer else OURS
    steps = spread(epoch.steps, most or epoch.steps)
    steps = steps[part * len(steps) // parts : (part + 1) * len(steps) // parts]
    few = _few_steps(steps, parts)
    times: dict[str, Times] = {name: {} for name in names}
    for turn in range(passes):
        (folder / str(turn)).mkdir(exist_ok=True)
        contenders = {name: make(name, model, is_peer, epoch.sizes, epoch.size, folder / str(turn)) for name in names}
        for number in range(WARM_UP if parts == 1 else PART_WARM_UP):
            take_turns(contenders, number, *epoch.batch(number % epoch.steps), names)
        for number, step in enumerate(steps):
            chosen = [name for name in names if name not in few or (step in few[name] and turn == 0)]
            batch = epoch.batch(step, turn, is_single="loop" in chosen)
            for name, seconds in take_turns(contenders, number, *batch, chosen).items():
                times[name][turn, step] = seconds
    return {
        "parameters": sum(p.numel() for p in contenders["sgd"].model.parameters()),
        "utterances": epoch.utterances,
        "steps": epoch.steps,
        "times": {name: in_portions(own, times["sgd"]) for name, own in times.items()},
    }


def _few_steps(steps: Sequence[int], parts: int) -> dict[str, set[int]]:
    """The steps of slow contenders; of an epoch in parts, those of smaller units too."""
    numbers = dict.fromkeys(SLOW, SLOW_STEPS)
    if parts > 1:
        numbers |= dict.fromkeys(("groups", "example"), SAMPLE)
    found = {}
    for name, number in numbers.items():
        chosen = spread(len(steps), math.ceil(number / parts))
        found[name] = {steps[place] for place in chosen}
    return found


def _memory(model: str, epoch: Epoch, folder: Path, is_peer: bool, contender: str) -> Peak:
    chosen = make(contender, model, is_peer, epoch.sizes, epoch.size, folder)
    return peak(chosen, contender, *epoch.batch(0))


def _parts(model: str, epoch: Epoch, folder: Path, rounds: int) -> TimedParts:
    """For the cost model: milliseconds of a step of SGD and of eDP-SGD, and of the parts of the latter."""
    names = ("sgd", "edp")
    contenders: dict[str, Contender] = {}
    for name in names:
        contenders[name] = make(name, model, False, epoch.sizes, epoch.size, folder)
    whole, parts = [], []
    for number in range(WARM_UP + rounds):
        batch, examples = epoch.batch(number % epoch.steps, is_single=False)
        whole.append(take_turns(contenders, number, batch, examples, names))
        parts.append(step_parts(contenders["edp"], batch, examples))

    def middle(found: list[dict[str, float]]) -> dict[str, float]:
        return {key: 1e3 * statistics.median(one.get(key, 0.0) for one in found[WARM_UP:]) for key in found[-1]}

    size = sum(p.numel() for p in contenders["sgd"].model.parameters())
    return {"parameters": size, "whole_ms": middle(whole), "parts_ms": middle(parts)}


def spread(steps: int, most: int) -> list[int]:
    """So many of an epoch's steps, evenly, or all of them.

    Example:
        >>> spread(10, 3), spread(2, 3)
        ([1, 5, 8], [0, 1])
    """
    number = min(steps, most)
    return [(2 * i + 1) * steps // (2 * number) for i in range(number)]


# -------------------------------------------------------------------- the command


class Work(NamedTuple):
    """A measurement.

    Attributes:
        job: what its workers are told.
        workers: how many.
        about: what its piece says about itself.
    """

    job: EpochJob
    workers: int
    about: AboutEpoch | AboutMemory | AboutParts


def jobs(data: Path | None, is_reduced: bool) -> dict[str, Work]:
    """By name: all that is measured."""
    sizes = (100,) if is_reduced else GENERATED
    batch = FEW if is_reduced else BATCH
    found: dict[str, Work] = {}
    for model in MODELS:
        if not is_reduced:
            for number, (task, name) in enumerate(CORPORA.items()):
                folder = None if data is None else str(data)
                where = EpochJob(model=model, task=task, examples=1, data=folder, batch=batch)
                found |= _of_corpus(where, name, passes=3)
                if number == 0:
                    found |= _of_peers(where, name)
        smallest = EpochJob(model=model, task="generated", examples=min(sizes), data=None, batch=batch)
        for size in sizes:
            where = {**smallest, "examples": size}
            has_one_pass = is_reduced or size == MANY
            found |= _of_corpus(where, generated(size), passes=1 if has_one_pass else 3)
        if model == "clc" or not is_reduced:
            found |= _other_jobs(model, smallest, is_reduced)
    return found


def _of_corpus(where: EpochJob, corpus: str, passes: int) -> dict[str, Work]:
    """Epochs over a corpus; a large one is measured in parts."""
    model = where["model"]
    parts = PARTS if where["examples"] == MANY else 1
    about = AboutEpoch(model=model, corpus=corpus, is_peer=False)
    found: dict[str, Work] = {}
    for part in range(parts):
        name = f"{model}, {corpus}"
        if parts > 1:
            name += f", part {part + 1} of {parts}"
        job: EpochJob = {
            **where,
            "what": "times",
            "is_peer": False,
            "passes": passes,
            "most": None,
            "parts": parts,
            "part": part,
        }
        found[name] = Work(job, WORKERS, about)
    return found


def _of_peers(where: EpochJob, corpus: str) -> dict[str, Work]:
    """Some steps of the models that Opacus can train."""
    job: EpochJob = {
        **where,
        "what": "times",
        "is_peer": True,
        "passes": 1,
        "most": PEER_STEPS,
        "parts": 1,
        "part": 0,
    }
    about = AboutEpoch(model=where["model"], corpus=corpus, is_peer=True)
    return {f"{where['model']}, {corpus}, peers": Work(job, WORKERS, about)}


def _other_jobs(model: str, where: EpochJob, is_reduced: bool) -> dict[str, Work]:
    """Memory and the parts of a step, on the smallest generated corpus."""
    found: dict[str, Work] = {}
    measured_for_memory = [(False, name) for name in (OURS[:2] if is_reduced else OURS)]
    if not is_reduced:
        measured_for_memory += [(True, name) for name in PEERS]
    for is_peer, name in measured_for_memory:
        about = AboutMemory(model=model, is_peer=is_peer, contender=name)
        job: EpochJob = {**where, "what": "memory", "is_peer": is_peer, "contender": name}
        peers = ", peers" if is_peer else ""
        found[f"{model}, memory of {name}{peers}"] = Work(job, WORKERS, about)
    for number in (1, 2, 3):
        job = {**where, "what": "parts", "rounds": 3 if is_reduced else 60}
        about_parts = AboutParts(model=model, workers=number)
        found[f"{model}, parts on {number} workers"] = Work(job, number, about_parts)
    return found


def measured(job: EpochJob, workers: int, about: AboutEpoch | AboutMemory | AboutParts) -> Piece:
    """A piece of the figures."""
    return {**on_workers.run("benchmarks.epoch_time", job, workers), "about": about}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs everything, or (on a worker) one job."""
    parser = results.reducible("epoch_time", __doc__)
    results.add_anew(parser)
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder of the real corpora")
    results.add_choice(parser, "'clc, ATIS', 'bert, parts on 2 workers', ...")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.job is not None:
        return on_workers.serve(measure, flags.job, flags.folder)
    if flags.data is None and not (flags.reduced or flags.page):
        parser.error("--data DIR, the folder of the corpora, is missing")
    command = f"python -m benchmarks.epoch_time {'--reduced' if flags.reduced else '--data DIR'}"
    works = jobs(flags.data, flags.reduced)
    wanted: dict[str, EpochJob] = {name: {**work.job, "data": None} for name, work in works.items()}
    kept = results.Pieces(flags.out, "epoch_time", partial(figures, wanted=wanted), page, command, flags.anew)
    for name in results.chosen(flags, works):
        kept.get(name, partial(measured, *works[name]), wanted[name])
    kept.write()
    return None


if __name__ == "__main__":
    main()
