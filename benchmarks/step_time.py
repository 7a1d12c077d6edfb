"""Time and memory of a training step: Horovod's SGD, ours with units from a batch to an example, and Opacus.

    python -m benchmarks.step_time [--rounds 12] [--only bert]

Two Horovod workers with one thread each, Adam. All contenders of a model take turns in one process, so that a slow
moment of the machine hits them alike; a ratio compares two steps of the same round. Peak memory is taken in processes
of their own. Opacus runs on variants of the models that it can train, beside plain training and ours on the same.
A row that is in the file of figures is not measured again.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import edpsgd
from benchmarks.harness import on_workers, results
from benchmarks.harness.contenders import SLOW, Batch, Contender, make, take_turns
from benchmarks.harness.step_rows import (
    KINDS,
    PARTS,
    PEERS_UP_TO,
    SIZES,
    SLOW_ROUNDS,
    WORKERS,
    contenders_of,
    figures,
    settings,
    summarise,
)
from benchmarks.report.render import page
from edpsgd import tensors
from edpsgd.mechanism import buffers
from edpsgd.per_example import UnitGradients

SHAPES = ((14, 32), (30, 32), (14, 128), (30, 128))  # tokens, examples of a worker
FEW = ((14, 8),)  # of the reduced version
LETTERS = 8  # of a word
WARM_UP, TIMED_STEPS = 8, 6  # the gradients of the first steps are compared with autograd
CHECKED = ("groups", "example")  # and those of one step of many later on

# -------------------------------------------------------------------- what the two workers run


@contextmanager
def stopwatch(optimizer: edpsgd.PrivateOptimizer) -> Iterator[dict[str, float]]:
    """Seconds spent in each part of a private step."""
    spent: dict[str, float] = {}

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[part] = spent.get(part, 0.0) + time.perf_counter() - start

        return wrapper

    places: list[tuple[Any, str, str]] = [
        (tensors, "layer_norms", "norm"),
        (buffers.GradientSum, "add_", "scale"),
        (buffers.GradientSum, "add_noise_", "noise"),
        (type(optimizer.ledger), "charge", "ledger"),
        (type(optimizer._collective), "sum_", "wire"),
        (type(optimizer._inner), "step", "adam"),
        (UnitGradients, "backward", "backward"),
        (UnitGradients, "add_weighted_", "sums"),
    ]
    originals = [getattr(owner, name) for owner, name, _ in places]
    try:
        for (owner, name, part), original in zip(places, originals, strict=True):
            setattr(owner, name, timed(part, original))
        yield spent
    finally:
        for (owner, name, _), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def make_batches(kind: str, tokens: int, size: int, seed: int) -> tuple[Batch, list[Batch]]:
    """Random utterances, all of one length: together, and one by one."""
    rng, sizes = np.random.default_rng(seed), SIZES[kind]
    words = np.minimum(rng.zipf(1.3, (size, tokens)), sizes.words - 1)
    spelled = rng.integers(2, 60, (sizes.words, LETTERS))
    labels = rng.integers(0, sizes.tags, (size, tokens)), rng.integers(0, sizes.intents, size)

    def batch(rows: slice) -> Batch:
        parts = _pieces(words[rows]) if kind == "bert" else _distinct(words[rows], spelled)
        parts |= {"mask": np.ones_like(words[rows], dtype=bool), "tags": labels[0][rows], "intents": labels[1][rows]}
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in parts.items()}

    return batch(slice(None)), [batch(slice(row, row + 1)) for row in range(size)]


def _pieces(words: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """Every word is one piece, between the two that frame an utterance."""
    framed = np.pad(words, ((0, 0), (1, 1)), constant_values=1)
    return {"pieces": framed, "read": np.ones_like(framed), "first": np.arange(1, words.shape[1] + 1) + 0 * words}


def _distinct(words: npt.NDArray[Any], spelled: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    rows, place = np.unique(words, return_inverse=True)
    lengths = np.full(len(words), words.shape[1])
    return {"rows": rows, "characters": spelled[rows], "place": place.reshape(words.shape), "lengths": lengths}


def measure(
    kind: str, tokens: int, size: int, is_peer: bool, folder: Path, rounds: int = 0, contender: str = ""
) -> dict[str, Any]:
    """On one worker: the time of all contenders, or the memory of one."""
    import horovod.torch as hvd

    names = [contender] if contender else contenders_of(is_peer, size)
    contenders = {name: make(name, kind, is_peer, SIZES[kind], size, folder) for name in names}
    batches = make_batches(kind, tokens, size, hvd.rank())
    if contender:
        return peak(contenders[contender], contender, *batches)
    slow = (*SLOW, "opacus_ghost") if kind == "clc" else SLOW
    return time_all(contenders, rounds, batches, slow)


def time_all(
    contenders: dict[str, Contender], rounds: int, batches: tuple[Batch, list[Batch]], slow: Sequence[str]
) -> dict[str, Any]:
    """Interleaved steps of all contenders, in seconds, and where the time of ours goes."""
    warm_up = min(WARM_UP, rounds + 1)
    times: dict[str, list[float | None]] = {name: [] for name in contenders}
    for number in range(warm_up + rounds):
        is_for_all = warm_up - 1 <= number < warm_up + SLOW_ROUNDS
        chosen = [name for name in contenders if is_for_all or name not in slow]
        seconds = take_turns(contenders, number, *batches, chosen)
        for name in contenders:
            times[name].append(seconds.get(name))
    few = min(SLOW_ROUNDS, rounds)
    checks = {name: checked_steps(contenders[name], *batches, few) for name in CHECKED if name in contenders}
    parts = {}
    for name in [name for name in ("edp", "edp_per_worker", "groups", "example") if name in contenders]:
        found = [step_parts(contenders[name], *batches) for _ in range(min(TIMED_STEPS, rounds))]
        parts[name] = {part: statistics.median(one.get(part, 0.0) for one in found) for part in PARTS}
    return {
        "parameters": sum(p.numel() for p in contenders["sgd"].model.parameters()),
        "times": {name: values[warm_up:] for name, values in times.items()},
        "checks": checks,
        "parts": parts,
    }


def checked_steps(contender: Contender, batch: Batch, examples: list[Batch], rounds: int) -> float:
    """Seconds of a step whose gradients are compared with autograd."""
    seconds = []
    for _ in range(rounds):
        contender.optimizer._engine._batches = 2**20 - 1
        seconds.append(take_turns({"": contender}, 0, batch, examples, [""])[""])
    return statistics.median(seconds)


def step_parts(contender: Contender, batch: Batch, examples: list[Batch]) -> dict[str, float]:
    """Seconds of the parts of one private step."""
    with stopwatch(contender.optimizer) as spent:
        start = time.perf_counter()
        contender.step(batch, examples)
    whole = time.perf_counter() - start
    return {**spent, "rest": whole - sum(spent.values()), "whole": whole}


def peak(contender: Contender, name: str, batch: Batch, examples: list[Batch]) -> dict[str, float]:
    """Peak resident memory of a process that does nothing else, in MiB."""
    for _ in range(2 if name in SLOW else 4):
        contender.step(batch, examples)
    return {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


# -------------------------------------------------------------------- what starts them and writes the report


def jobs(shapes: Sequence[tuple[int, int]]) -> dict[str, dict[str, Any]]:
    """What is measured: every model in every shape, and the variants of the peers."""
    return {
        f"{kind}-{tokens}-{size}{'-peers' if is_peer else ''}": {
            "kind": kind, "tokens": tokens, "size": size, "is_peer": is_peer
        }
        for is_peer, chosen in ((False, shapes), (True, [(n, size) for n, size in shapes if size <= PEERS_UP_TO]))
        for kind in KINDS
        for tokens, size in chosen
    }  # fmt: skip


def measured(job: dict[str, Any], rounds: int, has_memory: bool = True) -> dict[str, Any]:
    """A row of the report."""
    times = on_workers.run("benchmarks.step_time", {**job, "rounds": rounds}, WORKERS)
    memory = {
        name: on_workers.run("benchmarks.step_time", {**job, "contender": name}, WORKERS)["peak_mib"]
        for name in (times["times"] if has_memory else ())
    }
    return summarise(job, times, memory)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs everything, or (on a worker) one job."""
    parser = results.reducible("step_time", __doc__)
    results.add_anew(parser)
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="interleaved rounds of each row")
    results.add_choice(parser, "clc-14-32, bert-30-32-peers, ...")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.job is not None:
        return on_workers.serve(measure, flags.job, flags.folder)
    rounds = 2 if flags.reduced else flags.rounds
    command = f"python -m benchmarks.step_time {'--reduced' if flags.reduced else f'--rounds {rounds}'}"
    works = jobs(FEW if flags.reduced else SHAPES)
    wanted = {name: settings(work, rounds) for name, work in works.items()}
    kept = results.Pieces(flags.out, "step_time", partial(figures, wanted=wanted), page, command, flags.anew)
    for name in results.chosen(flags, works):
        kept.get(name, partial(measured, works[name], rounds, not flags.reduced), wanted[name])
    kept.write()
    return None


if __name__ == "__main__":
    main()
