"""From ε to the noise multiplier that reaches it, never more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from scipy import optimize

from edpsgd._arguments import check_count, is_real_number
from edpsgd.accounting import pld
from edpsgd.accounting.gaussian import (
    check_delta,
    exact_epsilon,
    gaussian_epsilon,
    mu_squared,
    zcdp_epsilon,
    zcdp_rho,
)
from edpsgd.accounting.pld import Composition, Steps
from edpsgd.accounting.sampled import (
    check_sampling,
    compose,
    fixed_size_epsilon,
)
from edpsgd.schedules import Decay


def calibrate_fixed_size(target_epsilon: float, delta: float, sampling_rate: float, rounds: int) -> float:
    """The noise multiplier with which so many rounds of a fixed size reach a target ε, never more.

    Example:
        >>> z = calibrate_fixed_size(4.0, 1e-6, sampling_rate=0.01, rounds=1000)
        >>> 3.99 < fixed_size_epsilon([Steps(z, 0.01, 1000)], 1e-6) <= 4.0
        True
    """
    _check_calibration(target_epsilon, delta, sampling_rate, rounds, "exact")

    def epsilon(z: float) -> float:
        return fixed_size_epsilon([Steps(z, float(sampling_rate), rounds)], delta)

    z = _approach(
        _z_in_the_limit(_mu_for(target_epsilon, delta), np.ones(1), sampling_rate, rounds),
        epsilon,
        0.998 * target_epsilon,
        target_epsilon,
    )
    return _settle(z, epsilon, target_epsilon)


def calibrate(
    target_epsilon: float,
    delta: float,
    epochs: int,
    decay: Decay | None = None,
    sampling_rate: float | None = None,
    steps_per_epoch: int | None = None,
    method: str = "exact",
    also: Iterable[float] = (),
) -> float:
    """The noise multiplier z0 of epoch 0 with which all epochs together reach a target ε, never more.

    Args:
        target_epsilon: what the whole training may cost.
        delta: the δ of that ε.
        epochs: how many there will be.
        decay: what the noise multiplier of epoch t is multiplied by, None for constant noise.
        sampling_rate: with Poisson sampling, its rate, together with ``steps_per_epoch``.
        steps_per_epoch: with Poisson sampling, the steps of an epoch.
        method: "exact" or, without sampling, "zcdp" for the paper's bound.
        also: noise multipliers of further releases without sampling that the target must cover too, such as that of
            ``FirstStepNorms``.

    Example:
        >>> from edpsgd import LinearDecay
        >>> round(calibrate(8.0, 1e-5, epochs=20, decay=LinearDecay(0.1)), 6)
        5.458456
        >>> round(calibrate(8.0, 1e-5, epochs=20, decay=LinearDecay(0.1), also=[2.0]), 6)
        5.722232
    """
    _check_calibration(target_epsilon, delta, sampling_rate, steps_per_epoch, method)
    factors, others = np.array(decay_factors(epochs, decay)), _checked_releases(also)
    if sampling_rate is not None and steps_per_epoch is not None:
        return _calibrate_poisson(target_epsilon, delta, factors, sampling_rate, steps_per_epoch, others)

    def epsilon(noise_multipliers: Iterable[float]) -> float:
        if method == "zcdp":
            return zcdp_epsilon(zcdp_rho(noise_multipliers), delta)
        return gaussian_epsilon(noise_multipliers, delta)

    mu = _mu_for_zcdp(target_epsilon, delta) if method == "zcdp" else _mu_for(target_epsilon, delta)
    z = float(np.linalg.norm(1 / factors)) / _mu_left(mu, others, epsilon(others), target_epsilon)
    return _settle(z, lambda z: epsilon([*others, *(z * factors)]), target_epsilon)


def _check_calibration(
    target_epsilon: float, delta: float, sampling_rate: float | None, steps_per_epoch: int | None, method: str
) -> None:
    check_delta(delta)
    if not (is_real_number(target_epsilon) and 0 < target_epsilon < math.inf):
        raise ValueError(f"target_epsilon must be a finite number > 0, got {target_epsilon!r}")
    if (sampling_rate is None) != (steps_per_epoch is None):
        raise ValueError("sampling_rate and steps_per_epoch belong together: give both, or none for no sampling")
    if method not in ("exact", "zcdp") or (method == "zcdp" and sampling_rate is not None):
        raise ValueError(f"method must be 'exact', or 'zcdp' without sampling, got {method!r}")
    if sampling_rate is not None and steps_per_epoch is not None:
        check_sampling(sampling_rate, steps_per_epoch)
        if steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch must be an int >= 1, got {steps_per_epoch!r}")
        if not 1e-6 <= target_epsilon <= 1e6:
            raise ValueError(f"target_epsilon must be between 1e-6 and 1e6 with sampling, got {target_epsilon!r}")


def decay_factors(epochs: int, decay: Decay | None) -> list[float]:
    """What the noise multiplier is multiplied by, in each epoch."""
    check_count("epochs", epochs)
    if decay is not None and not callable(decay):
        raise ValueError(f"decay must be None or a callable epoch -> factor, got {decay!r}")
    factors = [1.0 if decay is None else decay(epoch) for epoch in range(epochs)]
    for epoch, factor in enumerate(factors):
        if not (is_real_number(factor) and 0 < factor < math.inf):
            raise ValueError(f"decay({epoch}) must be a finite number > 0, got {factor!r}")
    return [float(factor) for factor in factors]


def _mu_for(epsilon: float, delta: float) -> float:
    """The μ of a Gaussian mechanism with a given ε."""

    def excess(log_mu: float) -> float:
        return exact_epsilon(math.exp(log_mu), delta) - epsilon

    high = math.log(4 * math.sqrt(epsilon) + 4)
    return math.exp(optimize.brentq(excess, -700.0, high, xtol=1e-14, rtol=8.9e-16))


def _mu_for_zcdp(epsilon: float, delta: float) -> float:
    """The same by the paper's bound: √(2ρ)."""
    log = math.log(1 / delta)
    return math.sqrt(2) * epsilon / (math.sqrt(log + epsilon) + math.sqrt(log))


def _mu_left(mu: float, others: list[float], cost: float, target: float) -> float:
    """What of μ is left for the training, if other releases come on top: the squares add up."""
    left = mu * mu - mu_squared(others)
    if left <= 0 or cost >= target:
        raise ValueError(
            f"target_epsilon must be larger than what the further releases alone cost, {cost:.6g}, got {target!r}"
        )
    return math.sqrt(left) if others else mu


def _calibrate_poisson(
    target: float, delta: float, factors: np.ndarray, rate: float, steps: int, others: list[float]
) -> float:
    """A search with rough figures first, then with those that the user will see."""
    first, cost = [Steps(z, 1.0, 1) for z in others], gaussian_epsilon(others, delta)

    def epsilon(z: float, composition: Composition) -> float:
        return compose([*first, *(Steps(z * f, rate, steps) for f in factors)], delta, composition)

    room = target - cost  # for the training; searched by itself, since ε hardly moves where the rest dominates
    z = _z_in_the_limit(_mu_left(_mu_for(target, delta), others, cost, target), factors, rate, steps)
    rough, fine = Composition(100 * pld.TOLERANCE), Composition()
    if room > 0.1 * target:
        z = _approach(z, lambda z: epsilon(z, rough) - cost, max(room - 0.03 * target, room / 2), room)
    z = _approach(z, lambda z: epsilon(z, fine) - cost, max(room - 0.002 * target, room / 2), room)
    return _settle(z, lambda z: epsilon(z, fine), target)


def _z_in_the_limit(mu: float, factors: np.ndarray, rate: float, steps: int) -> float:
    """Many steps are like one Gaussian mechanism with μ² = Σ q²·(e^(1/z²) − 1) (Bu et al. 2020): where to start."""

    def excess(log_z: float) -> float:
        exponents = np.minimum((math.exp(log_z) * factors) ** -2.0, 600.0)
        return math.log(rate * rate * steps * float(np.expm1(exponents).sum())) - 2 * math.log(mu)

    low, high = -20.0 - math.log(factors.min()), 50.0 + math.log(steps) - math.log(factors.min())
    return math.exp(optimize.brentq(excess, low, high, xtol=1e-3)) if excess(low) > 0 > excess(high) else 1.0


def _approach(z: float, epsilon: Callable[[float], float], low: float, high: float) -> float:
    """The secant method in logarithms, until ε is between the two."""
    aim, found, slope = math.sqrt(low * high), epsilon(z), -1.5
    for _ in range(30):
        if low <= found <= high:
            break
        step = 0.7 if found == math.inf else math.log(aim / max(found, 1e-12)) / slope
        tried = z * math.exp(max(-0.7, min(0.7, step)))
        result = epsilon(tried)
        if 0 < result < math.inf and 0 < found < math.inf and result != found:
            slope = max(-50.0, min(-0.3, math.log(result / found) / math.log(tried / z)))
        z, found = tried, result
    return z


def _settle(z: float, epsilon: Callable[[float], float], target: float) -> float:
    """The next z, from below, whose ε as it will be computed does not exceed the target."""
    step = 1e-15
    while not epsilon(z) <= target:  # also if it is not a number
        z, step = z * (1 + step), 2 * step
        if not z < math.inf:
            raise ValueError(f"target_epsilon {target!r} cannot be reached with any noise multiplier")
    return z


def _checked_releases(noise_multipliers: Iterable[float]) -> list[float]:
    z = list(noise_multipliers)
    for index, value in enumerate(z):
        if not (is_real_number(value) and 0 < value < math.inf):
            raise ValueError(f"also[{index}] must be a finite number > 0, got {value!r}")
    return [float(value) for value in z]
