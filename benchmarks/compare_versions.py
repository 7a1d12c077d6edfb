"""Step times of two checkouts in one run: whether a change has made training faster or slower.

    python -m benchmarks.compare_versions --other DIR [--models clc bert] [--sizes 32] [--rounds 40]

A process for each checkout, with one thread, trains with the code of its own folder. The two take
turns step by step, so that a slow moment of the machine hits both alike, and every other round the
other one begins. A ratio compares the two steps of a round. The figures are printed, and written
as JSON to runs/compare_versions.json: they tell about two states of the code, not about the plugin.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import cast

from typing_extensions import Self

from benchmarks.harness import version_worker
from benchmarks.harness.contenders import NAMES, SIZES
from benchmarks.harness.results import machine
from benchmarks.harness.version_worker import Answer, Subject

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("clc", "bert")
CONTENDERS = ("sgd", "edp", "example", "verified")
OUT = Path("runs/compare_versions.json")
LEVEL = 0.95  # of intervals


class Compared(Subject):
    """The steps of one contender in both checkouts."""

    new_ms: float
    other_ms: float
    ratio: float
    ratio_interval: tuple[float, float]
    level: float
    new_seconds: list[float]
    other_seconds: list[float]


class Worker:
    """A process that trains with the code of a checkout, a step at a time.

    Args:
        checkout: the folder.
    """

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.checkout),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, version_worker.__file__],
            cwd=self.checkout,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self._check_code(Path(self._answer()["edpsgd"]))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def _check_code(self, file: Path) -> None:
        """An installed edpsgd must not be measured in the place of the checkout's."""
        if not file.resolve().is_relative_to(self.checkout):
            raise RuntimeError(f"the process in {self.checkout} trains with {file}")

    def _stop(self) -> None:
        """Ends the process: without orders, it has nothing more to do."""
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        self._process.wait()

    def make(self, subject: Subject) -> None:
        """Makes a contender, in the place of the last one."""
        self._order({"make": subject})

    def step(self) -> float:
        """Makes one step; its seconds."""
        return float(self._order({"step": True})["seconds"])

    def _order(self, order: Mapping[str, object]) -> Answer:
        if self._process is None or self._process.stdin is None:
            raise RuntimeError("the process of a checkout runs within `with` only")
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Answer:
        if self._process is None or self._process.stdout is None:
            raise RuntimeError("the process of a checkout runs within `with` only")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process in {self.checkout} has failed, see above")
        return cast(Answer, json.loads(line))


def median_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float, float]:
    """An interval for the median that holds for every distribution, and its true level.

    The bounds are the k-th smallest and the k-th largest value: the number of values below the
    median is binomial, and k is as large as the level allows. With too few values it is 1.

    Example:
        >>> median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
        (2.0, 8.0, 0.9609375)
        >>> median_interval([1.0, 3.0])
        (1.0, 3.0, 0.5)
    """
    ordered = sorted(values)
    count = len(ordered)
    rank = 1
    while rank < count / 2 and _level_of(rank + 1, count) >= level:
        rank += 1
    return ordered[rank - 1], ordered[count - rank], _level_of(rank, count)


def _level_of(rank: int, count: int) -> float:
    """How surely the median is between the rank-th smallest and the rank-th largest of values."""
    below = sum(math.comb(count, successes) for successes in range(rank))
    return max(0.0, 1.0 - 2.0 * below / 2**count)


def compare(
    workers: tuple[Worker, Worker],
    subject: Subject,
    warm_up: int,
    rounds: int,
) -> Compared:
    """Interleaved steps of one contender in both checkouts, this one first."""
    new, other = workers
    seconds: dict[Worker, list[float]] = {new: [], other: []}
    for worker in workers:
        worker.make(subject)
    for number in range(warm_up + rounds):
        order = workers if number % 2 == 0 else workers[::-1]
        for worker in order:
            seconds[worker].append(worker.step())
    new_seconds, other_seconds = seconds[new][warm_up:], seconds[other][warm_up:]
    ratios = [one / two for one, two in zip(new_seconds, other_seconds, strict=True)]
    low, high, level = median_interval(ratios)
    return {
        **subject,
        "new_ms": 1e3 * statistics.median(new_seconds),
        "other_ms": 1e3 * statistics.median(other_seconds),
        "ratio": statistics.median(ratios),
        "ratio_interval": (low, high),
        "level": level,
        "new_seconds": new_seconds,
        "other_seconds": other_seconds,
    }


def version_of(checkout: Path) -> str:
    """The commit of a checkout, and whether files were changed since; "unknown" without git."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def as_text(row: Compared) -> str:
    """A line for people."""
    low, high = row["ratio_interval"]
    return (
        f"{row['model']:5} {row['tokens']:3} tokens x {row['size']:3}  "
        f"{NAMES[row['contender']]:38} "
        f"new {row['new_ms']:8.1f} ms  other {row['other_ms']:8.1f} ms  "
        f"new/other {row['ratio']:.3f} [{low:.3f}, {high:.3f}] at {100 * row['level']:.0f} %"
    )


def subjects(models: Iterable[str], sizes: Sequence[int], tokens: int) -> list[Subject]:
    """What is measured, in this order."""
    found: list[Subject] = []
    for model in models:
        for size in sizes:
            for contender in CONTENDERS:
                found.append(Subject(model=model, contender=contender, tokens=tokens, size=size))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_versions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--other", type=Path, required=True, metavar="DIR", help="the other checkout")
    add("--models", nargs="+", choices=sorted(SIZES), default=MODELS, help="what is trained")
    add("--sizes", nargs="+", type=int, default=[32], metavar="N", help="examples of a batch")
    add("--tokens", type=int, default=14, metavar="N", help="words of an example")
    add("--rounds", type=int, default=40, metavar="N", help="steps that count")
    add("--warm-up", type=int, default=4, metavar="N", help="steps before them")
    add("--out", type=Path, default=OUT, metavar="FILE", help="where the figures go")
    flags = parser.parse_args(arguments)
    if flags.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {flags.rounds}")
    other = flags.other.resolve()
    if not (other / "edpsgd").is_dir():
        parser.error(f"--other must be a checkout of this project, got {flags.other}")
    rows = []
    with Worker(ROOT) as new_worker, Worker(other) as other_worker:
        for subject in subjects(flags.models, flags.sizes, flags.tokens):
            row = compare((new_worker, other_worker), subject, flags.warm_up, flags.rounds)
            print(as_text(row), flush=True)
            rows.append(row)
    versions = {"new": version_of(ROOT), "other": version_of(other)}
    found = {"machine": machine(), **versions, "rows": rows}
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    flags.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"written to {flags.out}")


if __name__ == "__main__":
    main()
