"""Sections on privacy and utility: Table 1 and the frontier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from benchmarks.harness.rows.tradeoff import FrontierPoint, Published, TableRow, Tradeoff
from benchmarks.report import plots
from benchmarks.report.blocks import Block, Plots, Table, Text, epsilon, mean, number, place, within
from benchmarks.report.conditions import ONE_PASS, SECRET
from benchmarks.report.plots import unit_name

# ---------------------------------------------------------------- Table 1

_ABOUT_MODELS = "BERT is MiniLM, CLC has the vectors of its word pieces, frozen; random split, another for each seed."
_SEARCH = (
    "Of the paper's grid, z0 was searched by powers of ten with C = 1, and with C = 5 where a multiplier was not "
    "borne; other norms only here and there, as a smaller one is little more than a common factor where most "
    "micro-batches are clipped, which Adam undoes. For each decay, the smallest τ was sought at which the next larger "
    "z0 is borne; where none is, the smallest of all was tried with the same z0, so that such rows are close to no "
    "decay. The choice is the one with the most noise whose SER on validation data is at most 5 % above plain "
    "training's, and where none is, the one with the lowest SER, marked †. Validation sets are small, and 5 % is less "
    "than what chance makes of them."
)


def tradeoff(found: Tradeoff) -> Iterator[Block]:
    """Table 1 of the paper, its decays and its attack."""
    rows, delta = found["table"], found["delta"]
    is_raw = any(row["settings"].get("layer_scaling") == "raw" for row in rows)
    raw_scales = " Raw layer scales of the first step are not covered by any ε here." if is_raw else ""
    not_complete = " Not complete: rows are missing, and where † stands, the search may have only begun."
    yield Table[TableRow](
        f"Table 1. The published algorithm: SER, AUC of the shadow attack and ε at δ = {delta:g} for replacing one "
        f"utterance, K = {found['micro_batches']} micro-batches in one process, forward pass in "
        f"bf16{_about_precision(rows)}. {_ABOUT_MODELS} {_about_seeds(rows)} In brackets behind AUC its 95 % interval. "
        "ε is as the printed multiplier claims it, and as the noise really was; zCDP is the paper's bound, exact the "
        f"tight one. Seeds are public here, so ε is that of the same training with secret ones, {ONE_PASS}. It does "
        "not cover that settings were chosen on validation data, as told below. The paper's SER and AUC are computed "
        f"from the changes that it prints. {_about_delta(found)}{raw_scales}"
        + ("" if found.get("is_complete", True) else not_complete),
        rows,
        {
            "model, corpus": place,
            "decay": _decay,
            "test SER": lambda row: mean([run["test_ser"] for run in row["runs"]]),
            "paper's SER": lambda row: number(row["paper"]["ser"] if row["paper"] else None, 1),
            "AUC": _auc,
            "paper's AUC": lambda row: number(row["paper"]["auc"] if row["paper"] else None, 3),
            "ε really, exact": lambda row: _largest_epsilon(row, "exact"),
            "ε really, zCDP": lambda row: _largest_epsilon(row, "zcdp"),
            "ε claimed, exact": lambda row: _largest_epsilon(row, "claimed_exact"),
            "ε claimed, zCDP": lambda row: _largest_epsilon(row, "claimed_zcdp"),
            "paper's ε": lambda row: _claim(row["paper"]),
            "noise, real over printed": _smallest_share,
            "epochs": lambda row: str(row["settings"]["epochs"]),
            "C": lambda row: f"{row['settings'].get('clip_norm', '–')}",
            "z": _multiplier,
            "settings tried": lambda row: str(row["tried"]),
            "seeds": lambda row: str(len(row["runs"])),
            "validation SER": lambda row: mean([run["validation_ser"] for run in row["runs"]]),
            "processor": lambda row: row["processor"],
        },
    )
    yield Text(_SEARCH)
    example = ", ".join(dict.fromkeys(place(row) for row in plots.example_of_decays(found)))
    yield Plots(
        f"Noise that was really added and ε that was spent, by epoch, with the settings of Table 1 for {example}: at "
        f"δ = {delta:g}, for replacing one utterance, on the conditions that stand there. * was not trained: it is "
        "what the steepest decays of the paper would have with the z0 of no decay.",
        plots.decays(found),
    )
    yield Plots(
        "ROC curves of the shadow attack, first seed. Of the private trainings, the one that it does best on.",
        plots.roc(found),
    )


def _about_precision(rows: Sequence[TableRow]) -> str:
    """Which rows were made on processors without bf16, and which were chosen among both precisions."""
    others = [_name(row) for row in rows if row["settings"]["precision"] != "bf16"]
    mixed = [_name(row) for row in rows if len(row["precisions_tried"]) > 1]
    named = {"in fp32": others, "chosen among some in bf16 and some in fp32": mixed}
    texts = [f"{text}: {', '.join(rows)}" for text, rows in named.items() if rows]
    return f" ({'; '.join(texts)})" if texts else ""


def _name(row: TableRow) -> str:
    return f"{row['model']} {row['task']} {row['decay']}"


def _about_seeds(rows: Sequence[TableRow]) -> str:
    """How many there are, and what is made of several."""
    if all(len(row["runs"]) == 1 for row in rows):
        return "One seed for all rows."
    return "Where there are several seeds: means, with the lowest and highest SER, and the bounds of AUC over all."


def _about_delta(found: Tradeoff) -> str:
    """How δ compares with one over the number of utterances."""
    sizes = {row["task"]: row["settings"]["utterances"] for row in found["table"]}
    above = [f"{task} ({size})" for task, size in sizes.items() if found["delta"] * size > 1]
    if not above:
        return ""
    return f"δ is the paper's, and above one over the number of training utterances of {', '.join(above)}."


def _decay(row: TableRow) -> str:
    decay = str(row["settings"].get("decay", row["decay"])).replace(":", ", τ = ")
    return decay if row.get("is_allowed", True) else f"{decay} †"


def _auc(row: TableRow) -> str:
    found = [run["auc"] for run in row["runs"] if run["auc"]]
    if not found:
        return "–"
    bounds = [*(one["low"] for one in found), *(one["high"] for one in found)]
    return within(sum(one["value"] for one in found) / len(found), bounds, 3)


def _largest_epsilon(row: TableRow, kind: Literal["exact", "zcdp", "claimed_exact", "claimed_zcdp"]) -> str:
    """Of all seeds."""
    costs = [run["epsilon"][kind] for run in row["runs"] if run["epsilon"]]
    return epsilon(max(costs, default=None))


def _smallest_share(row: TableRow) -> str:
    """The multiplier that the noise really had, over the printed one; of all seeds."""
    shares = [run["real_share"] for run in row["runs"] if run["real_share"]]
    return f"{min(shares):.3g}" if shares else "–"


def _multiplier(row: TableRow) -> str:
    z = row["settings"].get("noise_multiplier")
    return "–" if z is None else f"{z:g}"


def _claim(paper: Published | None) -> str:
    if paper is None or paper["log10_epsilon"] is None:
        return "–"
    return f"10^{paper['log10_epsilon']:g}"


# ---------------------------------------------------------------- the frontier


def frontier(found: Tradeoff) -> Iterator[Block]:
    """What an ε costs, by the unit of clipping."""
    about = found["frontier"]
    if about is None:
        yield Text("Not measured yet: `python -m benchmarks.tradeoff` measures it.", "missing")
        return
    size = f"{about['layers']} layer of {about['hidden']}"
    where = f"{place(about)} ({size}), {about['epochs']} epochs, batch {about['batch']}"
    plain = f"plain training has {about['plain']['test_ser']:.2f}" if about["plain"] else "plain training was not run"
    yield Plots(
        f"SER against ε for micro-batches (K per worker) and single examples. {where}; one seed. ε is at "
        f"δ = {about['delta']:g}, for adding or removing one utterance, on the conditions of the table below.",
        plots.frontier(about),
    )
    yield Table[FrontierPoint](
        f"SER at ε, δ = {about['delta']:g}; {plain}. {where}, {about['utterances']} utterances, hash split, calibrated "
        f"noise, Poisson sampling, one seed; `{about['command']}`. K is the number of micro-batches on each of two "
        f"workers, here 2·K in one process. ε is for adding or removing one utterance, {SECRET}; for single examples "
        f"also {ONE_PASS}. All units have the recipe for single examples, which may not be the best for larger ones; ε "
        f"does not cover its choice. What is not there was not run, as with more ε the SER is above "
        f"{about['useless']:g} already.",
        about["points"],
        {
            "unit": lambda one: unit_name(one["unit"]),
            "ε": lambda one: epsilon(one["epsilon"]),
            "SER": lambda one: number(one["test_ser"]),
            "intent accuracy, %": lambda one: number(one["test_intent_accuracy"]),
        },
    )
