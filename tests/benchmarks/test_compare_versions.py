"""Step times of two checkouts are compared in one run."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest

from benchmarks import compare_versions
from benchmarks.compare_versions import CONTENDERS, Worker, compare, median_interval, subjects
from tests.helpers.paths import ROOT


class Clock(Worker):
    """Steps of known length, written down in the order in which they are made."""

    def __init__(self, name: str, seconds: list[float], log: list[str]) -> None:
        super().__init__(ROOT)
        self.name, self.seconds, self.log = name, seconds, log

    def make(self, subject: compare_versions.Subject) -> None:
        self.log.append(f"{self.name} makes {subject['contender']}")

    def step(self) -> float:
        self.log.append(self.name)
        return self.seconds.pop(0)


def test_a_tiny_model_makes_a_step_in_a_copy_of_this_checkout(tmp_path, capsys) -> None:
    other = tmp_path / "other"
    for package in ("edpsgd", "models", "tasks"):
        shutil.copytree(ROOT / package, other / package)
    out = tmp_path / "found.json"
    flags = ["--models", "tiny", "--sizes", "2", "--tokens", "3", "--rounds", "1", "--warm-up", "0"]
    compare_versions.main(["--other", str(other), *flags, "--out", str(out)])
    found = json.loads(out.read_text())
    assert [row["contender"] for row in found["rows"]] == list(CONTENDERS)
    for row in found["rows"]:
        assert row["ratio"] == row["new_seconds"][0] / row["other_seconds"][0] > 0
    assert capsys.readouterr().out.count("new/other") == len(CONTENDERS)


def test_code_from_elsewhere_is_not_measured(tmp_path) -> None:
    """Without an edpsgd of its own, the folder's process would import the installed one."""
    with pytest.raises(RuntimeError, match="trains with"), Worker(tmp_path):
        pass


def test_a_folder_without_the_project_is_refused(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        compare_versions.main(["--other", str(tmp_path)])
    assert "must be a checkout of this project" in capsys.readouterr().err


def test_checkouts_take_turns_and_the_warm_up_does_not_count() -> None:
    log: list[str] = []
    new = Clock("new", [9.0, 2.0, 3.0, 8.0], log)
    other = Clock("other", [9.0, 1.0, 2.0, 2.0], log)
    [subject, *_] = subjects(["clc"], [32], 14)
    found = compare((new, other), subject, warm_up=1, rounds=3)
    assert log[2:] == ["new", "other", "other", "new", "new", "other", "other", "new"]
    assert (found["new_ms"], found["other_ms"]) == (3000, 2000)
    assert found["ratio"] == 2.0, "the median of 2, 1.5 and 4"
    assert found["ratio_interval"] == (1.5, 4.0)


@pytest.mark.parametrize("count", [1, 2, 5, 6, 9, 40])
def test_the_level_of_an_interval_is_how_often_it_holds_the_median(count) -> None:
    _, _, level = median_interval([float(value) for value in range(count)])
    draws = np.random.default_rng(0).exponential(size=(4000, count))
    bounds = np.array([median_interval(row)[:2] for row in draws])
    holds = (bounds[:, 0] <= math.log(2)) & (math.log(2) <= bounds[:, 1])
    assert abs(holds.mean() - level) < 0.03
    assert level >= 0.95 or count < 6
