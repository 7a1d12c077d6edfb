"""Cumulants of summed losses, against closed forms."""

from __future__ import annotations

import math

import pytest

from edpsgd.accounting.loss_cumulants import Moments, conversion
from edpsgd.accounting.steps import Steps


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("order", [0.01, 1.0, 2.5, 8.0])
def test_cumulants_without_sampling(sign, order) -> None:
    """The loss is N(1/(2z²), 1/z²): K(λ) = λ(λ + 1)/(2z²) for each step."""
    steps = [Steps(1.5, 1.0, 4), Steps(3.0, 1.0, 2)]
    moments = Moments.of_steps(steps, sign, 1e-14, math.inf)
    expected = order * (order + 1) / 2 * (4 / 1.5**2 + 2 / 3.0**2)
    assert moments.cumulant(order) == pytest.approx(expected, rel=1e-3)


def test_the_first_moment_of_removing_with_sampling() -> None:
    """E[e^loss] under the law with the example is 1 + q²·(e^(1/z²) − 1)."""
    z, q = 0.8, 0.03
    moments = Moments.of_steps([Steps(z, q, 10)], 1, 1e-14, math.inf)
    assert moments.cumulant(1.0) == pytest.approx(10 * math.log1p(q * q * math.expm1(z**-2)), rel=1e-3)


def test_losses_above_the_top_are_infinite() -> None:
    whole = Moments.of_steps([Steps(1.0, 0.5, 3)], 1, 1e-14, math.inf)
    cut = Moments.of_steps([Steps(1.0, 0.5, 3)], 1, 1e-14, 1.0)
    assert whole.infinite() == pytest.approx(0.0, abs=1e-12)
    assert cut.infinite() > 0.0
    assert cut.cumulant(2.0) < whole.cumulant(2.0)


def test_the_least_conversion_is_the_epsilon() -> None:
    moments = Moments.of_steps([Steps(1.0, 0.1, 20)], 1, 1e-14, math.inf)
    bounds = [conversion(moments.cumulant(2.0**k), 2.0**k, 1e-5) for k in range(-3, 6)]
    assert moments.renyi_epsilon(1e-5) == min(bounds)
