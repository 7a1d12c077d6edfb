"""Sampled steps: reference values, the tables of McMahan et al. 2018, laws, and bad input."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edpsgd import LinearDecay, accounting
from edpsgd.accounting import (
    gaussian_epsilon,
    moments_epsilon,
    pld,
    poisson_epsilon,
    rdp_epsilon,
)
from edpsgd.accounting.pld import Steps


def some(examples: int):
    return settings(deadline=None, derandomize=True, max_examples=examples)


def multipliers(z0: float, decay, epochs: int) -> list[float]:
    return [z0 * decay(t) for t in range(epochs)]


def test_poisson_sampling() -> None:
    epsilon = poisson_epsilon(multipliers(1.0, LinearDecay(0.1), 5), 0.01, 100, 1e-5)
    assert 2.591377 <= epsilon <= 2.591377 * (1 + 1e-4)


TABLE_1 = [  # users, sample, z, ε after 1, 10, … 10⁶ rounds
    (1e5, 1e2, 1.0, ["0.97", "0.98", "1.00", "1.07", "1.18", "2.21", "7.50"]),
    (1e6, 1e1, 1.0, ["0.68", "0.69", "0.69", "0.69", "0.69", "0.72", "0.73"]),
    (1e6, 1e3, 1.0, ["1.17", "1.17", "1.20", "1.28", "1.39", "2.44", "8.13"]),
    (1e6, 1e4, 1.0, ["1.73", "1.92", "2.08", "3.06", "8.49", "32.38", "187.01"]),
    (1e6, 1e3, 3.0, ["0.47", "0.47", "0.48", "0.48", "0.49", "0.67", "1.95"]),
    (1e9, 1e3, 1.0, ["0.84", "0.84", "0.84", "0.85", "0.88", "0.88", "0.88"]),
]
TABLE_2 = [  # users, sample, ε after 5000 rounds with z = 1 at δ = 1e-9
    (763430, 5000, "4.634"),
    (763430, 1667, "2.314"),
    (763430, 1250, "2.038"),
    (1e8, 5000, "1.152"),
    (1e8, 1667, "0.991"),
    (1e8, 1250, "0.987"),
]


@pytest.mark.parametrize(("users", "sample", "z", "printed"), TABLE_1)
def test_table_1(users, sample, z, printed) -> None:
    delta, rate = users**-1.1, sample / users
    for exponent, figure in enumerate(printed):
        epsilon = moments_epsilon(z, rate, 10**exponent, delta)
        assert f"{epsilon:.2f}" == figure
        assert poisson_epsilon([z], rate, 10**exponent, delta) < epsilon


@pytest.mark.parametrize(("users", "sample", "printed"), TABLE_2)
def test_table_2(users, sample, printed) -> None:
    epsilon = moments_epsilon(1.0, sample / users, 5000, 1e-9)
    assert f"{epsilon:.3f}" == printed
    assert poisson_epsilon([1.0], sample / users, 5000, 1e-9) < epsilon


@some(12)
@given(
    st.floats(0.5, 5.0),
    st.floats(-4.0, -0.1).map(lambda e: 10.0**e),
    st.integers(1, 300),
    st.integers(1, 3),
    st.floats(-8.0, -3.0).map(lambda e: 10.0**e),
    st.floats(1.05, 2.0),
)
def test_poisson_is_monotone(z, rate, steps, epochs, delta, factor) -> None:
    """By more than the accuracy of the fourth digit, unless it is 0."""
    epsilon = poisson_epsilon([z] * epochs, rate, steps, delta)
    assert math.isfinite(epsilon)
    for larger in (
        poisson_epsilon([z] * (epochs + 1), rate, steps, delta),
        poisson_epsilon([z / factor] * epochs, rate, steps, delta),
        poisson_epsilon([z] * epochs, rate, steps, delta / factor),
        poisson_epsilon([z] * epochs, min(1.0, rate * factor), steps, delta) * (1 + 5e-4),
    ):
        assert larger > epsilon or larger == epsilon == 0
    assert epsilon <= gaussian_epsilon([z / math.sqrt(epochs * steps)], delta) * (1 + 5e-4)


@some(8)
@given(st.floats(0.7, 4.0), st.floats(-3.0, -0.5).map(lambda e: 10.0**e), st.integers(1, 500))
def test_poisson_is_below_rdp(z, rate, steps) -> None:
    assert poisson_epsilon([z], rate, steps, 1e-5) <= rdp_epsilon([pld.Steps(z, rate, steps)], 1e-5)


def test_without_sampling_poisson_is_exact() -> None:
    assert poisson_epsilon([2.0], 1.0, 4, 1e-5) == pytest.approx(gaussian_epsilon([1.0], 1e-5), rel=1e-12)


STEPS_FUNCTIONS = {
    "steps_per_epoch": lambda steps: poisson_epsilon([1.0], 0.1, steps, 1e-5),
    "rounds": lambda steps: moments_epsilon(1.0, 0.1, steps, 1e-5),
}


@pytest.mark.parametrize("name", STEPS_FUNCTIONS)
@pytest.mark.parametrize("steps", [-1, 1.5, math.nan, True, "10", None])
def test_bad_numbers_of_steps(name, steps) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an int >= 0, got"):
        STEPS_FUNCTIONS[name](steps)


@pytest.mark.parametrize("max_order", [0, -1, 1.5, True])
def test_bad_orders(max_order) -> None:
    with pytest.raises(ValueError, match="max_order must be an int >= 1, got"):
        moments_epsilon(1.0, 0.1, 10, 1e-5, max_order)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (Steps(math.nan, 0.1, 1), "noise_multiplier"),
        (Steps(-1.0, 0.1, 1), "noise_multiplier"),
        (Steps(math.inf, 0.1, 1), "noise_multiplier"),
        (Steps(1.0, math.nan, 1), "sampling_rate"),
        (Steps(1.0, 1.5, 1), "sampling_rate"),
        (Steps(1.0, -0.1, 1), "sampling_rate"),
        (Steps(1.0, 0.1, -5), "number"),
        (Steps(1.0, 0.1, 1.5), "number"),
    ],
)
def test_steps_that_are_none_are_refused(step, name) -> None:
    steps = [Steps(1.0, 0.01, 10), step]
    for accountant in (
        accounting.compose,
        accounting.rdp_epsilon,
        accounting.moments_of,
        accounting.fixed_size_epsilon,
    ):
        with pytest.raises(ValueError, match=rf"{name} of steps\[1\] must be"):
            accountant(steps, 1e-5)
