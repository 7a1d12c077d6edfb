"""Rényi divergences: never too small, and never below zero."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edpsgd import accounting
from edpsgd.accounting import renyi
from edpsgd.accounting.pld import Steps
from tests.helpers.one_step import removing_once


@pytest.mark.parametrize("delta", [1e-12, 1e-10])
def test_divergences_too_small_to_be_computed_are_not_zero(delta) -> None:
    """At a rate of 1e-9, δ at ε = 0 is 3.8e-10: dp-accounting's divergence is 0, and so would be its ε."""
    exact = removing_once(1.0, 1e-9, delta)
    assert exact > 0
    assert accounting.rdp_epsilon([Steps(1.0, 1e-9, 1)], delta) >= exact
    assert accounting.fixed_size_epsilon([Steps(1.0, 1e-9, 1)], delta) > 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_divergences_that_are_not_numbers_do_not_help(value) -> None:
    def divergences(z, rate):
        return np.full(len(renyi.ORDERS), value)

    epsilon = renyi.renyi_epsilon([Steps(1.0, 0.1, 1)], 1e-9, divergences)
    assert epsilon == math.inf or value < 0 < epsilon


def test_divergences_of_the_gaussian_mechanism() -> None:
    """α/(2z²) at each order α where everyone is in the step, and never more with sampling."""
    orders = np.array(renyi.ORDERS)
    assert renyi.poisson_divergences(2.0, 1.0) == pytest.approx(orders / 8)
    assert renyi.poisson_divergences(1e-5, 0.1) == pytest.approx(orders / 2 / 1e-5**2)
    assert (renyi.poisson_divergences(2.0, 0.1) < orders / 8).all()
