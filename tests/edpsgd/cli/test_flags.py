"""What flags may be, and which of them fit together."""

from __future__ import annotations

import pytest

from tests.helpers.edpsgd_command import EPSILON, PLAN, changed, refused


@pytest.mark.parametrize(
    ("flag", "values", "allowed"),
    [
        ("--delta", ("2", "0", "1", "nan", "-1", "x", "inf"), "between 0 and 1"),
        ("--examples", ("0", "-5", "1.5", "nan", "1e3", "9" * 20), "a whole number from 1 to 1000000000000000"),
        ("--batch", ("0", "x"), "a whole number from 1 to 1000000000000000"),
        ("--epochs", ("0", "10001", "ten"), "a whole number from 1 to 10000"),
        ("--workers", ("0",), "a whole number from 1 to 1000000"),
        ("--micro-batches", ("0",), "a whole number from 1 to 1000000"),
        ("--epsilon", ("0", "-1", "nan", "inf", "1e7", "1e-7"), "from 1e-6 to 1e6"),
    ],
)
def test_bad_numbers(capsys, flag: str, values: tuple[str, ...], allowed: str) -> None:
    for value in values:
        line = refused(capsys, *changed(PLAN, flag, value))
        assert line == f"edpsgd plan: error: {flag} must be {allowed}, got {value}"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--decay", "cosine"], "--decay must be none, linear:TAU or exponential:TAU, got 'cosine'"),
        (["--decay", "linear"], "--decay must be none, linear:TAU or exponential:TAU, got 'linear'"),
        (["--decay", "linear:x"], "--decay must have a finite TAU >= 0, as in linear:0.05, got 'linear:x'"),
        (["--decay", "exponential:-1"], "--decay must have a finite TAU >= 0, as in exponential:0.05, got"),
        (["--decay", "exponential:nan"], "--decay must have a finite TAU >= 0"),
        (["--decay", "exponential:100"], "--decay exponential:100.0 cannot be computed for --epochs 20"),
        (["--sampling", "random"], "--sampling must be shuffled or poisson, got 'random'"),
        (["--unit", "user"], "--unit must be micro_batch or example, got 'user'"),
        (["--workers", "3"], "--batch must be a multiple of workers times micro-batches, 3, got 80"),
        (["--workers", "8", "--micro-batches", "3"], "--batch must be a multiple of workers times micro-batches, 24"),
        (["--unit", "example", "--micro-batches", "2"], "--micro-batches is for --unit micro_batch, got 2"),
        (["--batch", "8001"], "--batch must be at most --examples 8000, got 8001"),
        (["--plot"], "--plot expected one argument"),
        (["--noise", "1"], "unrecognized arguments: --noise 1"),
    ],
)
def test_flags_that_do_not_fit(capsys, more: list[str], message: str) -> None:
    assert message in refused(capsys, *PLAN, *more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--noise", "0"], "--noise must be from 1e-6 to 1e6, got 0"),
        (["--max-scale", "2"], "--max-scale is for --paper, got 2 without it"),
        (["--paper", "--max-scale", "0.5"], "--max-scale must be a finite number >= 1"),
        (["--paper", "--unit", "example"], "--paper is for --unit micro_batch, got --unit example"),
        (["--epochs", "20", "--decay", "exponential:100"], "--noise 1 cannot be computed with these --decay and"),
    ],
)
def test_flags_of_epsilon_that_do_not_fit(capsys, more: list[str], message: str) -> None:
    assert refused(capsys, *EPSILON, *more).startswith(f"edpsgd epsilon: error: {message}")
