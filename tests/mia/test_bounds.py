"""The statistics of audits, against scipy, hand-worked figures and simulation."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from scipy.special import expit, logit
from scipy.stats import beta, binom, binomtest

from edpsgd.accounting import gaussian_epsilon
from mia.bounds import (
    clopper_pearson_upper,
    count_guesses,
    epsilon_bound,
    lower_bounds,
    mu_bound,
    noticeable_mu,
    one_run_epsilon,
    one_run_p_value,
)

REPETITIONS = 200


@pytest.mark.parametrize(("events", "trials"), [(0, 400), (1, 7), (63, 400), (399, 400), (5, 5)])
def test_clopper_pearson_against_scipy(events, trials) -> None:
    interval = binomtest(events, trials, alternative="less").proportion_ci(confidence_level=0.975, method="exact")
    assert clopper_pearson_upper(events, trials, 0.975) == pytest.approx(interval.high, rel=1e-9)


def test_clopper_pearson_fails_as_seldom_as_it_says() -> None:
    uppers = np.array([clopper_pearson_upper(events, 40, 0.9) for events in range(41)])
    for rate in np.linspace(0.01, 0.99, 50):
        assert binom.pmf(np.flatnonzero(uppers < rate), 40, rate).sum() <= 0.1


def test_hand_worked_bounds() -> None:
    assert float(mu_bound(0.025, 0.025)) == pytest.approx(2 * 1.959964, abs=1e-6)
    assert float(mu_bound(0.05, 0.5)) == pytest.approx(1.644854, abs=1e-6)
    assert float(epsilon_bound(0.02, 0.3, 0.1)) == pytest.approx(math.log(0.6 / 0.02))
    assert float(epsilon_bound(0.3, 0.02, 0.1)) == pytest.approx(math.log(0.6 / 0.02))  # the worlds exchanged
    assert float(epsilon_bound(0.9, 0.9, 0.1)) == 0.0


def test_separate_worlds() -> None:
    """No error in 80 certifying trials a world: the rates are below 1 − 0.025^(1/80) at once with confidence 0.95."""
    bounds = lower_bounds(np.zeros(100), np.ones(100), delta=0.01, confidence=0.95)
    rate = 1 - 0.025 ** (1 / 80)
    assert (bounds.fpr, bounds.fnr) == pytest.approx((rate, rate))
    assert bounds.mu == pytest.approx(float(mu_bound(rate, rate)))
    assert bounds.epsilon == pytest.approx(math.log((1 - 0.01 - rate) / rate))


def test_the_trials_that_choose_do_not_certify() -> None:
    """A fifth that separates the worlds by luck does not help if the others do not."""
    same = np.tile([0.0, 1.0], 40)
    bounds = lower_bounds(np.append(np.zeros(20), same), np.append(np.ones(20), same), delta=0.0)
    assert bounds.mu == 0.0
    assert bounds.epsilon == 0.0


def statistics(mu: float, trials: int = 500):
    """The scalar Gaussian mechanism in two worlds, again and again."""
    random = np.random.default_rng(round(1000 * mu) + trials)
    for _ in range(REPETITIONS):
        yield random.normal(size=trials), random.normal(mu, size=trials)


@pytest.mark.parametrize("z", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("factor", "least", "most"),
    [(1.0, 0.0, 0.01), (2.0, 0.95, 1.0), (2 * math.sqrt(8), 0.95, 1.0)],
    ids=["correct", "missing factor 2", "paper, eight micro-batches"],
)
def test_error_rates_of_the_verdict(z, factor, least, most) -> None:
    """Noise too small by a factor makes the real μ larger by it."""
    refuted = [lower_bounds(*worlds, delta=1e-5).mu > 1 / z for worlds in statistics(factor / z)]
    assert least <= np.mean(refuted) <= most


@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_bounds_hold_with_their_confidence(mu) -> None:
    bounds = [lower_bounds(*worlds, delta=0.01, confidence=0.9) for worlds in statistics(mu)]
    assert np.mean([b.mu > mu for b in bounds]) <= 0.1
    assert np.mean([b.epsilon > gaussian_epsilon([1 / mu], 0.01) for b in bounds]) <= 0.1
    assert np.mean([b.mu for b in bounds]) > 0.5 * mu - 0.1  # and are worth something


@pytest.mark.parametrize("claimed", [0.5, 2.0])
def test_what_is_noticeable_is_noticed_half_of_the_time(claimed) -> None:
    true = noticeable_mu(claimed, trials=500)
    assert 0.3 < np.mean([lower_bounds(*w, delta=0.0).mu > claimed for w in statistics(true)]) < 0.7


def test_a_claim_beyond_the_trials() -> None:
    largest = float(mu_bound(1 - 0.025 ** (1 / 400), 1 - 0.025 ** (1 / 400)))
    assert math.isfinite(noticeable_mu(largest - 0.01, trials=500))
    assert noticeable_mu(largest + 0.01, trials=500) == math.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"absent": np.zeros(9)}, "absent must be at least 10"),
        ({"present": np.full(20, np.nan)}, "present must be .* finite"),
        ({"present": np.zeros(21)}, "as many trials, got 20 and 21"),
        ({"delta": 1.0}, "delta"),
        ({"confidence": 1.0}, "confidence"),
    ],
)
def test_bad_trials(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        lower_bounds(**{"absent": np.zeros(20), "present": np.zeros(20), "delta": 0.0, **arguments})


# -------------------------------------------------------------------- one run
def test_one_run_without_delta_is_a_binomial_proportion() -> None:
    """The lower Clopper-Pearson bound of the accuracy q, and ε = ln(q/(1 − q))."""
    for guesses, right in ((100, 80), (100, 100), (2000, 1300)):
        accuracy = beta.ppf(0.05, right, guesses - right + 1)
        assert one_run_epsilon(5000, guesses, right, 0.0, 0.95) == pytest.approx(logit(accuracy), abs=1e-7)
    assert one_run_epsilon(100, 100, 51, 0.0, 0.95) == 0.0
    assert one_run_epsilon(100, 100, 0, 0.0, 0.95) == 0.0


def test_one_run_p_value_by_hand() -> None:
    """m = r = v = 2, q = 1/2: 1/4, and at most max(1/2, 3/4 / 2) for each of 2·2·δ further guesses."""
    assert one_run_p_value(2, 2, 2, epsilon=0.0, delta=0.01) == pytest.approx(0.25 + 4 * 0.01 * 0.5)


@pytest.mark.parametrize(("m", "r", "v", "epsilon", "delta"), [(30, 20, 17, 0.7, 0.01), (12, 12, 12, 2.0, 0.04)])
def test_one_run_p_value_term_by_term(m, r, v, epsilon, delta) -> None:
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    mass = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    extra = max(sum(mass[max(v - i, 0) : v]) / i for i in range(1, m + 1))
    assert one_run_p_value(m, r, v, epsilon, delta) == pytest.approx(sum(mass[v:]) + 2 * m * delta * extra, rel=1e-9)


@pytest.mark.parametrize("way", ["each by itself", "all at once"])
@pytest.mark.parametrize(("epsilon", "delta"), [(2.0, 0.0), (1.0, 1e-4), (1.0, 1e-3)])
def test_one_run_bound_holds_for_randomized_response(way, epsilon, delta) -> None:
    """(ε, δ)-DP: an answer is right with probability q; with probability δ, a coin leaks, or all coins at once.

    How probable each number of right answers is is known, so nothing needs to be drawn.
    """
    m, q = 100, expit(epsilon)
    right = np.arange(m + 1)
    if way == "each by itself":
        chances = binom.pmf(right, m, delta + (1 - delta) * q)
    else:
        chances = (1 - delta) * binom.pmf(right, m, q) + delta * (right == m)
    bounds = np.array([0.0 if v < 55 else one_run_epsilon(m, m, v, delta, 0.95) for v in right.tolist()])
    assert one_run_epsilon(m, m, 54, 0.0, 0.95) == 0.0
    assert (np.diff(bounds) >= 0).all()
    assert chances[bounds > epsilon].sum() <= 0.05
    if delta <= 1e-4:
        assert chances @ bounds > epsilon - 0.8


def test_one_run_bound_in_a_simulated_game() -> None:
    """Scores of a Gaussian mechanism, coins and guesses as in an audit; the bound is above the true ε seldom enough."""
    m, delta, random = 200, 1e-4, np.random.default_rng(3)
    true, bound, found = gaussian_epsilon([1.0], delta), cache(one_run_epsilon), []
    for _ in range(REPETITIONS):
        coins = random.random(m) < 0.5
        guesses, right = count_guesses(random.normal(size=m) + coins, coins, each_side=20)
        found.append(bound(m, guesses, right, delta, 0.95))
    assert np.mean(np.array(found) > true) <= 0.05
    assert np.mean(np.array(found) > 0.2) > 0.5


@pytest.mark.parametrize("m", [10**4, 10**6])
def test_one_run_bound_is_tight_for_many_canaries(m) -> None:
    """The accuracy is known to 1.645·√(q(1−q)/m), and dε/dq = 1/(q(1−q))."""
    q = float(expit(1.0))
    gap = 1.0 - one_run_epsilon(m, m, round(m * q), 0.0, 0.95)
    assert gap == pytest.approx(1.644854 / math.sqrt(m * q * (1 - q)), rel=0.05)


def test_one_run_delta_costs() -> None:
    bounds = [one_run_epsilon(1000, 600, 600, delta, 0.95) for delta in (0.0, 1e-6, 1e-5, 1e-4)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] == pytest.approx(logit(0.05 ** (1 / 600)), abs=1e-7)
    assert bounds[0] > bounds[-1] > 2


def test_guesses() -> None:
    scores = [0.1, 0.9, 0.4, 0.8, 0.2, 0.5]
    coins = np.array([False, True, True, False, True, False])
    assert count_guesses(scores, coins, 1) == (2, 2)
    assert count_guesses(scores, coins, 2) == (4, 2)
    assert count_guesses(scores, coins, 3) == (6, 2)


def test_equal_scores_tell_nothing() -> None:
    """Even if the canaries are sorted by their coins."""
    guesses, right = count_guesses(np.zeros(1000), np.arange(1000) < 500, 200)
    assert guesses == 400
    assert 150 < right < 250


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: one_run_epsilon(10, 11, 3, 0.0), "guesses must be 0 to 10"),
        (lambda: one_run_epsilon(10, 8, 9, 0.0), "right must be 0 to 8"),
        (lambda: one_run_epsilon(10, 8, 8, 0.06), r"delta must be at most 1/\(2 \* canaries\) = 0.05"),
        (lambda: one_run_p_value(10, 8, 8, -1.0, 0.0), "epsilon"),
        (lambda: count_guesses([1.0, 2.0], [True, False], 2), "each_side must be 1 to 1"),
        (lambda: count_guesses([1.0, 2.0], [1, 0], 1), "booleans"),
        (lambda: count_guesses([1.0, np.nan], [True, False], 1), "scores must be a row of numbers"),
        (lambda: noticeable_mu(1.0, 5), "trials"),
        (lambda: clopper_pearson_upper(3, 2, 0.9), "events must be 0 to 2"),
    ],
)
def test_bad_counts(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
