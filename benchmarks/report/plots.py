"""The plots of the report: figures in, SVG text out.

A plot is drawn with colours that stand for roles. In the SVG they become the page's CSS variables, so that plots follow
light and dark like all else. Text stays text, in the page's font.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any, cast

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from benchmarks.harness.rows.audits import AuditRow, Audits
from benchmarks.harness.rows.epoch_time import CostModel, EpochRow, EpochTime, TimedEpoch
from benchmarks.harness.rows.recipes import Recipes
from benchmarks.harness.rows.tradeoff import Frontier, TableRow, Tradeoff
from edpsgd.accounting import decay_factors, gaussian_epsilon
from edpsgd.schedules import parse_decay

INK, MUTED, GRID, GROUND = "#f10000", "#f10001", "#f10002", "#f10003"
COLOURS = [f"#f1001{number}" for number in range(7)]
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
PALE = 0.45  # of marks that are extrapolated
STEEP = ("linear:0.9", "exponential:0.5")  # the largest τ of Dupuy et al. 2021
WHOLE, PANEL = (520, 380), (440, 350)  # in units of the SVG, of which a phone shows about 330 pixels
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_VARIABLES = {INK: "ink", MUTED: "muted", GRID: "line", GROUND: "ground"} | {
    colour: f"plot-{number}" for number, colour in enumerate(COLOURS)
}
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 14,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 14,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "legend.edgecolor": "none",
    "legend.frameon": False,
    "legend.labelspacing": 0.3,
    "legend.columnspacing": 1.2,
    "lines.linewidth": 2,
    "lines.markersize": 7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


def shown(name: str) -> str:
    """A model or corpus, as people write it.

    Example:
        >>> shown("nlu-eval"), shown("generated 10^4")
        ('NLU-EVAL', 'generated 10^4')
    """
    return name if name.startswith("generated") else name.upper()


@dataclass(frozen=True)
class Panel:
    """One plot, which is drawn when a page with plots is made.

    Args:
        label: what it shows, for those who do not see it. No two plots of a page may have the same.
        draw: draws it.
        size: width and height.
    """

    label: str
    draw: Callable[[Axes], None]
    size: tuple[int, int] = WHOLE

    def svg(self) -> str:
        """An SVG element to put into a page; the same figures always give the same text."""
        width, height = self.size
        without = {"Date": None, "Creator": None, "Format": None, "Type": None}
        with matplotlib.style.context(["default", {**_STYLE, "svg.hashsalt": self.label}]):
            figure, text = Figure(figsize=(width / 72, height / 72), layout="constrained"), io.StringIO()
            axes = figure.subplots()
            self.draw(axes)
            figure.savefig(text, format="svg", metadata=without)
        return _for_a_page(text.getvalue(), self.label, _digest(axes))


def _digest(axes: Axes) -> str:
    """Of what is drawn, but not of how, which depends on the machine's fonts."""
    drawn = [(line.get_label(), line.get_marker(), line.get_alpha(), _points(line)) for line in axes.lines]
    names = [label.get_text() for label in axes.get_yticklabels()]
    return hashlib.sha256(repr((drawn, names)).encode()).hexdigest()[:16]


def _points(line: Line2D) -> list[str]:
    return [f"{x:.6g} {y:.6g}" for x, y in np.asarray(line.get_xydata())]


def _for_a_page(text: str, label: str, digest: str) -> str:
    """Leaves out what only files of their own need, or would be there twice in a page."""
    box = re.search(r'viewBox="[^"]*"', text)
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"font-family: [^;\"]*; ?", "", body)
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href", "href")
    body = re.sub(r"#f100[01][0-9]", lambda found: f"var(--{_VARIABLES[found[0]]})", body)
    return f'<svg role="img" aria-label="{escape(label)}" data-drawn="{digest}" {box[0] if box else ""}>{body.strip()}'


# -------------------------------------------------------------------- the plots


def frontier(about: Frontier) -> list[Panel]:
    """SER against ε, one line for each unit."""
    if not about["points"]:
        return []
    units: dict[str, list[tuple[float, float]]] = {}
    for point in about["points"]:
        units.setdefault(point["unit"], []).append((point["epsilon"], point["test_ser"]))

    def draw(axes: Axes) -> None:
        for number, (unit, points) in enumerate(units.items()):
            _line(axes, sorted(points), number, unit_name(unit))
        if about["plain"]:
            axes.axhline(about["plain"]["test_ser"], color=MUTED, linestyle=(0, (4, 3)), label="plain training")
        axes.set_xscale("log")
        axes.set_xlim(0.8, max(1.2e6, 1.2 * max(point["epsilon"] for point in about["points"])))
        _powers(axes, "x")
        axes.set_ylim(bottom=0)
        _labels(axes, f"ε at δ = {about['delta']:g}", "semantic error rate, %")

    return [Panel(f"Semantic error rate against epsilon, {_of(about['model'], about['task'])}", draw)]


def unit_name(unit: str) -> str:
    """Of what one clipped gradient is made."""
    return "single examples" if unit == "example" else f"K = {unit}"


def multipliers(found: EpochTime) -> list[Panel]:
    """Time of an epoch over that of SGD: one line of marks for each model and corpus."""
    rows = found["rows"]
    used = {name for row in rows for name in row["contenders"]} - {"sgd"}
    order = {name: number % len(MARKERS) for number, name in enumerate(n for n in found["names"] if n in used)}

    def draw(axes: Axes) -> None:
        for height, row in enumerate(rows):
            for name, one in row["contenders"].items():
                if name != "sgd":
                    _ratio(axes, one, height, order[name])
            for paper, ours in (("edp", "edp"), ("dp_sgd", "loop")):
                if row["paper"] and row["paper"].get(paper) and ours in order:
                    _mark(axes, row["paper"][paper], height + 0.22, order[ours], is_hollow=True)
        names = {name: text.replace("`", "") for name, text in found["names"].items()}
        _legend_of_marks(axes, names, order, any(row["paper"] for row in rows))
        axes.axvline(1, color=MUTED, linewidth=1)
        axes.set_yticks(range(len(rows)), [_group(row) for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xscale("log")
        _few_ticks(axes)
        _labels(axes, "time over SGD's (logarithmic)", None)

    entries = [*(found["names"][name] for name in order), "the paper's eDP-SGD", "the paper's DP-SGD"]
    height = 90 + 22 * len(entries) // _columns(entries, WHOLE[0]) + 34 * len(rows)
    return [Panel("Time of an epoch over that of SGD", draw, (WHOLE[0], height))]


def decays(found: Tradeoff) -> list[Panel]:
    """Noise that is really there, and the ε that is spent, epoch by epoch."""
    rows = example_of_decays(found)
    if not rows:
        return []
    title, curves = _of(rows[0]["model"], rows[0]["task"]), {row["settings"]["decay"]: noise_of(row) for row in rows}
    for decay in STEEP:
        if decay not in curves:
            curves[f"{decay} *"] = noise_of({**rows[0], "settings": {**rows[0]["settings"], "decay": decay}})

    def draw(axes: Axes, name: str, curve: Callable[[list[float]], list[float]]) -> None:
        for number, (decay, noise) in enumerate(curves.items()):
            _line(axes, list(enumerate(curve(noise), 1)), number, decay.replace(":", ", τ = "))
        axes.set_yscale("log")
        _powers(axes, "y")
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
        _labels(axes, "epoch", name)

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
    settings, share = row["settings"], next((r["real_share"] for r in row["runs"] if r["real_share"]), 1.0)
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
            private = max((row for row in same if row["decay"] != "plain"), key=_auc, default=None)
            for row in (*(row for row in same if row["decay"] == "plain"), *([private] if private else [])):
                x, y = zip(*next(run["roc"] for run in row["runs"] if run["roc"]), strict=True)
                kind = "plain" if row["decay"] == "plain" else "private"
                dashes = "-" if kind == "plain" else DASHES[1]
                axes.plot(x, y, color=COLOURS[number], linestyle=dashes, label=f"{shown(task)}, {kind}")
        _labels(axes, "false positive rate", "true positive rate", shown(model))

    models, height = dict.fromkeys(row["model"] for row in rows), PANEL[1] + 60 + 10 * len(tasks)
    return [
        Panel(f"ROC curves of the shadow attack, {shown(m)}", partial(draw, model=m), (PANEL[0], height))
        for m in models
    ]


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
        _proxies(axes, [("claimed μ", INK, "D", True)])
        if not all(row["is_refuted"] for row in rows):
            _proxies(axes, [("lower bound of μ, claim stands", COLOURS[0], "o", False)])
        if any(row["is_refuted"] for row in rows):
            _proxies(axes, [("lower bound of μ, claim refuted", COLOURS[1], "X", False)])
        axes.set_yticks(range(len(rows)), [audit_name(row, between="\n") for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(left=0)
        _labels(axes, "μ", None)

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
                _mark(axes, workers, ratio, number)
            _proxies(axes, [(f"{shown(model)}, measured", COLOURS[number], MARKERS[number], False)])
        axes.axhline(1, color=MUTED, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        _labels(axes, "workers", "time of a step over SGD's")

    return [Panel("Time of a step over that of SGD for more workers: a prediction", draw)]


def measured_ratios(about: CostModel) -> list[tuple[int, float]]:
    """Workers and eDP-SGD's time over SGD's, where both were measured."""
    times = {(one["workers"], one["contender"]): one["ms"] for one in about["measured"]}
    return [(n, times[n, "edp"] / times[n, "sgd"]) for n, name in times if name == "edp" and (n, "sgd") in times]


def recipes(found: Recipes) -> list[Panel]:
    """SER at small ε, a panel for each model."""
    budgets = sorted({row["epsilon"] for row in found["rows"] if row["epsilon"] is not None})
    places = {budget: place for place, budget in enumerate([*budgets, None])}
    tasks = list(dict.fromkeys(row["task"] for row in found["rows"]))

    def draw(axes: Axes, model: str) -> None:
        for number, task in enumerate(tasks):
            same = [row for row in found["rows"] if (row["model"], row["task"]) == (model, task)]
            if same:
                _line(axes, sorted((places[row["epsilon"]], row["test_ser"]) for row in same), number, shown(task))
        axes.set_xticks(range(len(places)), [*(f"{budget:g}" for budget in budgets), "none"])
        axes.set_ylim(bottom=0)
        _labels(axes, f"ε at δ = {found['delta']:g}", "semantic error rate, %", shown(model))

    models = dict.fromkeys(row["model"] for row in found["rows"])
    return [Panel(f"Semantic error rate at small epsilon, {shown(m)}", partial(draw, model=m), PANEL) for m in models]


# -------------------------------------------------------------------- parts of them


def _line(axes: Axes, points: Sequence[tuple[float, float]], number: int, label: str) -> None:
    x, y = zip(*points, strict=True)
    marker = MARKERS[number % len(MARKERS)]
    axes.plot(x, y, color=COLOURS[number % 7], linestyle=DASHES[number % 5], marker=marker, label=label)


def _mark(axes: Axes, x: float, y: float, number: int, is_hollow: bool = False, strength: float = 1.0) -> None:
    face = GROUND if is_hollow else COLOURS[number]
    style: dict[str, Any] = {"color": COLOURS[number], "markerfacecolor": face, "linestyle": "none", "alpha": strength}
    axes.plot(x, y, marker=MARKERS[number], **style)


def _ratio(axes: Axes, one: TimedEpoch, height: int, number: int) -> None:
    strength = PALE if one["is_extrapolated"] else 1.0
    axes.plot(one["ratio_spread"], [height - 0.1] * 2, color=COLOURS[number], linewidth=1.5, alpha=strength)
    _mark(axes, one["ratio"], height - 0.1, number, strength=strength)


def _legend_of_marks(axes: Axes, names: dict[str, str], order: dict[str, int], has_paper: bool) -> None:
    _proxies(axes, [(names[name], COLOURS[number], MARKERS[number], False) for name, number in order.items()])
    papers = [("the paper's eDP-SGD", "edp"), ("the paper's DP-SGD", "loop")] if has_paper else []
    marks = [(text, COLOURS[order[name]], MARKERS[order[name]], True) for text, name in papers if name in order]
    _proxies(axes, marks)


def _proxies(axes: Axes, marks: Iterable[tuple[str, str, str, bool]]) -> None:
    """Entries of the legend for marks that were drawn one by one."""
    for label, colour, marker, is_hollow in marks:
        face = GROUND if is_hollow else colour
        axes.plot([], [], marker=marker, color=colour, markerfacecolor=face, linestyle="none", label=label)


def _labels(axes: Axes, x: str, y: str | None, title: str | None = None) -> None:
    """Names of the axes; the legend stands above the plot, in two columns if its texts are short."""
    axes.set_xlabel(x)
    axes.set_ylabel(y or "")
    figure = cast(Figure, axes.get_figure())
    handles, texts = axes.get_legend_handles_labels()
    has_lines = any(cast(Line2D, handle).get_linestyle() != "None" for handle in handles)
    legend = figure.legend(
        handles,
        texts,
        loc="outside upper left",
        ncols=_columns(texts, 72 * figure.get_size_inches()[0]),
        title=title,
        handlelength=2.4 if has_lines else 1.0,
    )
    legend.set_alignment("left")
    legend.get_title().set_fontweight("bold")


def _columns(texts: Sequence[str], room: float) -> int:
    return 2 if 8 * max(map(len, texts), default=0) + 50 < room / 2 else 1


def _powers(axes: Axes, axis: str) -> None:
    """Ticks at powers of ten, at least two and at most eight of them."""
    low, high = (math.log10(limit) for limit in getattr(axes, f"get_{axis}lim")())
    if math.floor(high) - math.ceil(low) < 1:
        low, high = math.floor(low), math.ceil(high)
        getattr(axes, f"set_{axis}lim")(10.0**low, 10.0**high)
    exponents, chosen = range(math.ceil(low), math.floor(high) + 1), getattr(axes, f"{axis}axis")
    ticks = [10.0**exponent for exponent in exponents[:: math.ceil(len(exponents) / 8)]]
    chosen.set_major_locator(FixedLocator(ticks))
    chosen.set_minor_locator(NullLocator())
    chosen.set_major_formatter(FuncFormatter(lambda value, _: _power(value)))


def _power(value: float) -> str:
    exponent = round(math.log10(value))
    return f"{value:g}" if -3 < exponent < 3 else _raised(f"10^{exponent}")


def _raised(text: str) -> str:
    """With superscripts for exponents."""
    return re.sub(r"\^(-?\d+)", lambda found: found[1].translate(_SUPERSCRIPTS), text)


def _few_ticks(axes: Axes) -> None:
    low, high = axes.get_xlim()
    ticks = [tick for tick in (0.5, 1, 2, 3, 5, 10, 20, 50, 100) if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _group(row: EpochRow) -> str:
    return _raised(_of(row["model"], row["corpus"])) + ("*" if row["is_peer"] else "")


def _of(model: str, task: str) -> str:
    return f"{shown(model)}, {shown(task)}"
