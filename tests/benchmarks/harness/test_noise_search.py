"""The search of the benchmark for the largest noise, with error rates that are known."""

from __future__ import annotations

import json

import pytest

from benchmarks.harness.noise_search import DECAYS, FIRST, GRID, Search
from benchmarks.harness.results import RESULTS
from benchmarks.report.sections.utility import largest_noise
from benchmarks.utility import all_private


class Trainings:
    """Error rates that depend on the noise of the first epoch only, as a share of it is what a model bears."""

    def __init__(self, bearable: float) -> None:
        self.bearable, self.tried = bearable, []

    def __call__(self, job) -> dict:
        """Up to 5 % more than plain training's 10 % is allowed, exactly that too."""
        if job.settings["private"] == "off":
            return {"test_ser": 10.0}
        self.tried.append(job.folder)
        real = job.settings["noise_multiplier"] / (8**0.5 if job.settings["noise"] == "paper" else 1)
        return {"test_ser": 10.5 if real <= self.bearable else 10.6}


@pytest.mark.parametrize("bearable", range(-1, len(GRID)))
def test_the_largest_noise(bearable) -> None:
    train = Trainings(GRID[bearable] if bearable >= 0 else 0.0)
    assert Search("clc", "atis", train).largest("none", "calibrated", FIRST) == bearable
    assert len(train.tried) == len(set(train.tried)) <= 6


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("bearable", "more"), [(1e-3, 0), (2e-3, 0), (4e-3, 1)])
def test_paper_noise_bears_a_larger_multiplier(decay, bearable, more) -> None:
    """It is too small by a factor of 2.8."""
    search = Search("clc", "atis", Trainings(bearable))
    assert search.largest(decay, "calibrated", FIRST) == GRID.index(1e-3)
    assert search.largest(decay, "paper", GRID.index(1e-3)) == GRID.index(1e-3) + more


def test_what_follows_is_not_run() -> None:
    """Linear decay has less noise than none in every epoch, and passes where that does."""
    train = Trainings(1e-3)
    search = Search("clc", "atis", train)
    search.largest("none", "calibrated", GRID.index(1e-3))
    assert search.largest("linear:0.5", "calibrated", GRID.index(1e-3)) == GRID.index(1e-3)
    assert train.tried == [f"atis-clc-calibrated-{name}" for name in ("none-0.001", "none-0.01", "linear-0.01")]


def test_whatever_is_found_is_run() -> None:
    train = Trainings(1e-3)
    all_private(train, "snips-bert")
    decays = ("none", "linear", "exponential")
    assert {f"snips-bert-{noise}-{d}-0.001" for d in decays for noise in ("calibrated", "paper")} <= set(train.tried)


@pytest.fixture
def results() -> dict:
    return json.loads((RESULTS / "utility.json").read_text(encoding="utf-8"))


def test_the_epsilon_of_trainings_that_are_not_run_is_that_of_a_ledger(results) -> None:
    private = [r for r in results["runs"] if r["settings"]["private"] == "edp"]
    for r in private:
        settings = r["settings"]
        search = Search(settings["model"], settings["task"], Trainings(1.0))
        expected = search.epsilon(settings["decay"], settings["noise"], settings["noise_multiplier"])
        assert r["metrics"]["epsilon"] == pytest.approx(expected, rel=1e-9)
    assert private


def test_only_complete_searches_are_in_the_table_of_the_largest_noise(results) -> None:
    def rows() -> list:
        return [row for row in largest_noise(results["runs"]) if (row.model, row.task) == ("clc", "atis")]

    assert len(rows()) == 6
    results["runs"] = [r for r in results["runs"] if r["name"] != "atis-clc-paper-none-0.0001"]
    assert rows() == []
