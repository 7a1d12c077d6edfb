"""The report in a browser: on a phone and a desk, light and dark."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.harness.results import RESULTS
from benchmarks.report import render
from benchmarks.report.__main__ import main
from tests.benchmarks.report.made_up import write_results

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
)
OF_RECIPES = ["Semantic error rate at small epsilon", "Semantic error rate against epsilon, BERT, SNIPS"]
PLOTS = [
    "Time of an epoch over that of SGD",
    "Time of a step over that of SGD for more workers: a prediction",
    *(f"{name} by epoch, CLC, ATIS" for name in ("Noise multiplier", "Epsilon")),
    *(f"ROC curves of the shadow attack, {model}" for model in ("CLC", "BERT")),
    "Semantic error rate against epsilon, BERT, ATIS",
    *OF_RECIPES,
    "Audited lower bounds of mu against claims",
]

pytestmark = pytest.mark.skipif(
    not (PROGRAM and DRIVER), reason="no Chromium with chromedriver on PATH: scripts/browser.sh installs them"
)


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> str:
    folder = write_results(tmp_path_factory.mktemp("results"))
    main(["--results", str(folder), "--out", str(folder)])
    return (folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = PROGRAM
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield started
    started.quit()


@pytest.fixture(scope="module", params=[(360, "light"), (360, "dark"), (1200, "light"), (1200, "dark")], ids=str)
def page(request, browser, address) -> Any:
    """The page, opened anew in a window of some width and in one of the schemes."""
    width, scheme = request.param
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # what was before
    browser.get(address)
    browser.width, browser.scheme = width, scheme
    return browser


def test_every_plot_is_seen(page) -> None:
    boxes = page.execute_script(
        "return [...document.querySelectorAll('svg')].map(e => ({label: e.getAttribute('aria-label'), "
        "role: e.getAttribute('role'), width: e.getBoundingClientRect().width, "
        "height: e.getBoundingClientRect().height, shapes: e.querySelectorAll('path, use').length, "
        "visible: e.checkVisibility()}))"
    )
    assert sorted(box["label"] for box in boxes) == sorted(PLOTS)
    for box in boxes:
        assert box["role"] == "img"
        assert box["visible"]
        assert box["shapes"] > 10
        assert box["width"] > 100 < box["height"]


def test_text_of_plots_can_be_read(page) -> None:
    sizes = page.execute_script(
        "return [...document.querySelectorAll('svg text')].map(e => parseFloat(getComputedStyle(e).fontSize) * "
        "e.getScreenCTM().a).filter(size => size > 0)"
    )
    assert min(sizes) > 8.5


def test_tables_have_rows(page) -> None:
    counts = page.execute_script(
        "return [...document.querySelectorAll('table')].map(e => [e.querySelectorAll('thead th[scope=col]').length, "
        "e.querySelectorAll('tbody tr').length, e.querySelectorAll('tbody th[scope=row]').length])"
    )
    assert len(counts) == 31
    assert all(columns >= 2 and rows >= 1 and rows == named for columns, rows, named in counts)


def test_only_boxes_scroll(page) -> None:
    assert page.execute_script("return window.innerWidth") == page.width
    assert page.execute_script("return document.scrollingElement.scrollWidth <= window.innerWidth")
    wide = page.execute_script(
        "return [...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)"
        ".map(e => getComputedStyle(e).overflowX)"
    )
    assert set(wide) == {"auto"}


def test_quiet(page) -> None:
    """No messages, no requests but for the file itself. (The logs are empty after the first reading.)"""
    page.get(page.current_url.partition("#")[0])
    assert page.get_log("browser") == []
    sent = re.findall(r'"Network\.requestWillBeSent".*?"url":"([^"]*)"', "\n".join(_messages(page)))
    assert sent
    assert all(url.startswith(("file://", "data:")) for url in sent)
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0


def _messages(page: Any) -> list[str]:
    return [entry["message"] for entry in page.get_log("performance")]


def test_structure(page) -> None:
    assert page.title == render.TITLE
    assert page.execute_script("return document.documentElement.lang") == "en"
    assert page.execute_script("return document.querySelectorAll('h1').length") == 1
    assert page.execute_script(
        "return [...document.querySelectorAll('nav a')].map(a => decodeURIComponent(a.hash.slice(1)))"
        ".every(name => document.getElementById(name)?.tagName === 'H2')"
    )


@pytest.mark.parametrize(
    "selector", ["body", "p.made", "figcaption", "thead th", "tbody th", "td", "nav a", "li small", "code", "svg text"]
)
def test_contrast(page, selector) -> None:
    text, ground = page.execute_script(
        "const e = document.querySelector(arguments[0]); let b = e;"
        "while (getComputedStyle(b).backgroundColor === 'rgba(0, 0, 0, 0)') b = b.parentElement;"
        "const s = getComputedStyle(e);"
        "return [e instanceof SVGElement ? s.fill : s.color, getComputedStyle(b).backgroundColor]",
        selector,
    )
    assert _contrast(text, ground) >= 4.5
    assert (_luminance(ground) < 0.2) == (page.scheme == "dark")


@pytest.mark.parametrize("number", range(6))
def test_contrast_of_lines(page, number) -> None:
    """3 is what the guidelines ask of graphics."""
    line, ground = page.execute_script(
        "const e = document.body.appendChild(document.createElement('i'));"
        "e.style.color = `var(--plot-${arguments[0]})`; const found = getComputedStyle(e).color; e.remove();"
        "return [found, getComputedStyle(document.body).backgroundColor]",
        number,
    )
    assert _contrast(line, ground) >= 3


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    """Relative luminance, as the Web Content Accessibility Guidelines define it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_dark_plots_are_not_light_ones(browser, address) -> None:
    """Lines of plots follow the scheme."""
    colours = []
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.get(address)
        colours.append(
            browser.execute_script(
                "return [...document.querySelectorAll('svg path')].map(e => getComputedStyle(e).stroke)"
                ".filter(stroke => stroke !== 'none')"
            )
        )
    assert len(colours[0]) == len(colours[1]) > 50
    assert not any(light == dark for light, dark in zip(*colours, strict=True))


def test_prints_on_light_ground(browser, address) -> None:
    media = {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(address)
    assert _luminance(browser.execute_script("return getComputedStyle(document.body).backgroundColor")) > 0.9


def test_the_page_of_the_project(browser) -> None:
    """That of the real measurements, which has all plots and tables of what was measured."""
    browser.get((RESULTS / "report.html").as_uri())
    plots = browser.execute_script(
        "return [...document.querySelectorAll('svg')].filter(e => e.querySelectorAll('path, use').length > 10 && "
        "e.checkVisibility()).map(e => e.getAttribute('aria-label'))"
    )
    known = [label for label in PLOTS if label not in OF_RECIPES or (RESULTS / "recipes.json").exists()]
    assert sorted(label.partition(",")[0] for label in plots) == sorted(label.partition(",")[0] for label in known)
    rows = browser.execute_script(
        "return [...document.querySelectorAll('table')].map(e => e.querySelectorAll('tbody tr').length)"
    )
    assert len(rows) == 26
    assert min(rows) >= 1
