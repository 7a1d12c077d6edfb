"""From the seconds of steps to the rows of step times."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.harness import results
from benchmarks.harness.contenders import NAMES, PEERS
from benchmarks.harness.rows.step_time import TimedStep
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


def summarise(job: dict[str, Any], measured: dict[str, Any], memory: dict[str, float]) -> dict[str, Any]:
    """Medians, ratios within rounds, and the parts of a step."""
    times = measured["times"]
    contenders: dict[str, TimedStep] = {}
    for contender in times:
        pairs = [(own, sgd) for own, sgd in zip(times[contender], times["sgd"], strict=True) if own is not None]
        own, check = statistics.median(own for own, _ in pairs), measured["checks"].get(contender)
        contenders[contender] = {
            "milliseconds": [1e3 * q for q in quartiles([own for own, _ in pairs])],
            "ratio_to_sgd": quartiles([own / sgd for own, sgd in pairs]),
            "ratio_with_checks": None,
            "steps": len(pairs),
            "peak_mib": memory.get(contender),
            "memory_ratio": memory[contender] / memory["sgd"] if memory else None,
        }
        if check is not None:
            slower = 1 + (check / own - 1) / SELDOM
            ratio = contenders[contender]["ratio_to_sgd"][1]
            contenders[contender]["checked_ms"] = 1e3 * check
            contenders[contender]["ratio_with_checks"] = slower * ratio
    parts = {name: {k: 1e3 * v for k, v in found.items()} for name, found in measured["parts"].items()}
    return {**job, "parameters": measured["parameters"], "contenders": contenders, "parts_ms": parts}


def settings(work: dict[str, Any], rounds: int) -> dict[str, Any]:
    """What a row must have been measured with; those without ``verify="always"`` are as they were before it."""
    contenders = contenders_of(work["is_peer"], work["size"])
    return {"rounds": rounds, "contenders": contenders} if "verified" in contenders else {"rounds": rounds}


def figures(pieces: dict[str, dict[str, Any]], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """All rows that are wanted, as they are, in this order; ``wanted`` has their settings."""
    missing, rows = results.missing(pieces, wanted), [pieces[name] for name in wanted if name in pieces]
    return {"is_complete": not missing, "missing": missing, "seed": 0, "names": NAMES, "rows": rows}
