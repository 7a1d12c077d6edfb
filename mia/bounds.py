"""The statistics of audits: lower bounds on what a mechanism or a training leaks, each with its confidence.

Many runs, two worlds (privacy.md section 10): a threshold on a statistic tells the worlds apart, and upper bounds on
its error rates give lower bounds on μ and ε. One run, many canaries: Steinke, Nasr, Jagielski, "Privacy Auditing with
One (1) Training Run", 2023.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, ndtri
from scipy.stats import beta, binom

Floats = NDArray[np.float64]
_CHOOSING = 5  # one trial in five chooses the threshold
_LEAST_TRIALS = 10
_LARGEST_EPSILON = 40.0  # where e^ε/(1+e^ε) is 1 in double precision


def clopper_pearson_upper(events: int, trials: int, confidence: float) -> float:
    """The largest probability for which so few events are no surprise: an upper bound with this confidence.

    Example:
        >>> round(clopper_pearson_upper(0, 100, 0.95), 6)  # 1 − 0.05^(1/100)
        0.029513
    """
    _check_counts("events", events, "trials", trials)
    _check_confidence(confidence)
    return float(_uppers(trials, confidence)[events])


@lru_cache(maxsize=64)
def _uppers(trials: int, confidence: float) -> Floats:
    """The upper bound for every number of events, 0 to ``trials``."""
    events = np.arange(trials)
    return np.append(beta.ppf(confidence, events + 1, trials - events), 1.0)


def mu_bound(fpr: ArrayLike, fnr: ArrayLike) -> Floats:
    """Φ⁻¹(1 − FPR) − Φ⁻¹(FNR): no mechanism with a lower μ lets a test have error rates that low.

    Example:
        >>> round(float(mu_bound(0.158655, 0.158655)), 4)
        2.0
    """
    return np.asarray(-ndtri(fpr) - ndtri(fnr), dtype=np.float64)


def epsilon_bound(fpr: ArrayLike, fnr: ArrayLike, delta: float) -> Floats:
    """ln((1 − δ − FNR)/FPR), or the same with the worlds exchanged if that is larger; never below 0.

    Example:
        >>> round(float(epsilon_bound(0.01, 0.5, delta=0.0)), 4)  # ln 50
        3.912
    """
    first, second = np.asarray(fpr, dtype=np.float64), np.asarray(fnr, dtype=np.float64)
    ratios = np.maximum((1.0 - delta - second) / first, (1.0 - delta - first) / second)
    return np.asarray(np.log(np.maximum(ratios, 1.0)), dtype=np.float64)


@dataclass(frozen=True)
class LowerBounds:
    """What trials in two worlds show.

    Attributes:
        mu: with this confidence, the mechanism is not μ'-GDP for any μ' below it.
        epsilon: with this confidence, it is not (ε', δ)-DP for any ε' below it.
        delta: the δ of epsilon.
        confidence: of each of the two bounds.
        fpr: upper bound on the false positive rate of the threshold behind mu.
        fnr: upper bound on its false negative rate.
        trials: in each world, those for choosing the thresholds included.
    """

    mu: float
    epsilon: float
    delta: float
    confidence: float
    fpr: float
    fnr: float
    trials: int


def lower_bounds(absent: ArrayLike, present: ArrayLike, delta: float, confidence: float = 0.95) -> LowerBounds:
    """Lower bounds on μ and ε from a statistic that tends to be larger in the world where the canary is present.

    The first fifth of the trials chooses a threshold for each bound, the others certify it. The bounds on the two error
    rates fail with probability (1 − confidence)/2 each, so that both hold with the stated confidence.

    Example:
        >>> noise = np.random.default_rng(0).normal(size=(2, 500))
        >>> bounds = lower_bounds(noise[0], noise[1] + 2.0, delta=1e-5)
        >>> 1.4 < bounds.mu < 2.0, 0.5 < bounds.epsilon
        (True, True)
    """
    _check_delta(delta)
    _check_confidence(confidence)
    worlds = _trials("absent", absent), _trials("present", present)
    if len(worlds[0]) != len(worlds[1]):
        raise ValueError(f"absent and present must have as many trials, got {len(worlds[0])} and {len(worlds[1])}")
    split = len(worlds[0]) // _CHOOSING
    choosing, certifying = (worlds[0][:split], worlds[1][:split]), (worlds[0][split:], worlds[1][split:])
    each = 1.0 - (1.0 - confidence) / 2.0
    candidates = _between(np.concatenate(choosing))
    guessed = _error_bounds(*choosing, candidates, each)
    by_mu = candidates[np.argmax(mu_bound(*guessed))]
    by_epsilon = candidates[np.argmax(epsilon_bound(*guessed, delta))]
    fpr, fnr = _error_bounds(*certifying, np.array([by_mu, by_epsilon]), each)
    return LowerBounds(
        mu=max(0.0, float(mu_bound(fpr[0], fnr[0]))),
        epsilon=float(epsilon_bound(fpr[1], fnr[1], delta)),
        delta=delta,
        confidence=confidence,
        fpr=float(fpr[0]),
        fnr=float(fnr[0]),
        trials=len(worlds[0]),
    )


def noticeable_mu(claimed: float, trials: int, confidence: float = 0.95) -> float:
    """About the least true μ that so many trials refute the claim for, in one audit of two; inf if there is none.

    Example:
        >>> round(noticeable_mu(1.0, trials=500), 2)
        1.27
    """
    _check_confidence(confidence)
    if trials < _LEAST_TRIALS:
        raise ValueError(f"trials must be an int >= {_LEAST_TRIALS}, got {trials!r}")
    certifying = trials - trials // _CHOOSING
    uppers = _uppers(certifying, 1.0 - (1.0 - confidence) / 2.0)
    refuting = np.flatnonzero(mu_bound(uppers, uppers) > claimed)
    if not len(refuting):
        return math.inf
    rate = max(float(refuting[-1]), 0.5) / certifying
    return float(mu_bound(rate, rate))


def _trials(name: str, values: ArrayLike) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or len(array) < _LEAST_TRIALS or not np.isfinite(array).all():
        raise ValueError(f"{name} must be at least {_LEAST_TRIALS} finite numbers in one row, got shape {array.shape}")
    return array


def _between(values: Floats) -> Floats:
    """Thresholds between neighbouring values."""
    ordered = np.sort(values)
    return np.asarray((ordered[1:] + ordered[:-1]) / 2.0, dtype=np.float64)


def _error_bounds(absent: Floats, present: Floats, thresholds: Floats, confidence: float) -> tuple[Floats, Floats]:
    """Upper bounds on false positives and negatives of "present if the statistic is above the threshold"."""
    positives = len(absent) - np.searchsorted(np.sort(absent), thresholds, side="right")
    negatives = np.searchsorted(np.sort(present), thresholds, side="right")
    return _uppers(len(absent), confidence)[positives], _uppers(len(present), confidence)[negatives]


# -------------------------------------------------------------------- one run, many canaries


def one_run_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """How probable so many right guesses are at most, whatever the attack, if the training is (ε, δ)-DP.

    With W binomial of ``guesses`` draws and q = e^ε/(1 + e^ε), this is Steinke et al.'s
    P[W ≥ v] + 2·m·δ·max over i of P[v > W ≥ v − i]/i: δ lets m·2δ further guesses be right in the mean, and the
    worst that they can do is to come i at a time.

    Example:
        >>> one_run_p_value(canaries=2, guesses=2, right=2, epsilon=0.0, delta=0.0)
        0.25
    """
    _check_game(canaries, guesses, right, delta)
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be a number >= 0, got {epsilon!r}")
    accuracy = float(expit(epsilon))
    tail = float(binom.sf(right - 1, guesses, accuracy))
    if delta == 0 or right == 0:
        return tail
    steps = np.arange(1, right + 1)
    extra = (binom.sf(right - 1 - steps, guesses, accuracy) - tail) / steps
    return min(1.0, tail + 2.0 * canaries * delta * float(extra.max()))


def one_run_epsilon(canaries: int, guesses: int, right: int, delta: float, confidence: float = 0.95) -> float:
    """The ε that a training with independent fair coins for its canaries exceeds, with this confidence.

    Args:
        canaries: m, how many coins were flipped, those without a guess included.
        guesses: r, how many of them were guessed; fixed before looking.
        right: v, how many guesses were right.
        delta: the δ of ε, at most 1/(2m): above it the p-value need not grow with ε.
        confidence: how often the bound is right at least.

    Example:
        >>> round(one_run_epsilon(100, 100, 100, delta=0.0), 4)  # q^100 = 0.05
        3.493
    """
    _check_game(canaries, guesses, right, delta)
    _check_confidence(confidence)
    low, high = 0.0, _LARGEST_EPSILON
    if one_run_p_value(canaries, guesses, right, low, delta) >= 1.0 - confidence:
        return 0.0
    while high - low > 1e-9:
        middle = (low + high) / 2.0
        if one_run_p_value(canaries, guesses, right, middle, delta) < 1.0 - confidence:
            low = middle
        else:
            high = middle
    return low


def count_guesses(scores: ArrayLike, included: ArrayLike, each_side: int) -> tuple[int, int]:
    """Guesses "in" for the k highest scores and "out" for the k lowest; k must be chosen before looking at the coins.

    Equal scores are put in an order that has nothing to do with that of the canaries.

    Args:
        scores: one for each canary, higher for one that seems to have been trained on.
        included: the coins, True for canaries that were in the training.
        each_side: k.

    Returns:
        How many guesses there are, and how many of them are right.

    Example:
        >>> count_guesses([0.9, 0.1, 0.5, 0.8], [True, False, True, False], each_side=1)
        (2, 2)
    """
    values, coins = np.asarray(scores, dtype=np.float64), np.asarray(included)
    if values.ndim != 1 or np.isnan(values).any() or coins.dtype != np.bool_ or coins.shape != values.shape:
        raise ValueError(
            "scores must be a row of numbers, and included as many booleans, "
            f"got shapes {values.shape} and {coins.shape}, included of type {coins.dtype}"
        )
    if each_side < 1 or 2 * each_side > len(values):
        raise ValueError(f"each_side must be 1 to {len(values) // 2}, half of the canaries, got {each_side!r}")
    shuffled = np.random.default_rng(0).permutation(len(values))
    order = shuffled[np.argsort(values[shuffled], kind="stable")]
    right = int(coins[order[-each_side:]].sum()) + int((~coins[order[:each_side]]).sum())
    return 2 * each_side, right


# -------------------------------------------------------------------- bad input


def _check_game(canaries: int, guesses: int, right: int, delta: float) -> None:
    _check_counts("guesses", guesses, "canaries", canaries)
    _check_counts("right", right, "guesses", guesses)
    _check_delta(delta)
    if 2 * canaries * delta > 1:
        raise ValueError(f"delta must be at most 1/(2 * canaries) = {1 / (2 * canaries):.6g}, got {delta!r}")


def _check_counts(name: str, value: int, of: str, total: int) -> None:
    if not total >= 1:
        raise ValueError(f"{of} must be an int >= 1, got {total!r}")
    if not 0 <= value <= total:
        raise ValueError(f"{name} must be 0 to {total}, the number of {of}, got {value!r}")


def _check_delta(delta: float) -> None:
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be a number from 0 to below 1, got {delta!r}")


def _check_confidence(confidence: float) -> None:
    if not 0.5 <= confidence < 1:
        raise ValueError(f"confidence must be a number from 0.5 to below 1, got {confidence!r}")
