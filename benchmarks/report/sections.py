"""The sections of the report: what each shows of its results."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.audits import NEIGHBOURS, VERDICT
from benchmarks.harness.results import epsilon
from benchmarks.membership import intervals
from benchmarks.report import plots as plots
from benchmarks.report.blocks import (
    Block,
    Found,
    Plots,
    Section,
    Table,
    Text,
    command,
    interval,
    mean,
    number,
    place,
    within,
)
from benchmarks.report.epoch_page import ABOUT_PEERS
from benchmarks.report.plots import audit_name, shown, unit_name
from benchmarks.report.tradeoff_page import ABOUT_MODELS, SEARCH, about_delta, about_precision, about_seeds

_SECRET = "on condition that the seed is secret, which it is not here"
_ONE_PASS = "on condition that examples lie in all batches as in those that were compared with autograd"


def epoch_time(found: Found) -> Iterator[Block]:
    """Table 2 of the paper, and the same in seconds."""
    names, rows = found["names"], [row for row in found["rows"] if not row["is_peer"]]
    others = [name for name in names if name != "sgd" and any(name in row["contenders"] for row in rows)]
    about = f"{found['workers']} workers, {found['batch']} utterances per worker and step, layers of the paper's sizes"
    missing = found.get("missing", ())
    yield Plots(
        f"Time of an epoch over that of plain training, {about}. Filled marks are ours, with the spread over "
        "repetitions, or over the parts of one; of pale ones some steps were measured, and the epoch is extrapolated; "
        "hollow ones are the paper's. * is a model that was changed until the peers accept it.",
        plots.multipliers(found),
    )
    yield Table(
        f"Table 2. Time of an epoch over that of plain training, {about}: in brackets the spread over "
        "repetitions, or over the parts of one; ≈ is extrapolated from some of the steps."
        + (f" Not measured with these settings: {'; '.join(missing)}." if missing else ""),
        rows,
        {
            "model, corpus": place,
            "utterances": lambda row: f"{row['utterances']:,}",
            "SGD, seconds": lambda row: (
                _sign(row["contenders"]["sgd"]) + number(row["contenders"]["sgd"]["seconds"], 1)
            ),
            **{names[name]: lambda row, name=name: _ratio(row["contenders"].get(name)) for name in others},
            "paper, eDP-SGD": lambda row: number((row["paper"] or {}).get("edp")),
            "paper, DP-SGD": lambda row: number((row["paper"] or {}).get("dp_sgd")),
            "processor": lambda row: row["processor"],
        },
    )
    yield Table(
        "Epochs in seconds, with the spread over repetitions, or over the parts of one.",
        [(row, names[name], one) for row in found["rows"] for name, one in row["contenders"].items()],
        {
            "model, corpus": lambda row: place(row[0]),
            "algorithm": lambda row: row[1],
            "parameters": lambda row: f"{row[0]['parameters']:,}",
            "seconds": lambda row: _sign(row[2]) + within(row[2]["seconds"], row[2]["spread"], 1),
            "steps": lambda row: str(row[0]["steps"]),
            "of them measured": lambda row: str(row[2]["measured_steps"]),
            "repetitions": lambda row: str(row[2]["repetitions"]),
        },
    )


def _sign(one: Found) -> str:
    return "≈" if one["is_extrapolated"] else ""


def _ratio(one: Found | None) -> str:
    return "–" if one is None else _sign(one) + within(one["ratio"], one["ratio_spread"])


def peers(found: Found) -> Iterator[Block]:
    """Other libraries: time, memory, and what had to change for them."""
    names, rows = found["names"], [row for row in found["rows"] if row["is_peer"]]
    yield Table(
        "Time of an epoch over plain training's on the same model, which was changed until the peers accept it; ≈ is "
        "extrapolated from some of the steps.",
        [(row, names[name], one) for row in rows for name, one in row["contenders"].items() if name != "sgd"],
        {
            "model, corpus": lambda row: place(row[0]),
            "algorithm": lambda row: row[1],
            "time over SGD's": lambda row: _ratio(row[2]),
            "steps measured": lambda row: str(row[2]["measured_steps"]),
        },
    )
    changes = {f"{place(row)}: {row['changes']}" for row in rows if row["changes"]}
    if changes:
        yield Text(f"What had to change: {'; '.join(sorted(changes))}. {ABOUT_PEERS}")
    yield Table(
        "Memory of a worker at its peak; * is a model that was changed for the peers.",
        found["memory"],
        {
            "model": place,
            "algorithm": lambda one: names.get(one["contender"], one["contender"]),
            "peak, MiB": lambda one: number(one["peak_mib"], 0),
            "over SGD's": lambda one: number(one["ratio"]),
        },
    )


def more_workers(found: Found) -> Iterator[Block]:
    """The cost model: its parts, how it fits, what it predicts."""
    models = found["cost_model"]
    for model, about in models.items():
        parts = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in about["parts_ms"].items())
        yield Text(f"{shown(model)}, {about['parameters']:,} parameters, parts of a step in ms: {parts}.")
    for text in dict.fromkeys(about["text"] for about in models.values()):
        yield Text(text)
    caption = "Time of a step over plain training's. Lines are a prediction, only the marks were measured."
    yield Plots(caption, plots.scaling(found) if models else [])
    yield Table(
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
    yield Table(
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


def step_time(found: Found) -> Iterator[Block]:
    """Single steps, and where their time goes."""
    yield Table(
        "Time of a training step and memory at its peak: median, in brackets the quartiles. With checks: the gradients "
        "of units are compared with autograd in one step of many."
        + ("" if found.get("is_complete", True) else " Not complete: rows are missing."),
        [(row, name, one) for row in found["rows"] for name, one in row["contenders"].items()],
        {
            "model": lambda row: place(row[0]),
            "tokens": lambda row: str(row[0]["tokens"]),
            "batch per worker": lambda row: str(row[0]["size"]),
            "algorithm": lambda row: found["names"].get(row[1], row[1]),
            "ms": lambda row: within(row[2]["milliseconds"][1], row[2]["milliseconds"], 1),
            "over SGD's": lambda row: within(row[2]["ratio_to_sgd"][1], row[2]["ratio_to_sgd"]),
            "with checks": lambda row: number(row[2].get("ratio_with_checks")),
            "steps": lambda row: str(row[2]["steps"]),
            "peak, MiB": lambda row: number(row[2].get("peak_mib"), 0),
            "memory over SGD's": lambda row: number(row[2].get("memory_ratio")),
        },
    )
    rows = [(row, name, parts) for row in found["rows"] for name, parts in (row.get("parts_ms") or {}).items()]
    names = dict.fromkeys(part for _, _, parts in rows for part in parts)
    yield Table(
        "Where the time of a step goes, in ms.",
        rows,
        {
            "model": lambda row: place(row[0]),
            "tokens": lambda row: str(row[0]["tokens"]),
            "batch per worker": lambda row: str(row[0]["size"]),
            "algorithm": lambda row: found["names"].get(row[1], row[1]),
            **{part: lambda row, part=part: number(row[2].get(part), 1) for part in names},
        },
    )


def tradeoff(found: Found) -> Iterator[Block]:
    """Table 1 of the paper, its decays and its attack."""
    rows, delta = found["table"], found["delta"]
    is_raw = any(row["settings"].get("layer_scaling") == "raw" for row in rows)
    yield Table(
        f"Table 1. SER, AUC of the shadow attack and ε at δ = {delta:g} for replacing one utterance, K = "
        f"{found['micro_batches']} micro-batches, forward pass in bf16{about_precision(found)}. {ABOUT_MODELS} "
        f"{about_seeds(found)} In brackets behind AUC its 95 % interval. ε is as the printed multiplier claims it, and "
        "as the noise really was; zCDP is the paper's bound, exact the tight one. Seeds are public here, so ε is that "
        f"of the same training with secret ones, {_ONE_PASS}. It does not cover that settings were chosen on "
        "validation data, as told below. The paper's SER and AUC are computed from the changes that it prints. "
        f"{about_delta(found)}"
        + (" Raw layer scales of the first step are not covered by any ε here." if is_raw else "")
        + ("" if found.get("is_complete", True) else " Not complete: where † stands, the search may have only begun."),
        rows,
        {
            "model, corpus": place,
            "decay": lambda row: (
                row["settings"].get("decay", row["decay"]).replace(":", ", τ = ")
                + ("" if row.get("is_allowed", True) else " †")
            ),
            "test SER": lambda row: mean([run["test_ser"] for run in row["runs"]]),
            "paper's SER": lambda row: number((row["paper"] or {}).get("ser"), 1),
            "AUC": _auc,
            "paper's AUC": lambda row: number((row["paper"] or {}).get("auc"), 3),
            **{head: lambda row, kind=kind: _spent(row, kind) for head, kind in _EPSILONS.items()},
            "paper's ε": lambda row: _claim(row["paper"]),
            "epochs": lambda row: str(row["settings"]["epochs"]),
            "C": lambda row: f"{row['settings'].get('clip_norm', '–')}",
            "z": lambda row: (
                f"{row['settings']['noise_multiplier']:g}" if "noise_multiplier" in row["settings"] else "–"
            ),
            "settings tried": lambda row: str(row["tried"]),
            "seeds": lambda row: str(len(row["runs"])),
            "validation SER": lambda row: mean([run["validation_ser"] for run in row["runs"]]),
            "processor": lambda row: row["processor"],
        },
    )
    yield Text(SEARCH)
    example = ", ".join(dict.fromkeys(map(place, plots.example_of_decays(found))))
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


_EPSILONS = {
    "ε really, exact": "exact",
    "ε really, zCDP": "zcdp",
    "ε claimed, exact": "claimed_exact",
    "ε claimed, zCDP": "claimed_zcdp",
}


def _auc(row: Found) -> str:
    found = [run["auc"] for run in row["runs"] if run["auc"]]
    bounds = [one[name] for one in found for name in ("low", "high")]
    return within(sum(one["value"] for one in found) / len(found), bounds, 3) if found else "–"


def _spent(row: Found, kind: str) -> str:
    return epsilon(max((run["epsilon"][kind] for run in row["runs"] if run["epsilon"]), default=None))


def _claim(paper: Found | None) -> str:
    return f"10^{paper['log10_epsilon']:g}" if paper and paper.get("log10_epsilon") is not None else "–"


def frontier(found: Found) -> Iterator[Block]:
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
        plots.frontier(found),
    )
    yield Table(
        f"SER at ε, δ = {about['delta']:g}; {plain}. {where}, one seed; `{about['command']}`. ε is for adding or "
        f"removing one utterance, {_SECRET}; for single examples also {_ONE_PASS}. All units have the recipe for "
        "single examples, which may not be the best for larger ones; ε does not cover its choice.",
        about["points"],
        {
            "unit": lambda one: unit_name(one["unit"]),
            "ε": lambda one: epsilon(one["epsilon"]),
            "SER": lambda one: number(one["test_ser"]),
            "intent accuracy, %": lambda one: number(one["test_intent_accuracy"]),
        },
    )


def recipes(found: Found) -> Iterator[Block]:
    """Small ε, with single examples."""
    yield Plots(
        f"SER by ε at δ = {found['delta']:g} for adding or removing one utterance, {_SECRET}, and {_ONE_PASS}; none is "
        "training without privacy.",
        plots.recipes(found),
    )
    yield Table(
        f"Settings for small ε at δ = {found['delta']:g}, and what they reach on test data. ε is for adding or "
        f"removing one utterance, {_SECRET}, and {_ONE_PASS}. It does not cover the choice of the settings.",
        found["rows"],
        {
            "model, corpus": place,
            "ε": lambda row: epsilon(row["epsilon"]),
            "SER": lambda row: number(row["test_ser"]),
            "intent accuracy, %": lambda row: number(row["test_intent_accuracy"]),
            "slot F1, %": lambda row: number(row["test_slot_f1"]),
            "validation SER": lambda row: number(row["validation_ser"]),
            "settings": lambda row: ", ".join(f"{n.replace('_', ' ')} {v}" for n, v in row["recipe"].items()),
        },
    )


def audits(found: Found) -> Iterator[Block]:
    """What the mechanism really gives, by attacking it."""
    about = f"{found['trials']} trials, confidence {found['confidence']:g}, δ = {found['delta']:g}"
    yield Plots(
        f"A lower bound above the claim refutes it: μ is the distance that noise has to hide, smaller is more private. "
        f"{about}.",
        plots.audits(found),
    )
    yield Table(
        f"Claims and what an audit finds, {about}, {NEIGHBOURS}. {VERDICT}",
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


def membership(found: Found) -> Iterator[Block]:
    """Who was in the data."""
    figures = {"AUC": "auc", "balanced accuracy": "balanced_accuracy", "TPR at 1 % FPR": "tpr_at_1_percent"}
    yield Table(
        "All attacks on a model that knows its utterances by heart, and on one that never saw them. Brackets are "
        f"{intervals(found)}.",
        [(name, attack, one) for name, attacks in found["by_heart"].items() for attack, one in attacks.items()],
        {
            "model": lambda row: row[0],
            "attack": lambda row: row[1],
            **{head: lambda row, key=key: interval(row[2][key]) for head, key in figures.items()},
        },
    )
    yield Table(
        f"The paper's attack on trainings of `benchmarks.utility`. Brackets are {intervals(found)}.",
        found["corpora"],
        {
            "model, corpus": place,
            "noise": lambda one: "none" if one["private"] == "off" else one["noise"],
            "decay": lambda one: "–" if one["private"] == "off" else one["decay"].replace(":", ", τ = "),
            "z": lambda one: "–" if one["private"] == "off" else f"{one['noise_multiplier']:g}",
            **{head: lambda one, key=key: interval(one[key]) for head, key in figures.items()},
        },
    )


def memorization(found: Found) -> Iterator[Block]:
    """Canaries in language models."""
    scale = found["scale"]
    canaries = len(scale["rates"]) * scale["per"]
    yield Table(
        f"Of {canaries} canaries among the sentences of {scale['users']} users, how many a language model has "
        f"memorised: the likeliest among {scale['suffixes']} random ones, or found by beam search. ε is for adding or "
        f"removing one user, at δ = {found['delta']:g}, {_SECRET}; on IID data users are made up, and so is the one "
        "that it is for.",
        found["rows"],
        {
            "algorithm": lambda row: row["name"],
            "users": lambda row: "dealt anew (IID)" if row["is_iid"] else "as they are",
            "batch": lambda row: f"{row['batch']} {'sentences' if row['name'].startswith('SGD') else 'users'}",
            "steps": lambda row: str(row["steps"]),
            "likeliest": lambda row: str(row["memorised"]["all"]["random_sampling"]),
            "by beam search": lambda row: str(row["memorised"]["all"]["beam_search"]),
            "median exposure, bits": lambda row: number(row["memorised"]["all"]["median_exposure"], 1),
            "accuracy, %": lambda row: number(100 * row["test_accuracy"], 1),
            "perplexity": lambda row: number(row["test_perplexity"], 1),
            "ε": lambda row: epsilon(row.get("epsilon")),
        },
    )


def others(found: Found) -> Iterator[Block]:
    """Results that have no section, among all that were found."""
    shown_above = {section.source for section in SECTIONS}
    yield Table(
        "Further results, each with a page of its own.",
        [(name, one) for name, one in found.items() if name not in shown_above],
        {
            "results": lambda row: f"`{row[0]}.json`",
            "to read": lambda row: f"`{row[0]}.md`",
            "command": lambda row: f"`{command(*row)}`",
            "processor": lambda row: row[1].get("machine", {}).get("processor", "not recorded"),
        },
    )


SECTIONS = (
    Section("Time of an epoch", "epoch_time", epoch_time),
    Section("Peers and memory", "epoch_time", peers),
    Section("More workers", "epoch_time", more_workers),
    Section("Time of a step", "step_time", step_time),
    Section("Noise, errors and attacks", "tradeoff", tradeoff),
    Section("What an ε costs", "tradeoff", frontier),
    Section("Small ε", "recipes", recipes),
    Section("Audits", "audits", audits),
    Section("Membership", "membership", membership),
    Section("Memorised phrases", "memorization", memorization),
    Section("Other measurements", None, others),
)
