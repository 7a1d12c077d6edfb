"""Sections on what else costs time: the accountant, data, everything in small."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.harness.rows.accounting import AccountedEpsilon, Accounting, Calibrated, GrowingEpsilon
from benchmarks.harness.rows.bench import Bench, BenchRow
from benchmarks.harness.rows.data_loading import DataLoading, EpochOfData, HeldData
from benchmarks.harness.settings import DECAY, DELTA, EPOCHS, LOADED_BATCH, STEPS, TARGET
from benchmarks.report.blocks import Block, Table, Text, number
from benchmarks.report.drawing import shown


class OfLibrary(NamedTuple):
    """A line of a table: ε by one library."""

    name: str
    epsilon: float
    seconds: float


def accounting(found: Accounting) -> Iterator[Block]:
    """Speed and tightness of ε."""
    exact, theirs = found["without_sampling"], found["dp_accounting"]
    yield Table[AccountedEpsilon](
        f"ε of a whole training: {EPOCHS} epochs of {STEPS} steps, linear decay with τ = {DECAY.tau:g}, δ = {DELTA:g}. "
        "The distance is relative, to a grid with a sixteenth of the tolerance. Without sampling (q = 1) it is exact.",
        found["epsilon"],
        {
            "q": lambda row: f"{row['rate']:g}",
            "z of the first epoch": lambda row: f"{row['noise']:g}",
            "ε": lambda row: f"{row['epsilon']:.6g}",
            "seconds": lambda row: number(row["seconds"], 3),
            "above the finer grid": lambda row: f"{row['above']:.1e}",
        },
    )
    yield Table[Calibrated](
        f"Noise for ε = {TARGET:g} in the same training.",
        found["calibration"],
        {
            "q": lambda row: f"{row['rate']:g}",
            "z of the first epoch": lambda row: f"{row['noise']:.6g}",
            "its ε": lambda row: f"{row['epsilon']:.6g}",
            "seconds": lambda row: number(row["seconds"], 3),
        },
    )
    yield Text(
        f"Without sampling, ε of {EPOCHS} epochs takes {exact['epsilon_ms']:.3f} ms (the slowest of 201: "
        f"{exact['epsilon_slowest_ms']:.3f} ms), calibration {exact['calibrate_ms']:.2f} ms."
    )
    yield Table[GrowingEpsilon](
        f"ε after each of {EPOCHS} epochs, with what was composed before and from scratch.",
        found["growth"],
        {
            "q": lambda row: f"{row['rate']:g}",
            "seconds for all": lambda row: number(row["seconds"]),
            "slowest": lambda row: number(row["slowest"], 3),
            "seconds from scratch": lambda row: number(row["seconds_anew"]),
            "slowest from scratch": lambda row: number(row["slowest_anew"], 3),
            "largest difference": lambda row: f"{row['difference']:.1e}",
        },
    )
    yield Table[OfLibrary](
        f"The same by dp-accounting at its default discretisation: q = {theirs['rate']:g}, {theirs['levels']} epochs.",
        [
            OfLibrary("dp-accounting", theirs["dp_accounting_epsilon"], theirs["dp_accounting_seconds_per_level"]),
            OfLibrary("edpsgd", theirs["epsilon"], theirs["seconds_per_level"]),
        ],
        {
            "library": lambda row: row.name,
            "ε": lambda row: f"{row.epsilon:.6g}",
            "seconds per noise level": lambda row: number(row.seconds, 3),
        },
    )


# ---------------------------------------------------------------- data


def data_loading(found: DataLoading) -> Iterator[Block]:
    """Drawing and assembling batches, and the memory of what they are drawn from."""
    models = {"clc": found["clc"], "bert": found["bert"]}
    yield Table[tuple[str, EpochOfData]](
        f"One epoch of eDP-SGD over {found['examples']} generated utterances on {found['workers']} Horovod workers, "
        f"batch {LOADED_BATCH} each, models of full size.",
        [(model, one["epoch"]) for model, one in models.items()],
        {
            "model": lambda row: shown(row[0]),
            "epoch, seconds": lambda row: number(row[1]["seconds"], 0),
            "drawing and assembling batches, seconds": lambda row: number(row[1]["data_seconds"], 1),
            "share": lambda row: f"{row[1]['share']:.2%}",
        },
    )
    yield Table[tuple[str, HeldData]](
        "Memory of a process that holds the utterances ready for the model, in MB.",
        [(model, row) for model, one in models.items() for row in one["memory"]],
        {
            "model": lambda row: shown(row[0]),
            "utterances": lambda row: str(row[1]["examples"]),
            "token arrays": lambda row: number(row[1]["arrays"] / 1e6, 1),
            "grown": lambda row: number(row[1]["grown"] / 1e6, 1),
            "at most, while reading": lambda row: number(row[1]["peak"] / 1e6, 1),
        },
    )
    for model, one in models.items():
        first, last = one["memory"][0], one["memory"][-1]
        grown, arrays = (last["grown"] - first["grown"]) / 1e6, (last["arrays"] - first["arrays"]) / 1e6
        yield Text(f"{shown(model)}, from the smallest to the largest: {grown:.1f} MB for {arrays:.1f} MB of arrays.")


# ---------------------------------------------------------------- everything in small


def bench(found: Bench) -> Iterator[Block]:
    """Reduced versions of the benchmarks."""
    yield Table[BenchRow](
        "Minutes of the reduced benchmarks, on generated data.",
        found["rows"],
        {"benchmark": lambda row: row["name"], "minutes": lambda row: number(row["minutes"], 1)},
    )
