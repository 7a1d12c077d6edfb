"""Results files that were made up, one of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MACHINE = {"processor": "Quick <b>&amp; Cheap", "cores": 6, "python": "3.11.7", "torch": "2.99.0"}
ABOUT = {"minutes": 12.4, "machine": MACHINE}
NAMES = {
    "sgd": "SGD (`hvd.DistributedOptimizer`)",
    "edp": "eDP-SGD",
    "groups": "eDP-SGD, K = 4",
    "example": "single examples, one pass",
    "loop": "vanilla DP-SGD (loop over examples)",
    "opacus_hooks": "Opacus, hooks",
    "opacus_ghost": "Opacus, ghost",
}


def _epoch(seconds: float, ratio: float) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "spread": [seconds - 1, seconds + 1],
        "ratio": ratio,
        "ratio_spread": [0.97 * ratio, 1.04 * ratio],
        "measured_steps": 83,
        "repetitions": 5,
        "is_extrapolated": ratio > 4,
    }


def epochs_over(model: str, corpus: str, paper: dict[str, float] | None, is_peer: bool = False) -> dict[str, Any]:
    ratios = {"sgd": 1.0, "edp": 1.043, "groups": 1.37, "example": 2.16, "loop": 6.71}
    ratios = {"sgd": 1.0, "example": 2.24, "opacus_hooks": 3.18, "opacus_ghost": 2.83} if is_peer else ratios
    return {
        "model": model,
        "corpus": corpus,
        "is_peer": is_peer,
        "changes": "CRF in float64 | no tied weights" if is_peer else "",
        "parameters": 14359638,
        "utterances": 2642,
        "steps": 42,
        "paper": paper,
        "processor": MACHINE["processor"],
        "contenders": {name: _epoch(41.27 * ratio, ratio) for name, ratio in ratios.items()},
    }


def epoch_time() -> dict[str, Any]:
    rows = [
        epochs_over(model, corpus, {"dp_sgd": 2.1, "edp": 1.29} if corpus != "generated 10^4" else None)
        for model in ("clc", "bert")
        for corpus in ("ATIS", "SNIPS", "NLU-EVAL", "generated 10^4")
    ]
    cost = {
        "parameters": 14359638,
        "parts_ms": {"compute": 321.5, "norm": 7.25, "noise": 55.5, "wire": 66.75},
        "text": "Fitted by least squares.",
        "measured": [
            {"workers": n, "contender": name, "ms": ms + 5 * n, "predicted_ms": ms + 4.5 * n}
            for n in (1, 2, 3)
            for name, ms in (("sgd", 444.0), ("edp", 471.0))
        ],
        "predicted": [
            {"workers": n, "sgd_ms": 450.5 + n, "edp_ms": 480.5 + n, "ratio": (480.5 + n) / (450.5 + n)}
            for n in (2, 4, 8, 16, 32, 64)
        ],
    }
    memory = [{"model": "bert", "is_peer": False, "contender": "edp", "peak_mib": 803.4, "ratio": 1.08}]
    rows.append(epochs_over("bert", "ATIS", None, is_peer=True))
    about = {"command": "python -m benchmarks.epoch_time", "seed": 0, "workers": 2, "batch": 32, "names": NAMES}
    return {**about, **ABOUT, "rows": rows, "memory": memory, "cost_model": {"bert": cost, "clc": {**cost}}}


def step_time() -> dict[str, Any]:
    one = {"milliseconds": [493.9, 555.6, 595.3], "ratio_to_sgd": [0.95, 1.05, 1.17], "steps": 30}
    row = {"kind": "bert", "tokens": 14, "size": 32, "is_peer": False, "parameters": 14359638}
    row |= {
        "contenders": {"edp": {**one, "peak_mib": 742.7, "memory_ratio": 1.02}},
        "parts_ms": {"edp": {"norm": 7.75, "wire": 66.5}},
    }
    return {"command": "python -m benchmarks.step_time", **ABOUT, "names": NAMES, "rows": [row]}


DECAYS = {"none": "none", "linear": "linear:0.5", "exponential": "exponential:0.35"}


def _run(seed: int, decay: str, auc: float) -> dict[str, Any]:
    epsilon = {"claimed_zcdp": 31234.5, "claimed_exact": 30123.4, "zcdp": 2.5e7, "exact": 2.4e24}
    is_plain = decay == "plain"
    return {
        "seed": seed,
        "validation_ser": 5.25,
        "test_ser": 5.5 + seed / 10,
        "auc": {"value": auc, "low": auc - 0.02, "high": auc + 0.02},
        "roc": [[0.0, 0.0], [0.2, 0.2 + (auc - 0.5)], [0.6, 0.6 + (auc - 0.5)], [1.0, 1.0]],
        "epsilon": None if is_plain else epsilon,
        "real_share": None if is_plain else 0.125,
    }


def tradeoff() -> dict[str, Any]:
    rows = []
    for model in ("clc", "bert"):
        for task in ("atis", "snips", "nlu-eval"):
            for decay in ("plain", *DECAYS):
                private = {"clip_norm": 0.75, "noise_multiplier": 0.003, "tau": 0.5, "layer_scaling": "raw"}
                settings = {"epochs": 8, "utterances": 2642, "precision": "bf16"} | (
                    {} if decay == "plain" else {**private, "decay": DECAYS[decay]}
                )
                auc = 0.58 + 0.03 * len(task) / 5 - (0 if decay == "plain" else 0.04)
                paper = {"ser": 6.3, "auc": 0.675, "log10_epsilon": None if decay == "plain" else 24.4}
                row = {"model": model, "task": task, "decay": decay, "settings": settings, "tried": 9, "paper": paper}
                row |= {"processor": MACHINE["processor"], "precisions_tried": ["bf16"]}
                rows.append({**row, "runs": [_run(seed, decay, auc) for seed in (0, 1, 2)]})
    points = [
        {"unit": unit, "epsilon": 10.0**k, "test_ser": worst / (k + 1) + 5.8, "test_intent_accuracy": 91.25}
        for unit, worst in (("1", 80.0), ("4", 60.0), ("16", 40.0), ("example", 11.25))
        for k in range(5)
    ]
    frontier = {"model": "bert", "task": "atis", "epochs": 20, "delta": 1e-4, "batch": 512, "points": points}
    frontier |= {"command": "python -m benchmarks.tradeoff frontier", "plain": {"test_ser": 4.75}}
    frontier |= {"layers": 1, "hidden": 128, "utterances": 2642, "useless": 95.0}
    about = {"command": "python -m benchmarks.tradeoff", "delta": 5e-4, "micro_batches": 8}
    return {**about, **ABOUT, "table": rows, "frontier": frontier}


TITLES = {"snips": "BERT (MiniLM), SNIPS", "atis": "BERT (MiniLM), ATIS, with schema", "clc-snips": "CLC, SNIPS"}


def _repetitions(ser: float, spent: float | None, number: int = 3) -> list[dict[str, Any]]:
    one = {"spent": spent, "test_intent_accuracy": 93.75, "test_slot_f1": 88.25, "validation_ser": 9.875}
    one |= {"clip_fraction": None if spent is None else 0.625, "seconds": 71.5, "minutes": 71.5 / 60}
    return [{**one, "test_ser": ser + shift} for shift in (0.0, -0.25, 0.5)[:number]]


def recipes() -> dict[str, Any]:
    settings = {"model": "bert", "freeze": "encoder", "zero_heads": True, "learning_rate": 0.5, "batch_size": 1024}
    rows = [
        {
            "name": name,
            "title": title,
            "epsilon": epsilon,
            "utterances": 6548,
            "recipe": settings,
            "runs": _repetitions(4.25 + extra + len(name), epsilon),
        }
        for name, title in TITLES.items()
        for epsilon, extra in ((1.0, 20.0), (3.0, 12.0), (8.0, 8.0), (None, 0.0))
    ]
    changes = [
        {"text": text, "epsilon": 8.0, "recipe": settings, "runs": _repetitions(ser, 8.0, 1)}
        for text, ser in (("the recipe as it is", 17.0), ("without neighbours", 19.375))
    ]
    points = [
        {"unit": unit, "target": target, "epsilon": 0.75 * target, "test_ser": worst / target**0.1, "recipe": settings}
        | {"test_intent_accuracy": 92.5, "test_slot_f1": 84.5}
        for unit, worst in (("4", 60.0), ("example", 21.125))
        for target in (1.0, 100.0)
    ]
    frontier = {"model": "bert", "task": "snips", "delta": 1e-4, "batch": 1024, "epochs": 16, "rates": [1.0, 0.13]}
    frontier |= {"plain": {"test_ser": 9.25}, "points": points}
    tuning = {"test_ser": 22.625, "minutes": 31.5, "tuning": {"task": "nlu-eval", "model": "bert", "epochs": 6}}
    features = [{"task": "snips", "encoder": "MiniLM", "computed": 14484, "seconds": 187.0, "minutes": 3.1}]
    found = {"rows": rows, "changes": changes, "frontier": frontier, "tuning": tuning, "features": features}
    return {"command": "python -m benchmarks.recipes", **ABOUT, "delta": 1e-4, "is_complete": True, **found}


def lira() -> dict[str, Any]:
    auc = {"value": 0.5125, "low": 0.4875, "high": 0.5375}
    few = {"value": 0.0125, "low": 0.0, "high": 0.0375}
    row = {"auc": auc, "balanced_accuracy": auc, "tpr_at_1_percent": few, "shadows": 64, "near_duplicates": 11}
    row |= {"members": 5120, "non_members": 5210, "test_ser": 17.875}
    rows = [{**row, "epsilon": 8.0, "spent": 7.875}, {**row, "epsilon": None, "spent": None}]
    about = {"command": "python -m benchmarks.lira", "delta": 1e-4, "title": TITLES["snips"], "is_complete": True}
    return {**about, **ABOUT, "rows": rows}


def audits() -> dict[str, Any]:
    rows = [
        {
            "noise": noise,
            "micro_batches": count,
            "clipping": clipping,
            "scaling": scaling,
            "claimed_mu": 1.0,
            "mu": 6.125 if noise == "paper" else 0.875,
            "claimed_epsilon": 4.377,
            "epsilon": 9.0625 if noise == "paper" else 0.5,
            "is_refuted": noise == "paper",
        }
        for noise in ("calibrated", "paper")
        for count, clipping, scaling in ((1, "flat", "none"), (4, "flat", "private"), (1, "per_layer", "none"))
    ]
    about = {"command": "python -m benchmarks.audits", "trials": 500, "delta": 1e-5, "confidence": 0.95, "seed": 0}
    return {**about, **ABOUT, "rows": rows}


def membership() -> dict[str, Any]:
    names = ("auc", "balanced_accuracy", "tpr_at_1_percent")
    one = {name: {"value": 0.824, "low": 0.786, "high": 0.859} for name in names}
    row = {"model": "clc", "task": "atis", "private": "edp", "noise": "calibrated", "noise_multiplier": 0.0001}
    row |= {"decay": "linear:0.5", **one}
    return {"machine": MACHINE, "by_heart": {"trained by heart": {"shadow": one, "lira": one}}, "corpora": [row]}


def memorization() -> dict[str, Any]:
    scale = {
        "users": 1500,
        "sentences": 10,
        "words": 300,
        "size": [16, 32],
        "rates": [[0.002, 0.1], [0.02, 1.0]],
        "per": 10,
        "suffixes": 100000,
    }
    found = {"all": {"random_sampling": 17, "beam_search": 13, "median_exposure": 16.64}}
    row = {"name": "DP-FedAvg", "is_iid": False, "batch": 200, "steps": 100, "memorised": found}
    row |= {"tables": [2, 5, 6], "test_accuracy": 0.2478, "test_perplexity": 41.84, "epsilon": 2.7214}
    return {"machine": MACHINE, "scale": scale, "delta": 1e-4, "rows": [row]}


def utility() -> dict[str, Any]:
    """Plain training of one model, and one private training whose search is not complete."""
    about = {"model": "clc", "task": "atis", "split": "random", "private": "off", "epochs": 8}
    plain = {"name": "plain", "settings": about, "metrics": {"test_ser": 5.75}}
    private = {"private": "edp", "noise": "calibrated", "decay": "linear:0.5", "noise_multiplier": 1e-5}
    noisy = {"name": "noisy", "settings": {**about, **private}, "metrics": {"test_ser": 5.8125, "epsilon": 3.21e11}}
    runs = [{**run, "data": {"near_duplicate_share": 0.3175}} for run in (plain, noisy)]
    return {"command": "python -m benchmarks.utility", **ABOUT, "seed": 0, "workers": 2, "runs": runs}


def exposure() -> dict[str, Any]:
    unseen = {"seconds": 47.875, "processor_seconds": 95.25, "rank": 388926, "exposure": 2.375}
    sizes = {"threads": 2, "parameters": 1_350_000, "suffixes": 2_000_000, "chunk": 512, "grown": 75_000_000}
    cases = {"unseen": unseen, "learned": {**unseen, "rank": 1}}
    return {"command": "python -m benchmarks.exposure", **ABOUT, "seed": 0, **sizes, **cases}


def attack_cost() -> dict[str, Any]:
    row = {"model": "clc", "tags": 57, "prediction": 560.25, "features": 616.25, "ratio": 1.125}
    return {"command": "python -m benchmarks.attack_cost", **ABOUT, "seed": 0, "examples": 100_000, "rows": [row]}


def accounting() -> dict[str, Any]:
    compared = {"rate": 0.01, "levels": 3, "dp_accounting_epsilon": 3.32304, "dp_accounting_seconds_per_level": 0.6875}
    growth = {"seconds": 12.75, "slowest": 0.758, "seconds_anew": 46.25, "slowest_anew": 0.976, "difference": 1e-9}
    return {
        "command": "python -m benchmarks.accounting",
        **ABOUT,
        "epsilon": [{"noise": 4.0, "rate": 0.001, "epsilon": 0.647621, "seconds": 0.892, "above": 6.8e-5}],
        "calibration": [{"rate": 0.001, "noise": 2.94042, "seconds": 3.267, "epsilon": 0.999418}],
        "without_sampling": {"epsilon_ms": 0.197, "epsilon_slowest_ms": 0.368, "calibrate_ms": 1.14},
        "growth": [{"rate": 0.01, **growth}],
        "dp_accounting": {**compared, "epsilon": 3.32313, "seconds_per_level": 0.01},
    }


def data_loading() -> dict[str, Any]:
    memory = [{"examples": n * 100_000, "grown": n * 12_400_000, "peak": n * 12_100_000, "arrays": n * 10_900_000}
              for n in (1, 8)]  # fmt: skip
    model = {"epoch": {"seconds": 838.25, "data_seconds": 1.4375, "share": 0.00171}, "memory": memory}
    sizes = {"examples": 100_000, "workers": 2}
    return {"command": "python -m benchmarks.data_loading", **ABOUT, "seed": 0, **sizes, "clc": model, "bert": model}


def bench() -> dict[str, Any]:
    return {"command": "make bench", **ABOUT, "rows": [{"name": "audits", "minutes": 0.25}]}


RESULTS = {
    made.__name__: made
    for made in (epoch_time, step_time, tradeoff, recipes, utility, audits, membership, lira, memorization, exposure,
                 attack_cost, accounting, data_loading, bench)
}  # fmt: skip


def write_results(folder: Path) -> Path:
    """All results, made up."""
    for name, make in RESULTS.items():
        (folder / f"{name}.json").write_text(json.dumps(make()), encoding="utf-8")
    return folder
