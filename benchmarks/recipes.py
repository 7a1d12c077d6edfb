"""What an ε alone buys: error rates at ε = 1, 3 and 8 by the recommended recipes, and without privacy.

    python -m benchmarks.recipes --data DIR [--only snips-8] [--seeds 3] [--changed 1]

Trainings are `tasks.train --epsilon X --pretrained ...`: all else is what tasks/recipes.yaml says. The noise is secret,
so that each ε holds; what differs between repetitions is shown. Then, at two of the ε, each part of the recipe is left
out in turn, and a schema and a public training are added; and micro-batches take the place of single examples.

The hidden states of a frozen encoder are computed once for each encoder and corpus, in a run folder of their own.
Trainings run side by side with one thread each. One that is in the file of figures is not run again unless its recipe
has changed, and one that was interrupted begins again.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from benchmarks.harness import results, trainings
from benchmarks.harness.recipe_jobs import MINILM, PUBLIC, REDUCED, SCHEMA, Extent, Job, jobs, recipe_of
from benchmarks.harness.recipe_rows import figures
from benchmarks.harness.results import Piece
from benchmarks.harness.rows.recipes import FeaturesPiece, TrainedPiece, TuningPiece
from benchmarks.harness.rows.trainings import Flags
from benchmarks.report.render import page
from tasks import schema
from tasks.nlu import encoder_states
from tasks.nlu.configuration import Config, read_file

COMPUTED = re.compile(r"hidden states of (\d+) utterances: .*, (\d+) s")


class Trainer:
    """Runs trainings, each once, and before them what they begin with.

    Args:
        get: that of the results file: a piece that it has, or what the given work finds.
        data: the folder of the corpora.
        runs: where run folders go.
        tuning: flags of the public training.
    """

    def __init__(self, get: Callable[..., Any], data: Path | None, runs: Path, tuning: Mapping[str, object]) -> None:
        self._get, self._data, self._runs, self._tuning = get, data, runs, tuning
        self._locks: dict[Path, threading.Lock] = defaultdict(threading.Lock)

    def train(self, name: str, job: Job) -> TrainedPiece:
        """A training of the table or of what stands below it."""

        def work() -> Mapping[str, object]:
            return {"about": job.about, **measured(self.folder(name, job))}

        return cast(TrainedPiece, self._get(name, work, job.hangs_on))

    def folder(self, name: str, job: Job) -> Path:
        """The run folder of a complete training; with another recipe it is another one."""
        flags = self._placed(job.flags)
        if job.kept_states_of is not None:
            flags["states_from"] = self.features(job.flags, job.kept_states_of)
        folder = self._folder(name, job.hangs_on)
        trainings.train(flags, folder)
        return folder

    def features(self, of: Flags, encoder: str) -> Path:
        """The run folder that keeps what an encoder makes of a corpus.

        Args:
            of: flags of a training that reads it.
            encoder: MINILM or PUBLIC.
        """
        corpus = {name: value for name, value in of.items() if name in ("task", "examples")}
        origin = {"init_from": PUBLIC} if encoder == PUBLIC else {"pretrained": MINILM}
        plain = {"private": "off", "epochs": 1, "learning_rate": 0.003, "seed": 0, "tensorboard": False}
        flags = {**corpus, **origin, **plain, "model": "bert", "freeze": "encoder", "keep_features": True}
        hangs_on = {**flags, "public": dict(self._tuning)} if encoder == PUBLIC else flags
        name = f"features-{of['task']}-{'public' if encoder == PUBLIC else encoder}"
        folder = self._folder(name, hangs_on)
        with self._locks[folder]:
            are_kept = encoder_states.kept_by(folder, Config(private="off")) is not None
            if trainings.final(folder) is not None and not are_kept:  # somebody has deleted them
                shutil.rmtree(folder)
            trainings.train(self._placed(flags), folder)
            self._get(name, partial(_computed, folder, str(of["task"]), encoder), hangs_on)
        return folder

    def tuned(self) -> Path:
        """The run folder of the public training."""
        folder = self._folder("public", self._tuning)
        with self._locks[folder]:
            trainings.train(self._placed(self._tuning), folder)
            self._get("public", partial(self._of_tuning, folder), dict(self._tuning))
        return folder

    def _of_tuning(self, folder: Path) -> TuningPiece:
        found = trainings.scores(folder)
        return {"test_ser": found["test_ser"], "minutes": found["minutes"], "tuning": cast(Flags, dict(self._tuning))}

    def _schema(self, task: str) -> Path:
        """A schema as developers write one; here it is read from the training utterances."""
        file = self._runs / f"{task}.yaml"
        with self._locks[file]:
            if not file.exists():
                self._runs.mkdir(parents=True, exist_ok=True)
                data = [] if self._data is None else ["--data", str(self._data)]
                schema.main(["--task", task, *data, "--output", str(file)])
        return file

    def _placed(self, flags: Mapping[str, object]) -> dict[str, object]:
        """With places on this machine for the words that stand for them."""
        found = {**flags, "data": self._data}
        for name in ("pretrained", "vectors"):
            if found.get(name) == MINILM:
                found[name] = str(trainings.ENCODER)
        if found.get("labels") == SCHEMA:
            found["labels"] = self._schema(str(found["task"]))
        if found.get("init_from") == PUBLIC:
            found["init_from"] = self.tuned()
        return found

    def _folder(self, name: str, hangs_on: Mapping[str, object]) -> Path:
        digest = blake2b(json.dumps(hangs_on, sort_keys=True).encode(), digest_size=4).hexdigest()
        return self._runs / f"{name}-{digest}"


def measured(folder: Path) -> dict[str, object]:
    """What came of a complete training, and what it followed."""
    found = trainings.scores(folder)
    return {
        "spent": found.get("epsilon"),
        "test_ser": found["test_ser"],
        "test_intent_accuracy": found["test_intent_accuracy"],
        "test_slot_f1": found["test_slot_f1"],
        "validation_ser": found["validation_ser"],
        "clip_fraction": found["clip_fraction"],
        "epochs": found["epochs"],
        "utterances": found["utterances"],
        "precision": found["precision"],
        "seconds": round(60 * found["minutes"], 1),
        "minutes": found["minutes"],
        "recipe": recipe_of(Config(**read_file(folder / "config.yaml"))),
    }


def _computed(folder: Path, task: str, encoder: str) -> FeaturesPiece:
    """What the log of a run says about its hidden states."""
    said = COMPUTED.search(Path(f"{folder}.log").read_text(encoding="utf-8"))
    if said is None:
        raise ValueError(f"{folder}.log does not say how long hidden states took: delete the run folder")
    utterances, seconds = int(said[1]), float(said[2])
    return {"task": task, "encoder": encoder, "computed": utterances, "seconds": seconds, "minutes": seconds / 60}


def works(trainer: Trainer, found: Mapping[str, Job]) -> dict[str, Callable[[], object]]:
    """By name: all that is to be done; what others begin with comes first, and is made once."""
    first: dict[str, Callable[[], object]] = {}
    for job in found.values():
        if job.kept_states_of is not None:
            name = f"features of {job.flags['task']} by {job.kept_states_of}"
            first[name] = partial(trainer.features, job.flags, job.kept_states_of)
    return {**first, **{name: partial(trainer.train, name, job) for name, job in found.items()}}


def extent_of(is_reduced: bool, repetitions: int, changed: int) -> Extent:
    """How much a command runs."""
    if is_reduced:
        return REDUCED
    return Extent(repetitions=repetitions, changed_repetitions=changed)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    names = "snips-8, without-pieces, frontier-16, ..."
    flags = trainings.parse("recipes", __doc__, names, arguments, seeds=3, changed=1)
    extent = extent_of(flags.reduced, flags.seeds, flags.changed)
    all_figures: Callable[[dict[str, Piece]], Mapping[str, Any]] = partial(figures, extent=extent)
    kept = results.Pieces(flags.out, "recipes", all_figures, page, flags.command)
    trainer = Trainer(kept.get, flags.data, flags.runs, extent.tuning)
    todo = works(trainer, jobs(extent))
    with ThreadPoolExecutor(flags.jobs) as pool:
        list(pool.map(lambda name: todo[name](), results.chosen(flags, todo)))
    kept.write()


if __name__ == "__main__":
    main()
