"""From the seconds of steps to epochs: the rows of the paper's Table 2, and what follows from the other pieces."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from benchmarks.harness import cost_model, results
from benchmarks.harness.contenders import CHANGES, NAMES
from benchmarks.harness.published import EPOCH_RATIOS
from benchmarks.harness.results import Piece
from benchmarks.harness.rows.epoch_time import (
    AboutEpoch,
    CostModel,
    EpochJob,
    EpochRow,
    EpochTime,
    MeasuredEpoch,
    MeasuredMemory,
    MeasuredParts,
    PeakMemory,
    Portions,
    TimedEpoch,
)

BATCH, WORKERS = 32, 2
WARM_UP, PART_WARM_UP = 3, 8  # steps that are not counted; more in parts of an epoch, none of which begins a training
MANY = 100_000  # utterances whose epoch is measured in parts
MODELS = {"clc": "CLC", "bert": "BERT"}
OURS = ("sgd", "edp", "groups", "example", "loop")
Times = dict[tuple[int, int], float]  # seconds, by pass and step


def in_portions(own: Times, sgd: Times) -> Portions:
    """Mean seconds of a step and ratio to SGD on the same steps, for each pass; of a single one for its thirds.

    Example:
        >>> in_portions({(0, 3): 2.0, (1, 3): 6.0}, {(0, 3): 1.0, (1, 3): 2.0, (1, 4): 9.0})
        {'steps': 1, 'passes': 2, 'step_seconds': [2.0, 6.0], 'ratios': [2.0, 3.0]}
    """
    passes = [[key for key in own if key[0] == turn] for turn in sorted({turn for turn, _ in own})]
    portions = passes
    if len(passes) == 1 and len(passes[0]) >= 3:
        third = len(passes[0]) / 3
        portions = [passes[0][round(i * third) : round((i + 1) * third)] for i in range(3)]
    seconds = [statistics.fmean(own[key] for key in portion) for portion in portions]
    plain = [statistics.fmean(sgd[key] for key in portion) for portion in portions]
    return {
        "steps": len(passes[0]),
        "passes": len(passes),
        "step_seconds": seconds,
        "ratios": [one / other for one, other in zip(seconds, plain, strict=True)],
    }


def summarise(model: str, corpus: str, is_peer: bool, found: MeasuredEpoch, steps: int | None = None) -> EpochRow:
    """A row of the table; ``steps`` makes it one of a larger corpus whose steps cost the same."""
    steps = steps or found["steps"]
    plain = _epoch(found["times"]["sgd"], steps)[0]
    contenders: dict[str, TimedEpoch] = {}
    for name, one in found["times"].items():
        is_whole = one["steps"] == steps
        seconds, ratio = _epoch(one, steps)
        epochs = [plain * ratio / seconds * steps * part for part in one["step_seconds"]]
        contenders[name] = {
            "seconds": plain * ratio,  # as on the steps that SGD made
            "spread": [min(epochs), max(epochs)],
            "ratio": ratio,
            "ratio_spread": [min(one["ratios"]), max(one["ratios"])],
            "measured_steps": one["steps"],
            "repetitions": one["passes"],
            "is_extrapolated": not is_whole,
        }
    paper = EPOCH_RATIOS.get((model, corpus)) if not is_peer else None
    return {
        "model": model, "corpus": corpus, "is_peer": is_peer, "changes": CHANGES[model] if is_peer else "",
        "parameters": found["parameters"], "utterances": found["utterances"], "steps": steps,
        "processor": found["machine"]["processor"],
        "paper": None if paper is None else dict(zip(("dp_sgd", "edp"), paper, strict=True)), "contenders": contenders,
    }  # fmt: skip


def _epoch(one: Portions, steps: int) -> tuple[float, float]:
    """Seconds and ratio of a pass: the median of passes, or the whole of a single one, whose thirds are known."""
    plain = [own / ratio for own, ratio in zip(one["step_seconds"], one["ratios"], strict=True)]
    if one["passes"] > 1:
        return steps * statistics.median(one["step_seconds"]), statistics.median(one["ratios"])
    seconds = statistics.fmean(one["step_seconds"])
    return steps * seconds, seconds / statistics.fmean(plain)


def whole_epochs(pieces: Iterable[MeasuredEpoch]) -> list[MeasuredEpoch]:
    """Puts parts of one epoch together; each is a portion of it."""
    rows: dict[str, list[MeasuredEpoch]] = {}
    for piece in pieces:
        rows.setdefault(json.dumps(piece["about"]), []).append(piece)
    return [_joined(parts) if len(parts) > 1 else parts[0] for parts in rows.values()]


def _joined(parts: Sequence[MeasuredEpoch]) -> MeasuredEpoch:
    times: dict[str, Portions] = {}
    for name in parts[0]["times"]:
        own = [part["times"][name] for part in parts]
        seconds, ratios = zip(*(_epoch(one, 1) for one in own), strict=True)
        steps = sum(one["steps"] for one in own)
        times[name] = {"steps": steps, "passes": 1, "step_seconds": list(seconds), "ratios": list(ratios)}
    processors = ", ".join(dict.fromkeys(part["machine"]["processor"] for part in parts))
    return {**parts[0], "times": times, "machine": {"processor": processors}}


def figures(pieces: Mapping[str, Piece], wanted: Mapping[str, EpochJob]) -> EpochTime:
    """Tables and cost model, as far as the wanted pieces are measured; ``wanted`` has their settings."""
    there = {name: pieces[name] for name in wanted if name in pieces}
    missing = results.missing(there, wanted)
    timed = whole_epochs(cast(MeasuredEpoch, piece) for piece in there.values() if "times" in piece)
    rows = [summarise(**piece["about"], found=piece) for piece in timed]
    rows += [_of_ten_times_as_many(piece) for piece in timed if piece["utterances"] == MANY]
    models: dict[str, CostModel] = {}
    for model in MODELS:
        parts = _of_workers(there, model)
        if {1, 2, 3} <= parts.keys():
            models[model] = cost_model.fit(parts)
    return {
        "is_complete": not missing,
        "missing": missing,
        "seed": 0,
        "workers": WORKERS,
        "batch": next((settings["batch"] for settings in wanted.values()), BATCH),
        "names": NAMES,
        "rows": sorted(rows, key=lambda row: (row["is_peer"], row["model"] != "clc", row["utterances"])),
        "memory": _memory(there.values()),
        "cost_model": models,
    }


def _of_ten_times_as_many(piece: MeasuredEpoch) -> EpochRow:
    """An epoch over a corpus that was not measured: its steps cost the same."""
    steps = math.ceil(10 * MANY / (BATCH * WORKERS))
    about: AboutEpoch = {**piece["about"], "corpus": generated(10 * MANY)}
    row = summarise(**about, found=piece, steps=steps)
    row["utterances"] = 10 * MANY
    return row


def _memory(pieces: Iterable[Piece]) -> list[PeakMemory]:
    """Peaks, and their ratios to SGD's."""
    measured = [cast(MeasuredMemory, piece) for piece in pieces if "peak_mib" in piece]
    plain: dict[tuple[str, bool], float] = {}
    for piece in measured:
        about = piece["about"]
        if about["contender"] == "sgd":
            plain[about["model"], about["is_peer"]] = piece["peak_mib"]
    rows: list[PeakMemory] = []
    for piece in measured:
        about, peak = piece["about"], piece["peak_mib"]
        ratio = peak / plain.get((about["model"], about["is_peer"]), peak)
        rows.append({**about, "peak_mib": peak, "ratio": ratio})
    return rows


def _of_workers(pieces: Mapping[str, Piece], model: str) -> dict[int, MeasuredParts]:
    """The parts of a step, by the number of workers."""
    found: dict[int, MeasuredParts] = {}
    for piece in pieces.values():
        if "whole_ms" in piece and piece["about"]["model"] == model:
            found[piece["about"]["workers"]] = cast(MeasuredParts, piece)
    return found


def generated(utterances: int) -> str:
    """The name of a generated corpus.

    Example:
        >>> generated(10_000), generated(1200)
        ('generated 10^4', 'generated 1200')
    """
    power = round(math.log10(utterances))
    return f"generated 10^{power}" if 10**power == utterances else f"generated {utterances}"
