"""Accounting: from noise multipliers, or from the events of a ledger, to ε; and from ε to the noise that it needs.

Section numbers are those of privacy.md. A noise multiplier is the noise's standard deviation over the sensitivity,
and lists of them have one entry per epoch. Noise of multiplier 0 gives an infinite ε, and so does whatever cannot be
computed: a bound that is wrong must be wrong upwards.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
from scipy import optimize, special

from edpsgd import pld, renyi
from edpsgd.arguments import check_count
from edpsgd.noise import Decay
from edpsgd.pld import Composition, Steps

_SMALL_MU = 1e-2  # below, differences of tails are integrated
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(4)


# -------------------------------------------------------------------- every example once an epoch


def zcdp_rho(noise_multipliers: Iterable[float]) -> float:
    """ρ = Σ 1/(2z²), one term for each epoch (section 7).

    Example:
        >>> zcdp_rho([1.0, 0.5])
        2.5
    """
    z = _checked(noise_multipliers)
    rho = _mu_squared(z) / 2
    return max(rho, sys.float_info.min) if z else 0.0  # never 0 because the noise is large


def zcdp_epsilon(rho: float, delta: float) -> float:
    """The paper's ε = ρ + 2·√(ρ·ln(1/δ)).

    Example:
        >>> round(zcdp_epsilon(0.5, 1e-5), 6)
        5.298526
    """
    _check_delta(delta)
    if not (_is_number(rho) and rho >= 0):
        raise ValueError(f"rho must be a number >= 0, got {rho!r}")
    return rho + 2 * math.sqrt(rho) * math.sqrt(-math.log(delta))


def gaussian_epsilon(noise_multipliers: Iterable[float], delta: float) -> float:
    """The exact ε of epochs in which every example is in one step: together, one Gaussian mechanism.

    Example:
        >>> round(gaussian_epsilon([1.0], 1e-5), 6)
        4.377178
    """
    _check_delta(delta)
    mu = math.hypot(*(math.inf if z == 0 else 1 / z for z in _checked(noise_multipliers)))
    return _exact_epsilon(mu, delta)


@lru_cache(maxsize=256)
def _exact_epsilon(mu: float, delta: float) -> float:
    """ε = μ²/2 − μa with δ = ½e^(−a²/2)·[erfcx(−a/√2) − erfcx((μ−a)/√2)], which is stable for any μ (section 7)."""
    if mu == 0 or math.isinf(mu):
        return mu
    if special.erf(mu / math.sqrt(8)) <= delta:  # δ at ε = 0
        return 0.0

    def excess(a: float) -> float:
        return math.log(_tails(a, mu) / 2) - a * a / 2 - math.log(delta)

    low, high = float(special.ndtri(delta)) - 0.01, min(mu / 2, 38.0)
    if excess(high) <= 0:
        return 0.0
    a = optimize.brentq(excess, low, high, xtol=1e-15, rtol=8.9e-16)
    return float(max(0.0, mu * (mu / 2 - a)))


def _tails(a: float, mu: float) -> float:
    """erfcx(−a/√2) − erfcx((μ−a)/√2); for a small μ the integral of its derivative, since the difference would be 0."""
    begin, width = -a / math.sqrt(2), mu / math.sqrt(2)
    if mu > _SMALL_MU:
        return float(special.erfcx(begin) - special.erfcx(begin + width))
    x = begin + width * (_NODES + 1) / 2
    return float(width / 2 * (_WEIGHTS @ (2 / math.sqrt(math.pi) - 2 * x * special.erfcx(x))))


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
    _check_steps(steps)
    whole = gaussian_epsilon(_repeated(steps), delta)  # without sampling: exact, or an upper bound
    if whole == 0 or all(s.sampling_rate == 1 for s in steps if s.number):
        return whole
    return min((composition or Composition()).epsilon(steps, delta), whole)


def rdp_epsilon(steps: Sequence[Steps], delta: float) -> float:
    """The same by Rényi divergences, with dp-accounting: looser, and an independent check."""
    _check_delta(delta)
    _check_steps(steps)
    return renyi.renyi_epsilon(steps, delta, renyi.poisson_divergences)


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
    _check_steps(steps)
    return renyi.moments_epsilon(steps, delta, max_order)


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
    _check_steps(steps)
    whole = gaussian_epsilon(_repeated(steps), delta)  # without sampling
    return min(renyi.renyi_epsilon(steps, delta, renyi.fixed_size_divergences), whole)


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


def _check_steps(steps: Iterable[Steps]) -> None:
    """Refuses what is no step: nothing that a comparison with NaN or a negative count could pass off as cheap."""
    for index, s in enumerate(steps):
        if not (_is_number(s.noise_multiplier) and 0 <= s.noise_multiplier < math.inf):
            raise ValueError(f"noise_multiplier of steps[{index}] must be a finite number >= 0, got {s[0]!r}")
        if not (_is_number(s.sampling_rate) and 0 <= s.sampling_rate <= 1):
            raise ValueError(f"sampling_rate of steps[{index}] must be between 0 and 1, got {s[1]!r}")
        if isinstance(s.number, bool) or not isinstance(s.number, int | np.integer) or s.number < 0:
            raise ValueError(f"number of steps[{index}] must be an int >= 0, got {s[2]!r}")


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
