"""Epochs in which every example is in one step: together, one Gaussian mechanism (privacy.md section 7)."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from scipy import optimize, special

from edpsgd._arguments import is_real_number

_SMALL_MU = 1e-2  # below, differences of erfcx are integrated
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(4)


def zcdp_rho(noise_multipliers: Iterable[float]) -> float:
    """ρ = Σ 1/(2z²), one term for each epoch (privacy.md section 7).

    Example:
        >>> zcdp_rho([1.0, 0.5])
        2.5
    """
    z = checked_multipliers(noise_multipliers)
    if not z:
        return 0.0
    return max(mu_squared(z) / 2, sys.float_info.min)  # never 0 because the noise is large


def zcdp_epsilon(rho: float, delta: float) -> float:
    """ε = ρ + 2·√(ρ·ln(1/δ)) of ρ-zCDP, the paper's figure (Bun and Steinke 2016; privacy.md section 7).

    Example:
        >>> round(zcdp_epsilon(0.5, 1e-5), 6)
        5.298526
    """
    check_delta(delta)
    if not (is_real_number(rho) and rho >= 0):
        raise ValueError(f"rho must be a number >= 0, got {rho!r}")
    return rho + 2 * math.sqrt(rho) * math.sqrt(-math.log(delta))


def gaussian_epsilon(noise_multipliers: Iterable[float], delta: float) -> float:
    """The exact ε of epochs in which every example is in one step: together, one Gaussian mechanism.

    Its μ is √(Σ 1/z²), and ε that of the analytic Gaussian mechanism (Balle and Wang 2018; privacy.md section 7).

    Example:
        >>> round(gaussian_epsilon([1.0], 1e-5), 6)
        4.377178
    """
    check_delta(delta)
    parts = [math.inf if z == 0 else 1 / z for z in checked_multipliers(noise_multipliers)]
    return exact_epsilon(math.hypot(*parts), delta)


@lru_cache(maxsize=256)
def exact_epsilon(mu: float, delta: float) -> float:
    """ε of the Gaussian mechanism with parameter μ, in a form that is stable for any μ (privacy.md section 7).

    ε = μ²/2 − μa with δ = ½e^(−a²/2)·[erfcx(−a/√2) − erfcx((μ−a)/√2)], which is solved for a.
    """
    if mu == 0 or math.isinf(mu):
        return mu
    if special.erf(mu / math.sqrt(8)) <= delta:  # δ at ε = 0
        return 0.0

    def excess(a: float) -> float:
        return math.log(_erfcx_difference(a, mu) / 2) - a * a / 2 - math.log(delta)

    low, high = float(special.ndtri(delta)) - 0.01, min(mu / 2, 38.0)
    if excess(high) <= 0:
        return 0.0
    a = optimize.brentq(excess, low, high, xtol=1e-15, rtol=8.9e-16)
    return float(max(0.0, mu * (mu / 2 - a)))


def _erfcx_difference(a: float, mu: float) -> float:
    """erfcx(−a/√2) − erfcx((μ−a)/√2); for a small μ the integral of its derivative, since the difference would be 0."""
    begin, width = -a / math.sqrt(2), mu / math.sqrt(2)
    if mu > _SMALL_MU:
        return float(special.erfcx(begin) - special.erfcx(begin + width))
    x = begin + width * (_NODES + 1) / 2
    return float(width / 2 * (_WEIGHTS @ (2 / math.sqrt(math.pi) - 2 * x * special.erfcx(x))))


def mu_squared(noise_multipliers: Iterable[float]) -> float:
    """μ² = Σ 1/z² of one Gaussian mechanism after another; infinite if there is no noise."""
    z = checked_multipliers(noise_multipliers)
    with np.errstate(divide="ignore", over="ignore"):
        return math.fsum(np.minimum(1 / np.square(z), np.inf)) if len(z) else 0.0


def checked_multipliers(noise_multipliers: Iterable[float]) -> list[float]:
    """The noise multipliers as a list of floats, also of a single number.

    Raises:
        ValueError: naming the first that is no finite number >= 0.
    """
    z = [noise_multipliers] if isinstance(noise_multipliers, float | int) else list(noise_multipliers)
    for index, value in enumerate(z):
        if not (is_real_number(value) and 0 <= value < math.inf):
            raise ValueError(f"noise_multipliers[{index}] must be a finite number >= 0, got {value!r}")
    return [float(value) for value in z]


def check_delta(delta: float) -> None:
    """Refuses a δ that is not between 0 and 1, both excluded."""
    if not (is_real_number(delta) and 0 < delta < 1):
        raise ValueError(f"delta must be between 0 and 1, both excluded, got {delta!r}")
