"""The best of a random number of trainings: ε of releasing that one alone (Papernot and Steinke 2022).

A training and its score are one mechanism, a trial. The number of trials K is drawn from a public law, independently of
the data, and what is released is the trial with the best score. Then at every order λ

    ε(λ) + (1 + η)·min over λ̂ of [(1 − 1/λ̂)·ε(λ̂) + ln(1/γ)/λ̂] + ln E[K]/(λ − 1)

bounds the Rényi divergence, with ε(λ) that of one trial, and η and γ those of the law, a truncated negative binomial
one (their Theorem 2; privacy.md section 15). dp-accounting has the same as RepeatAndSelectDpEvent, for trials that are
all alike. Here a trial may draw its settings at random, independently of the data: then ε(λ) is the largest of its
candidates', as a mixture diverges by no more. A Poisson number of trials is left out: it costs more than a logarithmic
one of the same mean, and may be 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from dp_accounting import rdp
from scipy import optimize, stats

from edpsgd._arguments import is_real_number
from edpsgd.accounting import renyi
from edpsgd.accounting.gaussian import check_delta
from edpsgd.accounting.loss_grid import Array
from edpsgd.accounting.sampled import check_steps
from edpsgd.accounting.steps import Steps

# Low ones for where ε is large, high ones for where it is small; dp-accounting is slow below 1.5.
ORDERS: renyi.Orders = (
    *(1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.25, 3.5, 4, 4.5),
    *range(5, 25),
    *(int(order) for order in np.geomspace(26, 1024, 24)),
)
_ROUNDING = 1e-9  # relative, of γ and of the mean
_LEAST_LOG, _MOST_LOG = -700.0, -1e-12  # of γ: the mean is then above 1e300, and next to 1


@dataclass(frozen=True)
class TrialLaw:
    """How the number of trials is drawn, which is public; the number itself is not.

    Attributes:
        mean: of the number of trials, at least 1.
        shape: η of the truncated negative binomial law. 1 is the geometric one; 0 the logarithmic one, which costs
            less, and has more of very few trials and of very many.

    Example:
        >>> TrialLaw(10.0).number(0.5)
        7
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not (is_real_number(self.mean) and 1 <= self.mean <= 1e4):
            raise ValueError(f"mean of a TrialLaw must be a number from 1 to 10000, got {self.mean!r}")
        if not (is_real_number(self.shape) and 0 <= self.shape <= 100):
            raise ValueError(f"shape of a TrialLaw must be a number from 0 to 100, got {self.shape!r}")

    @property
    def log_gamma(self) -> float:
        """The logarithm of γ, with which the law has this mean."""
        if self.mean == 1:
            return 0.0
        if self.shape == 1:
            return -math.log(self.mean)

        def excess(log_gamma: float) -> float:
            return _log_mean(log_gamma, self.shape) - math.log(self.mean)

        if excess(_MOST_LOG) >= 0:  # the mean is next to 1
            return _MOST_LOG
        return float(optimize.brentq(excess, _LEAST_LOG, _MOST_LOG, xtol=1e-14, rtol=8.9e-16))

    def number(self, uniform: float) -> int:
        """The number of trials for a uniform random number from 0 to 1: the inverse of the law's distribution."""
        if not (is_real_number(uniform) and 0 <= uniform < 1):
            raise ValueError(f"uniform must be a number from 0 to below 1, got {uniform!r}")
        probabilities = self.probabilities()
        place = int(np.searchsorted(np.cumsum(probabilities), uniform, side="right"))
        return 1 + min(place, len(probabilities) - 1)

    def probabilities(self) -> Array:
        """Of 1, 2, 3 … trials, without the last ones, which are less than 1e-17 in all."""
        if self.mean == 1:
            return np.ones(1)
        gamma = math.exp(self.log_gamma)
        numbers = np.arange(1, int(50 * (1 + self.shape) / gamma) + 100)
        if self.shape == 0:
            return np.asarray(stats.logser.pmf(numbers, -math.expm1(self.log_gamma)))
        is_above_0 = -math.expm1(self.shape * self.log_gamma)  # what truncation keeps
        return np.asarray(stats.nbinom.pmf(numbers, self.shape, gamma) / is_above_0)


def _log_mean(log_gamma: float, shape: float) -> float:
    """The logarithm of the mean of the law, η·(1/γ − 1)/(1 − γ^η), or for η = 0 its limit."""
    many = math.log(-math.expm1(log_gamma)) - log_gamma  # ln(1/γ − 1)
    if shape == 0:
        return many - math.log(-log_gamma)
    return many + math.log(shape) - math.log(-math.expm1(shape * log_gamma))


def selected_epsilon(
    candidates: Sequence[Sequence[Steps]], delta: float, law: TrialLaw, *, fixed_size: bool = False
) -> float:
    """ε of the best of a random number of trials; it is infinite where it cannot be computed.

    A step that has every example has sampling rate 1, and a score with noise that is measured on the training
    examples is such a step. One that is measured on others is a training of its own, whose ε and that of the trainings
    are not added: see ``ledger.guarantee``.

    Args:
        candidates: what a trial can be, one of which it draws; each a list of groups of alike steps.
        delta: the δ to find ε for.
        law: of the number of trials.
        fixed_size: whether the steps are rounds of a fixed size, drawn without replacement.

    Example:
        >>> round(selected_epsilon([[Steps(1.0, 0.01, 1000)]], 1e-5, TrialLaw(10.0)), 2)
        4.11
    """
    check_delta(delta)
    for steps in candidates:
        check_steps(steps)
    divergences = _of_trial(candidates, fixed_size)
    if divergences is None:
        return 0.0
    selected = _of_selection(divergences, law)
    selected = np.where(np.isnan(selected), math.inf, selected)
    return float(rdp.compute_epsilon(ORDERS, selected, delta)[0])


def _of_trial(candidates: Sequence[Sequence[Steps]], fixed_size: bool) -> Array | None:
    """The divergences of one trial at all orders, (orders,); None if it takes no steps whatever it draws."""
    of_step = renyi.fixed_size_divergences if fixed_size else renyi.poisson_divergences
    curves = []
    for steps in candidates:
        if any(group.number for group in steps):
            curves.append(renyi.composed_divergences(steps, ORDERS, of_step))
    return _increasing(np.max(curves, axis=0)) if curves else None


def _of_selection(divergences: Array, law: TrialLaw) -> Array:
    """The divergences of the best trial at all orders, (orders,), of those of one."""
    orders = np.array(ORDERS)
    log_mean = math.log(law.mean)
    if law.mean > 1:
        log_mean += _ROUNDING
    selected = divergences + (1 + law.shape) * _least_price(divergences, law) + log_mean / (orders - 1)
    return _increasing(selected)


def _increasing(divergences: Array) -> Array:
    """The same or less: a divergence is never above that of a larger order."""
    return np.minimum.accumulate(divergences[::-1])[::-1]


def _least_price(divergences: Array, law: TrialLaw) -> float:
    """(1 − 1/λ̂)·ε(λ̂) + ln(1/γ)/λ̂, at the best λ̂; λ̂ = 1 leaves ln(1/γ)."""
    orders = np.array(ORDERS)
    log = -law.log_gamma * (1 + _ROUNDING)
    if not np.isfinite(divergences).any():
        return math.inf
    return min(log, float(np.min((1 - 1 / orders) * divergences + log / orders)))
