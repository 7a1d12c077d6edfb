"""Rényi divergences of sampled Gaussian steps, by dp-accounting, and the ε that follows from their sum.

Whatever is not a number counts as infinite, and rounding errors are added on top: a bound is wrong upwards only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import dp_accounting
import numpy as np
from dp_accounting import rdp

from edpsgd.accounting.loss_grid import Array
from edpsgd.accounting.steps import LEAST_NOISE, MOST_NOISE, Steps

Orders = tuple[float, ...]
ORDERS: Orders = (
    *(1.25, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 4.5),
    *range(5, 33),
    *(40, 48, 64, 96, 128, 256),
)
_ERROR = 1e-12  # of the divergence of one step: a smaller one may be computed as 0, or below
_ALL_UNITS = 10**12  # of which a round of a fixed size takes a share


def renyi_epsilon(steps: Sequence[Steps], delta: float, divergences: Callable[[float, float], Array]) -> float:
    """ε of steps whose divergences at all orders are ``divergences(noise_multiplier, rate)``.

    dp-accounting converts a divergence near 0 as it is, and takes one below 0 for perfect privacy,
    hence the error on top.

    Args:
        steps: the groups to compose.
        delta: the δ to find ε for.
        divergences: of one step, (len(ORDERS),).
    """
    if not any(group.number for group in steps):
        return 0.0
    total = composed_divergences(steps, ORDERS, lambda z, rate, _: divergences(z, rate))
    return float(rdp.compute_epsilon(ORDERS, total, delta)[0])


def composed_divergences(
    steps: Sequence[Steps], orders: Orders, divergences: Callable[[float, float, Orders], Array]
) -> Array:
    """The divergences of all steps together at some orders, (orders,): finite and above 0, or infinite.

    Args:
        steps: the groups to compose, of which some have steps.
        orders: of the divergences.
        divergences: of one step at these orders, by its noise multiplier and sampling rate.
    """
    not_empty = [group for group in steps if group.number]
    error = _ERROR * np.maximum(1.0, 1 / (np.array(orders) - 1))  # a divergence is a logarithm over λ − 1
    return _summed(not_empty, lambda z, rate: np.maximum(divergences(z, rate, orders), 0.0) + error)


def moments_epsilon(steps: Sequence[Steps], delta: float, max_order: int) -> float:
    """ε = min over λ = 1…max_order of (α(λ) + ln(1/δ))/λ (McMahan et al. 2018; privacy.md section 9)."""
    moments = np.arange(1, max_order + 1)
    orders = tuple(float(order) for order in moments + 1)  # α(λ) is λ times the divergence of order λ + 1
    not_empty = [group for group in steps if group.number]
    total = _summed(not_empty, lambda z, q: poisson_divergences(z, q, orders))
    return float(np.min(total - math.log(delta) / moments))


def _summed(steps: Sequence[Steps], divergences: Callable[[float, float], Array]) -> Array:
    """The divergences of all steps together, (orders,); they are never negative."""
    total: Array = np.zeros(1)
    for group in steps:
        of_one_step = divergences(float(group.noise_multiplier), float(group.sampling_rate))
        total = total + group.number * np.maximum(of_one_step, 0.0)
    return np.where(np.isnan(total), math.inf, total)


def poisson_divergences(noise_multiplier: float, rate: float, orders: Orders = ORDERS) -> Array:
    """Rényi divergences of one step that every example joins with probability ``rate``, (orders,)."""
    if noise_multiplier < LEAST_NOISE:
        return _unsampled(noise_multiplier, orders)
    return np.array(_poisson(min(noise_multiplier, MOST_NOISE), rate, orders))


def fixed_size_divergences(noise_multiplier: float, rate: float, orders: Orders = ORDERS) -> Array:
    """Rényi divergences of one round, for replacing one unit, (len(orders),).

    The round has a share ``rate`` of all units, drawn without replacement.
    """
    if noise_multiplier < LEAST_NOISE:
        return _unsampled(noise_multiplier, orders)
    return np.array(_fixed_size(min(noise_multiplier, MOST_NOISE), rate, orders))


def _unsampled(noise_multiplier: float, orders: Orders) -> Array:
    """α/(2z²) at each order α: as if everyone were in the step, an upper bound that exists for any noise."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.asarray(np.array(orders) / 2 / noise_multiplier / noise_multiplier)


@lru_cache(maxsize=256)
def _poisson(noise_multiplier: float, rate: float, orders: Orders) -> Orders:
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    accountant = rdp.RdpAccountant(orders)
    with _without_warnings():
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, event))
    return tuple(float(value) for value in accountant.rdp)


@lru_cache(maxsize=256)
def _fixed_size(noise_multiplier: float, rate: float, orders: Orders) -> Orders:
    drawn = min(_ALL_UNITS, math.ceil(rate * _ALL_UNITS))
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    accountant = rdp.RdpAccountant(orders, dp_accounting.NeighboringRelation.REPLACE_ONE)
    with _without_warnings():
        accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(_ALL_UNITS, drawn, event))
    return tuple(float(value) for value in accountant.rdp)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Without dp-accounting's warnings of orders that it leaves out: they are infinite."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
