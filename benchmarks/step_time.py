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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import on_workers, results
from benchmarks.harness.contenders import SIZES, SLOW, Batch, Contender, make, take_turns
from benchmarks.harness.random_batches import make_batches
from benchmarks.harness.rows.common import Peak
from benchmarks.harness.rows.step_time import MeasuredSteps, StepJob, StepRow
from benchmarks.harness.step_rows import (
    KINDS,
    LABELS,
    PARTS,
    PEERS_UP_TO,
    SLOW_ROUNDS,
    WORKERS,
    contenders_of,
    figures,
    settings,
    summarise,
)
from benchmarks.report.render import page

SHAPES = ((14, 32), (30, 32), (14, 128), (30, 128))  # tokens, examples of a worker
FEW = ((14, 8),)  # of the reduced version
WARM_UP, TIMED_STEPS = 8, 6
CHECKED = ("groups", "example")  # compare their gradients with autograd in some first steps and, later, in a few

# -------------------------------------------------------------------- what the two workers run


def part_seconds(step: Callable[[], None], wait: Callable[[], None]) -> dict[str, float]:
    """Seconds of the parts of a private step, as edpsgd names them for profilers.

    Args:
        step: makes one step.
        wait: returns when all workers are about to make it. A profiler starts and ends at another
            moment in each of them, and the first would wait for the last in the allreduce.

    Returns:
        By part; "rest" is what has no name, "whole" is all of it.
    """
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        wait()
        start = time.perf_counter()
        step()
        whole = time.perf_counter() - start
    seconds: dict[str, float] = {}
    for event in profiler.events():
        part = LABELS.get(event.name)
        if part is not None:
            seconds[part] = seconds.get(part, 0.0) + 1e-6 * event.time_range.elapsed_us()
    return {**seconds, "rest": whole - sum(seconds.values()), "whole": whole}


def measure(
    kind: str, tokens: int, size: int, is_peer: bool, folder: Path, rounds: int = 0, contender: str = ""
) -> MeasuredSteps | Peak:
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
) -> MeasuredSteps:
    """Interleaved steps of all contenders, in seconds, and where the time of ours goes."""
    warm_up = min(WARM_UP, rounds + 1)
    times: dict[str, list[float | None]] = {name: [] for name in contenders}
    for number in range(warm_up + rounds):
        is_for_all = warm_up - 1 <= number < warm_up + SLOW_ROUNDS
        chosen = [name for name in contenders if is_for_all or name not in slow]
        seconds = take_turns(contenders, number, *batches, chosen)
        for name in contenders:
            times[name].append(seconds.get(name))
    checks = {name: median_of_checked(times[name][:warm_up]) for name in CHECKED if name in contenders}
    parts: dict[str, dict[str, float]] = {}
    for name in [name for name in ("edp", "edp_per_worker", "groups", "example") if name in contenders]:
        found = [step_parts(contenders[name], *batches) for _ in range(min(TIMED_STEPS, rounds))]
        parts[name] = {part: statistics.median(one.get(part, 0.0) for one in found) for part in PARTS}
    return {
        "parameters": sum(p.numel() for p in contenders["sgd"].model.parameters()),
        "times": {name: values[warm_up:] for name, values in times.items()},
        "checks": checks,
        "parts": parts,
    }


def median_of_checked(seconds: Sequence[float | None]) -> float:
    """Of a contender's first steps, those that the engine compares with autograd: the 1st, 2nd, 4th, 8th ...

    The 1st is left out, since it makes the optimizer's state as well.
    """
    checked = []
    number = 2
    while number <= len(seconds):
        one = seconds[number - 1]
        if one is not None:
            checked.append(one)
        number *= 2
    return statistics.median(checked)


def step_parts(contender: Contender, batch: Batch, examples: list[Batch]) -> dict[str, float]:
    """Seconds of the parts of one private step, which all workers begin together."""
    import horovod.torch as hvd

    return part_seconds(partial(contender.step, batch, examples), hvd.barrier)


def peak(contender: Contender, name: str, batch: Batch, examples: list[Batch]) -> Peak:
    """Peak resident memory of a process that does nothing else, in MiB."""
    for _ in range(2 if name in SLOW else 4):
        contender.step(batch, examples)
    return {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


# -------------------------------------------------------------------- what starts them and writes the report


def jobs(shapes: Sequence[tuple[int, int]]) -> dict[str, StepJob]:
    """What is measured: every model in every shape, and the variants of the peers."""
    found: dict[str, StepJob] = {}
    for kind in KINDS:
        for tokens, size in shapes:
            found[f"{kind}-{tokens}-{size}"] = StepJob(kind=kind, tokens=tokens, size=size, is_peer=False)
    for kind in KINDS:
        for tokens, size in shapes:
            if size <= PEERS_UP_TO:
                name = f"{kind}-{tokens}-{size}-peers"
                found[name] = StepJob(kind=kind, tokens=tokens, size=size, is_peer=True)
    return found


def measured(job: StepJob, rounds: int, has_memory: bool = True) -> StepRow:
    """A row of the report."""
    module = "benchmarks.step_time"
    times = cast(MeasuredSteps, on_workers.run(module, {**job, "rounds": rounds}, WORKERS))
    memory: dict[str, float] = {}
    for name in times["times"] if has_memory else ():
        memory[name] = on_workers.run(module, {**job, "contender": name}, WORKERS)["peak_mib"]
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
