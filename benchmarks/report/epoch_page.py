"""Time of an epoch as a Markdown page, and its table in the README."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import cost_model, results
from benchmarks.harness.contenders import CHANGES, NAMES
from benchmarks.harness.epoch_rows import MANY, MODELS, OURS, PART_WARM_UP, WARM_UP, WORKERS


def page(found: dict[str, Any]) -> str:
    """The figures, to read."""
    lines = ["# Time of an epoch", "", results.made(found), "", _ABOUT.format(batch=found["batch"]), ""]
    if found["missing"]:
        lines += [f"Not complete, not measured with these settings: {'; '.join(found['missing'])}.", ""]
    lines += epoch_table([row for row in found["rows"] if not row["is_peer"]])
    peers = [row for row in found["rows"] if row["is_peer"]]
    if peers:
        changes = "; ".join(f"{MODELS[model]}: {text}" for model, text in CHANGES.items())
        lines += [
            "",
            "## Opacus, on models that it can train",
            "",
            f"{changes}. {ABOUT_PEERS}",
            "",
        ]
        lines += epoch_table(peers)
    if found["memory"]:
        rows = [
            (MODELS[one["model"]] + (", as Opacus can train it" if one["is_peer"] else ""), NAMES[one["contender"]],
             f"{one['peak_mib']:.0f}", f"{one['ratio']:.2f}")
            for one in found["memory"]
        ]  # fmt: skip
        lines += ["", "## Peak memory of a worker", ""]
        lines += results.table(("model", "training", "MiB", "over SGD"), rows)
    for model, fitted in found["cost_model"].items():
        lines += [
            "",
            f"## Prediction for more workers: {MODELS[model]}",
            "",
            fitted["text"],
            "",
            *cost_model.tables(fitted),
        ]
    return "\n".join(lines) + "\n"


_ABOUT = (
    f"{WORKERS} Horovod workers, one thread each, {{batch}} utterances per worker and step, Adam, ledger on disk; of "
    "the real corpora the 45 % that are for training. Assembling batches is not in the times. Seconds of an epoch, and "
    "in brackets how many times those of SGD, with the lowest and the highest: the median of three passes, each the "
    "first epoch of another training; of 10^5 utterances one pass in parts, each a process of its own; of what made "
    "some of the steps one pass and its thirds. ≈: extrapolated from so many steps; 10^6 with the word table of 10^5. "
    "K is the number of micro-batches of a worker in a step. Single examples and micro-batches in one pass compare "
    f"some batches with autograd, most of them at the beginning: after {WARM_UP} steps that are not counted, or "
    f"{PART_WARM_UP} in parts, these checks are in the figures. The paper's are from eight GPUs. The layers of CLC and "
    "BERT have the sizes of the paper, their tables the words of the training set (BERT: its own "
    "pieces), which are learned; both end in a CRF. Memory is that of a process with Python, libraries and data."
)
ABOUT_PEERS = (
    "SGD and ours train torch's LSTM, so that Opacus's figures for CLC hold the cost of its own. Opacus knows no "
    "Horovod: each worker adds its share of the noise, and Horovod averages."
)


def epoch_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Seconds and ratios, a line for each model and corpus."""
    names = [name for name in NAMES if any(name in row["contenders"] for row in rows)]
    head = ("model", "corpus", "steps", *(NAMES[name] for name in names), "paper: DP-SGD, eDP-SGD", "processor")
    body = []
    for row in rows:
        cells = [_cell(name, row["contenders"][name]) if name in row["contenders"] else "–" for name in names]
        paper = f"{row['paper']['dp_sgd']:g}, {row['paper']['edp']:g}" if row["paper"] else "–"
        body.append((MODELS[row["model"]], row["corpus"], str(row["steps"]), *cells, paper, row["processor"]))
    return results.table(head, body)


def _cell(name: str, one: dict[str, Any]) -> str:
    sign, steps = _sign(one), f", {one['measured_steps']} steps" if one["is_extrapolated"] else ""
    if name == "sgd":
        return f"{sign}{one['seconds']:.1f} s"
    low, high = one["ratio_spread"]
    return f"{sign}{one['seconds']:.1f} s ({one['ratio']:.2f}; {low:.2f} to {high:.2f}{steps})"


def _sign(one: dict[str, Any]) -> str:
    return "≈" if one["is_extrapolated"] else ""


def readme_table(found: dict[str, Any]) -> str:
    """Ratios over SGD, for the README; a million utterances have those of a tenth."""
    names = [name for name in NAMES if name != "sgd" and name in OURS]
    rows = [row for row in found["rows"] if not row["is_peer"] and row["utterances"] <= MANY]
    usual = Counter(row["processor"] for row in rows).most_common(1)[0][0]
    others = ", ".join(dict.fromkeys(row["processor"] for row in rows if row["processor"] != usual))
    head = ("an epoch over SGD's", *(NAMES[name] for name in names), "the paper's eDP-SGD")
    body = [
        (
            f"{MODELS[row['model']]}, {row['corpus']}{'' if row['processor'] == usual else ' *'}",
            *(_sign(row["contenders"][name]) + f"{row['contenders'][name]['ratio']:.2f}" for name in names),
            f"{row['paper']['edp']:.2f}" if row["paper"] else "–",
        )
        for row in rows
    ]
    note = ["", f"\\* on another processor: {others}; the others on {usual}"] if others else []
    return "\n".join([*results.table(head, body), *note])
