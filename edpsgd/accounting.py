"""Accounting: from noise multipliers, or from the events of a ledger, to ε; and from ε to the noise that it needs.

Section numbers are those of privacy.md. A noise multiplier is the noise's standard deviation over the sensitivity,
and lists of them have one entry per epoch. Noise of multiplier 0 gives an infinite ε.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import dp_accounting
import numpy as np
from dp_accounting import rdp
from scipy import optimize, special

from edpsgd import pld
from edpsgd.arguments import check_count
from edpsgd.noise import Decay
from edpsgd.pld import Composition, Steps

_RDP_ORDERS = (1.25, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 4.5, *range(5, 33), 40, 48, 64, 96, 128, 256)

_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e5  # between which sampling is worth the computation


# -------------------------------------------------------------------- every example once an epoch


def zcdp_rho(noise_multipliers: Iterable[float]) -> float:
    """ρ = Σ 1/(2z²), one term for each epoch (section 7).

    Example:
        >>> zcdp_rho([1.0, 0.5])
        2.5
    """
    return _mu_squared(noise_multipliers) / 2


def zcdp_epsilon(rho: float, delta: float) -> float:
    """The paper's ε = ρ + 2·√(ρ·ln(1/δ)).

    Example:
        >>> round(zcdp_epsilon(0.5, 1e-5), 6)
        5.298526
    """
    _check_delta(delta)
    if not (_is_number(rho) and rho >= 0):
        raise ValueError(f"rho must be a number >= 0, got {rho!r}")
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def gaussian_epsilon(noise_multipliers: Iterable[float], delta: float) -> float:
    """The exact ε of epochs in which every example is in one step: together, one Gaussian mechanism.

    Example:
        >>> round(gaussian_epsilon([1.0], 1e-5), 6)
        4.377178
    """
    _check_delta(delta)
    return _exact_epsilon(math.sqrt(_mu_squared(noise_multipliers)), delta)


@lru_cache(maxsize=256)
def _exact_epsilon(mu: float, delta: float) -> float:
    """ε = μ²/2 − μa with δ = ½e^(−a²/2)·[erfcx(−a/√2) − erfcx((μ−a)/√2)], which is stable for any μ (section 7)."""
    if mu == 0 or math.isinf(mu):
        return mu

    def excess(a: float) -> float:
        tails = special.erfcx(-a / math.sqrt(2)) - special.erfcx((mu - a) / math.sqrt(2))
        return float(0.5 * math.exp(-a * a / 2) * tails) - delta

    low, high = float(special.ndtri(delta)), min(mu / 2, 38.0)
    if excess(high) <= 0:
        return 0.0
    a = optimize.brentq(excess, low, high, xtol=1e-15, rtol=8.9e-16)
    return float(max(0.0, mu * (mu / 2 - a)))


# -------------------------------------------------------------------- Poisson sampling


def poisson_epsilon(
    noise_multipliers: Iterable[float], sampling_rate: float, steps_per_epoch: int, delta: float
) -> float:
    """ε of epochs of Poisson-sampled steps, for adding or removing an example; rounded up in the fourth digit.

    Example:
        >>> round(poisson_epsilon([1.0, 0.9], sampling_rate=0.01, steps_per_epoch=100, delta=1e-5), 2)
        1.11
    """
    _check_delta(delta)
    _check_sampling(sampling_rate, steps_per_epoch)
    steps = [Steps(z, float(sampling_rate), steps_per_epoch) for z in _checked(noise_multipliers)]
    return compose(steps, delta)


def compose(steps: Sequence[Steps], delta: float, composition: Composition | None = None) -> float:
    """ε of any steps; a ``composition`` that has seen the first of them makes it faster."""
    _check_delta(delta)
    extreme = any(s.number and not _LEAST_NOISE <= s.noise_multiplier <= _MOST_NOISE for s in steps)
    if extreme or all(s.sampling_rate == 1 for s in steps):  # without sampling: exact, or an upper bound
        return gaussian_epsilon(_repeated(steps), delta)
    return min((composition or Composition()).epsilon(steps, delta), gaussian_epsilon(_repeated(steps), delta))


def rdp_epsilon(steps: Sequence[Steps], delta: float) -> float:
    """The same by Rényi divergences, with dp-accounting: looser, and an independent check."""
    if any(s.noise_multiplier == 0 for s in steps):
        return math.inf
    accountant = rdp.RdpAccountant(_RDP_ORDERS)
    with _without_warnings():  # of orders that dp-accounting leaves out
        for s in steps:
            event = dp_accounting.GaussianDpEvent(s.noise_multiplier)
            accountant.compose(dp_accounting.PoissonSampledDpEvent(s.sampling_rate, event), s.number)
        return float(accountant.get_epsilon(delta))


@contextmanager
def _without_warnings() -> Iterator[None]:
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def moments_epsilon(
    noise_multiplier: float, sampling_rate: float, rounds: int, delta: float, max_order: int = 32
) -> float:
    """The moments accountant of McMahan et al. 2018: min over λ = 1…max_order of (T·α(λ) + ln(1/δ))/λ.

    It reproduces the tables of that paper. ``poisson_epsilon`` is far lower, and is what to publish.

    Example:
        >>> round(moments_epsilon(1.0, 1e-3, rounds=1, delta=1e6**-1.1), 2)
        1.17
    """
    if not (_is_number(noise_multiplier) and 0 <= noise_multiplier < math.inf):
        raise ValueError(f"noise_multiplier must be a finite number >= 0, got {noise_multiplier!r}")
    _check_sampling(sampling_rate, rounds, "rounds")
    return moments_of([Steps(float(noise_multiplier), float(sampling_rate), rounds)], delta, max_order)


def moments_of(steps: Sequence[Steps], delta: float, max_order: int = 32) -> float:
    """The same for any steps."""
    _check_delta(delta)
    check_count("max_order", max_order)
    if any(s.noise_multiplier == 0 for s in steps):
        return math.inf
    orders = np.arange(1, max_order + 1)
    accountant = rdp.RdpAccountant(orders + 1)  # α(λ) is λ times the Rényi divergence of order λ + 1
    for s in steps:
        event = dp_accounting.GaussianDpEvent(s.noise_multiplier)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(s.sampling_rate, event), s.number)
    return float(np.min(accountant.rdp + math.log(1 / delta) / orders))


# -------------------------------------------------------------------- rounds of a fixed size


def fixed_size_epsilon(steps: Sequence[Steps], delta: float) -> float:
    """ε of rounds of a fixed size, drawn without replacement, for replacing one unit; by Rényi divergences.

    The sampling rate is the share of all units in a round, and the noise multiplier relative to how far replacing one
    can move the sum, twice the clip norm.

    Example:
        >>> round(fixed_size_epsilon([Steps(1.0, 0.01, 1000)], delta=1e-6), 2)
        4.02
    """
    _check_delta(delta)
    whole = gaussian_epsilon(_repeated(steps), delta)  # without sampling
    if any(s.number and s.noise_multiplier < _LEAST_NOISE for s in steps):
        return whole
    divergences = [s.number * np.array(_divergences(s.noise_multiplier, s.sampling_rate)) for s in steps]
    return min(float(rdp.compute_epsilon(_RDP_ORDERS, np.sum(divergences, axis=0), delta)[0]), whole) if steps else 0.0


@lru_cache(maxsize=256)
def _divergences(noise_multiplier: float, sampling_rate: float) -> tuple[float, ...]:
    """Of one round, at all orders."""
    accountant = rdp.RdpAccountant(_RDP_ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE)
    all_units = 10**12
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        all_units, min(all_units, math.ceil(sampling_rate * all_units)), dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    accountant.compose(event)
    return tuple(float(value) for value in accountant.rdp)


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


# -------------------------------------------------------------------- calibration


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
    _check_delta(delta)
    if not (_is_number(target_epsilon) and 0 < target_epsilon < math.inf):
        raise ValueError(f"target_epsilon must be a finite number > 0, got {target_epsilon!r}")
    if (sampling_rate is None) != (steps_per_epoch is None):
        raise ValueError("sampling_rate and steps_per_epoch belong together: give both, or none for no sampling")
    if method not in ("exact", "zcdp") or (method == "zcdp" and sampling_rate is not None):
        raise ValueError(f"method must be 'exact', or 'zcdp' without sampling, got {method!r}")
    if sampling_rate is not None and steps_per_epoch is not None:
        _check_sampling(sampling_rate, steps_per_epoch)
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
        if not (_is_number(factor) and 0 < factor < math.inf):
            raise ValueError(f"decay({epoch}) must be a finite number > 0, got {factor!r}")
    return [float(factor) for factor in factors]


def _mu_for(epsilon: float, delta: float) -> float:
    """The μ of a Gaussian mechanism with a given ε."""

    def excess(log_mu: float) -> float:
        return _exact_epsilon(math.exp(log_mu), delta) - epsilon

    high = math.log(4 * math.sqrt(epsilon) + 4)
    return math.exp(optimize.brentq(excess, -700.0, high, xtol=1e-14, rtol=8.9e-16))


def _mu_for_zcdp(epsilon: float, delta: float) -> float:
    """The same by the paper's bound: √(2ρ)."""
    log = math.log(1 / delta)
    return math.sqrt(2) * epsilon / (math.sqrt(log + epsilon) + math.sqrt(log))


def _mu_left(mu: float, others: list[float], cost: float, target: float) -> float:
    """What of μ is left for the training, if other releases come on top: the squares add up."""
    left = mu * mu - _mu_squared(others)
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
        step = math.log(aim / max(found, 1e-12)) / slope
        tried = z * math.exp(max(-0.7, min(0.7, step)))
        result = epsilon(tried)
        if 0 < result < math.inf and 0 < found < math.inf and result != found:
            slope = max(-50.0, min(-0.3, math.log(result / found) / math.log(tried / z)))
        z, found = tried, result
    return z


def _settle(z: float, epsilon: Callable[[float], float], target: float) -> float:
    """The next z, from below, whose ε as it will be computed does not exceed the target."""
    step = 1e-15
    while epsilon(z) > target:
        z, step = z * (1 + step), 2 * step
    return z


# -------------------------------------------------------------------- checks


def _mu_squared(noise_multipliers: Iterable[float]) -> float:
    """Σ 1/z², infinite if there is no noise."""
    z = _checked(noise_multipliers)
    with np.errstate(divide="ignore", over="ignore"):
        return math.fsum(np.minimum(1 / np.square(z), np.inf)) if len(z) else 0.0


def _repeated(steps: Sequence[Steps]) -> list[float]:
    """One multiplier for each group of equal steps: n steps with z are one with z/√n."""
    return [s.noise_multiplier / math.sqrt(s.number) for s in steps if s.number]


def _checked(noise_multipliers: Iterable[float]) -> list[float]:
    z = [noise_multipliers] if isinstance(noise_multipliers, float | int) else list(noise_multipliers)
    for index, value in enumerate(z):
        if not (_is_number(value) and 0 <= value < math.inf):
            raise ValueError(f"noise_multipliers[{index}] must be a finite number >= 0, got {value!r}")
    return [float(value) for value in z]


def _checked_releases(noise_multipliers: Iterable[float]) -> list[float]:
    z = list(noise_multipliers)
    for index, value in enumerate(z):
        if not (_is_number(value) and 0 < value < math.inf):
            raise ValueError(f"also[{index}] must be a finite number > 0, got {value!r}")
    return [float(value) for value in z]


def _check_delta(delta: float) -> None:
    if not (_is_number(delta) and 0 < delta < 1):
        raise ValueError(f"delta must be between 0 and 1, both excluded, got {delta!r}")


def _check_sampling(rate: float, steps: int, name: str = "steps_per_epoch") -> None:
    if not (_is_number(rate) and 0 < rate <= 1):
        raise ValueError(f"sampling_rate must be > 0 and <= 1, got {rate!r}")
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer) or steps < 0:
        raise ValueError(f"{name} must be an int >= 0, got {steps!r}")


def _is_number(value: object) -> bool:
    is_real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return is_real and not math.isnan(float(value))  # type: ignore[arg-type]
