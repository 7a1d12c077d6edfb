"""Sampled steps: ε of Poisson-sampled steps and of rounds of a fixed size (privacy.md section 7)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from edpsgd._arguments import check_count, is_real_number
from edpsgd.accounting import renyi
from edpsgd.accounting.gaussian import (
    check_delta,
    checked_multipliers,
    gaussian_epsilon,
)
from edpsgd.accounting.pld import Composition, Steps


def poisson_epsilon(
    noise_multipliers: Iterable[float], sampling_rate: float, steps_per_epoch: int, delta: float
) -> float:
    """ε of epochs of Poisson-sampled steps, for adding or removing an example, by privacy loss distributions.

    It is an upper bound, within a relative 1e-4 of the best one, or 5e-4 where more would take long.

    Example:
        >>> round(poisson_epsilon([1.0, 0.9], sampling_rate=0.01, steps_per_epoch=100, delta=1e-5), 2)
        1.11
    """
    check_delta(delta)
    check_sampling(sampling_rate, steps_per_epoch)
    rate = float(sampling_rate)
    steps = [Steps(z, rate, steps_per_epoch) for z in checked_multipliers(noise_multipliers)]
    return compose(steps, delta)


def compose(steps: Sequence[Steps], delta: float, composition: Composition | None = None) -> float:
    """ε of any Poisson-sampled steps by their privacy loss distributions, for adding or removing an example.

    Args:
        steps: groups of alike steps.
        delta: the δ to find ε for.
        composition: what has seen the first of the steps, to be faster.
    """
    check_delta(delta)
    check_steps(steps)
    unsampled = gaussian_epsilon(repeated_multipliers(steps), delta)  # exact at rate 1, else an upper bound
    has_everyone = all(group.sampling_rate == 1 for group in steps if group.number)
    if unsampled == 0 or has_everyone:
        return unsampled
    return min((composition or Composition()).epsilon(steps, delta), unsampled)


def rdp_epsilon(steps: Sequence[Steps], delta: float) -> float:
    """ε of Poisson-sampled steps by Rényi divergences, with dp-accounting: looser, and an independent check."""
    check_delta(delta)
    check_steps(steps)
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
    if not (is_real_number(noise_multiplier) and 0 <= noise_multiplier < math.inf):
        raise ValueError(f"noise_multiplier must be a finite number >= 0, got {noise_multiplier!r}")
    check_sampling(sampling_rate, rounds, "rounds")
    return moments_of([Steps(float(noise_multiplier), float(sampling_rate), rounds)], delta, max_order)


def moments_of(steps: Sequence[Steps], delta: float, max_order: int = 32) -> float:
    """ε of any Poisson-sampled steps by the moments accountant of McMahan et al. 2018."""
    check_delta(delta)
    check_count("max_order", max_order)
    check_steps(steps)
    return renyi.moments_epsilon(steps, delta, max_order)


def fixed_size_epsilon(steps: Sequence[Steps], delta: float) -> float:
    """ε of rounds of a fixed size, drawn without replacement, for replacing one unit; by Rényi divergences.

    The sampling rate is the share of all units in a round. The noise multiplier is relative to the sensitivity of
    replacing one, twice the clip norm.

    Example:
        >>> round(fixed_size_epsilon([Steps(1.0, 0.01, 1000)], delta=1e-6), 2)
        4.02
    """
    check_delta(delta)
    check_steps(steps)
    unsampled = gaussian_epsilon(repeated_multipliers(steps), delta)
    return min(renyi.renyi_epsilon(steps, delta, renyi.fixed_size_divergences), unsampled)


def repeated_multipliers(steps: Sequence[Steps]) -> list[float]:
    """One multiplier for each group of equal steps: n steps with z are one with z/√n."""
    return [group.noise_multiplier / math.sqrt(group.number) for group in steps if group.number]


def check_steps(steps: Iterable[Steps]) -> None:
    """Refuses what is no step: nothing that a comparison with NaN or a negative count could pass off as cheap."""
    for index, (z, rate, number) in enumerate(steps):
        if not (is_real_number(z) and 0 <= z < math.inf):
            raise ValueError(f"noise_multiplier of steps[{index}] must be a finite number >= 0, got {z!r}")
        if not (is_real_number(rate) and 0 <= rate <= 1):
            raise ValueError(f"sampling_rate of steps[{index}] must be between 0 and 1, got {rate!r}")
        if not _is_count(number):
            raise ValueError(f"number of steps[{index}] must be an int >= 0, got {number!r}")


def check_sampling(rate: float, steps: int, name: str = "steps_per_epoch") -> None:
    """Refuses a sampling rate or a number of steps that cannot be."""
    if not (is_real_number(rate) and 0 < rate <= 1):
        raise ValueError(f"sampling_rate must be > 0 and <= 1, got {rate!r}")
    if not _is_count(steps):
        raise ValueError(f"{name} must be an int >= 0, got {steps!r}")


def _is_count(value: object) -> bool:
    """Whether it is a whole number >= 0, of Python or numpy; for Python, True is one too."""
    is_whole_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_whole_number and int(value) >= 0  # type: ignore[call-overload]
