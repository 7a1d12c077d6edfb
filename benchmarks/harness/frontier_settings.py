"""Command lines of the frontier of benchmarks.tradeoff: a small CLC that is trained whole."""

from __future__ import annotations

from benchmarks.harness import trainings
from benchmarks.harness.rows.trainings import Flags
from benchmarks.harness.settings import SMALL

DELTA = 1e-4
_CLC: Flags = {
    "hidden": 128, "layers": 1, "batch_size": 1024, "epochs": 30, "learning_rate": 1e-2, "head_learning_rate": 2e-2,
    "clip_norm": 1.0, "dropout": 0.0, "warmup": 0.1, "precision": "bf16",
}  # fmt: skip
CHOSEN: dict[tuple[str, str], Flags] = {
    ("clc", "snips"): _CLC,
    ("clc", "generated"): {**SMALL, "batch_size": 64, "epochs": 10, "learning_rate": 1e-2},
}


def settings(model: str, task: str, epsilon: float | None) -> Flags:
    """Flags of tasks.train, but for data and output; plain training has the same epochs and batches."""
    common: Flags = {
        "task": task,
        "model": model,
        "split": "hash",
        "seed": 0,
        "tensorboard": False,
        "delta": DELTA,
    }
    found: Flags = {**common, **CHOSEN[model, task]}
    if task != "generated":
        found = {**found, **trainings.words(model)}
    if epsilon is None:
        return {**found, "private": "off"}
    return {**found, "private": "example", "sampling": "poisson", "epsilon": epsilon}
