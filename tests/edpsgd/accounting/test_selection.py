"""The best of a random number of trainings: against dp-accounting, the theorem in other words, and exact laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent, rdp
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy import stats
from scipy.integrate import trapezoid

from edpsgd import LinearDecay, accounting
from edpsgd.accounting import Steps, TrialLaw, selected_epsilon
from edpsgd.accounting.selection import ORDERS

LAWS = [TrialLaw(1.5), TrialLaw(10.0), TrialLaw(10.0, 0.0), TrialLaw(30.0, 0.5), TrialLaw(5.0, 4.0)]


@pytest.mark.parametrize("law", LAWS)
def test_it_is_the_bound_of_dp_accounting(law) -> None:
    for z, rate, number in [(1.0, 0.01, 1000), (3.0, 0.2, 30), (20.0, 1.0, 1)]:
        accountant = rdp.RdpAccountant(ORDERS)
        training = SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(z)), number)
        accountant.compose(RepeatAndSelectDpEvent(training, law.mean, law.shape))
        expected = accountant.get_epsilon(1e-5)
        assert selected_epsilon([[Steps(z, rate, number)]], 1e-5, law) == pytest.approx(expected, rel=1e-6)


def test_reference_values() -> None:
    """Those of privacy.md section 15."""
    step = [Steps(1.0, 1.0, 1)]
    assert selected_epsilon([step], 1e-5, TrialLaw(10.0)) == pytest.approx(8.52, abs=0.005)
    assert selected_epsilon([step], 1e-5, TrialLaw(10.0, 0.0)) == pytest.approx(7.42, abs=0.01)


def density_of_best(x: np.ndarray, mean: float, law: TrialLaw) -> np.ndarray:
    """Of the largest of K normal numbers around ``mean``: the sum over K, as the law's probabilities say."""
    below, density = stats.norm.cdf(x - mean), stats.norm.pdf(x - mean)
    probabilities = law.probabilities()
    derivative = np.polynomial.polynomial.polyval(below, probabilities * np.arange(1, len(probabilities) + 1))
    return np.asarray(density * derivative)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0])
def test_it_lies_above_the_exact_loss_of_the_best_gaussian_output(law, mu) -> None:
    """The score is the output itself: what is released is the largest of K numbers, whose law is known."""
    x = np.linspace(-12, 15, 4001)
    here, there = density_of_best(x, 0.0, law), density_of_best(x, mu, law)
    for delta in (1e-5, 1e-2):
        epsilon = selected_epsilon([[Steps(1 / mu, 1.0, 1)]], delta, law)
        for p, q in [(here, there), (there, here)]:
            assert trapezoid(np.maximum(0, p - math.exp(epsilon) * q), x) < delta
        # The figure is of some use: without the choice, ε is exceeded with more than δ.
        alone = accounting.gaussian_epsilon([1 / mu], delta)
        assert epsilon < 3 * alone + 1.5
        exceeded = trapezoid(np.maximum(0, there - math.exp(0.99 * alone) * here), x)
        assert exceeded > delta


@pytest.mark.parametrize("law", LAWS[1:3])
def test_it_lies_above_the_exact_loss_of_trials_that_draw_their_noise(law) -> None:
    """Each of two candidates has a Gaussian output, which is its score too; the candidate is released beside it."""
    x, candidates = np.linspace(-20, 25, 9001), ((1.0, 0.0), (3.0, 1.5))  # noise, and where its outputs lie

    def densities(mean: float) -> list[np.ndarray]:
        below = sum(stats.norm.cdf((x - mean - place) / z) for z, place in candidates) / 2
        probabilities = law.probabilities()
        derivative = np.polynomial.polynomial.polyval(below, probabilities * np.arange(1, len(probabilities) + 1))
        return [stats.norm.pdf((x - mean - place) / z) / z / 2 * derivative for z, place in candidates]

    here, there = densities(0.0), densities(1.0)
    epsilon = selected_epsilon([[Steps(z, 1.0, 1)] for z, _ in candidates], 1e-4, law)
    for p, q in [(here, there), (there, here)]:
        excess = sum(np.maximum(0, mine - math.exp(epsilon) * other) for mine, other in zip(p, q, strict=True))
        assert trapezoid(excess, x) < 1e-4


def test_an_exact_discrete_mechanism_stays_below() -> None:
    """Randomised response, whose better answer is the right one on one side only; K is geometric."""
    law, likely = TrialLaw(10.0), 0.6
    gamma = 1 / law.mean
    none_of_the_best = (1 - likely) * gamma / (1 - (1 - gamma) * (1 - likely))  # all K trials gave the worse answer
    none_there = likely * gamma / (1 - (1 - gamma) * likely)
    exact = math.log(none_there / none_of_the_best)
    # A Gaussian mechanism that dominates: a threshold on its output gives the same probabilities.
    mu = 2 * stats.norm.ppf(likely)
    assert exact < selected_epsilon([[Steps(1 / mu, 1.0, 1)]], 1e-9, law)
    assert exact > math.log(likely / (1 - likely))  # the choice does cost something


def test_of_the_number_of_trials_mean_and_probabilities_are_those_of_the_law() -> None:
    random = np.random.default_rng(0)
    for law in LAWS:
        probabilities = law.probabilities()
        assert probabilities.sum() == pytest.approx(1)
        assert (probabilities * np.arange(1, len(probabilities) + 1)).sum() == pytest.approx(law.mean)
    drawn = [TrialLaw(4.0).number(uniform) for uniform in random.random(2000)]
    assert min(drawn) == 1
    assert stats.kstest(drawn, stats.geom(0.25).cdf).statistic < 0.25  # 1 has a share of 0.25
    assert np.mean(drawn) == pytest.approx(4.0, abs=0.3)
    assert [TrialLaw(1.0, shape).number(0.999) for shape in (0.0, 0.5, 1.0)] == [1, 1, 1]
    assert TrialLaw(10.0, 0.0).number(1 - 2**-53) > 100
    assert TrialLaw(1 + 1e-13, 0.5).log_gamma <= 0


def test_more_trials_more_noise_and_more_candidates_change_it_as_they_must() -> None:
    steps = [Steps(1.0, 0.02, 500)]
    alone = accounting.compose(steps, 1e-5)
    found = [selected_epsilon([steps], 1e-5, TrialLaw(mean)) for mean in (1.0, 1.1, 3.0, 10.0, 100.0)]
    assert found == sorted(found)
    assert alone < found[0] < found[1]
    assert selected_epsilon([[Steps(1.2, 0.02, 500)]], 1e-5, TrialLaw(10.0)) < found[3]
    other = [Steps(2.0, 1.0, 7)]
    both = selected_epsilon([steps, other], 1e-5, TrialLaw(10.0))
    each = [selected_epsilon([one], 1e-5, TrialLaw(10.0)) for one in (steps, other)]
    composed = selected_epsilon([[*steps, *other]], 1e-5, TrialLaw(10.0))
    assert max(each) <= both < composed


@pytest.mark.parametrize(
    "steps", [[Steps(0.0, 0.1, 1)], [Steps(1e-200, 1.0, 3)], [Steps(1.0, 0.1, 1), Steps(0.0, 1, 1)]]
)
def test_what_cannot_be_computed_is_infinite(steps) -> None:
    assert selected_epsilon([[Steps(1.0, 0.1, 1)], steps], 1e-5, TrialLaw(3.0)) == math.inf


def test_nothing_that_was_released_costs_nothing() -> None:
    assert selected_epsilon([], 1e-5, TrialLaw(3.0)) == 0.0
    assert selected_epsilon([[Steps(1.0, 0.1, 0)]], 1e-5, TrialLaw(3.0)) == 0.0


@pytest.mark.parametrize("mean", [0.5, math.nan, math.inf, 1e9, "3"])
def test_a_mean_that_no_number_of_trials_has_is_refused(mean) -> None:
    with pytest.raises(ValueError, match="mean of a TrialLaw must be"):
        TrialLaw(mean)
    with pytest.raises(ValueError, match="shape of a TrialLaw must be"):
        TrialLaw(2.0, -0.5)
    with pytest.raises(ValueError, match="uniform must be"):
        TrialLaw(2.0).number(1.0)


@pytest.mark.parametrize(
    "training",
    [
        {"epochs": 20},
        {"epochs": 3, "decay": LinearDecay(0.1), "also": [3.0]},
        {"epochs": 5, "sampling_rate": 0.02, "steps_per_epoch": 50},
        {"epochs": 2, "sampling_rate": 1.0, "steps_per_epoch": 4},
    ],
)
@pytest.mark.parametrize("target", [0.5, 8.0])
def test_calibration_reaches_the_target_and_never_more(training, target) -> None:
    law = TrialLaw(10.0)
    if training.get("also") and target < 1:
        with pytest.raises(ValueError, match="cannot be reached"):
            accounting.calibrate_selected(target, 1e-5, law=law, **training)
        return
    z = accounting.calibrate_selected(target, 1e-5, law=law, **training)
    factors = accounting.decay_factors(training["epochs"], training.get("decay"))
    rate, steps = training.get("sampling_rate", 1.0), training.get("steps_per_epoch", 1)
    whole = [Steps(z * factor, rate, steps) for factor in factors]
    whole += [Steps(other, 1.0, 1) for other in training.get("also", [])]
    assert 0.99 * target < selected_epsilon([whole], 1e-5, law) <= target
