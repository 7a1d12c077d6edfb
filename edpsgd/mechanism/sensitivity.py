"""Sensitivity, divisor, and the noise that follows from them: the one place for these formulas.

Sums are those of the clipped gradients of all units of a step, over N workers with K micro-batches each. Sections are
those of privacy.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def sum_sensitivity(unit: str, clip_norm: float, factor: float = 1.0) -> float:
    """s, how far one example or user can move the sum of clipped gradients (section 2).

    The average of a micro-batch can move across the whole ball: s = 2C. A single example or user is within the ball
    or not there: s = C times a factor.

    Args:
        unit: what is clipped, "micro_batch", "example" or "user".
        clip_norm: C.
        factor: how many clip norms one example or user can move the sum, which the sampler knows.

    Example:
        >>> sum_sensitivity("micro_batch", 1.5), sum_sensitivity("example", 1.5)
        (3.0, 1.5)
    """
    return clip_norm * (2.0 if unit == "micro_batch" else factor)


def public_divisor(given: float | None, workers: int, micro_batches: int) -> float:
    """What the sum is divided by: the expected number of units, or N·K (sections 3 and 7).

    A count of what happened to be drawn would tell of the draw. ``micro_batches`` is one only where
    a script groups examples by ``units=`` without ``count``, of which a condition of ε speaks.
    """
    return given or float(workers * micro_batches)


def noise_on_mean(sensitivity: float, noise_multiplier: float, divisor: float) -> float:
    """The std of the noise on each coordinate of the mean gradient: s·z over the divisor (section 3)."""
    return sensitivity * noise_multiplier / divisor


def paper_multiplier(noise_multiplier: float, workers: int, micro_batches: int, largest_scale: float = 1.0) -> float:
    """The real multiplier of the published algorithm, z / (2·√(N·K)·max α) (section 3).

    With per-layer clipping it has no max α: leave ``largest_scale`` out.

    Example:
        >>> round(paper_multiplier(1.0, workers=8, micro_batches=1, largest_scale=1.512), 4)
        0.1169
    """
    return noise_multiplier / (2.0 * math.sqrt(workers * micro_batches) * largest_scale)


def paper_worker_std(clip_norm: float, noise_multiplier: float, workers: int, micro_batches: int) -> float:
    """The std of a worker's noise in the published algorithm, C·z/(N·√K) (section 3).

    The worker adds y/(N·K) to its sum for each of its K micro-batches, with independent y ~ N(0, (C·z)²).
    """
    return clip_norm * noise_multiplier / (workers * math.sqrt(micro_batches))


def calibrated_worker_stds(
    sensitivity: float, noise_multiplier: float, shares: int, scales: Sequence[float]
) -> list[float]:
    """The std of the noise on a worker's sum for each layer: α·s·z/√shares, so that all make α·s·z (section 3).

    Args:
        sensitivity: s.
        noise_multiplier: z.
        shares: how many workers noise the same coordinate: one, if each has its own.
        scales: α of the layers; ones where the noise is isotropic, as with per-layer clipping (section 6).
    """
    isotropic = sensitivity * noise_multiplier / math.sqrt(shares)
    return [scale * isotropic for scale in scales]
