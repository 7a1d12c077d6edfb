"""Sections on time and memory: epochs, peers, more workers, single steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks.harness import step_rows
from benchmarks.harness.contenders import SIZES
from benchmarks.harness.epoch_rows import PART_WARM_UP, WARM_UP
from benchmarks.harness.rows.epoch_time import CheckedStep, EpochRow, EpochTime, PeakMemory, PredictedStep, TimedEpoch
from benchmarks.harness.rows.step_time import StepRow, StepTime, TimedStep
from benchmarks.report import plots
from benchmarks.report.blocks import Block, Plots, Table, Text, number, place, within
from benchmarks.report.drawing import shown
from edpsgd.per_example.engine import SELDOM

_ABOUT_EPOCHS = (
    "{workers} Horovod workers, one thread each, Adam, ledger on disk; of the real corpora the 45 % that are for "
    "training. Assembling batches is not in the times. The figure is the median of three passes, each the first epoch "
    "of another training; of 10^5 utterances one pass in parts, each a process of its own; of what made some of the "
    "steps one pass and its thirds. 10^6 utterances have the word table of 10^5. K is the number of micro-batches of a "
    f"worker in a step. Single examples and micro-batches in one pass compare some batches with autograd, most of them "
    f"at the beginning: after {WARM_UP} steps that are not counted, or {PART_WARM_UP} in parts, these checks are in "
    "the figures. The paper's are from eight GPUs. The layers of CLC and BERT have the sizes of the paper, their "
    "tables the words of the training set (BERT: its own pieces), which are learned; both end in a CRF."
)
_ABOUT_PEERS = (
    "SGD and ours train torch's LSTM, so that Opacus's figures for CLC hold the cost of its own. Opacus knows no "
    "Horovod: each worker adds its share of the noise, and Horovod averages."
)


class OfEpoch(NamedTuple):
    """A line of a table: one contender's epoch over one corpus."""

    row: EpochRow
    name: str
    epoch: TimedEpoch


class OfStep(NamedTuple):
    """A line of a table: one contender's steps on one shape of batches."""

    row: StepRow
    name: str
    step: TimedStep


class OfParts(NamedTuple):
    """A line of a table: where the time of one contender's step goes."""

    row: StepRow
    name: str
    parts: dict[str, float]


# ---------------------------------------------------------------- epochs


def epoch_time(found: EpochTime) -> Iterator[Block]:
    """Table 2 of the paper, and the same in seconds."""
    rows = [row for row in found["rows"] if not row["is_peer"]]
    about = f"{found['workers']} workers, {found['batch']} utterances per worker and step, layers of the paper's sizes"
    missing = found.get("missing", [])
    not_complete = f" Not complete, not measured with these settings: {'; '.join(missing)}." if missing else ""
    yield Text(_ABOUT_EPOCHS.format(workers=found["workers"]))
    yield Plots(
        f"Time of an epoch over that of plain training, {about}. Filled marks are ours, with the spread over "
        "repetitions, or over the parts of one; of pale ones some steps were measured, and the epoch is extrapolated; "
        "hollow ones are the paper's. * is a model that was changed until the peers accept it.",
        plots.multipliers(found),
    )
    yield Table[EpochRow](
        f"Table 2. Time of an epoch over that of plain training, {about}: in brackets the spread over "
        f"repetitions, or over the parts of one; ≈ is extrapolated from some of the steps.{not_complete}",
        rows,
        {
            "model, corpus": place,
            "utterances": lambda row: f"{row['utterances']:,}",
            "SGD, seconds": _seconds_of_sgd,
            **_ratio_columns(rows, found["names"]),
            "paper, eDP-SGD": lambda row: number((row["paper"] or {}).get("edp")),
            "paper, DP-SGD": lambda row: number((row["paper"] or {}).get("dp_sgd")),
            "processor": lambda row: row["processor"],
        },
    )
    yield Table[OfEpoch](
        "Epochs in seconds, with the spread over repetitions, or over the parts of one.",
        _epochs(found["rows"], found["names"]),
        {
            "model, corpus": lambda one: place(one.row),
            "algorithm": lambda one: one.name,
            "parameters": lambda one: f"{one.row['parameters']:,}",
            "seconds": lambda one: _sign(one.epoch) + within(one.epoch["seconds"], one.epoch["spread"], 1),
            "steps": lambda one: str(one.row["steps"]),
            "of them measured": lambda one: str(one.epoch["measured_steps"]),
            "repetitions": lambda one: str(one.epoch["repetitions"]),
        },
    )


def _ratio_columns(rows: list[EpochRow], names: dict[str, str]) -> dict[str, Callable[[EpochRow], str]]:
    """A column for each contender that is in some row."""
    used = {name for row in rows for name in row["contenders"]} - {"sgd"}
    return {title: _ratio_to_sgd(name) for name, title in names.items() if name in used}


def _ratio_to_sgd(name: str) -> Callable[[EpochRow], str]:
    """What to show of a contender in a row."""

    def show(row: EpochRow) -> str:
        one = row["contenders"].get(name)
        return "–" if one is None else _ratio(one)

    return show


def _ratio(one: TimedEpoch) -> str:
    return _sign(one) + within(one["ratio"], one["ratio_spread"])


def _sign(one: TimedEpoch) -> str:
    return "≈" if one["is_extrapolated"] else ""


def _seconds_of_sgd(row: EpochRow) -> str:
    sgd = row["contenders"]["sgd"]
    return _sign(sgd) + number(sgd["seconds"], 1)


def _epochs(rows: list[EpochRow], names: dict[str, str]) -> list[OfEpoch]:
    return [OfEpoch(row, names[name], one) for row in rows for name, one in row["contenders"].items()]


def peers(found: EpochTime) -> Iterator[Block]:
    """Other libraries: time, memory, and what had to change for them."""
    names, rows = found["names"], [row for row in found["rows"] if row["is_peer"]]
    yield Table[OfEpoch](
        "Time of an epoch over plain training's on the same model, which was changed until the peers accept it; ≈ is "
        "extrapolated from some of the steps.",
        [one for one in _epochs(rows, names) if one.name != names["sgd"]],
        {
            "model, corpus": lambda one: place(one.row),
            "algorithm": lambda one: one.name,
            "time over SGD's": lambda one: _ratio(one.epoch),
            "steps measured": lambda one: str(one.epoch["measured_steps"]),
            "processor": lambda one: one.row["processor"],
        },
    )
    changes = {f"{place(row)}: {row['changes']}" for row in rows if row["changes"]}
    if changes:
        yield Text(f"What had to change: {'; '.join(sorted(changes))}. {_ABOUT_PEERS}")
    yield Table[PeakMemory](
        "Memory of a worker at its peak, a process with Python, libraries and data; * is a model that was changed for "
        "the peers.",
        found["memory"],
        {
            "model": place,
            "algorithm": lambda one: names.get(one["contender"], one["contender"]),
            "peak, MiB": lambda one: number(one["peak_mib"], 0),
            "over SGD's": lambda one: number(one["ratio"]),
        },
    )


# ---------------------------------------------------------------- more workers


def more_workers(found: EpochTime) -> Iterator[Block]:
    """The cost model: its parts, how it fits, what it predicts."""
    models = found["cost_model"]
    for model, about in models.items():
        parts = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in about["parts_ms"].items())
        yield Text(f"{shown(model)}, {about['parameters']:,} parameters, parts of a step in ms: {parts}.")
    for text in dict.fromkeys(about["text"] for about in models.values()):
        yield Text(text)
    caption = "Time of a step over plain training's. Lines are a prediction, only the marks were measured."
    yield Plots(caption, plots.scaling(found) if models else [])
    yield Table[tuple[str, CheckedStep]](
        "Time of a step as measured, and as the model has it.",
        [(model, one) for model, about in models.items() for one in about["measured"]],
        {
            "model": lambda row: shown(row[0]),
            "workers": lambda row: str(row[1]["workers"]),
            "algorithm": lambda row: found["names"][row[1]["contender"]],
            "measured, ms": lambda row: number(row[1]["ms"], 1),
            "by the model, ms": lambda row: number(row[1]["predicted_ms"], 1),
            "off by": lambda row: f"{row[1]['predicted_ms'] / row[1]['ms'] - 1:+.0%}",
        },
    )
    yield Table[tuple[str, PredictedStep]](
        "Prediction, not a measurement: time of a step with more workers.",
        [(model, one) for model, about in models.items() for one in about["predicted"]],
        {
            "model": lambda row: shown(row[0]),
            "workers": lambda row: str(row[1]["workers"]),
            "SGD, ms": lambda row: number(row[1]["sgd_ms"], 1),
            "eDP-SGD, ms": lambda row: number(row[1]["edp_ms"], 1),
            "ratio": lambda row: number(row[1]["ratio"], 3),
        },
    )


# ---------------------------------------------------------------- steps

_ABOUT_STEPS = (
    f"{step_rows.WORKERS} workers with one thread each, Adam, the ledger on disk. Ratios compare steps of the same "
    "round. With checks: the gradients of units are compared with autograd in some of the first steps, and then in "
    f"one of {SELDOM}. Memory is the peak of a worker, with Python and libraries. BERT has the paper's configuration "
    f"and {SIZES['bert'].words} word pieces, CLC learns {SIZES['clc'].words} word vectors; both "
    f"end in a CRF. * is a model that was changed for the peers: BERT without CRF, CLC without CRF and characters. "
    f"Slow trainings have {step_rows.SLOW_ROUNDS} steps."
)


def step_time(found: StepTime) -> Iterator[Block]:
    """Single steps, and where their time goes."""
    missing = ", ".join(found.get("missing", []))
    not_complete = f" Not complete, not measured with this code: {missing}." if missing else ""
    yield Text(_ABOUT_STEPS)
    yield Table[OfStep](
        f"Time of a training step and memory at its peak: median, in brackets the quartiles.{not_complete}",
        _steps(found),
        {
            "model": lambda one: place(one.row),
            "parameters": lambda one: f"{one.row['parameters']:,}",
            "tokens": lambda one: str(one.row["tokens"]),
            "batch per worker": lambda one: str(one.row["size"]),
            "algorithm": lambda one: one.name,
            "ms": lambda one: within(one.step["milliseconds"][1], one.step["milliseconds"], 1),
            "over SGD's": lambda one: within(one.step["ratio_to_sgd"][1], one.step["ratio_to_sgd"]),
            "with checks": lambda one: number(one.step.get("ratio_with_checks")),
            "steps": lambda one: str(one.step["steps"]),
            "peak, MiB": lambda one: number(one.step.get("peak_mib"), 0),
            "memory over SGD's": lambda one: number(one.step.get("memory_ratio")),
        },
    )
    rows = _parts(found)
    used = dict.fromkeys(part for one in rows for part in one.parts)
    yield Table[OfParts](
        "Where the time of a step goes, in ms.",
        rows,
        {
            "model": lambda one: place(one.row),
            "tokens": lambda one: str(one.row["tokens"]),
            "batch per worker": lambda one: str(one.row["size"]),
            "algorithm": lambda one: one.name,
            **{step_rows.PARTS[part]: _milliseconds_of(part) for part in used},
        },
    )


def _steps(found: StepTime) -> list[OfStep]:
    names = found["names"]
    return [OfStep(row, names.get(name, name), one) for row in found["rows"] for name, one in row["contenders"].items()]


def _parts(found: StepTime) -> list[OfParts]:
    names = found["names"]
    return [
        OfParts(row, names.get(name, name), parts)
        for row in found["rows"]
        for name, parts in row.get("parts_ms", {}).items()
    ]


def _milliseconds_of(part: str) -> Callable[[OfParts], str]:
    """What to show of a part of a step."""
    return lambda one: number(one.parts.get(part), 1)
