"""The report: all figures of the results are there, whatever is missing is said, and the page needs nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import render, sections
from benchmarks.report.__main__ import main

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
MISSING = "Not measured yet: "


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


def _epochs(model: str, corpus: str, paper: dict[str, float] | None, is_peer: bool = False) -> dict[str, Any]:
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
        _epochs(model, corpus, {"dp_sgd": 2.1, "edp": 1.29} if corpus != "generated 10^4" else None)
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
    rows.append(_epochs("bert", "ATIS", None, is_peer=True))
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
    frontier |= {"layers": 1, "hidden": 128}
    about = {"command": "python -m benchmarks.tradeoff", "delta": 5e-4, "micro_batches": 8}
    return {**about, **ABOUT, "table": rows, "frontier": frontier}


def recipes() -> dict[str, Any]:
    rows = [
        {
            "model": model,
            "task": task,
            "epsilon": epsilon,
            "test_ser": 4.25 + extra + (3 if model == "clc" else 0) + len(task),
            "test_intent_accuracy": 93.75,
            "test_slot_f1": 88.25,
            "validation_ser": 9.875,
            "recipe": {
                "learning_rate": 0.003,
                "batch_size": 512,
                "epochs": 20,
                "clip_norm": 0.1,
                "freeze": "embeddings",
            },
        }
        for model in ("clc", "bert")
        for task in ("atis", "snips", "nlu-eval")
        for epsilon, extra in ((1, 20.0), (3, 12.0), (8, 8.0), (None, 0.0))
    ]
    return {"command": "python -m benchmarks.recipes", **ABOUT, "delta": 1e-4, "seed": 3, "rows": rows}


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
    scale = {"users": 1500, "rates": [[0.002, 0.1], [0.02, 1.0]], "per": 10, "suffixes": 100000}
    found = {"all": {"random_sampling": 17, "beam_search": 13, "median_exposure": 16.64}}
    row = {"name": "DP-FedAvg", "is_iid": False, "batch": 200, "steps": 100, "memorised": found}
    row |= {"test_accuracy": 0.2478, "test_perplexity": 41.84, "epsilon": 2.7214}
    return {"machine": MACHINE, "scale": scale, "delta": 1e-4, "rows": [row]}


RESULTS = {made.__name__: made for made in (epoch_time, step_time, tradeoff, recipes, audits, membership, memorization)}


def write_results(folder: Path) -> Path:
    """All results, made up."""
    for name, make in RESULTS.items():
        (folder / f"{name}.json").write_text(json.dumps(make()), encoding="utf-8")
    (folder / "exposure.json").write_text(json.dumps({"machine": MACHINE}), encoding="utf-8")
    return folder


class Page(HTMLParser):
    """What a browser would make of it: cells, sections and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.words, self.addresses, self.ids, self.open = "", [], [], []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        self.ids += [value for name, value in attrs if name == "id"]
        self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.words += data
        if {"td", "th"} & set(self.open):
            self.cells[-1] += data


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[str, str]:
    folder = write_results(tmp_path_factory.mktemp("results"))
    main(["--results", str(folder), "--out", str(folder / "new" / "folder")])
    return tuple(
        (folder / "new" / "folder" / name).read_text(encoding="utf-8") for name in ("report.html", "report.md")
    )


FIGURES = [
    *("1.04 (1.01–1.08)", "≈6.71 (6.51–6.98)", "1.29", "2.10", "43.0 (42.0–44.0)", "≈276.9 (275.9–277.9)", "2,642"),
    *("3.18 (3.08–3.31)", "2.83 (2.75–2.94)", "803", "1.08", "14,359,638"),
    *("449.0", "448.5", "482.5", "1.066"),  # the cost model
    *("555.6 (493.9–595.3)", "1.05 (0.95–1.17)", "743", "1.02", "7.8", "66.5"),
    *("5.60 (5.50–5.70)", "6.3", "0.564 (0.544–0.584)", "0.675", "31240", "30130", "none", "linear, τ = 0.5", "0.003"),
    *("17.05", "1.000", "91.25"),  # the frontier
    *("31.25", "8.25", "93.75", "88.25", "1.000", "3.000"),  # the recipes
    *("6.125", "0.875", "4.377", "9.062", "refuted", "stands"),
    *("0.824 (0.786–0.859)", "0.0001", "lira"),
    *("17", "13", "16.6", "24.8", "41.8", "2.722"),
]


@pytest.mark.parametrize("figure", dict.fromkeys(FIGURES))
def test_figures_are_in_both(built, figure) -> None:
    page, text = built
    assert figure in Page(page).cells
    assert f"| {figure} |" in text


@pytest.mark.parametrize("power", ["7.4", "24.4"])
def test_powers_of_ten(built, power) -> None:
    assert all(f"10<sup>{power}</sup>" in text for text in built)


def test_tables_are_the_same(built) -> None:
    rows = [line for line in built[1].splitlines() if line.startswith("| ")]
    plain = [cell for line in rows for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    assert len(Page(built[0]).cells) == len(plain) > 500


def test_no_epsilon_without_its_condition(tmp_path) -> None:
    """Where seeds are public, or examples were clipped in one pass, whoever prints ε says so."""
    found = render.collect(write_results(tmp_path))
    for section, has_one_pass in (("tradeoff", True), ("frontier", True), ("recipes", True), ("memorization", False)):
        source = "tradeoff" if section == "frontier" else section
        blocks = list(getattr(sections, section)(found[source]))
        [table] = [block for block in blocks if hasattr(block, "columns")]
        assert "secret" in table.caption
        assert ("compared with autograd" in table.caption) == has_one_pass


def test_a_table_that_is_not_complete_says_so(tmp_path) -> None:
    found = render.collect(write_results(tmp_path))["tradeoff"]
    for is_complete in (True, False):
        blocks = sections.tradeoff({**found, "is_complete": is_complete})
        [table] = [block for block in blocks if hasattr(block, "columns")]
        assert ("Not complete" in table.caption) != is_complete


def test_headlines(built) -> None:
    page = Page(built[0]).words
    for text in ("1.04×", "1.29×", "2.1×", "16.2\u00a0%", "without privacy 8.2\u00a0%", "8×"):
        assert text in page.split("Time of an epoch")[0]
    assert all(f"({name}.json)" in built[1] for name in ("epoch_time", "tradeoff", "recipes"))


def test_every_plot(built) -> None:
    page = built[0]
    assert page.count("<svg") == page.count('role="img" aria-label="') == 1 + 1 + 2 + 2 + 1 + 2 + 1
    assert "#f100" not in page
    assert "font-family" not in page.split("</style>")[1]
    assert len(set(Page(page).ids)) == len(Page(page).ids)
    assert "<svg" not in built[1]


def test_how_figures_came_about(built) -> None:
    for text in (Page(built[0]).words, built[1]):
        for part in (
            "6 cores",
            "12 minutes",
            "torch 2.99.0",
            "Seeds: 0, 1, 2",
            "Seeds: 3",
        ):
            assert part in text
        assert all(make().get("command", f"python -m benchmarks.{name}") in text for name, make in RESULTS.items())
        assert "exposure.json" in text


def test_text_of_results_is_escaped(built) -> None:
    assert "Quick <b>&amp; Cheap" in Page(built[0]).words
    assert not any("<b>" in text for text in built)
    assert "What had to change: BERT, ATIS *: CRF in float64 | no tied weights" in built[1]
    assert render.Table("Caption.", ["a | b"], {"text": str}).markdown()[-1] == r"| a \| b |"


def test_nothing_is_loaded(built) -> None:
    page = built[0]
    assert all(address.startswith("#") or address == "data:," for address in Page(page).addresses)
    assert not re.search(r"https?:|<script|@import|url\((?!#)", page)


@pytest.mark.parametrize("missing", RESULTS)
def test_what_is_missing_is_said(missing) -> None:
    found = {name: make() for name, make in RESULTS.items() if name != missing}
    sections = [section for section in render.SECTIONS if section.source == missing]
    assert sections
    for section in sections:
        [block] = render.content(section, found)
        assert block.markdown() == [f"{MISSING}`python -m benchmarks.{missing}` measures it."]
    assert not any(f"{missing}.json" in headline.source for headline in render.headlines(found))


def test_nothing_measured(tmp_path) -> None:
    main(["--results", str(tmp_path), "--out", str(tmp_path)])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count(MISSING) == 10
    assert "<svg" not in page
    assert "<table" not in page
    assert "<li><strong>" not in page


def _without_plain(found: dict[str, Any]) -> dict[str, Any]:
    frontier = {**found["tradeoff"]["frontier"], "plain": None}
    return {**found, "tradeoff": {**found["tradeoff"], "frontier": frontier}}


def test_a_row_beyond_what_is_allowed_is_marked(tmp_path) -> None:
    found = render.collect(write_results(tmp_path))
    assert "†" not in _table_1(found)
    found["tradeoff"]["table"][1]["is_allowed"] = False
    assert _table_1(found).count("†") == 1


def _table_1(found: dict[str, Any]) -> str:
    return "\n".join(next(sections.tradeoff(found["tradeoff"])).markdown()[1:])


def test_parts_that_may_be_empty(tmp_path) -> None:
    write_results(tmp_path)
    found = render.collect(tmp_path)
    assert "plain training was not run" in render.html(render.build(_without_plain(found)))
    found["epoch_time"] |= {"cost_model": {}, "memory": [], "rows": [_epochs("clc", "ATIS", None)]}
    found["tradeoff"]["frontier"] = None
    for row in found["tradeoff"]["table"]:
        row["paper"] = None
        for run in row["runs"]:
            run |= {"auc": None, "roc": None, "real_share": None}
    page = render.html(render.build(found))
    assert page.count("<svg") == 1 + 2 + 2 + 1
    assert page.count("Not part of this measurement.") == 2
    assert page.count(MISSING) == 1


def test_other_formats_are_named(tmp_path) -> None:
    (tmp_path / "step_time.json").write_text('{"machine": {}, "rows": [{"model": "bert"}], "names": {}}')
    with pytest.raises(ValueError, match=r"step_time.json has no 'contenders'"):
        main(["--results", str(tmp_path), "--out", str(tmp_path)])


def test_raw_scales_are_told() -> None:
    found, warning = tradeoff(), "not covered by any ε"
    assert warning in next(sections.tradeoff(found)).caption
    for row in found["table"]:
        row["settings"].pop("layer_scaling", None)
    assert warning not in next(sections.tradeoff(found)).caption


def test_deterministic(built, tmp_path) -> None:
    again = render.build(render.collect(write_results(tmp_path)))
    assert (render.html(again), render.markdown(again)) == built
