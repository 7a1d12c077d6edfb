"""The exact ε of one sampled Gaussian step, from closed forms: what no bound may be below."""

from __future__ import annotations

import math

import numpy as np
from scipy import optimize, special


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
