"""Passes over the data as one Gaussian mechanism: reference values, 60 digits, and laws."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edpsgd import ExponentialDecay, LinearDecay
from edpsgd.accounting import (
    gaussian_epsilon,
    moments_epsilon,
    zcdp_epsilon,
    zcdp_rho,
)

noises = st.floats(0.05, 50.0)
deltas = st.floats(-12.0, -1.0).map(lambda exponent: 10.0**exponent)


def some(examples: int):
    return settings(deadline=None, derandomize=True, max_examples=examples)


def multipliers(z0: float, decay, epochs: int) -> list[float]:
    return [z0 * decay(t) for t in range(epochs)]


def test_linear_decay() -> None:
    z = multipliers(1.0, LinearDecay(0.1), 20)
    assert zcdp_rho(z) == pytest.approx(41.35, rel=1e-14)
    assert zcdp_epsilon(zcdp_rho(z), 5e-4) == pytest.approx(76.806864875624, abs=5e-13)
    assert gaussian_epsilon(z, 5e-4) == pytest.approx(70.422111705724, abs=5e-13)


def test_one_step() -> None:
    half_a_digit = 6e-15  # and one rounding error
    assert zcdp_epsilon(zcdp_rho([1.0]), 1e-5) == pytest.approx(5.29852591218808, abs=half_a_digit)
    assert gaussian_epsilon([1.0], 1e-5) == pytest.approx(4.37717809568122, abs=half_a_digit)


def test_hardly_any_noise() -> None:
    z = multipliers(1e-6, ExponentialDecay(0.5), 30)
    assert zcdp_rho(z) == pytest.approx(3.10963964249889e24, rel=2e-15)
    assert gaussian_epsilon(z, 5e-4) == pytest.approx(3.1096396425071e24, rel=2e-14)


def test_the_noise_as_printed_in_the_paper() -> None:
    """Section 3: eight workers, z = 1."""
    given_scales = np.array([0.378, 0.756, 1.512])
    scales = given_scales / np.sqrt(np.mean(given_scales**2))
    z = 1.0 / (2 * math.sqrt(8) * scales.max())
    assert z == pytest.approx(0.11692679, abs=5e-9)
    assert gaussian_epsilon([z], 1e-5) == pytest.approx(72.2365, abs=5e-5)


def gaussian_delta(epsilon: float, mu: float) -> mpmath.mpf:
    """Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) (Balle and Wang 2018)."""
    epsilon, mu = mpmath.mpf(epsilon), mpmath.mpf(mu)
    return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize("delta", [0.3, 1e-3, 1e-5, 1e-10, 1e-30, 1e-200])
@pytest.mark.parametrize("mu", [1e-12, 1e-8, 1e-4, 1e-2, 0.1, 1.0, 4.0, 30.0, 1e3, 1e5])
def test_gaussian_epsilon_to_the_last_digits(mu, delta) -> None:
    """δ at the ε that was found, moved by a relative 1e-11 or by 1e-15, encloses the given one."""
    epsilon = gaussian_epsilon([1 / mu], delta)
    mu = math.sqrt((1 / mu) ** -2)  # as given, after rounding
    slack = max(1e-11 * epsilon, 1e-15)
    with mpmath.workdps(60):
        assert gaussian_delta(epsilon + slack, mu) < delta
        assert epsilon == 0.0 or gaussian_delta(epsilon - slack, mu) > delta


@some(100)
@given(st.lists(noises, min_size=1, max_size=30), deltas)
def test_exact_is_below_zcdp(z, delta) -> None:
    assert gaussian_epsilon(z, delta) <= zcdp_epsilon(zcdp_rho(z), delta)


@some(100)
@given(st.lists(noises, min_size=1, max_size=30), deltas, noises, st.floats(1.01, 3.0))
def test_gaussian_is_monotone(z, delta, more, factor) -> None:
    """Strictly, unless it is 0."""
    epsilon = gaussian_epsilon(z, delta)
    for larger in (
        gaussian_epsilon([*z, more], delta),
        gaussian_epsilon([v / factor for v in z], delta),
        gaussian_epsilon(z, delta / factor),
    ):
        assert larger > epsilon or larger == epsilon == 0


def test_bad_noise_is_named_as_the_argument_is() -> None:
    with pytest.raises(ValueError, match=r"noise_multipliers\[1\] must be"):
        gaussian_epsilon([1.0, -1.0], 1e-5)
    with pytest.raises(ValueError, match=r"noise_multiplier must be"):
        moments_epsilon(-1.0, 0.1, 10, 1e-5)
    with pytest.raises(ValueError, match="noise_multipliers"):
        gaussian_epsilon(True, 1e-5)


@pytest.mark.parametrize("rho", [-1.0, math.nan, True, "1", None])
def test_bad_rho(rho) -> None:
    with pytest.raises(ValueError, match="rho must be a number >= 0, got"):
        zcdp_epsilon(rho, 1e-5)
