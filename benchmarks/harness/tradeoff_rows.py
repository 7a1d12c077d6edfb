"""From the pieces of tradeoff to the rows of Table 1 and the points of the frontier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from benchmarks.harness.grid_search import DECAYS, Setting, choose
from benchmarks.harness.noise_search import ALLOWED
from benchmarks.harness.published import ATTACK_AUCS, CHANGES, ERROR_RATES
from benchmarks.harness.results import Piece
from benchmarks.harness.rows.tradeoff import (
    Frontier,
    FrontierPoint,
    PointPiece,
    Published,
    TableRow,
    TableRun,
    TableSettings,
    TrainingPiece,
)

UNITS = {"1": 2, "4": 8, "16": 32, "example": None}  # by K: micro-batches of two workers
USELESS = 95.0  # SER: with less ε than that takes, next to nothing is learned


def table_rows(pieces: dict[str, Piece], pairs: Sequence[tuple[str, str]]) -> Iterator[TableRow]:
    """One for each model, corpus and decay that was run; further seeds of what was chosen belong to it."""
    runs: dict[Setting, TrainingPiece] = {}
    for piece in pieces.values():
        if "table" in piece:
            runs[Setting(**piece["table"])] = cast(TrainingPiece, piece)
    for model, task in pairs:
        plain = Setting(model, task)
        if plain not in runs:
            continue
        ours = {one: piece for one, piece in runs.items() if (one.model, one.task) == (model, task)}
        limit = ALLOWED * runs[plain]["validation_ser"]
        of_first_seed = {one: piece for one, piece in ours.items() if one.seed == 0}
        for kind in ("plain", *DECAYS):
            tried = {one: piece for one, piece in of_first_seed.items() if one.kind == kind}
            if not tried:
                continue
            best = plain if kind == "plain" else choose(tried, limit)
            of_seeds = [(one, piece) for one, piece in ours.items() if replace(one, seed=0) == best]
            row = _row(best, of_seeds, pieces, list(tried.values()))
            row["is_allowed"] = ours[best]["validation_ser"] <= limit
            yield row


def _row(
    setting: Setting,
    runs: Sequence[tuple[Setting, TrainingPiece]],
    pieces: dict[str, Piece],
    tried: Sequence[TrainingPiece],
) -> TableRow:
    """A row of Table 1.

    Args:
        setting: what was chosen.
        runs: its trainings, a seed each.
        pieces: of the file, with the attacks.
        tried: all trainings that it was chosen among.
    """
    processors = [run["machine"]["processor"] for _, run in runs]
    return {
        "model": setting.model,
        "task": setting.task,
        "decay": setting.kind,
        "settings": _settings(setting, [run for _, run in runs]),
        "runs": [_run(one, run, pieces.get(f"attack-{one.name}")) for one, run in runs],
        "paper": _published(setting.model, setting.task, setting.kind),
        "processor": ", ".join(dict.fromkeys(processors)),
        "tried": len(tried),
        "precisions_tried": sorted({_precision(piece) for piece in tried}),
    }


def _settings(setting: Setting, runs: Sequence[TrainingPiece]) -> TableSettings:
    """What the row says about its trainings."""
    found: TableSettings = {"epochs": runs[0]["epochs"], "utterances": runs[0]["utterances"]}
    if setting.kind != "plain":
        _, _, tau = setting.decay.partition(":")
        found["decay"] = setting.decay
        found["tau"] = float(tau) if tau else None
        found["layer_scaling"] = "raw"
        found["noise_multiplier"] = setting.noise_multiplier
        found["clip_norm"] = setting.clip_norm
    found["precision"] = ", ".join(sorted({_precision(run) for run in runs}))
    return found


def _run(setting: Setting, run: TrainingPiece, attack: Piece | None) -> TableRun:
    """A training, and the attack on it."""
    # with another error rate, the model was trained again, on another machine, after the attack
    is_same = attack is not None and attack["test_ser"] == run["test_ser"]
    return {
        "seed": setting.seed,
        "validation_ser": run["validation_ser"],
        "test_ser": run["test_ser"],
        "epsilon": run["epsilon"],
        "real_share": run["real_share"],
        "clip_fraction": run["clip_fraction"],
        "auc": attack["auc"] if attack is not None and is_same else None,
        "roc": attack["roc"] if attack is not None and is_same else None,
    }


def _precision(piece: TrainingPiece) -> str:
    return piece.get("precision", "bf16")


def _published(model: str, task: str, kind: str) -> Published | None:
    """The paper's figures of a row, computed from the changes that it prints."""
    if (model, task) not in CHANGES:
        return None
    ser, auc = ERROR_RATES[model, task], ATTACK_AUCS[model, task] / 100
    if kind == "plain":
        return {"ser": ser, "auc": auc, "log10_epsilon": None}
    of_ser, of_auc, power = CHANGES[model, task][kind]
    return {
        "ser": round(ser * (1 + of_ser / 100), 1),
        "auc": round(auc * (1 + of_auc / 100), 3),
        "log10_epsilon": power,
    }


def frontier_figures(pieces: dict[str, Piece]) -> Frontier | None:
    """The frontier, as far as it was run; None if nothing of it was."""
    points = [cast(PointPiece, piece) for piece in pieces.values() if "frontier" in piece]
    if not points:
        return None
    order = list(UNITS)
    points.sort(key=lambda one: one["frontier"]["target"] or 0.0)
    points.sort(key=lambda one: order.index(one["frontier"]["unit"]))
    plain, private = None, []
    for point in points:
        target = point["frontier"]["target"]
        if target is not None:
            private.append(_point(point, target))
        elif plain is None:
            plain = {"test_ser": point["test_ser"]}
    first, about = points[0], points[0]["frontier"]
    return {
        "model": about["model"],
        "task": about["task"],
        "batch": about["batch"],
        "delta": about["delta"],
        "epochs": first["epochs"],
        "utterances": first["utterances"],
        "layers": first["settings"]["layers"],
        "hidden": first["settings"]["hidden"],
        "useless": USELESS,
        "seed": 0,
        "command": "python -m benchmarks.tradeoff --data DIR --only frontier",
        "plain": plain,
        "points": private,
    }


def _point(point: PointPiece, target: float) -> FrontierPoint:
    return {
        "unit": point["frontier"]["unit"],
        "target": target,
        "epsilon": point["epsilon"],
        "test_ser": point["test_ser"],
        "test_intent_accuracy": point["test_intent_accuracy"],
        "test_slot_f1": point["test_slot_f1"],
    }
