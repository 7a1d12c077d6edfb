"""edpsgd epsilon."""

from __future__ import annotations

import pytest

from tests.helpers.edpsgd_command import EPSILON, changed, run, run_json


def test_epsilon_of_one_epoch(capsys) -> None:
    found = run_json(capsys, *EPSILON)
    exact, zcdp, worst = (bound["epsilon"] for bound in found["bounds"])
    assert exact == pytest.approx(4.37717809568122, rel=1e-9)  # privacy.md section 9
    assert zcdp == pytest.approx(5.29852591218808, rel=1e-9)
    assert worst > 50
    text = run(capsys, *EPSILON)
    assert "ε exact Gaussian                                      4.378" in text
    assert "neighbours: replace or blank one example" in text
    assert "claimed" not in text


def test_epsilon_with_decay_and_poisson_sampling(capsys) -> None:
    command = [*changed(EPSILON, "--epochs", "5"), "--decay", "linear:0.1", "--sampling", "poisson"]
    assert run_json(capsys, *command)["bounds"][0]["epsilon"] == pytest.approx(2.591377, rel=2e-4)


def test_epsilon_of_the_published_algorithm(capsys) -> None:
    command = [*EPSILON, "--workers", "8", "--paper", "--max-scale", str(4 / 7**0.5)]
    found = run_json(capsys, *command)
    assert found["z0"] == pytest.approx(0.11692679, rel=1e-7)  # privacy.md section 3
    assert found["bounds"][0]["epsilon"] == pytest.approx(72.2365, abs=1e-4)
    assert found["claimed"]["bounds"][0]["epsilon"] == pytest.approx(4.377, abs=1e-3)
    text = run(capsys, *command)
    assert "real multiplier 0.11692679 in epoch 0" in text
    (row,) = [line for line in text.splitlines() if line.startswith("  ε exact Gaussian  ")]
    assert row.split()[-2:] == ["4.378", "72.24"]


def test_micro_batches_and_the_default_scale_of_the_published_algorithm(capsys) -> None:
    found = run_json(capsys, *EPSILON, "--workers", "2", "--micro-batches", "8", "--paper")
    assert found["z0"] == pytest.approx(1 / 8)


def test_the_result_is_json_when_epsilon_is_infinite(capsys) -> None:
    command = [*changed(EPSILON, "--epochs", "600"), "--decay", "exponential:1"]
    bounds = run_json(capsys, *command)["bounds"]
    assert bounds[0]["epsilon"] == "inf"
