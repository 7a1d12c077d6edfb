"""From the seconds of steps to the rows of step times."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import cast

from benchmarks.harness import results
from benchmarks.harness.contenders import NAMES, PEERS
from benchmarks.harness.results import Piece
from benchmarks.harness.rows.step_time import MeasuredSteps, StepJob, StepRow, StepSettings, StepTime, TimedStep
from edpsgd.per_example.engine import SELDOM

WORKERS = 2
KINDS = {"bert": "BERT", "clc": "CLC"}
PEERS_UP_TO = 32  # examples: a gradient for each of 128 does not fit into this machine
OURS = ("sgd", "edp", "edp_per_worker", "groups", "example", "verified", "loop")
VERIFIED_UP_TO = 32  # examples: in larger batches it costs as much more, and takes long to measure
SLOW_ROUNDS = 3  # of trainings that are measured less often
PARTS = {
    "backward": "backward and norms",
    "sums": "weighted sums",
    "norm": "norm",
    "scale": "scale",
    "noise": "noise",
    "ledger": "ledger",
    "wire": "wire",
    "adam": "Adam",
    "rest": "forward and the rest",
    "whole": "all",
}
LABELS = {  # what edpsgd calls these parts for torch.profiler
    "edpsgd.backward": "backward",
    "edpsgd.weighted_sum": "sums",
    "edpsgd.norms": "norm",
    "edpsgd.clip": "scale",
    "edpsgd.noise": "noise",
    "edpsgd.ledger": "ledger",
    "edpsgd.allreduce": "wire",
    "edpsgd.inner_step": "adam",
}


def contenders_of(is_peer: bool, size: int) -> list[str]:
    """Who is in a row, by its batch."""
    if is_peer:
        return list(PEERS)
    return [name for name in OURS if name != "verified" or size <= VERIFIED_UP_TO]


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive")


def summarise(job: StepJob, measured: MeasuredSteps, memory: dict[str, float]) -> StepRow:
    """Medians, ratios within rounds, and the parts of a step."""
    times = measured["times"]
    contenders: dict[str, TimedStep] = {}
    for contender in times:
        seconds, ratios = _of_rounds(times[contender], times["sgd"])
        row: TimedStep = {
            "milliseconds": [1e3 * quartile for quartile in quartiles(seconds)],
            "ratio_to_sgd": quartiles(ratios),
            "ratio_with_checks": None,
            "steps": len(seconds),
            "peak_mib": memory.get(contender),
            "memory_ratio": memory[contender] / memory["sgd"] if memory else None,
        }
        check = measured["checks"].get(contender)
        if check is not None:
            slower = 1 + (check / statistics.median(seconds) - 1) / SELDOM
            row["checked_ms"] = 1e3 * check
            row["ratio_with_checks"] = slower * row["ratio_to_sgd"][1]
        contenders[contender] = row
    parts = {}
    for contender, found in measured["parts"].items():
        parts[contender] = {part: 1e3 * seconds for part, seconds in found.items()}
    return {**job, "parameters": measured["parameters"], "contenders": contenders, "parts_ms": parts}


def _of_rounds(own: list[float | None], sgd: list[float | None]) -> tuple[list[float], list[float]]:
    """Seconds of a contender in the rounds that it took part in, and ratios to SGD in the same round."""
    seconds, ratios = [], []
    for mine, plain in zip(own, sgd, strict=True):
        if mine is not None and plain is not None:  # slow contenders are not in all rounds; SGD is
            seconds.append(mine)
            ratios.append(mine / plain)
    return seconds, ratios


def settings(work: StepJob, rounds: int) -> StepSettings:
    """What a row must have been measured with; those without ``verify="always"`` are as they were before it."""
    contenders = contenders_of(work["is_peer"], work["size"])
    return {"rounds": rounds, "contenders": contenders} if "verified" in contenders else {"rounds": rounds}


def figures(pieces: Mapping[str, Piece], wanted: Mapping[str, StepSettings]) -> StepTime:
    """All rows that are wanted, as they are, in this order; ``wanted`` has their settings."""
    missing = results.missing(pieces, wanted)
    rows = [cast(StepRow, pieces[name]) for name in wanted if name in pieces]
    return {"is_complete": not missing, "missing": missing, "seed": 0, "names": NAMES, "rows": rows}
