"""The tables of the READMEs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.harness import step_rows
from benchmarks.harness.contenders import NAMES
from benchmarks.harness.epoch_rows import MANY, MODELS, OURS
from benchmarks.harness.published import ATTACK_AUCS, ERROR_RATES
from benchmarks.harness.rows.common import Interval
from benchmarks.harness.rows.epoch_time import EpochRow, EpochTime
from benchmarks.harness.rows.membership import AttackedRun, Membership
from benchmarks.harness.rows.memorization import Memorization, MemorizationRow
from benchmarks.harness.rows.recipes import RecipeRow, Recipes
from benchmarks.harness.rows.step_time import StepRow, StepTime, TimedStep
from benchmarks.harness.rows.tradeoff import Tradeoff
from benchmarks.harness.rows.utility import Utility
from benchmarks.report.blocks import Block, Table, Text, epsilon, number
from benchmarks.report.drawing import shown
from benchmarks.report.plots import unit_name
from benchmarks.report.sections.utility import PlainRow, plain_rows

WORD_TABLES = {"clc": "CLC, frozen word-piece vectors", "bert": "BERT, the weights of MiniLM"}

# ---------------------------------------------------------------- time


def epoch_time(found: EpochTime) -> Iterator[Block]:
    """Ratios over SGD; a million utterances have those of a tenth."""
    rows = [row for row in found["rows"] if not row["is_peer"] and row["utterances"] <= MANY]
    usual = Counter(row["processor"] for row in rows).most_common(1)[0][0]
    others = dict.fromkeys(row["processor"] for row in rows if row["processor"] != usual)
    columns: dict[str, Callable[[EpochRow], str]] = {
        "an epoch over SGD's": lambda row: _corpus(row) + ("" if row["processor"] == usual else " *")
    }
    columns |= {NAMES[name]: _epoch_ratio(name) for name in OURS if name != "sgd"}
    columns["the paper's eDP-SGD"] = lambda row: number((row["paper"] or {}).get("edp"))
    yield Table("", rows, columns)
    if others:
        yield Text(rf"\* on another processor: {', '.join(others)}; the others on {usual}")


def _corpus(row: EpochRow) -> str:
    return f"{MODELS[row['model']]}, {row['corpus']}"


def _epoch_ratio(name: str) -> Callable[[EpochRow], str]:
    def show(row: EpochRow) -> str:
        one = row["contenders"][name]
        return f"{'≈' if one['is_extrapolated'] else ''}{one['ratio']:.2f}"

    return show


class ModelSteps(NamedTuple):
    """All rows of a model."""

    name: str
    rows: list[dict[str, TimedStep]]


def step_time(found: StepTime) -> Iterator[Block]:
    """Ratios over SGD from the lowest to the highest, checks included, and the most memory."""
    models: dict[str, list[dict[str, TimedStep]]] = {}
    for row in found["rows"]:
        models.setdefault(_variant(row), []).append(row["contenders"])
    names = ("groups", "example", "verified", "loop", "opacus_hooks", "opacus_ghost")
    columns: dict[str, Callable[[ModelSteps], str]] = {"a step over SGD's (memory)": lambda one: one.name}
    columns |= {NAMES[name]: _step_ratios(name) for name in names}
    yield Table("", [ModelSteps(name, rows) for name, rows in models.items()], columns)


def _variant(row: StepRow) -> str:
    changed = {"bert": "BERT without CRF", "clc": "BiLSTM without CRF and characters"}
    return (changed if row["is_peer"] else step_rows.KINDS)[row["kind"]]


def _step_ratios(name: str) -> Callable[[ModelSteps], str]:
    def show(model: ModelSteps) -> str:
        steps = [row[name] for row in model.rows if name in row]
        if not steps:
            return "–"
        ratios = [one.get("ratio_with_checks") or one["ratio_to_sgd"][1] for one in steps]
        memory = max(one.get("memory_ratio") or 0.0 for one in steps)
        return f"{min(ratios):.2f} to {max(ratios):.2f} ({memory:.2f})"

    return show


# ---------------------------------------------------------------- privacy and utility


class UnitLine(NamedTuple):
    """SER of a unit of clipping, by ε."""

    unit: str
    sers: Mapping[float, float]


def frontier(found: Tradeoff) -> Iterator[Block]:
    """SER by units and ε."""
    about = found["frontier"]
    if about is None:
        yield Text("Not measured yet.")
        return
    units: dict[str, dict[float, float]] = {}
    for point in about["points"]:
        units.setdefault(point["unit"], {})[point["target"]] = point["test_ser"]
    columns: dict[str, Callable[[UnitLine], str]] = {
        f"SER in %, δ = {about['delta']:g}": lambda line: unit_name(line.unit)
    }
    columns |= {
        f"ε = {_power(target)}": _ser_at(target) for target in sorted({point["target"] for point in about["points"]})
    }
    yield Table("", [UnitLine(unit, sers) for unit, sers in units.items()], columns)


def _ser_at(target: float) -> Callable[[UnitLine], str]:
    return lambda line: number(line.sers.get(target), 1)


def _power(target: float) -> str:
    return f"{target:g}" if target < 1e4 else f"10^{math.log10(target):g}"


class RecipeLine(NamedTuple):
    """A model and a corpus, by ε."""

    title: str
    rows: Mapping[float | None, RecipeRow]


def recipes(found: Recipes) -> Iterator[Block]:
    """Mean error rates by ε."""
    titles: dict[str, dict[float | None, RecipeRow]] = {}
    for row in found["rows"]:
        titles.setdefault(row["title"], {})[row["epsilon"]] = row
    budgets = sorted({row["epsilon"] for row in found["rows"]}, key=lambda budget: budget or math.inf)
    columns: dict[str, Callable[[RecipeLine], str]] = {f"SER in %, δ = {found['delta']:g}": lambda line: line.title}
    columns |= {f"ε = {budget:g}" if budget else "no privacy": _errors_at(budget) for budget in budgets}
    yield Table("", [RecipeLine(*line) for line in titles.items()], columns)


def _errors_at(budget: float | None) -> Callable[[RecipeLine], str]:
    def show(line: RecipeLine) -> str:
        row = line.rows.get(budget)
        return "–" if row is None else with_spread([run["test_ser"] for run in row["runs"]])

    return show


def with_spread(values: Sequence[float]) -> str:
    """The mean, and half the distance between the lowest and the highest.

    Example:
        >>> with_spread([20.0, 21.0, 20.2]), with_spread([7.5])
        ('20.4 ± 0.5', '7.5')
    """
    middle = sum(values) / len(values)
    if len(values) == 1:
        return f"{middle:.1f}"
    return f"{middle:.1f} ± {(max(values) - min(values)) / 2:.1f}"


class ModelErrors(NamedTuple):
    """Plain training of a model, by corpus."""

    model: str
    corpora: Mapping[str, PlainRow]


def utility(found: Utility) -> Iterator[Block]:
    """SER of plain training on both splits, and the paper's in brackets."""
    models: dict[str, dict[str, PlainRow]] = {model: {} for model in WORD_TABLES}
    for row in plain_rows(found["runs"]):
        models[row.model][row.task] = row
    columns: dict[str, Callable[[ModelErrors], str]] = {
        "SER in %, random / hash split (the paper's)": lambda line: WORD_TABLES[line.model]
    }
    columns |= {shown(task): _errors_on(task) for task in ("atis", "snips", "nlu-eval")}
    yield Table("", [ModelErrors(model, corpora) for model, corpora in models.items()], columns)


def _errors_on(task: str) -> Callable[[ModelErrors], str]:
    def show(line: ModelErrors) -> str:
        row = line.corpora.get(task, PlainRow(line.model, task, None, None))
        sers = [None if run is None else run["metrics"]["test_ser"] for run in (row.random, row.hash)]
        return f"{' / '.join(number(ser, 1) for ser in sers)} ({ERROR_RATES[line.model, task]:.1f})"

    return show


# ---------------------------------------------------------------- attacks


class AttackLine(NamedTuple):
    """The attack on plain training, and on the private one with most noise."""

    model: str
    task: str
    plain: AttackedRun
    noisiest: AttackedRun | None


def membership(found: Membership) -> Iterator[Block]:
    """What the paper's attack gets."""
    lines = []
    for model, task in ATTACK_AUCS:
        ours = [one for one in found["corpora"] if (one["model"], one["task"]) == (model, task)]
        [plain] = [one for one in ours if one["private"] == "off"]
        lines.append(AttackLine(model, task, plain, noisiest(ours)))
    yield Table[AttackLine](
        "",
        lines,
        {
            "AUC of the shadow attack": lambda line: f"{shown(line.model)}, {shown(line.task)}",
            "plain training": lambda line: f"{_bounds(line.plain['auc'])}, paper {_published(line)}",
            "eDP-SGD, most noise": lambda line: "–" if line.noisiest is None else _bounds(line.noisiest["auc"]),
        },
    )


def noisiest(runs: Sequence[AttackedRun]) -> AttackedRun | None:
    """The private one with most noise; of the same z0, calibrated noise and that without decay is more."""
    private = [one for one in runs if one["private"] == "edp"]
    return max(private, key=_noise, default=None)


def _noise(one: AttackedRun) -> tuple[float, bool, bool]:
    return one["noise_multiplier"], one["noise"] == "calibrated", one["decay"] == "none"


def _published(line: AttackLine) -> str:
    return f"{ATTACK_AUCS[line.model, line.task] / 100:.3f}"


def _bounds(one: Interval) -> str:
    return f"{one['value']:.3f} ({one['low']:.3f}, {one['high']:.3f})"


def memorization(found: Memorization) -> Iterator[Block]:
    """What is memorised of users as they are."""
    scale = found["scale"]
    canaries, large = len(scale["rates"]) * scale["per"], scale["cohorts"][1]
    wanted = [("SGD", scale["batches"][0]), ("FedAvg", large), ("DP-FedAvg", large)]
    rows = {(row["name"], row["batch"]): row for row in found["rows"] if not row["is_iid"]}
    yield Table[MemorizationRow](
        "",
        [rows[which] for which in wanted],
        {
            "algorithm": lambda row: row["name"],
            f"of {canaries} canaries memorised": lambda row: str(row["memorised"]["all"]["random_sampling"]),
            "perplexity": lambda row: number(row["test_perplexity"], 1),
            "ε for adding or removing one user": lambda row: _cost(row, found["delta"]),
        },
    )


def _cost(row: MemorizationRow, delta: float) -> str:
    return f"{epsilon(row['epsilon'])} at δ = {delta:g}" if "epsilon" in row else "–"
