"""Makes training steps with the code of one checkout, each when it is told to.

`benchmarks.compare_versions` starts two of these processes, one in each checkout. The plugin and
the models are those of the checkout, found through PYTHONPATH. What measures them, the package
`benchmarks`, is in both processes the one that this file belongs to, so that both are measured
alike.

Orders come as lines of JSON on the standard input, and each is answered by a line on the standard
output: {"make": {...}} makes a contender and forgets the last one, {"step": true} is one step.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, TypedDict

HERE = Path(__file__).resolve().parents[1]  # the package `benchmarks`


class Subject(TypedDict):
    """What makes the steps that are compared."""

    model: str
    contender: str
    tokens: int
    size: int


class Answer(TypedDict, total=False):
    """To an order: what was made, or the seconds of a step. The first says where the code is."""

    edpsgd: str
    made: Subject
    seconds: float


def use_own_benchmarks() -> None:
    """Makes `benchmarks` the package of this file, wherever PYTHONPATH has another one."""
    sys.path[0] = os.getcwd()  # as for `python -m`: this file's folder would hide other modules
    found = importlib.util.spec_from_file_location(
        "benchmarks", HERE / "__init__.py", submodule_search_locations=[str(HERE)]
    )
    if found is None or found.loader is None:
        raise ImportError(f"there is no package in {HERE}")
    package = importlib.util.module_from_spec(found)
    sys.modules["benchmarks"] = package
    found.loader.exec_module(package)


def take_over_output() -> IO[str]:
    """The standard output for answers alone; what libraries print goes where errors go."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def make_step(
    model: str,
    contender: str,
    tokens: int,
    size: int,
    folder: Path,
) -> Callable[[], None]:
    """A training step of a contender on one batch; its ledger goes to the folder."""
    from benchmarks.harness.contenders import SIZES, make
    from benchmarks.harness.random_batches import make_batches

    made = make(contender, model, False, SIZES[model], size, folder)
    batch, examples = make_batches(model, tokens, size, seed=0)
    return partial(made.step, batch, examples)


def seconds_of(step: Callable[[], None]) -> float:
    """The time of one step."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def answers_to(orders: IO[str], folder: Path) -> Iterator[Answer]:
    """What each order comes to; ledgers go to the folder."""
    step: Callable[[], None] | None = None
    for number, line in enumerate(orders):
        order = json.loads(line)
        if "make" in order:
            step = None
            gc.collect()  # or two models and their optimizers would be held at once
            own = folder / str(number)
            own.mkdir()
            step = make_step(**order["make"], folder=own)
            yield {"made": order["make"]}
        elif step is not None:
            yield {"seconds": seconds_of(step)}


def main() -> None:
    """Serves until there are no more orders."""
    answers = take_over_output()
    use_own_benchmarks()
    import horovod.torch as hvd
    import torch

    import edpsgd

    torch.set_num_threads(1)
    hvd.init()
    print(json.dumps({"edpsgd": edpsgd.__file__}), file=answers, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for answer in answers_to(sys.stdin, Path(folder)):
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
