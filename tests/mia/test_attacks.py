"""Attacks against their formulas written out, and against the best that any attack can do on normal logits.

In the simulated world the logit of candidate j is N(μ_j + d/2, 1) if the model trained on it, else N(μ_j - d/2, 1), and
the hardness μ_j has a spread of s. Whoever knows μ_j has an AUC of Φ(d / √2), the threshold on the loss one of
Φ(d / √(2 (1 + s²))). An attack that estimates μ_j with an error of variance v is left with Φ(d / √(2 (1 + v))).
"""

from __future__ import annotations

import math
import statistics
from decimal import Decimal, localcontext
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from mia import attacks

GAP, SPREAD = 1.5, 3.0
BEST = norm.cdf(GAP / math.sqrt(2))


class World(NamedTuple):
    target: np.ndarray
    shadows: np.ndarray
    inside: np.ndarray
    members: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.target, self.shadows, self.inside


def world(candidates: int, side: int, hardness: float = 0.0, members: float = 0.5, seed: int = 0) -> World:
    """As many shadow models inside as outside for every candidate."""
    generator = np.random.default_rng(seed)
    inside = generator.permuted(np.repeat([[True], [False]], side, axis=0).repeat(candidates, axis=1), axis=0)
    trained = np.vstack([generator.random(candidates) < members, inside])
    middle = generator.normal(hardness, SPREAD, candidates)
    logit = generator.normal(middle + np.where(trained, GAP / 2, -GAP / 2))
    log_p = -np.logaddexp(0, -logit)
    return World(log_p[0], log_p[1:], inside, trained[0])


def reached(variance: float) -> float:
    return float(norm.cdf(GAP / math.sqrt(2 * (1 + variance))))


def small(seed: int, models: int = 6, candidates: int = 5) -> World:
    """Of uneven sides, with at least two models on each."""
    generator = np.random.default_rng(seed)
    inside = generator.random((models, candidates)) < 0.5
    inside[:4] = [[True], [True], [False], [False]]
    log_p = -generator.gamma(0.7, 2.0, (models + 1, candidates))
    return World(log_p[0], log_p[1:], inside, np.zeros(candidates, bool))


# ------------------------------------------------------------------- against the formulas, written out


def odds(log_p: float) -> float:
    with localcontext() as context:
        context.prec = 60
        p = Decimal(min(log_p, -attacks.FLOOR)).exp()
        return float((p / (1 - p)).ln())


def lira_by_hand(case: World, online: bool, variance: str) -> list[float]:
    scores = []
    for j, x in enumerate(case.target):
        fits = []
        for wanted in (True, False):
            sides = [[odds(p) for p, i in zip(*column, strict=True) if i == wanted] for column in columns(case)]
            each = statistics.variance(sides[j])
            pooled = sum(sum((v - statistics.fmean(s)) ** 2 for v in s) for s in sides) / sum(len(s) - 1 for s in sides)
            deviation = max(attacks.LEAST_DEVIATION, math.sqrt(each if variance == "each" else pooled))
            fits.append(((odds(x) - statistics.fmean(sides[j])) / deviation, deviation))
        (z_in, in_deviation), (z_out, out_deviation) = fits
        ratio = math.log(out_deviation / in_deviation) + (z_out**2 - z_in**2) / 2
        scores.append(ratio if online else z_out)
    return scores


def columns(case: World) -> list[tuple[list[float], list[bool]]]:
    return [(p.tolist(), i.tolist()) for p, i in zip(case.shadows.T, case.inside.T, strict=True)]


def ratios_by_hand(case: World, a: float | None) -> list[float]:
    found = []
    for x, (column, marks) in zip(case.target, columns(case), strict=True):
        within, outside = ([math.exp(p) for p, i in zip(column, marks, strict=True) if i == w] for w in (True, False))
        out = sum(outside) / len(outside)
        online = (sum(within) / len(within) + out) / 2 if within else out
        found.append(math.exp(x) / (online if a is None else ((1 + a) * out + (1 - a)) / 2))
    return found


@pytest.mark.parametrize("variance", ["fixed", "each"])
@pytest.mark.parametrize("online", [True, False])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_lira_is_its_formula(seed, online, variance) -> None:
    case = small(seed)
    found = attacks.lira(*case.arrays, online=online, variance=variance)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, lira_by_hand(case, online, variance), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("a", [None, 0.0, 0.3, 1.0])
@given(seed=st.integers(0, 2**32), gamma=st.floats(0.3, 3.0))
@settings(max_examples=15, deadline=None)
def test_rmia_is_its_formula(seed, gamma, a) -> None:
    """A population of which some points were in no shadow model."""
    case, points = small(seed), small(seed + 1, candidates=9)
    points.inside[:, :3] = False
    z = ratios_by_hand(points, a)
    shares = [sum(x / other >= gamma for other in z) / len(z) for x in ratios_by_hand(case, a)]
    np.testing.assert_allclose(attacks.rmia(*case.arrays, points.arrays, offline_a=a, gamma=gamma), shares, rtol=1e-12)


def test_rmia_takes_a_ratio_of_exactly_gamma_and_counts_ties() -> None:
    fresh = ([-3.0] * 2, [[-4.0] * 2], [[False] * 2])
    scores = attacks.rmia([-1.0, -2.0, -3.0, -4.0], [[-4.0] * 4], [[False] * 4], fresh, offline_a=1.0)
    assert scores.tolist() == [1.0, 1.0, 1.0, 0.0]


def test_rmia_far_below_what_floats_hold() -> None:
    """Probabilities of e^-2000: ratios of e^3, e^1 and e^-1 against e^0 and e^2."""
    fresh = ([-2000.0, -1998.0], [[-2000.0] * 2], [[False] * 2])
    scores = attacks.rmia([-1997.0, -1999.0, -2001.0], [[-2000.0] * 3], [[False] * 3], fresh, offline_a=1.0)
    assert scores.tolist() == [1.0, 0.5, 0.0]


def test_rmia_offline_with_small_probabilities_is_the_threshold_attack() -> None:
    """What the docstring warns of: p(x) is then (1 - a) / 2 for all."""
    case = world(50, 2, hardness=-60)
    fresh = world(2000, 2, hardness=-60, members=0.0, seed=1)
    scores = attacks.rmia(*case.arrays, fresh.arrays, offline_a=0.3)
    shares = [(fresh.target <= x).mean() for x in case.target]
    assert scores.tolist() == shares


# ------------------------------------------------------------------- against the best that can be reached


@pytest.fixture(scope="module")
def many() -> World:
    return world(8000, 64)


def test_the_threshold_is_far_below_the_best(many) -> None:
    found = roc_auc_score(many.members, attacks.loss(many.target))
    assert found == pytest.approx(reached(SPREAD**2), abs=0.02)
    assert found < BEST - 0.2


@pytest.mark.parametrize("variance", ["fixed", "each", None])
def test_lira_online_reaches_the_best(many, variance) -> None:
    scores = attacks.lira(*many.arrays, variance=variance)
    assert roc_auc_score(many.members, scores) == pytest.approx(BEST, abs=0.015)


def test_lira_finds_the_log_likelihood_ratio_itself(many) -> None:
    """d (x - μ) has a mean of ± d² / 2 and a variance of d²; the estimates add to it in the order of 1 / 64."""
    scores = attacks.lira(*many.arrays, variance="fixed")
    for members, sign in ((many.members, 1), (~many.members, -1)):
        assert scores[members].mean() == pytest.approx(sign * GAP**2 / 2, abs=0.12)
        assert scores[members].std() == pytest.approx(GAP, rel=0.06)


@pytest.mark.parametrize("side", [2, 4, 64])
def test_lira_offline_reaches_what_its_mean_allows(many, side) -> None:
    """The mean of k models has a variance of 1 / k. With the right degrees of freedom, z has one of 1 + 1 / k."""
    case = many if side == 64 else world(8000, side, seed=side)
    scores = attacks.lira(*case.arrays, online=False, variance="fixed")
    assert roc_auc_score(case.members, scores) == pytest.approx(reached(1 / side), abs=0.015)
    assert scores[~case.members].std() == pytest.approx(math.sqrt(1 + 1 / side), rel=0.05)
    assert scores[~case.members].mean() == pytest.approx(0, abs=0.06)


def test_with_few_shadows_one_variance_for_all_is_better() -> None:
    case = world(4000, 3, seed=3)
    by_default, fixed, each = (attacks.lira(*case.arrays, variance=v) for v in (None, "fixed", "each"))
    assert np.array_equal(by_default, fixed)
    assert roc_auc_score(case.members, fixed) > roc_auc_score(case.members, each) + 0.01


@pytest.mark.parametrize(("side", "kind"), [(31, "fixed"), (32, "each")])
def test_the_variance_that_is_chosen(side, kind) -> None:
    case = world(20, side)
    chosen, other = (attacks.lira(*case.arrays, variance=v) for v in (None, kind))
    assert np.array_equal(chosen, other)


@pytest.mark.parametrize("a", [None, 1.0])
def test_rmia_reaches_what_its_means_allow(a) -> None:
    """Where p = e^x nearly, p(x) is e^μ times a constant: the ratio orders as x - μ, the best there is.

    The mean of k log-normal probabilities has a relative variance of (e - 1) / k. Online, of the two means the one
    inside has a share of w = 1 / (1 + e^-d) in p(x).
    """
    side = 64
    case, fresh = world(8000, side, hardness=-15), world(2000, side, hardness=-15, members=0.0, seed=1)
    scores = attacks.rmia(*case.arrays, fresh.arrays, offline_a=a)
    share = 0.0 if a else 1 / (1 + math.exp(-GAP))
    bound = reached((math.e - 1) * (share**2 + (1 - share) ** 2) / side)
    assert roc_auc_score(case.members, scores) == pytest.approx(bound, abs=0.015)
    # the population is like the non-members: their scores are uniform
    assert np.quantile(scores[~case.members], [0.1, 0.5, 0.9]) == pytest.approx([0.1, 0.5, 0.9], abs=0.04)


# ------------------------------------------------------------------- extremes


def test_logits_to_the_last_digits() -> None:
    log_p = [-2e-7, -1e-5, -0.1, -math.log(2), -3.0, -50.0, -1000.0]
    np.testing.assert_allclose(attacks.logits(log_p), [odds(p) for p in log_p], rtol=1e-14, atol=1e-15)
    fine = attacks.logits([-1e-300, -1e-200], floor=1e-305)
    np.testing.assert_allclose(fine, [300 * math.log(10), 200 * math.log(10)], rtol=1e-14)


def test_a_loss_of_zero_and_one_below() -> None:
    floor = -math.log(math.expm1(attacks.FLOOR))
    assert attacks.logits([0.0, -1e-9, 1e-5]) == pytest.approx([floor] * 3, rel=1e-12)
    assert attacks.loss([0.0, 1e-5]).tolist() == [0.0, 0.0]
    certain = np.zeros((4, 3))  # every model is sure of every candidate
    inside = np.array([[True], [True], [False], [False]]).repeat(3, axis=1)
    for online in (True, False):
        for variance in ("fixed", "each"):
            scores = attacks.lira([0.0, 0.0, -1.0], certain, inside, online, variance)
            assert np.isfinite(scores).all()
    assert scores[0] == scores[1] > scores[2]


def test_no_ceiling_far_in_the_tail() -> None:
    """Φ(z) is 1.0 for every z from 8.3 on, and 0.0 below -38.5."""
    logit = np.array([-60.0, -50.0, 9.0, 10.0, 12.0])
    shadows = -np.logaddexp(0, -np.array([[-1.0], [1.0], [-0.5], [0.5]])).repeat(5, axis=1)
    scores = attacks.lira(-np.logaddexp(0, -logit), shadows, np.zeros((4, 5), bool), online=False)
    assert (np.diff(scores) > 0).all()
    assert scores == pytest.approx(logit / math.sqrt(2.5 / 3), rel=1e-6)


def test_a_variance_from_the_candidates_that_have_one() -> None:
    """Fixed: the second candidate has one model outside, and takes the variance of the first."""
    shadows = -np.logaddexp(0, -np.array([[1.0, 5.0], [3.0, 0.0]]))
    inside = np.array([[False, False], [False, True]])
    scores = attacks.lira(-np.logaddexp(0, [-4.0, -7.0]), shadows, inside, online=False)
    assert scores == pytest.approx([2 / math.sqrt(2), 2 / math.sqrt(2)], rel=1e-6)


# ------------------------------------------------------------------- bad input

X, S = np.full(3, -1.0), np.full((4, 3), -1.0)
IN = np.array([[True], [True], [False], [False]]).repeat(3, axis=1)
FRESH = (X, S, np.zeros((4, 3), bool))


def changed(array: np.ndarray, where, value) -> np.ndarray:
    array = array.copy()
    array[where] = value
    return array


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((S, S, IN), r"target must have 1 dimensions, none empty, got \(4, 3\)"),
        (([], S, IN), r"target must have 1 dimensions, none empty, got \(0,\)"),
        ((X, X, IN), r"shadows must have 2 dimensions"),
        ((X[:2], S, IN), r"shadows must be \(m, 2\) as target has, got \(4, 3\)"),
        ((X, S, IN[:3]), r"inside must be bool, \(4, 3\) as shadows, got bool, \(3, 3\)"),
        ((X, S, IN.astype(int)), r"inside must be bool, .* got int64"),
        ((changed(X, 1, np.nan), S, IN), "target must be finite, 1 of 3 values are NaN or infinite"),
        ((X, changed(S, (1, slice(2)), -np.inf), IN), "shadows must be finite, 2 of 12"),
        ((changed(X, 0, 0.5), S, IN), "target must be log-probabilities, at most 0, 1 values are above"),
        (
            (X, S, changed(IN, (slice(None), slice(2)), False)),
            "2 of 3 candidates have fewer than 1 shadow models inside",
        ),
        ((X, S, changed(IN, (slice(None), 0), True)), "1 of 3 candidates have fewer than 1 shadow models outside"),
    ],
)
def test_bad_arrays(arrays, message) -> None:
    with pytest.raises(ValueError, match=message):
        attacks.lira(*arrays)
    with pytest.raises(ValueError, match=message):
        attacks.rmia(*arrays, FRESH)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([2], {"online": False}, "shadows has 1 model, a variance needs at least 2"),
        ([0, 2], {}, "no candidate has 2 shadow models outside, which a variance needs"),
        ([0, 2, 3], {}, "no candidate has 2 shadow models inside"),
        ([0, 1, 2], {"variance": "each"}, "3 of 3 candidates have fewer than 2 shadow models outside"),
        ([0, 2, 3], {"variance": "each"}, "3 of 3 candidates have fewer than 2 shadow models inside"),
        ([0, 1, 2, 3], {"variance": "all"}, 'variance must be None, "fixed" or "each", got \'all\''),
        ([0, 1, 2, 3], {"floor": 0.0}, "floor must be above 0 and finite, got 0.0"),
    ],
)
def test_lira_with_too_few_models_or_bad_options(rows, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        attacks.lira(X, S[rows], IN[rows], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"population": (X, S)}, r"population must be \(target, shadows, inside\), got 2 arrays"),
        ({"population": (X, S[:2], IN[:2])}, "population has 2 shadow models, shadows has 4"),
        ({"population": (changed(X, 0, np.nan), S, IN)}, "population target must be finite, 1 of 3"),
        ({"population": (X, S, IN | True)}, "3 of 3 population points have fewer than 1 shadow models outside"),
        ({"gamma": 0.0}, "gamma must be above 0 and finite, got 0.0"),
        ({"gamma": math.nan}, "gamma must be above 0 and finite, got nan"),
        ({"offline_a": 1.5}, "offline_a must be None or from 0 to 1, got 1.5"),
    ],
)
def test_rmia_with_bad_options(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        attacks.rmia(X, S, IN, **{"population": FRESH, **options})


def test_offline_needs_no_model_inside() -> None:
    nowhere = np.zeros((4, 3), bool)
    assert attacks.lira(X, S, nowhere, online=False).tolist() == [0.0] * 3
    assert attacks.rmia(X, S[:1], nowhere[:1], (X, S[:1], nowhere[:1]), offline_a=0.5).tolist() == [1.0] * 3
    assert attacks.rmia(X, S, IN, FRESH).tolist() == [1.0] * 3
