"""From ε to the noise multiplier whose ε comes to it from below, and never exceeds it."""

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
from edpsgd.accounting.selection import TrialLaw, selected_epsilon
from edpsgd.schedules import Decay


def calibrate_fixed_size(target_epsilon: float, delta: float, sampling_rate: float, rounds: int) -> float:
    """The noise multiplier with which so many rounds of a fixed size reach a target ε, never more.

    Args:
        target_epsilon: what the whole training may cost.
        delta: the δ of that ε.
        sampling_rate: the share of all units in a round.
        rounds: how many there will be.

    Example:
        >>> z = calibrate_fixed_size(4.0, 1e-6, sampling_rate=0.01, rounds=1000)
        >>> 3.99 < fixed_size_epsilon([Steps(z, 0.01, 1000)], 1e-6) <= 4.0
        True
    """
    _check_calibration(target_epsilon, delta, sampling_rate, rounds, "exact")

    def epsilon(z: float) -> float:
        return fixed_size_epsilon([Steps(z, float(sampling_rate), rounds)], delta)

    mu = _mu_for(target_epsilon, delta)
    start = _multiplier_in_the_limit(mu, np.ones(1), sampling_rate, rounds)
    z = _secant_search(start, epsilon, 0.998 * target_epsilon, target_epsilon)
    return _raise_to_target(z, epsilon, target_epsilon)


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
    factors = np.array(decay_factors(epochs, decay))
    others = _checked_releases(also)
    if sampling_rate is not None and steps_per_epoch is not None:
        return _calibrate_poisson(target_epsilon, delta, factors, sampling_rate, steps_per_epoch, others)

    def epsilon(noise_multipliers: Iterable[float]) -> float:
        if method == "zcdp":
            return zcdp_epsilon(zcdp_rho(noise_multipliers), delta)
        return gaussian_epsilon(noise_multipliers, delta)

    mu = _mu_for_zcdp(target_epsilon, delta) if method == "zcdp" else _mu_for(target_epsilon, delta)
    mu = _mu_left(mu, others, epsilon(others), target_epsilon)
    z = float(np.linalg.norm(1 / factors)) / mu  # μ² = Σ 1/(z·factor)²
    return _raise_to_target(z, lambda z: epsilon([*others, *(z * factors)]), target_epsilon)


def calibrate_selected(
    target_epsilon: float,
    delta: float,
    epochs: int,
    law: TrialLaw,
    decay: Decay | None = None,
    sampling_rate: float | None = None,
    steps_per_epoch: int | None = None,
    also: Iterable[float] = (),
) -> float:
    """The noise multiplier z0 of a training, the best of a random number of which reaches a target ε, never more.

    Args:
        target_epsilon: what the whole may cost: all trainings, and the choice of one.
        delta: the δ of that ε.
        epochs: of a training.
        law: of the number of trainings.
        decay: as for ``calibrate``, like all that follows.
        sampling_rate: with Poisson sampling, its rate.
        steps_per_epoch: with Poisson sampling, the steps of an epoch.
        also: further releases of each training, such as a score with noise that is measured on the training examples.

    Example:
        >>> from edpsgd.accounting import TrialLaw
        >>> round(calibrate_selected(8.0, 1e-5, epochs=20, law=TrialLaw(10.0)), 2)
        4.78
    """
    _check_calibration(target_epsilon, delta, sampling_rate, steps_per_epoch, "exact")
    factors = np.array(decay_factors(epochs, decay))
    others = [Steps(z, 1.0, 1) for z in _checked_releases(also)]
    rate, steps = 1.0, 1
    if sampling_rate is not None and steps_per_epoch is not None:
        rate, steps = float(sampling_rate), steps_per_epoch

    def epsilon(z: float) -> float:
        training = [Steps(z * factor, rate, steps) for factor in factors]
        return selected_epsilon([[*others, *training]], delta, law)

    mu = _mu_for(target_epsilon / 2, delta)  # the choice costs about as much as the training
    start = float(np.linalg.norm(1 / factors)) * math.sqrt(steps) / mu
    if rate < 1:
        start = _multiplier_in_the_limit(mu, factors, rate, steps)
    z = _secant_search(start, epsilon, 0.998 * target_epsilon, target_epsilon)
    return _raise_to_target(z, epsilon, target_epsilon)


def scale_to_target(target_epsilon: float, epsilon: Callable[[float], float]) -> float:
    """By what noise multipliers are to be multiplied so that ``epsilon(factor)`` reaches a target ε, never more.

    Args:
        target_epsilon: what the noise may cost.
        epsilon: what it costs with a factor, which 1 is near.

    Example:
        >>> factor = scale_to_target(8.0, lambda factor: gaussian_epsilon([1.0 * factor, 2.0 * factor], 1e-5))
        >>> 7.95 < gaussian_epsilon([factor, 2 * factor], 1e-5) <= 8.0
        True
    """
    factor = _secant_search(1.0, epsilon, 0.996 * target_epsilon, target_epsilon)
    return _raise_to_target(factor, epsilon, target_epsilon)


def _check_calibration(
    target_epsilon: float, delta: float, sampling_rate: float | None, steps_per_epoch: int | None, method: str
) -> None:
    check_delta(delta)
    if not (is_real_number(target_epsilon) and 0 < target_epsilon < math.inf):
        raise ValueError(f"target_epsilon must be a finite number > 0, got {target_epsilon!r}")
    if (sampling_rate is None) != (steps_per_epoch is None):
        raise ValueError("sampling_rate and steps_per_epoch belong together: give both, or none for no sampling")
    is_zcdp_of_samples = method == "zcdp" and sampling_rate is not None
    if method not in ("exact", "zcdp") or is_zcdp_of_samples:
        raise ValueError(f"method must be 'exact', or 'zcdp' without sampling, got {method!r}")
    if sampling_rate is not None and steps_per_epoch is not None:
        check_sampling(sampling_rate, steps_per_epoch)
        if steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch must be an int >= 1, got {steps_per_epoch!r}")
        if not 1e-6 <= target_epsilon <= 1e6:
            raise ValueError(f"target_epsilon must be between 1e-6 and 1e6 with sampling, got {target_epsilon!r}")


def decay_factors(epochs: int, decay: Decay | None) -> list[float]:
    """What the noise multiplier of epoch 0 … epochs − 1 is multiplied by; ones without a decay."""
    check_count("epochs", epochs)
    if decay is not None and not callable(decay):
        raise ValueError(f"decay must be None or a callable epoch -> factor, got {decay!r}")
    factors = [1.0 if decay is None else decay(epoch) for epoch in range(epochs)]
    for epoch, factor in enumerate(factors):
        if not (is_real_number(factor) and 0 < factor < math.inf):
            raise ValueError(f"decay({epoch}) must be a finite number > 0, got {factor!r}")
    return [float(factor) for factor in factors]


def _mu_for(epsilon: float, delta: float) -> float:
    """The μ of the Gaussian mechanism that has this ε at δ (privacy.md section 7)."""

    def excess(log_mu: float) -> float:
        return exact_epsilon(math.exp(log_mu), delta) - epsilon

    high = math.log(4 * math.sqrt(epsilon) + 4)
    return math.exp(optimize.brentq(excess, -700.0, high, xtol=1e-14, rtol=8.9e-16))


def _mu_for_zcdp(epsilon: float, delta: float) -> float:
    """The μ whose ε by the paper's bound is this one: μ = √(2ρ), with ε = ρ + 2·√(ρ·ln(1/δ)) solved for ρ."""
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
    """z0 for Poisson sampling: a search with rough figures first, then with those that the user will see.

    Args:
        target: the ε to reach.
        delta: its δ.
        factors: of the decay, (epochs,).
        rate: the sampling rate.
        steps: of an epoch.
        others: noise multipliers of further releases, without sampling.
    """
    other_steps = [Steps(z, 1.0, 1) for z in others]
    other_cost = gaussian_epsilon(others, delta)

    def whole_epsilon(z: float, composition: Composition) -> float:
        training = [Steps(z * factor, rate, steps) for factor in factors]
        return compose([*other_steps, *training], delta, composition)

    def training_epsilon(z: float, composition: Composition) -> float:
        """What the training adds; searched by itself, since the whole hardly changes where the rest dominates."""
        return whole_epsilon(z, composition) - other_cost

    mu = _mu_left(_mu_for(target, delta), others, other_cost, target)
    z = _multiplier_in_the_limit(mu, factors, rate, steps)
    rough, fine = Composition(100 * pld.TOLERANCE), Composition()
    allowed = target - other_cost
    if allowed > 0.1 * target:
        low = max(allowed - 0.03 * target, allowed / 2)
        z = _secant_search(z, lambda z: training_epsilon(z, rough), low, allowed)
    low = max(allowed - 0.002 * target, allowed / 2)
    z = _secant_search(z, lambda z: training_epsilon(z, fine), low, allowed)
    return _raise_to_target(z, lambda z: whole_epsilon(z, fine), target)


def _multiplier_in_the_limit(mu: float, factors: np.ndarray, rate: float, steps: int) -> float:
    """The z0 with which many sampled steps are like a Gaussian mechanism with μ: where a search starts.

    Their limit has μ² = q²·Σ (e^(1/z²) − 1) (Bu et al. 2020).
    """

    def excess(log_z: float) -> float:
        exponents = np.minimum((math.exp(log_z) * factors) ** -2.0, 600.0)
        return math.log(rate * rate * steps * float(np.expm1(exponents).sum())) - 2 * math.log(mu)

    low = -20.0 - math.log(factors.min())
    high = 50.0 + math.log(steps) - math.log(factors.min())
    if not excess(low) > 0 > excess(high):
        return 1.0
    return math.exp(optimize.brentq(excess, low, high, xtol=1e-3))


def _secant_search(z: float, epsilon: Callable[[float], float], low: float, high: float) -> float:
    """A z whose ε is between ``low`` and ``high``, by the secant method in logarithms; or where 30 steps led."""
    aim = math.sqrt(low * high)
    found = epsilon(z)
    slope = -1.5  # of ln ε over ln z, until two points tell
    for _ in range(30):
        if low <= found <= high:
            break
        step = 0.7 if found == math.inf else math.log(aim / max(found, 1e-12)) / slope
        tried = z * math.exp(max(-0.7, min(0.7, step)))
        result = epsilon(tried)
        are_usable = 0 < result < math.inf and 0 < found < math.inf and result != found
        if are_usable:
            slope = max(-50.0, min(-0.3, math.log(result / found) / math.log(tried / z)))
        z, found = tried, result
    return z


def _raise_to_target(z: float, epsilon: Callable[[float], float], target: float) -> float:
    """The next z, from below, whose ε as it will be computed does not exceed the target."""
    step = 1e-15
    while not epsilon(z) <= target:  # also if it is not a number
        z, step = z * (1 + step), 2 * step
        if not z < math.inf:
            raise ValueError(f"target_epsilon {target!r} cannot be reached with any noise multiplier")
    return z


def _checked_releases(noise_multipliers: Iterable[float]) -> list[float]:
    """The noise multipliers of further releases as floats, if all of them can be ones."""
    releases = list(noise_multipliers)
    for index, value in enumerate(releases):
        if not (is_real_number(value) and 0 < value < math.inf):
            raise ValueError(f"also[{index}] must be a finite number > 0, got {value!r}")
    return [float(value) for value in releases]
