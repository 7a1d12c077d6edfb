"""An accountant errs upwards: more steps never cost less, and what cannot be computed is infinite or refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from edpsgd import accounting
from edpsgd.accounting import pld
from edpsgd.accounting.pld import Composition, Steps
from tests.helpers.one_step import removing_once

FORGOTTEN = [Steps(1.0, 0.01, 1000)], Steps(0.004, 5e-7, 1)  # hardly any noise, hardly any draws
LAST_DIGITS = 0.01  # relative: bounds of two lists are rounded up by different amounts


def some(examples: int):
    return settings(deadline=None, derandomize=True, max_examples=examples)


def powers(low: float, high: float):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


noises, rates, deltas = powers(1e-3, 1e5), powers(1e-9, 1.0) | st.just(1.0), powers(1e-15, 0.3)
single_steps = st.builds(Steps, noises, rates, st.integers(1, 30))
hardly_seen = st.builds(Steps, powers(1e-3, 0.02), powers(1e-9, 1e-5), st.just(1))
mixtures = st.lists(single_steps | hardly_seen, min_size=1, max_size=20)


def seeing_an_outlier(steps: list[Steps], delta: float) -> float:
    """ln((P − δ)/Q) of an event: that some output has a loss above a threshold."""
    best = 0.0
    for threshold in (0.1, 1.0, 3.0, 10.0, 40.0):
        quiet, quiet_without = 0.0, 0.0
        for z, q, number in steps:
            turn = z * z * math.log1p(math.expm1(threshold) / q) + 0.5
            without = special.ndtr(-turn / z)
            mixed = (1 - q) * without + q * special.ndtr((1 - turn) / z)
            quiet += number * np.log1p(-min(mixed, 1 - 1e-15))
            quiet_without += number * np.log1p(-min(without, 1 - 1e-15))
        seen, seen_without = -math.expm1(quiet), -math.expm1(quiet_without)
        if seen > delta and seen_without > 0:
            best = max(best, math.log(seen - delta) - math.log(seen_without))
    return best


def test_a_step_that_hides_nothing_is_not_forgotten() -> None:
    steps, rare = FORGOTTEN
    before = accounting.compose(steps, 1e-6)
    after = accounting.compose([*steps, rare], 1e-6)
    # Whoever is not drawn for the rare step has spent q of δ, and what the other steps cost at the rest.
    assert before < after
    assert after == pytest.approx(accounting.compose(steps, 5e-7), rel=1e-3)


@some(60)
@given(mixtures, deltas, single_steps | hardly_seen)
def test_another_step_never_costs_less(steps, delta, step) -> None:
    composition = Composition(100 * pld.TOLERANCE)
    before = accounting.compose(steps, delta, composition)
    after = accounting.compose([*steps, step], delta, composition)
    assert 0 <= before <= after
    reference = max(removing_once(z, q, delta) for z, q, _ in [*steps, step])
    assert after >= reference * (1 - 1e-9)
    assert after >= seeing_an_outlier([*steps, step], delta) * (1 - 1e-9)


@some(40)
@given(mixtures, deltas, st.data())
def test_more_of_a_step_never_costs_less(steps, delta, data) -> None:
    """More of it, a larger rate, less noise; with bounds that know nothing of each other."""
    index = data.draw(st.integers(0, len(steps) - 1))
    z, q, number = steps[index]
    worse = data.draw(
        st.sampled_from(
            [Steps(z, q, 2 * number), Steps(z, min(1.0, 3 * q), number), Steps(max(1e-3, z / 3), q, number)]
        )
    )
    before = accounting.compose(steps, delta)
    after = accounting.compose([*steps[:index], worse, *steps[index + 1 :]], delta)
    assert after >= before * (1 - LAST_DIGITS) - 1e-6


@some(12)
@given(mixtures, deltas, single_steps | hardly_seen)
def test_other_accountants_never_go_down_either(steps, delta, step) -> None:
    rdp = [accounting.rdp_epsilon(s, delta) for s in (steps, [*steps, step])]
    moments = [accounting.moments_of(s, delta) for s in (steps, [*steps, step])]
    fixed = [accounting.fixed_size_epsilon(s, delta) for s in (steps, [*steps, step])]
    z = [s.noise_multiplier for s in steps]
    zcdp = [accounting.zcdp_epsilon(accounting.zcdp_rho(s), delta) for s in (z, [*z, step[0]])]
    for before, after in (rdp, moments, fixed, zcdp):
        assert 0 <= before <= after
    reference = max(removing_once(z, q, delta) for z, q, _ in steps)
    assert min(rdp[0], moments[0], zcdp[0]) >= 0
    assert rdp[0] >= reference * (1 - 1e-9)


@pytest.mark.parametrize("z", [1e9, 1e17, 1e160, 1e300])
def test_large_noise_is_not_perfect(z) -> None:
    """δ at ε = 0 is μ/√(2π); below it ε is positive."""
    delta = 0.1 / z
    epsilon = accounting.gaussian_epsilon([z], delta)
    assert epsilon == pytest.approx(accounting.gaussian_epsilon([1e5], 0.1 / 1e5) * 1e5 / z, rel=1e-4)
    assert accounting.zcdp_epsilon(accounting.zcdp_rho([z]), delta) > epsilon


def test_noise_outside_the_range_is_taken_for_less() -> None:
    """One such step does not take the amplification from the others."""
    steps = [Steps(1.0, 0.01, 1000)]
    alone = accounting.compose(steps, 1e-6)
    assert alone * (1 - 1e-4) <= accounting.compose([*steps, Steps(2e5, 0.01, 1)], 1e-6) <= alone * 1.001
    shown = accounting.compose([*steps, Steps(1e-4, 5e-7, 1)], 1e-6)
    assert shown == pytest.approx(accounting.compose(steps, 5e-7), rel=1e-3)
    unsampled = accounting.compose([*steps, Steps(1e-4, 2e-6, 1)], 1e-6)  # δ does not cover it
    assert unsampled == accounting.gaussian_epsilon([1 / math.sqrt(1000), 1e-4], 1e-6)
    assert accounting.compose([*steps, Steps(0.0, 1e-9, 1)], 1e-6) == math.inf


@pytest.mark.parametrize("delta", [1e-120, 1e-300])
def test_delta_too_small_for_probabilities(delta) -> None:
    steps = [Steps(1.0, 0.5, 10)]
    assert accounting.compose(steps, delta) == accounting.gaussian_epsilon([1 / math.sqrt(10)], delta)
