"""What data cost in training: `python -m benchmarks.data_loading`, on two Horovod workers.

One epoch over generated utterances with the full-size models: the share of the time that drawing and assembling batches
takes, and how the memory of a process grows with the number of utterances.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import torch

from benchmarks.harness import results
from benchmarks.harness.results import machine
from benchmarks.harness.rows.data_loading import DataLoading, EpochOfData, HeldData, LoadedData
from benchmarks.harness.settings import LOADED_BATCH
from benchmarks.report.render import page
from edpsgd.sampling.base import Batches
from tasks.common.workers import workers
from tasks.nlu import generator as generate
from tasks.nlu import new_model as run
from tasks.nlu.configuration import Config
from tasks.nlu.corpus import Corpus, Rows
from tasks.nlu.example_batches import Examples
from tasks.nlu.noise_plan import make_plan
from tasks.nlu.samplers import make_batches
from tasks.nlu.training_loop import Training

SIZES = (100_000, 200_000, 400_000, 800_000)  # utterances, for the growth of memory
FEW = (10_000, 20_000)  # of the reduced version


class Stopwatch:
    """Adds up the time that is spent on data."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts the time inside."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begin


class TimedExamples(Examples):
    """Examples that count the time of assembling batches.

    Args:
        watch: counts it.
        arguments: of Examples.
    """

    def __init__(self, watch: Stopwatch, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._watch = watch

    def batch(self, chosen: Sequence[int] | Rows) -> dict[str, torch.Tensor]:
        """As that of Examples."""
        with self._watch.running():
            return super().batch(chosen)

    def sorted_parts(self, chosen: Sequence[int] | Rows) -> list[Rows]:
        """As that of Examples."""
        with self._watch.running():
            return super().sorted_parts(chosen)


class TimedBatches:
    """A sampler that counts the time of drawing; in everything else it is the one that it was made of.

    Args:
        batches: the sampler.
        watch: counts the time.
    """

    def __init__(self, batches: Batches, watch: Stopwatch) -> None:
        self._batches, self._watch = batches, watch

    def __iter__(self) -> Iterator[list[int]]:
        drawn = iter(self._batches)
        while True:
            with self._watch.running():
                batch = next(drawn, None)
            if batch is None:
                return
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def one_epoch(model: str, examples: int) -> EpochOfData | None:
    """Trains on all of them once; the figures of worker 0, None on the others."""
    config = Config(
        task="generated",
        model=model,
        epochs=1,
        batch_size=LOADED_BATCH,
        noise_multiplier=1.0,
        seed=0,
        tensorboard=False,
    )
    with workers() as team, tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(generate.utterances(examples))
        rows = np.arange(len(corpus))
        parts = run.build(config, corpus, rows)
        table = parts.inputs.table(corpus.words)
        watch = Stopwatch()
        train = TimedExamples(watch, corpus, rows, table, parts.labels)
        validation = Examples(corpus, rows[:64], table, parts.labels)
        batches = make_batches(config, len(rows), team.collective)
        plan = make_plan(config, batches, team.collective.size)
        training = Training(config, team, parts, batches, plan, Path(folder))
        training.batches = cast(Batches, TimedBatches(batches, watch))  # the optimizer keeps the sampler itself
        training.run(train, validation)
        training.close()
        if not team.is_first:
            return None
        seconds = training.state.seconds
        return {"seconds": seconds, "data_seconds": watch.seconds, "share": watch.seconds / seconds}


def memory(model: str, examples: int) -> HeldData:
    """Bytes of a process that holds so many utterances, ready for the model, beside those of the arrays."""
    config, process = Config(task="generated", model=model, noise_multiplier=1.0), psutil.Process()
    few = Corpus(generate.utterances(10_000))  # has all words and labels
    parts = run.build(config, few, np.arange(len(few)))
    table = parts.inputs.table(few.words)
    before = process.memory_info().rss
    corpus = Corpus(generate.utterances(examples))
    table = parts.inputs.table(corpus.words)
    held = Examples(corpus, np.arange(len(corpus)), table, parts.labels)
    arrays = (corpus.word_ids, corpus.tag_ids, corpus.intent_ids, corpus.starts, held.rows)
    return {
        "examples": examples,
        "grown": process.memory_info().rss - before,
        "peak": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before,
        "arrays": sum(array.nbytes for array in arrays),
    }


def _child(launcher: Sequence[str], *arguments: str) -> results.Found:
    """The last line of a process that runs one measurement."""
    command = [*launcher, sys.executable, "-m", "benchmarks.data_loading", *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(output[output.rindex("RESULT") + len("RESULT") :].splitlines()[0]))


def measure(examples: int, sizes: Sequence[int], command: str) -> DataLoading:
    """All of it."""
    start = time.monotonic()
    loaded: dict[str, LoadedData] = {}
    for model in ("clc", "bert"):
        memory = [_child([], "--memory", model, "--examples", str(size)) for size in sizes]
        epoch = _child(["horovodrun", "-np", "2", "--gloo"], "--epoch", model, "--examples", str(examples))
        loaded[model] = {"epoch": cast(EpochOfData, epoch), "memory": cast(list[HeldData], memory)}
    return {
        "command": command,
        "seed": 0,
        "machine": machine(),
        "examples": examples,
        "workers": 2,
        "clc": loaded["clc"],
        "bert": loaded["bert"],
        "minutes": (time.monotonic() - start) / 60,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = results.reducible("data_loading", __doc__)
    parser.add_argument("--examples", type=int, default=100_000, metavar="N")
    parser.add_argument("--epoch", choices=("clc", "bert"), help=argparse.SUPPRESS)
    parser.add_argument("--memory", choices=("clc", "bert"), help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.epoch or flags.memory:
        one = one_epoch(flags.epoch, flags.examples) if flags.epoch else memory(flags.memory, flags.examples)
        if one is not None:
            print(f"\nRESULT{json.dumps(one)}", flush=True)
        return
    examples = 500 if flags.reduced else flags.examples
    sizes = FEW if flags.reduced else SIZES
    found = measure(examples, sizes, results.command("data_loading", flags))
    results.save(flags.out, "data_loading", found, page("data_loading", found))


if __name__ == "__main__":
    main()
