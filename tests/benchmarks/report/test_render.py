"""The report: all figures of the results are there, whatever is missing is said, and the page needs nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from benchmarks.report import render
from benchmarks.report.__main__ import main
from benchmarks.report.blocks import Table
from benchmarks.report.sections import tradeoffs
from tests.benchmarks.report.made_up import RESULTS, epochs_over, tradeoff, write_results

MISSING = "Not measured yet: "


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
    *("29.33 (29.00–29.75)", "93.75 (93.75–93.75)", "62.50 (62.50–62.50)", "72", "6548", "1.000", "3.000"),  # recipes
    *("the recipe as it is", "19.38", "75.00", "13.33", "92.50", "84.50", "14484", "187"),
    *("7.875", "0.512 (0.487–0.537)", "0.013 (0.000–0.037)", "5120", "5210", "17.88"),  # LiRA
    *("6.125", "0.875", "4.377", "9.062", "refuted", "stands"),
    *("0.824 (0.786–0.859)", "0.0001", "lira"),
    *("17", "13", "16.6", "24.8", "41.8", "2.722", "2, 6"),
    *("5.75", "31.8%", "1e-05 *", "5.81", "+1%"),  # error rates and noise
    *("47.9", "95.2", "388926", "2.38"),  # the rank of a canary
    *("560", "616", "1.12"),  # the features of an attack
    *("0.647621", "6.8e-05", "2.94042", "46.25", "3.32304", "0.688"),  # the accountant
    *("838", "1.4", "0.17%", "10.9", "99.2"),  # data
    *("audits", "0.2"),
]


@pytest.mark.parametrize("figure", dict.fromkeys(FIGURES))
def test_figures_are_in_both(built, figure) -> None:
    page, text = built
    assert figure in Page(page).cells
    assert f"| {figure} |" in text


@pytest.mark.parametrize("power", ["7.4", "24.4", "11.6"])
def test_powers_of_ten(built, power) -> None:
    assert all(f"10<sup>{power}</sup>" in text for text in built)


def test_tables_are_the_same(built) -> None:
    rows = [line for line in built[1].splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    plain = [cell for line in rows for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    assert len(Page(built[0]).cells) == len(plain) > 500


WITH_ONE_PASS = ("tradeoff", "recipes", "lira")


def tables(name: str, found: dict[str, Any]) -> list[Table]:
    """Of all sections on some results."""
    sections = [section for section in render.SECTIONS if section.source == name]
    return [block for section in sections for block in section.show(found) if isinstance(block, Table)]


@pytest.mark.parametrize("name", ["tradeoff", "recipes", "lira", "memorization", "utility"])
def test_no_epsilon_without_its_condition(name) -> None:
    """Where seeds are public, or examples were clipped in one pass, whoever prints ε says so, and for which δ."""
    shown = [table for table in tables(name, RESULTS[name]()) if any("ε" in column for column in table.columns)]
    assert shown
    for table in shown:
        assert "secret" in table.caption
        assert "δ = " in table.caption
        assert "replacing one" in table.caption or "adding or removing one" in table.caption
        assert ("compared with autograd" in table.caption) == (name in WITH_ONE_PASS)


@pytest.mark.parametrize(
    ("name", "of_one"),
    [
        ("tradeoff", {"is_complete": False}),
        ("recipes", {"is_complete": False}),
        ("lira", {"is_complete": False}),
        ("epoch_time", {"missing": ["clc, ATIS"]}),
        ("step_time", {"missing": ["clc-14-32"]}),
    ],
)
def test_a_table_that_is_not_complete_says_so(name, of_one) -> None:
    for about, is_said in (({}, False), (of_one, True)):
        captions = [table.caption for table in tables(name, {**RESULTS[name](), **about})]
        assert any("Not complete" in caption for caption in captions) == is_said
        assert all(any(missing in caption for caption in captions) for missing in about.get("missing", []))


def test_headlines(built) -> None:
    page = Page(built[0]).words
    for text in ("1.04×", "1.29×", "2.1×", "16.3\u00a0%", "without privacy 8.3\u00a0%", "8×"):
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
            "Seeds: none",
        ):
            assert part in text
        assert all(make().get("command", f"python -m benchmarks.{name}") in text for name, make in RESULTS.items())


def test_text_of_results_is_escaped(built) -> None:
    assert "Quick <b>&amp; Cheap" in Page(built[0]).words
    assert not any("<b>" in text for text in built)
    assert "What had to change: BERT, ATIS *: CRF in float64 | no tied weights" in built[1]
    assert Table("Caption.", ["a | b"], {"text": str}).markdown()[-1] == r"| a \| b |"


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
    assert page.count(MISSING) == len(render.SECTIONS) == 17
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
    return "\n".join(next(tradeoffs.tradeoff(found["tradeoff"])).markdown()[1:])


def test_parts_that_may_be_empty(tmp_path) -> None:
    write_results(tmp_path)
    found = render.collect(tmp_path)
    assert "plain training was not run" in render.html(render.build(_without_plain(found)))
    found["epoch_time"] |= {"cost_model": {}, "memory": [], "rows": [epochs_over("clc", "ATIS", None)]}
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
    assert warning in next(tradeoffs.tradeoff(found)).caption
    for row in found["table"]:
        row["settings"].pop("layer_scaling", None)
    assert warning not in next(tradeoffs.tradeoff(found)).caption


@pytest.mark.parametrize("name", RESULTS)
def test_a_page_is_its_sections_of_the_report(name, tmp_path) -> None:
    """With all blocks of these, and how the figures came about once, at the end."""
    folder = write_results(tmp_path)
    main(["--results", str(folder), "--out", str(folder)])
    page, report = ((folder / f"{file}.md").read_text(encoding="utf-8") for file in (name, "report"))
    found = RESULTS[name]()
    for section in render.SECTIONS:
        if section.source == name:
            blocks = [line for block in render.content(section, {name: found}) for line in ["", *block.markdown()]]
            text = "\n".join([section.title, *blocks])
            assert text in page
            assert text in report
    *_, last, _ = page.split("\n")
    assert last.startswith(f"From {name}.json: ")
    assert page.count(last) == 1
    assert page.startswith("# ")


def test_deterministic(built, tmp_path) -> None:
    again = render.build(render.collect(write_results(tmp_path)))
    assert (render.html(again), render.markdown(again)) == built
