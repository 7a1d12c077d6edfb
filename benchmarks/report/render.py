"""Makes one page of all results, as HTML and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import NamedTuple, cast

from benchmarks.harness.results import load
from benchmarks.harness.rows.epoch_time import EpochRow
from benchmarks.harness.rows.recipes import RecipeRow
from benchmarks.harness.rows.tradeoff import Tradeoff
from benchmarks.report.blocks import Block, Found, Plots, Section, Table, Text, as_html, as_markdown, made, place
from benchmarks.report.sections import SECTIONS

TEMPLATE = Path(__file__).with_name("template.html")
TITLE = "What private training costs, and what it protects"
LEAD = (
    "All measurements of `edpsgd`, a differentially private optimizer for PyTorch and Horovod, with the command, "
    "machine and versions behind each. SER is the semantic error rate in percent: a wrong intent, slot type or slot "
    "border is an error."
)


# -------------------------------------------------------------------- headlines


class Headline(NamedTuple):
    """A figure that stands on top, and the results that it is from."""

    figure: str
    text: str
    source: str


def headlines(found: dict[str, Found]) -> Iterator[Headline]:
    """The figures that matter most, of those that were measured, in this order."""
    if "epoch_time" in found:
        yield from _speed([row for row in found["epoch_time"]["rows"] if not row["is_peer"]])
    if "recipes" in found:
        yield from _price(found["recipes"]["rows"], found["recipes"]["delta"])
    if "tradeoff" in found:
        yield from _shortfall(cast(Tradeoff, found["tradeoff"]))
    if "audits" in found:
        paper = [row["is_refuted"] for row in found["audits"]["rows"] if row["noise"] == "paper"]
        text = "claims of the published noise that an audit refutes"
        yield from [Headline(f"{sum(paper)} of {len(paper)}", text, "audits.json")] if paper else []


def _speed(rows: Sequence[EpochRow]) -> Iterator[Headline]:
    timed = [(row["contenders"]["edp"], place(row)) for row in rows if "edp" in row["contenders"]]
    ours = [(one["ratio"], where) for one, where in timed if not one["is_extrapolated"]]
    if ours:
        ratio, where = max(ours)
        text = f"plain training's time for an epoch of eDP-SGD, at worst of {len(ours)} that were measured ({where})"
        yield Headline(f"{ratio:.2f}×", text, "epoch_time.json")
    papers = [row["paper"] for row in rows if row["paper"]]
    edp, vanilla = ([paper[name] for paper in papers if name in paper] for name in ("edp", "dp_sgd"))
    if edp:
        also = f", and {_range(vanilla)} for vanilla DP-SGD" if vanilla else ""
        text = f"in the paper, for the same on its public corpora and eight GPUs{also}"
        yield Headline(_range(edp), text, "epoch_time.json")


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return f"{low}×" if low == high else f"{low}–{high}×"


def _price(rows: Sequence[RecipeRow], delta: float, aim: float = 8.0) -> Iterator[Headline]:
    """Of the trainings at some ε, those with the lowest error rate on average."""
    at_aim = [row for row in rows if row["epsilon"] == aim]
    best = min(at_aim, key=_mean_ser, default=None)
    if best is not None:
        same = [row for row in rows if row["name"] == best["name"] and row["epsilon"] is None]
        plain = f" (without privacy {_mean_ser(same[0]):.1f}\u00a0%)" if same else ""
        text = (
            f"SER at ε = {aim:g}, δ = {delta:g} with single-example units, {best['title']}, the lowest of "
            f"{len(at_aim)}{plain}; ε is for adding or removing one utterance, if spot checks speak for all batches"
        )
        yield Headline(f"{_mean_ser(best):.1f}\u00a0%", text, "recipes.json")


def _mean_ser(row: RecipeRow) -> float:
    return sum(run["test_ser"] for run in row["runs"]) / len(row["runs"])


def _shortfall(found: Tradeoff) -> Iterator[Headline]:
    shares = [run["real_share"] for row in found["table"] for run in row["runs"]]
    factors = [1 / share for share in shares if share and share < 1]
    if factors:
        text = f"too little noise, by the published algorithm with {found['micro_batches']} micro-batches in a step"
        yield Headline(_range(factors), text, "tradeoff.json")


# -------------------------------------------------------------------- the page


def collect(folder: Path) -> dict[str, Found]:
    """All results that are there."""
    return {path.stem: load(path.stem, folder) for path in sorted(folder.glob("*.json"))}


def content(section: Section, found: dict[str, Found]) -> list[Block]:
    """What a section shows; tables without rows and plots without panels are left out."""
    name = section.source
    if name not in found:
        return [Text(f"Not measured yet: `python -m benchmarks.{name}` measures it.", "missing")]
    try:
        blocks = [block for block in section.show(found[name]) if not _is_empty(block)]
    except KeyError as error:
        raise ValueError(f"{name}.json has no {error}: python -m benchmarks.{name} writes it anew") from error
    return blocks or [Text("Not part of this measurement.", "missing")]


def _is_empty(block: Block) -> bool:
    return (isinstance(block, Table) and not block.rows) or (isinstance(block, Plots) and not block.panels)


def page(name: str, found: Found) -> str:
    """The Markdown page of a results file: its sections, and how they came about."""
    lines: list[str] = []
    for section in SECTIONS:
        if section.source == name:
            lines += [f"{'##' if lines else '#'} {section.title}", ""]
            for block in content(section, {name: found}):
                lines += [*block.markdown(), ""]
    return "\n".join([*lines, *made(name, found).markdown()]) + "\n"


class Report(NamedTuple):
    """All that is shown, whatever the format."""

    headlines: Sequence[Headline]
    sections: Sequence[tuple[Section, Sequence[Block]]]


def build(found: dict[str, Found]) -> Report:
    """The report on some results."""
    sections = []
    for section in SECTIONS:
        is_measured = section.source in found
        origin = [made(section.source, found[section.source])] if is_measured else []
        sections.append((section, [*content(section, found), *origin]))
    return Report(list(headlines(found)), sections)


def html(report: Report) -> str:
    """The page, which needs nothing but itself."""
    top = [
        f"<li><strong>{as_html(one.figure)}</strong> <span>{as_html(one.text)}</span> <small>{one.source}</small></li>"
        for one in report.headlines
    ]
    sections = [
        f'<section>\n<h2 id="{section.anchor}">{escape(section.title)}</h2>\n'
        + "\n".join(block.html() for block in blocks)
        + "\n</section>"
        for section, blocks in report.sections
    ]
    parts = {
        "title": escape(TITLE),
        "lead": as_html(LEAD),
        "headlines": "\n".join(['<ul class="headlines">', *top, "</ul>"]) if top else "",
        "contents": "\n".join(
            f'<li><a href="#{one.anchor}">{escape(one.title)}</a></li>' for one, _ in report.sections
        ),
        "sections": "\n".join(sections),
    }
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(parts)


def markdown(report: Report) -> str:
    """The same without plots."""
    lines = [f"# {TITLE}", "", LEAD, "", "The same with plots is report.html.", ""]
    lines += [f"- **{as_markdown(one.figure)}** {as_markdown(one.text)} ({one.source})" for one in report.headlines]
    lines += ["", *(f"- [{section.title}](#{section.anchor})" for section, _ in report.sections)]
    for section, blocks in report.sections:
        lines += ["", f"## {section.title}"]
        for block in blocks:
            lines += ["", *block.markdown()]
    return "\n".join(lines) + "\n"


def write_report(results: Path, out: Path) -> None:
    """Writes a page of each results file of a folder, and report.html and report.md, into another one."""
    found = collect(results)
    report = build(found)
    texts = {"report.html": html(report), "report.md": markdown(report)}
    shown = dict.fromkeys(section.source for section in SECTIONS)
    texts |= {f"{name}.md": page(name, found[name]) for name in shown if name in found}
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
