"""Membership inference attacks on arrays: one score for each candidate, higher = more likely a member.

All attacks read natural log-probabilities, for this project's models log p(x) = -loss(x). `target` (n,) is under the
attacked model and `shadows` (m, n) under shadow models, and `inside` (m, n) says which of them trained on which
candidate. Losses in float32 may be a little below 0, so log-probabilities up to ROUNDING above 0 count as 0.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp
from scipy.stats import norm

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Population = tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]
Variance = Literal["fixed", "each"]

ROUNDING = 1e-3  # the sum over an utterance's tags in float32 is off by less
FLOOR = 1e-7  # of losses; in float32 they are not known any better
LEAST_DEVIATION = 1e-3  # of logits, where all shadow models agree
ENOUGH = 32  # shadow models on a side for a variance of its own: 64 in all, as in the paper


class _Given(NamedTuple):
    """The arrays of an attack, checked."""

    target: Array
    shadows: Array
    inside: Mask


def loss(target: npt.ArrayLike) -> Array:
    """The threshold attack (Yeom et al. 2018): members have a lower loss.

    Args:
        target: (n,) log-probabilities under the attacked model.

    Returns:
        (n,) the log-probabilities.

    Raises:
        ValueError: if they are not log-probabilities.

    Example:
        >>> loss([-0.1, -2.0]).tolist()
        [-0.1, -2.0]
    """
    return _log_probabilities("target", target, 1)


def lira(
    target: npt.ArrayLike,
    shadows: npt.ArrayLike,
    inside: npt.ArrayLike,
    online: bool = True,
    variance: Variance | None = None,
    floor: float = FLOOR,
) -> Array:
    """The likelihood ratio attack (Carlini et al. 2022), with normal distributions of logits.

    Online: log N(x; in-models) - log N(x; out-models). Offline: the z-score of x among the out-models, which orders
    candidates as the paper's Φ(z) does but never reaches a ceiling; shadow models inside are not looked at.

    Args:
        target: (n,) log-probabilities under the attacked model.
        shadows: (m, n) log-probabilities under the shadow models.
        inside: (m, n) bool, whether that shadow model trained on that candidate.
        online: whether to use the shadow models inside, too.
        variance: "fixed" pools the residuals of all candidates, one variance for the shadows inside and one for those
            outside, with a degree of freedom less for each candidate's mean. "each" is one for each candidate. None:
            "each" if all candidates have ENOUGH shadow models on each side that is used, else "fixed".
        floor: lower losses count as this one, see `logits`.

    Returns:
        (n,) scores. A standard deviation below LEAST_DEVIATION counts as that, so they are finite.

    Raises:
        ValueError: on bad shapes or values, or too few shadow models on a side.

    Example:
        >>> shadows = [[-0.2, -1.2], [-0.3, -1.0], [-0.7, -3.2], [-0.9, -2.8]]
        >>> inside = [[True, True], [True, True], [False, False], [False, False]]
        >>> lira([-0.8, -1.1], shadows, inside).round(1).tolist()
        [-14.7, 32.7]
        >>> lira([-0.8, -1.1], shadows, inside, online=False).round(1).tolist()
        [-0.0, 8.1]
    """
    given = _check(target, shadows, inside)
    sides = [~given.inside, given.inside] if online else [~given.inside]
    kind = _choose_variance(variance, sides)
    x, references = logits(given.target, floor), logits(given.shadows, floor)
    fits = [_fit(references, side, kind) for side in sides]
    mean, deviation = fits[0]
    if not online:
        return np.asarray((x - mean) / deviation)
    return np.asarray(norm.logpdf(x, *fits[1]) - norm.logpdf(x, mean, deviation))


def rmia(
    target: npt.ArrayLike,
    shadows: npt.ArrayLike,
    inside: npt.ArrayLike,
    population: Population,
    offline_a: float | None = None,
    gamma: float = 1.0,
) -> Array:
    """The robust attack (Zarifzadeh, Liu, Shokri 2024): how often x beats points of the population.

    With ratio(x) = p(x | target) / p(x), the score is the share of population points z with
    ratio(x) / ratio(z) >= γ. Online, p(x) is half the mean probability of the shadows inside and half that of those
    outside. Offline, it is ((1 + a) p_out(x) + (1 - a)) / 2, and shadow models inside are not looked at. If p is that
    of a whole utterance and far below 1 - a, this is almost a constant, and the attack is the threshold attack: take
    a near 1 then.

    The score never falls as ratio(x) grows. With k population points it has k + 1 values: candidates tie, above all
    at 1, and a false positive rate below about 1 / k cannot be told. A larger γ tells more of them apart at the
    top and fewer at the bottom: where all ratios are nearly alike, as of a private model, γ = 2 makes every score 0.
    With γ = 1, and population points like the non-members, a non-member reaches a score of s with a probability of
    about 1 - s.

    Args:
        target: (n,) log-probabilities under the attacked model.
        shadows: (m, n) log-probabilities under the shadow models; offline, one is enough.
        inside: (m, n) bool, whether that shadow model trained on that candidate.
        population: the same three arrays, (k,), (m, k) and (m, k), for points that the attacked model did not train
            on. Keep them out of the candidates: the best of them would tie with all members above it. For one that no
            shadow model trained on, p(z) is p_out(z).
        offline_a: a of the offline attack, from 0 to 1; None is online.
        gamma: above 0.

    Returns:
        (n,) shares from 0 to 1.

    Raises:
        ValueError: on bad shapes or values, or a point without the shadow models it needs.

    Example:
        >>> fresh = ([-1.0, -2.0, -0.5], [[-1.1, -1.5, -0.9]], [[False, False, False]])
        >>> rmia([-0.2, -2.0], [[-1.0, -1.7]], [[False, False]], fresh, offline_a=1.0).round(2).tolist()
        [1.0, 0.33]
    """
    if not 0 < gamma < math.inf:
        raise ValueError(f"gamma must be above 0 and finite, got {gamma}")
    if offline_a is not None and not 0 <= offline_a <= 1:
        raise ValueError(f"offline_a must be None or from 0 to 1, got {offline_a}")
    given, points = _check(target, shadows, inside), _check_population(population)
    if len(points.shadows) != len(given.shadows):
        raise ValueError(f"population has {len(points.shadows)} shadow models, shadows has {len(given.shadows)}")
    _check_side(~given.inside, 1, "outside")
    _check_side(~points.inside, 1, "outside", "population points")
    if offline_a is None:
        _check_side(given.inside, 1, "inside")
    others = np.sort(_log_ratio(points, offline_a))
    beaten = np.searchsorted(others, _log_ratio(given, offline_a) - math.log(gamma), side="right")
    return np.asarray(beaten / len(others), dtype=np.float64)


def logits(log_probabilities: npt.ArrayLike, floor: float = FLOOR) -> Array:
    """The log-odds log(p / (1 - p)), from log p.

    A loss of exactly 0 would be infinite odds, one of 1e-300 a logit of 691: single outliers that would decide every
    mean and variance. So losses below the floor count as the floor, which is a logit of 16.1 by default.

    Args:
        log_probabilities: of any shape, finite, at most 0.
        floor: the least loss, above 0. Lower it for losses in float64.

    Example:
        >>> logits([np.log(0.5), 0.0, -800.0]).round(1).tolist()
        [0.0, 16.1, -800.0]
    """
    if not 0 < floor < math.inf:
        raise ValueError(f"floor must be above 0 and finite, got {floor}")
    bounded = np.minimum(_log_probabilities("log_probabilities", log_probabilities), -floor)
    return np.asarray(bounded - np.log(-np.expm1(bounded)))


# -------------------------------------------------------------------- formulas


def _fit(values: Array, side: Mask, variance: Variance) -> tuple[Array, Array]:
    """Mean and standard deviation of each candidate over the models on a side."""
    counts = side.sum(axis=0)
    mean = np.where(side, values, 0.0).sum(axis=0) / counts
    squares = np.where(side, values - mean, 0.0) ** 2
    if variance == "fixed":
        variances = np.full(mean.shape, squares.sum() / (counts.sum() - counts.size))
    else:
        variances = squares.sum(axis=0) / (counts - 1)
    return mean, np.maximum(np.sqrt(variances), LEAST_DEVIATION)


def _log_ratio(given: _Given, offline_a: float | None) -> Array:
    """The log of ratio(x)."""
    outside = _log_mean(given.shadows, ~given.inside)
    if offline_a is None:
        within = np.where(given.inside.any(axis=0), _log_mean(given.shadows, given.inside), outside)
        twice = np.logaddexp(within, outside)
    else:
        rest = math.log1p(-offline_a) if offline_a < 1 else -math.inf
        twice = np.logaddexp(math.log1p(offline_a) + outside, rest)
    return np.asarray(given.target - (twice - math.log(2)))


def _log_mean(values: Array, side: Mask) -> Array:
    """Log of the mean probability over the models on a side, -inf where there is none."""
    counts = np.maximum(side.sum(axis=0), 1)
    return np.asarray(logsumexp(np.where(side, values, -np.inf), axis=0) - np.log(counts))


# -------------------------------------------------------------------- checks


def _check(target: npt.ArrayLike, shadows: npt.ArrayLike, inside: npt.ArrayLike, prefix: str = "") -> _Given:
    wanted = _log_probabilities(f"{prefix}target", target, 1)
    references = _log_probabilities(f"{prefix}shadows", shadows, 2)
    mask = np.asarray(inside)
    if references.shape[1] != len(wanted):
        raise ValueError(f"{prefix}shadows must be (m, {len(wanted)}) as target has, got {references.shape}")
    if mask.shape != references.shape or mask.dtype != np.bool_:
        raise ValueError(f"{prefix}inside must be bool, {references.shape} as shadows, got {mask.dtype}, {mask.shape}")
    return _Given(wanted, references, mask)


def _check_population(population: Population) -> _Given:
    if len(population) != 3:
        raise ValueError(f"population must be (target, shadows, inside), got {len(population)} arrays")
    return _check(*population, prefix="population ")


def _log_probabilities(name: str, values: npt.ArrayLike, dimensions: int | None = None) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if dimensions not in (None, array.ndim) or not array.size:
        raise ValueError(f"{name} must have {dimensions or 'any number of'} dimensions, none empty, got {array.shape}")
    wrong = ~np.isfinite(array)
    if wrong.any():
        raise ValueError(f"{name} must be finite, {wrong.sum()} of {array.size} values are NaN or infinite")
    if (array > ROUNDING).any():
        raise ValueError(f"{name} must be log-probabilities, at most 0, {(array > ROUNDING).sum()} values are above")
    return np.minimum(array, 0.0)


def _check_side(side: Mask, least: int, where: str, who: str = "candidates") -> None:
    few = (side.sum(axis=0) < least).sum()
    if few:
        raise ValueError(f"inside: {few} of {side.shape[1]} {who} have fewer than {least} shadow models {where}")


def _choose_variance(variance: str | None, sides: list[Mask]) -> Variance:
    """The one that is wanted, or that fits, if there are models enough for it."""
    if variance not in (None, "fixed", "each"):
        raise ValueError(f'variance must be None, "fixed" or "each", got {variance!r}')
    if len(sides[0]) < 2:
        raise ValueError(f"shadows has {len(sides[0])} model, a variance needs at least 2")
    enough = all(side.sum(axis=0).min() >= ENOUGH for side in sides)
    kind: Variance = "each" if variance == "each" or (variance is None and enough) else "fixed"
    for side, where in zip(sides, ("outside", "inside"), strict=False):
        _check_side(side, 2 if kind == "each" else 1, where)
        if side.sum() <= side.shape[1]:
            raise ValueError(f"inside: no candidate has 2 shadow models {where}, which a variance needs")
    return kind
