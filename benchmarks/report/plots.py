"""The plots of the report: each function makes the panels of one from the figures of a results file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from benchmarks.harness.rows.audits import AuditRow, Audits
from benchmarks.harness.rows.epoch_time import CostModel, EpochRow, EpochTime, TimedEpoch
from benchmarks.harness.rows.recipes import FrontierOfHeads, Recipes
from benchmarks.harness.rows.tradeoff import Frontier, TableRow, Tradeoff
from benchmarks.report.drawing import (
    COLOURS,
    DASHES,
    GROUND,
    INK,
    MARKERS,
    MUTED,
    PANEL,
    WHOLE,
    Panel,
    add_to_legend,
    draw_line,
    draw_mark,
    label_axes,
    legend_columns,
    mark_powers,
    mark_ratios,
    model_and_corpus,
    shown,
    with_superscripts,
)
from edpsgd.accounting import decay_factors, gaussian_epsilon
from edpsgd.schedules import parse_decay

PALE = 0.45  # of marks that are extrapolated
STEEP = ("linear:0.9", "exponential:0.5")  # the largest τ of Dupuy et al. 2021


# -------------------------------------------------------------------- the plots


def frontier(about: Frontier | FrontierOfHeads) -> list[Panel]:
    """SER against ε, one line for each unit."""
    if not about["points"]:
        return []
    units: dict[str, list[tuple[float, float]]] = {}
    for point in about["points"]:
        units.setdefault(point["unit"], []).append((point["epsilon"], point["test_ser"]))

    def draw(axes: Axes) -> None:
        for number, (unit, points) in enumerate(units.items()):
            draw_line(axes, sorted(points), number, unit_name(unit))
        if about["plain"]:
            axes.axhline(about["plain"]["test_ser"], color=MUTED, linestyle=(0, (4, 3)), label="plain training")
        axes.set_xscale("log")
        axes.set_xlim(0.8, max(1.2e6, 1.2 * max(point["epsilon"] for point in about["points"])))
        mark_powers(axes, "x")
        axes.set_ylim(bottom=0)
        label_axes(axes, f"ε at δ = {about['delta']:g}", "semantic error rate, %")

    return [Panel(f"Semantic error rate against epsilon, {model_and_corpus(about['model'], about['task'])}", draw)]


def unit_name(unit: str) -> str:
    """Of what one clipped gradient is made."""
    return "single examples" if unit == "example" else f"K = {unit}"


def multipliers(found: EpochTime) -> list[Panel]:
    """Time of an epoch over that of SGD: one line of marks for each model and corpus."""
    rows = found["rows"]
    used = {name for row in rows for name in row["contenders"]} - {"sgd"}
    shown_names = [name for name in found["names"] if name in used]
    order = {name: number % len(MARKERS) for number, name in enumerate(shown_names)}

    def draw(axes: Axes) -> None:
        for height, row in enumerate(rows):
            for name, one in row["contenders"].items():
                if name != "sgd":
                    _ratio(axes, one, height, order[name])
            published = row["paper"] or {}
            for paper, ours in (("edp", "edp"), ("dp_sgd", "loop")):
                if published.get(paper) and ours in order:
                    draw_mark(axes, published[paper], height + 0.22, order[ours], is_hollow=True)
        names = {name: text.replace("`", "") for name, text in found["names"].items()}
        _legend_of_marks(axes, names, order, any(row["paper"] for row in rows))
        axes.axvline(1, color=MUTED, linewidth=1)
        axes.set_yticks(range(len(rows)), [_group(row) for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xscale("log")
        mark_ratios(axes)
        label_axes(axes, "time over SGD's (logarithmic)", None)

    entries = [*(found["names"][name] for name in order), "the paper's eDP-SGD", "the paper's DP-SGD"]
    height = 90 + 22 * len(entries) // legend_columns(entries, WHOLE[0]) + 34 * len(rows)
    return [Panel("Time of an epoch over that of SGD", draw, (WHOLE[0], height))]


def decays(found: Tradeoff) -> list[Panel]:
    """Noise that is really there, and the ε that is spent, epoch by epoch."""
    rows = example_of_decays(found)
    if not rows:
        return []
    title = model_and_corpus(rows[0]["model"], rows[0]["task"])
    curves = {row["settings"]["decay"]: noise_of(row) for row in rows}
    for decay in STEEP:
        if decay not in curves:
            curves[f"{decay} *"] = noise_of({**rows[0], "settings": {**rows[0]["settings"], "decay": decay}})

    def draw(axes: Axes, name: str, curve: Callable[[list[float]], list[float]]) -> None:
        for number, (decay, noise) in enumerate(curves.items()):
            draw_line(axes, list(enumerate(curve(noise), 1)), number, decay.replace(":", ", τ = "))
        axes.set_yscale("log")
        mark_powers(axes, "y")
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
        label_axes(axes, "epoch", name)

    def spent(noise: list[float]) -> list[float]:
        return [gaussian_epsilon(noise[: epoch + 1], found["delta"]) for epoch in range(len(noise))]

    return [
        Panel(f"Noise multiplier by epoch, {title}", lambda axes: draw(axes, "real noise multiplier", list), PANEL),
        Panel(f"Epsilon by epoch, {title}", lambda axes: draw(axes, f"ε at δ = {found['delta']:g}", spent), PANEL),
    ]


def example_of_decays(found: Tradeoff) -> list[TableRow]:
    """The private rows of the first model and corpus that has most of them."""
    groups: dict[tuple[str, str], list[TableRow]] = {}
    for row in found["table"]:
        if row["decay"] != "plain":
            groups.setdefault((row["model"], row["task"]), []).append(row)
    return max(groups.values(), key=len, default=[])


def noise_of(row: TableRow) -> list[float]:
    """The noise multipliers of all epochs, as they really are."""
    settings = row["settings"]
    shares = [run["real_share"] for run in row["runs"] if run["real_share"]]
    share = shares[0] if shares else 1.0
    factors = decay_factors(settings["epochs"], parse_decay(settings["decay"]))
    return [settings["noise_multiplier"] * share * factor for factor in factors]


def roc(found: Tradeoff) -> list[Panel]:
    """ROC curves of the shadow attack, a panel for each model."""
    rows = [row for row in found["table"] if any(run["roc"] for run in row["runs"])]
    tasks = list(dict.fromkeys(row["task"] for row in rows))

    def draw(axes: Axes, model: str) -> None:
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, label="guessing")
        for number, task in enumerate(tasks):
            same = [row for row in rows if (row["model"], row["task"]) == (model, task)]
            for row in same:
                if row["decay"] == "plain":
                    x, y = _first_curve(row)
                    axes.plot(x, y, color=COLOURS[number], linestyle="-", label=f"{shown(task)}, plain")
            private = [row for row in same if row["decay"] != "plain"]
            if private:
                x, y = _first_curve(max(private, key=_auc))
                axes.plot(x, y, color=COLOURS[number], linestyle=DASHES[1], label=f"{shown(task)}, private")
        label_axes(axes, "false positive rate", "true positive rate", shown(model))

    size = PANEL[0], PANEL[1] + 60 + 10 * len(tasks)
    panels = []
    for model in dict.fromkeys(row["model"] for row in rows):
        label = f"ROC curves of the shadow attack, {shown(model)}"
        panels.append(Panel(label, partial(draw, model=model), size))
    return panels


def _first_curve(row: TableRow) -> tuple[list[float], list[float]]:
    """False and true positive rates of the first run that was attacked."""
    points = next(run["roc"] for run in row["runs"] if run["roc"])
    return [x for x, _ in points], [y for _, y in points]


def _auc(row: TableRow) -> float:
    return max((run["auc"]["value"] for run in row["runs"] if run["auc"]), default=0.0)


def audits(found: Audits) -> list[Panel]:
    """Claimed μ and the lower bound of it that was found."""
    rows = found["rows"]

    def draw(axes: Axes) -> None:
        for height, row in enumerate(rows):
            colour = COLOURS[1] if row["is_refuted"] else COLOURS[0]
            axes.plot([row["claimed_mu"], row["mu"]], [height, height], color=colour, linestyle="-")
            axes.plot(row["claimed_mu"], height, marker="D", color=INK, markerfacecolor=GROUND, linestyle="none")
            axes.plot(row["mu"], height, marker="X" if row["is_refuted"] else "o", color=colour, linestyle="none")
        add_to_legend(axes, [("claimed μ", INK, "D", True)])
        if not all(row["is_refuted"] for row in rows):
            add_to_legend(axes, [("lower bound of μ, claim stands", COLOURS[0], "o", False)])
        if any(row["is_refuted"] for row in rows):
            add_to_legend(axes, [("lower bound of μ, claim refuted", COLOURS[1], "X", False)])
        axes.set_yticks(range(len(rows)), [audit_name(row, between="\n") for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(left=0)
        label_axes(axes, "μ", None)

    return [Panel("Audited lower bounds of mu against claims", draw, (WHOLE[0], 130 + 46 * len(rows)))]


def audit_name(row: AuditRow, between: str = ", ") -> str:
    """What was audited, in short."""
    scales = "" if row["scaling"] in (None, "none") else f", {row['scaling']} scales"
    return f"{row['noise']}, K = {row['micro_batches']}{between}{row['clipping'].replace('_', ' ')}{scales}"


def scaling(found: EpochTime) -> list[Panel]:
    """The predicted ratio for more workers, and the measured one for few."""

    def draw(axes: Axes) -> None:
        for number, (model, about) in enumerate(found["cost_model"].items()):
            points = [(one["workers"], one["ratio"]) for one in about["predicted"]]
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=COLOURS[number], linestyle=DASHES[1], label=f"{shown(model)}, predicted")
            for workers, ratio in measured_ratios(about):
                draw_mark(axes, workers, ratio, number)
            add_to_legend(axes, [(f"{shown(model)}, measured", COLOURS[number], MARKERS[number], False)])
        axes.axhline(1, color=MUTED, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        label_axes(axes, "workers", "time of a step over SGD's")

    return [Panel("Time of a step over that of SGD for more workers: a prediction", draw)]


def measured_ratios(about: CostModel) -> list[tuple[int, float]]:
    """Workers and eDP-SGD's time over SGD's, where both were measured."""
    times = {(one["workers"], one["contender"]): one["ms"] for one in about["measured"]}
    return [(n, times[n, "edp"] / times[n, "sgd"]) for n, name in times if name == "edp" and (n, "sgd") in times]


def recipes(found: Recipes) -> list[Panel]:
    """Mean SER at small ε, a line for each model and corpus."""
    budgets = sorted({row["epsilon"] for row in found["rows"] if row["epsilon"] is not None})
    places = {budget: place for place, budget in enumerate([*budgets, None])}
    titles = list(dict.fromkeys(row["title"] for row in found["rows"]))
    if not titles:
        return []

    def draw(axes: Axes) -> None:
        for number, title in enumerate(titles):
            points = []
            for row in found["rows"]:
                if row["title"] == title:
                    sers = [run["test_ser"] for run in row["runs"]]
                    points.append((places[row["epsilon"]], sum(sers) / len(sers)))
            draw_line(axes, sorted(points), number, title)
        axes.set_xticks(range(len(places)), [*(f"{budget:g}" for budget in budgets), "none"])
        axes.set_ylim(bottom=0)
        label_axes(axes, f"ε at δ = {found['delta']:g}", "semantic error rate, %")

    size = WHOLE[0], WHOLE[1] + 20 * len(titles)
    return [Panel("Semantic error rate at small epsilon", draw, size)]


def _ratio(axes: Axes, one: TimedEpoch, height: int, number: int) -> None:
    strength = PALE if one["is_extrapolated"] else 1.0
    axes.plot(one["ratio_spread"], [height - 0.1] * 2, color=COLOURS[number], linewidth=1.5, alpha=strength)
    draw_mark(axes, one["ratio"], height - 0.1, number, strength=strength)


def _legend_of_marks(axes: Axes, names: dict[str, str], order: dict[str, int], has_paper: bool) -> None:
    add_to_legend(axes, [(names[name], COLOURS[number], MARKERS[number], False) for name, number in order.items()])
    papers = [("the paper's eDP-SGD", "edp"), ("the paper's DP-SGD", "loop")] if has_paper else []
    marks = [(text, COLOURS[order[name]], MARKERS[order[name]], True) for text, name in papers if name in order]
    add_to_legend(axes, marks)


def _group(row: EpochRow) -> str:
    return with_superscripts(model_and_corpus(row["model"], row["corpus"])) + ("*" if row["is_peer"] else "")
