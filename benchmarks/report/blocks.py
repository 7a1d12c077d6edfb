"""What the report consists of: paragraphs, plots and tables, each as HTML and as Markdown, and figures as texts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Generic, NamedTuple, TypeVar

from benchmarks.harness.rows.common import Interval
from benchmarks.report.drawing import Panel, shown
from edpsgd.card.markdown import table
from edpsgd.escaping import visible
from edpsgd.ledger.guarantee import format_epsilon

Found = Mapping[str, Any]  # a results file, whichever it is
Row = TypeVar("Row")


@dataclass(frozen=True)
class Text:
    """A paragraph; `code` and powers as in 10^4 are marked up."""

    text: str
    kind: str = "text"

    def html(self) -> str:
        """For the page."""
        return f'<p class="{self.kind}">{as_html(self.text)}</p>'

    def markdown(self) -> list[str]:
        """The same, as lines."""
        return [as_markdown(self.text)]


@dataclass(frozen=True)
class Plots:
    """Panels under one caption."""

    caption: str
    panels: Sequence[Panel]

    def html(self) -> str:
        """Side by side, where there is room."""
        drawn, caption = "\n".join(panel.svg() for panel in self.panels), as_html(self.caption)
        return f'<figure>\n<div class="plots">\n{drawn}\n</div>\n<figcaption>{caption}</figcaption>\n</figure>'

    def markdown(self) -> list[str]:
        """Only the page has plots."""
        return [f"Plot, in report.html only: {as_markdown(self.caption)}"]


@dataclass(frozen=True)
class Table(Generic[Row]):
    """A line for each row; columns have a name and say what to show of a row.

    The first column names the line. Tables of READMEs have no caption.
    """

    caption: str
    rows: Sequence[Row]
    columns: Mapping[str, Callable[[Row], str]]

    def _texts(self, markup: Callable[[str], str]) -> list[list[str]]:
        return [[markup(show(row)) for show in self.columns.values()] for row in self.rows]

    def html(self) -> str:
        """In a box of its own, which scrolls if the table is wide. Columns of figures are set flush right."""
        kinds = [_kind(cells) for cells in zip(*self._texts(str), strict=True)]
        head = "".join(_cell("th", kind, as_html(name), "col") for name, kind in zip(self.columns, kinds, strict=True))
        body = "\n".join(
            f"<tr>{_cell('th', kinds[0], first, 'row')}{''.join(map(_cell, ['td'] * len(rest), kinds[1:], rest))}</tr>"
            for first, *rest in self._texts(as_html)
        )
        return (
            f'<figure class="table">\n<figcaption>{as_html(self.caption)}</figcaption>\n'
            f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(visible(self._label()))}">\n'
            f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>\n</figure>"
        )

    def _label(self) -> str:
        """What the table is called: the first sentence that is more than a number."""
        sentences = re.sub(r"^Table \d+\. ", "", self.caption).replace("`", "").split(". ")
        return sentences[0].rstrip(".")

    def markdown(self) -> list[str]:
        """The same, as lines."""
        caption = [as_markdown(self.caption), ""] if self.caption else []
        rows = self._texts(lambda text: as_markdown(text).replace("|", r"\|"))
        head = [as_markdown(name) for name in self.columns]
        return [*caption, *table(head, rows).splitlines()]


Block = Text | Plots | Table[Any]


class Section(NamedTuple):
    """A heading, the name of the results below it, and what to show of these."""

    title: str
    source: str
    show: Callable[[Any], Iterator[Block]]

    @property
    def anchor(self) -> str:
        """Where links to it go: what readers of Markdown make of the heading."""
        return re.sub(r"[^\w -]", "", self.title.lower()).replace(" ", "-")


def _kind(cells: Sequence[str]) -> str:
    if all(re.match(r"[-+≈]?\d|–$", cell) for cell in cells):
        return "number"
    longest = max(map(len, cells))
    return "long" if longest > 44 else "title" if longest > 24 else "name"


def _cell(tag: str, kind: str, content: str, scope: str = "") -> str:
    attribute = f' scope="{scope}"' if scope else ""
    return f'<{tag} class="{kind}"{attribute}>{content}</{tag}>'


def as_html(text: str) -> str:
    """Marked up for the page."""
    return _marked(text, lambda code: f"<code>{escape(code)}</code>")


def as_markdown(text: str) -> str:
    """Marked up for the lines."""
    return _marked(text, lambda code: f"`{code}`")


def _marked(text: str, code: Callable[[str], str]) -> str:
    """Escaped, but for `code`, whose form differs, and for powers."""
    parts = text.split("`") if text.count("`") % 2 == 0 else [text]
    return "".join(
        code(part) if index % 2 else _raised(escape(visible(part, keep="\n"), quote=False))
        for index, part in enumerate(parts)
    )


def _raised(text: str) -> str:
    return re.sub(r"10\^(-?[\d.]*\d)", r"10<sup>\1</sup>", text)


# -------------------------------------------------------------------- figures as texts


def number(value: float | None, digits: int = 2) -> str:
    """With so many decimals; a dash for none."""
    return "–" if value is None else f"{value:.{digits}f}"


def within(middle: float, bounds: Sequence[float], digits: int = 2) -> str:
    """A figure, and in brackets how far it may be off."""
    return f"{middle:.{digits}f} ({min(bounds):.{digits}f}–{max(bounds):.{digits}f})"


def epsilon(value: float | None) -> str:
    """Four digits, or a power of ten; never below the value.

    Example:
        >>> epsilon(8.0), epsilon(3.11e24), epsilon(None)
        ('8.000', '10^24.5', '–')
    """
    if value is None:
        return "–"
    if value < 1e6:
        return format_epsilon(value)
    return f"10^{math.ceil(10 * math.log10(value)) / 10:.1f}"


def mean(values: Sequence[float]) -> str:
    """Over seeds, with the smallest and the largest."""
    mean = sum(values) / len(values)
    return within(mean, values) if len(values) > 1 else number(mean)


def interval(one: Interval) -> str:
    """An estimate with its bounds."""
    return within(one["value"], (one["low"], one["high"]), 3)


def place(row: Found) -> str:
    """Model and corpus of a row; a star marks models that were changed for peers."""
    corpus = row.get("corpus") or row.get("task")
    names = [row.get("model") or row["kind"], *([corpus] if corpus else [])]
    return ", ".join(map(shown, names)) + (" *" if row.get("is_peer") else "")


def made(name: str, found: Found) -> Text:
    """How figures came about: command, duration, machine, seeds, versions."""
    machine, minutes = dict(found.get("machine", {})), found.get("minutes")
    where = f"{machine.pop('processor', 'Processor not recorded')}, {machine.pop('cores', '?')} cores"
    duration = "duration not recorded"
    if minutes is not None:
        duration = f"{minutes:.{0 if minutes >= 10 else 1}f} minutes of work"
    versions = ", ".join(f"{package.replace('_', '-')} {number}" for package, number in machine.items())
    drawn = {run["seed"] for row in found.get("table", ()) for run in row["runs"]}
    if "seed" in found:
        drawn = {found["seed"]}
    seeds = ", ".join(map(str, sorted(drawn))) or "none"
    return Text(
        f"From {name}.json: `{command(name, found)}`, {duration}. {where}. Seeds: {seeds}. Versions: {versions}.",
        "made",
    )


def command(name: str, found: Found) -> str:
    """That makes the results."""
    return str(found.get("command", f"python -m benchmarks.{name}"))
