"""Table 1 and the frontier as a Markdown page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import results

ABOUT_MODELS = "BERT is MiniLM, CLC has the vectors of its word pieces, frozen; random split, another for each seed."
SEARCH = (
    "Of the paper's grid, z0 was searched by powers of ten with C = 1, and with C = 5 where a multiplier was not "
    "borne; other norms only here and there, as a smaller one is little more than a common factor where most "
    "micro-batches are clipped, which Adam undoes. For each decay, the smallest τ was sought at which the next larger "
    "z0 is borne; where none is, the smallest of all was tried with the same z0, so that such rows are close to no "
    "decay. The choice is the one with the most noise whose SER on validation data is at most 5 % above plain "
    "training's, and where none is, the one with the lowest SER, marked †. Validation sets are small, and 5 % is less "
    "than what chance makes of them."
)
_ABOUT = (
    "The published algorithm, {micro_batches} micro-batches in a step, in one process, forward pass in bf16{others}. "
    "{models} {seeds} SER in %; AUC of the shadow attack, with its 95 % interval; ε at δ = {delta:g} for replacing one "
    "utterance: by the paper's formula (zCDP) and exactly, for the multiplier as it is printed and for the noise that "
    "was really added. The scales of layers are raw norms of the first step, which no ε covers, and the seeds are "
    "public here: ε is that of the same training with secret ones, and holds if examples lie in all batches as in "
    "those that were compared with autograd. It leaves out that settings were chosen on validation data. {search} In "
    "square brackets the paper's, SER and AUC computed from the changes that it prints."
)
_FRONTIER = (
    "CLC with {layers} layer of {hidden}. One seed. Calibrated noise, Poisson sampling, ε for adding or removing one "
    "utterance with a secret seed (here it is public), hash split, {utterances} utterances, {epochs} epochs, {batch} "
    "utterances in a step, δ = {delta:g}. K is the number of micro-batches on each of two workers, here 2·K in one "
    "process. All have the recipe for single examples, which may not be the best for larger units; ε does not cover "
    "its choice. ε of single examples also needs that they lie in all batches as in those compared with autograd. –: "
    "not run, as with more ε the SER is above {useless:g} already."
)
_HEAD = (
    "model", "corpus", "decay", "C", "z0", "SER", "AUC", "ε printed: zCDP, exact", "ε real: zCDP, exact",
    "noise, real over printed", "tried", "seeds", "processor",
)  # fmt: skip


def page(found: dict[str, Any]) -> str:
    """The figures, to read."""
    lines = ["# Privacy and utility", "", results.made(found), ""]
    if not found["is_complete"]:
        lines += ["Not complete: rows are missing, and where † stands the search may have only begun.", ""]
    if found["table"]:
        rows = [_row(row) for row in found["table"]]
        texts = {"models": ABOUT_MODELS, "search": SEARCH, "seeds": about_seeds(found)}
        texts["others"] = about_precision(found)
        about = _ABOUT.format(**found, **texts)
        about = f"{about} {about_delta(found)}"
        lines += ["## Table 1", "", about, "", *results.table(_HEAD, rows)]
    about = found["frontier"]
    if about:
        plain = f"{about['plain']['test_ser']:.2f}" if about["plain"] else "not run"
        lines += ["", "## SER against ε", "", f"{_FRONTIER.format(**about)} Plain training: {plain}.", ""]
        lines += frontier_table(about)
    return "\n".join(lines) + "\n"


def about_precision(found: dict[str, Any]) -> str:
    """Which rows were made on processors without bf16, and which were chosen among trainings in both precisions."""
    others = [_named(row) for row in found["table"] if row["settings"]["precision"] != "bf16"]
    mixed = [_named(row) for row in found["table"] if len(row["precisions_tried"]) > 1]
    named = {"in fp32": others, "chosen among some in bf16 and some in fp32": mixed}
    texts = [f"{text}: {', '.join(rows)}" for text, rows in named.items() if rows]
    return f" ({'; '.join(texts)})" if texts else ""


def _named(row: dict[str, Any]) -> str:
    return f"{row['model']} {row['task']} {row['decay']}"


def about_seeds(found: dict[str, Any]) -> str:
    """How many there are, and what is made of several."""
    if all(len(row["runs"]) == 1 for row in found["table"]):
        return "One seed for all rows."
    return "Where there are several: means, with the lowest and highest SER, and the bounds of AUC over all seeds."


def about_delta(found: dict[str, Any]) -> str:
    """How δ compares with one over the number of utterances."""
    sizes = {row["task"]: row["settings"]["utterances"] for row in found["table"]}
    above = [f"{task} ({size})" for task, size in sizes.items() if found["delta"] * size > 1]
    if not above:
        return ""
    return f"δ is the paper's, and above one over the number of training utterances of {', '.join(above)}."


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    settings, runs, paper = row["settings"], row["runs"], row["paper"]
    sers = [run["test_ser"] for run in runs]
    aucs = [run["auc"] for run in runs if run["auc"]]
    auc = f"{statistics.fmean(one['value'] for one in aucs):.3f}" if aucs else "–"
    if aucs:
        auc += f" ({min(one['low'] for one in aucs):.3f} to {max(one['high'] for one in aucs):.3f})"
    costs = [run["epsilon"] for run in runs if run["epsilon"]]
    printed, real = (_largest(costs, prefix) for prefix in ("claimed_", ""))
    if paper and paper["log10_epsilon"] is not None:
        printed += f" [10^{paper['log10_epsilon']:g}]"
    spread = f" ({min(sers):.2f} to {max(sers):.2f})" if len(sers) > 1 else ""
    shares = [run["real_share"] for run in runs if run["real_share"]]
    return (
        row["model"],
        row["task"],
        settings.get("decay", "plain") + ("" if row.get("is_allowed", True) else " †"),
        f"{settings['clip_norm']:g}" if "clip_norm" in settings else "–",
        f"{settings['noise_multiplier']:g}" if "noise_multiplier" in settings else "–",
        f"{statistics.fmean(sers):.2f}{spread}" + (f" [{paper['ser']:g}]" if paper else ""),
        auc + (f" [{paper['auc']:g}]" if paper else ""),
        printed,
        real,
        f"{min(shares):.3g}" if shares else "–",
        str(row["tried"]),
        str(len(runs)),
        row["processor"],
    )


def _largest(costs: Sequence[dict[str, float]], prefix: str) -> str:
    """Of all seeds, by the paper's formula and exactly."""
    if not costs:
        return "–"
    return ", ".join(results.epsilon(max(cost[f"{prefix}{method}"] for cost in costs)) for method in ("zcdp", "exact"))


def frontier_table(about: dict[str, Any]) -> list[str]:
    """SER by units and ε."""
    units = {"1": "K = 1", "4": "K = 4", "16": "K = 16", "example": "single examples"}
    targets = sorted({point["target"] for point in about["points"]})
    sers = {(point["unit"], point["target"]): f"{point['test_ser']:.1f}" for point in about["points"]}
    rows = [(name, *(sers.get((unit, target), "–") for target in targets)) for unit, name in units.items()]
    head = f"SER in %, δ = {about['delta']:g}"
    return results.table((head, *(f"ε = {_power(target)}" for target in targets)), rows)


def _power(epsilon: float) -> str:
    return f"{epsilon:g}" if epsilon < 1e4 else f"10^{math.log10(epsilon):g}"


def readme_table(found: dict[str, Any]) -> str:
    """The frontier, for the README."""
    about = found["frontier"]
    return "\n".join(frontier_table(about)) if about else "Not measured yet."
