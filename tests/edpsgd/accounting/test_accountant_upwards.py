"""An accountant errs upwards: more steps never cost less, and what cannot be computed is infinite or refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special

from edpsgd import Budget, accounting
from edpsgd.accounting import calibration, loss_grid, pld, renyi
from edpsgd.accounting.pld import Composition, Steps
from edpsgd.ledger import Ledger, guarantee
from edpsgd.ledger.budget import Allowance
from edpsgd.ledger.events import Event

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


# ------------------------------------------------------------ references from below


def log_gaussian_delta(epsilon: float, mu: float) -> float:
    """ln(Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ)) (Balle and Wang 2018)."""
    first = special.log_ndtr(mu / 2 - epsilon / mu)
    second = epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
    return float(first + np.log(-np.expm1(second - first))) if second < first else -math.inf


def removing_once(z: float, q: float, delta: float) -> float:
    """Exact, for one step: δ is q times that of the Gaussian at u, ε = ln(1 + q·(e^u − 1))."""
    mu, aim = 1 / z, math.log(delta) - math.log(q)
    if log_gaussian_delta(0.0, mu) <= aim:
        return 0.0
    u = optimize.brentq(lambda u: max(log_gaussian_delta(u, mu), -1e4) - aim, 0.0, mu * mu / 2 + 40 * mu, rtol=1e-12)
    return float(np.logaddexp(math.log1p(-q) if q < 1 else -math.inf, math.log(q) + u))


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


# ------------------------------------------------------------ more never costs less


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


@pytest.mark.parametrize("delta", [1e-12, 1e-10])
def test_divergences_too_small_to_be_computed_are_not_zero(delta) -> None:
    """At a rate of 1e-9, δ at ε = 0 is 3.8e-10: dp-accounting's divergence is 0, and so would be its ε."""
    exact = removing_once(1.0, 1e-9, delta)
    assert exact > 0
    assert accounting.rdp_epsilon([Steps(1.0, 1e-9, 1)], delta) >= exact
    assert accounting.fixed_size_epsilon([Steps(1.0, 1e-9, 1)], delta) > 0


# ------------------------------------------------------------ what is not finite, or not there


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


def test_a_distribution_without_finite_losses_is_infinite(monkeypatch) -> None:
    nothing = loss_grid.Mass(np.array([0, 1]), np.zeros(2), 1.0)
    assert nothing.moment(2.0, 0.1) == -math.inf
    monkeypatch.setattr(pld, "round_losses", lambda *args: nothing)
    assert Composition().epsilon([Steps(1.0, 0.1, 3)], 1e-5) == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_probabilities_that_are_not_numbers_are_infinite(monkeypatch, value) -> None:
    original = loss_grid.round_losses

    def broken(z, q, grid):
        mass = original(z, q, grid)
        mass.probabilities[len(mass.points) // 2] = value
        return mass

    monkeypatch.setattr(pld, "round_losses", broken)
    with np.errstate(invalid="ignore"):
        assert Composition().epsilon([Steps(1.0, 0.1, 3), Steps(0.7, 0.1, 3)], 1e-5) == math.inf


def test_a_grid_without_a_bound_is_made_finer(monkeypatch) -> None:
    """Rényi divergences give an ε meanwhile, of which nobody knows how much comes from the grid."""
    steps, solve, sizes = [Steps(1.0, 0.1, 30)], pld._Transform._solve, []

    def unknown_at_first(self, *args):
        sizes.append(self.grid.spacing)
        return pld._UNKNOWN if len(sizes) < 3 else solve(self, *args)

    right = Composition().epsilon(steps, 1e-5)
    monkeypatch.setattr(pld._Transform, "_solve", unknown_at_first)
    assert Composition().epsilon(steps, 1e-5) == pytest.approx(right, rel=1e-3)
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_divergences_that_are_not_numbers_do_not_help(value) -> None:
    def divergences(z, rate):
        return np.full(len(renyi.ORDERS), value)

    epsilon = renyi.renyi_epsilon([Steps(1.0, 0.1, 1)], 1e-9, divergences)
    assert epsilon == math.inf or value < 0 < epsilon


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


def test_a_calibration_never_settles_for_no_number() -> None:
    with pytest.raises(ValueError, match="cannot be reached"):
        calibration._settle(1.0, lambda z: math.nan, 1.0)


@pytest.mark.parametrize("batching", ["shuffled", "poisson", "fixed_size"])
def test_steps_whose_noise_is_not_recorded_are_not_free(batching) -> None:
    event = Event("gradients", 0, None, 3, batching, None if batching == "shuffled" else 0.01)
    assert guarantee.bound([event], 1e-5).epsilon == math.inf


# ------------------------------------------------------------ budgets


def test_a_budget_that_is_used_up_stays_so() -> None:
    steps, rare = FORGOTTEN
    ledger = Ledger()
    ledger.open_epoch(0, "poisson", steps[0].sampling_rate)
    for _ in range(steps[0].number):
        ledger.charge(steps[0].noise_multiplier)
    allowance = Allowance(Budget(float(ledger.epsilon(1e-6)) * 1.0001, 1e-6), ledger)

    def refusal():
        ledger.open_epoch(ledger.events[-1].epoch + 1, "poisson", steps[0].sampling_rate)
        return allowance.refusal(steps[0].noise_multiplier, ledger.open_event, 1000)

    assert refusal() is not None
    ledger.open_epoch(1, "poisson", rare.sampling_rate)
    assert allowance.refusal(rare.noise_multiplier, ledger.open_event, 1) is not None
    ledger.charge(rare.noise_multiplier)  # all the same, as by another run on the same ledger
    assert refusal() is not None
