"""How plots are drawn: colours, axes and legends, and the SVG text that a page takes.

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
from html import escape
from typing import Any, cast

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

INK, MUTED, GRID, GROUND = "#f10000", "#f10001", "#f10002", "#f10003"
COLOURS = [f"#f1001{number}" for number in range(7)]
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
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


# -------------------------------------------------------------------- lines, marks, axes


def draw_line(axes: Axes, points: Sequence[tuple[float, float]], number: int, label: str) -> None:
    """A line of marks; its number chooses colour, dashes and marker."""
    x, y = zip(*points, strict=True)
    marker = MARKERS[number % len(MARKERS)]
    axes.plot(x, y, color=COLOURS[number % 7], linestyle=DASHES[number % 5], marker=marker, label=label)


def draw_mark(axes: Axes, x: float, y: float, number: int, is_hollow: bool = False, strength: float = 1.0) -> None:
    """One mark; its number chooses colour and marker."""
    face = GROUND if is_hollow else COLOURS[number]
    axes.plot(
        x,
        y,
        marker=MARKERS[number],
        color=COLOURS[number],
        markerfacecolor=face,
        linestyle="none",
        alpha=strength,
    )


def add_to_legend(axes: Axes, marks: Iterable[tuple[str, str, str, bool]]) -> None:
    """Entries of the legend for marks that were drawn one by one."""
    for label, colour, marker, is_hollow in marks:
        face = GROUND if is_hollow else colour
        axes.plot([], [], marker=marker, color=colour, markerfacecolor=face, linestyle="none", label=label)


def label_axes(axes: Axes, x: str, y: str | None, title: str | None = None) -> None:
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
        ncols=legend_columns(texts, 72 * figure.get_size_inches()[0]),
        title=title,
        handlelength=2.4 if has_lines else 1.0,
    )
    legend.set_alignment("left")
    legend.get_title().set_fontweight("bold")


def legend_columns(texts: Sequence[str], room: float) -> int:
    """Two, if entries with these texts fit beside each other into the room; else one."""
    return 2 if 8 * max(map(len, texts), default=0) + 50 < room / 2 else 1


def mark_powers(axes: Axes, axis: str) -> None:
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
    return f"{value:g}" if -3 < exponent < 3 else with_superscripts(f"10^{exponent}")


def with_superscripts(text: str) -> str:
    """The text with superscripts for exponents."""
    return re.sub(r"\^(-?\d+)", lambda found: found[1].translate(_SUPERSCRIPTS), text)


def mark_ratios(axes: Axes) -> None:
    """Few ticks on a horizontal axis of ratios."""
    low, high = axes.get_xlim()
    ticks = [tick for tick in (0.5, 1, 2, 3, 5, 10, 20, 50, 100) if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def model_and_corpus(model: str, task: str) -> str:
    """Both as people write them."""
    return f"{shown(model)}, {shown(task)}"
