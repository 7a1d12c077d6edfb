"""Statistical tests of noise: its size, and whether streams of it are independent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri
from scipy.stats import chi2
from scipy.stats import t as student

from mia.bounds import Floats


@dataclass(frozen=True)
class Check:
    """One thing looked at, in words, with the probability that sound noise looks as bad."""

    name: str
    found: str
    p_value: float


@dataclass(frozen=True)
class NoiseFinding:
    """All checks of the noise; sound noise is refuted with a probability of at most ``error_rate``."""

    checks: tuple[Check, ...]
    error_rate: float

    @property
    def failed(self) -> list[Check]:
        """The checks that refute the noise, after a union bound over all of them."""
        return [check for check in self.checks if check.p_value * len(self.checks) < self.error_rate]

    @property
    def is_refuted(self) -> bool:
        """Whether the noise is not what the multiplier promises."""
        return bool(self.failed)


def check_std(name: str, values: Floats) -> Check:
    """Two-sided chi-square test of values that should be standard normal.

    Example:
        >>> check_std("ones", np.ones(100)).found
        '1.0000 of what is promised'
    """
    total, count = float(np.square(values).sum()), values.size
    p_value = min(1.0, 2.0 * float(min(chi2.cdf(total, count), chi2.sf(total, count))))
    return Check(f"std of {name}", f"{math.sqrt(total / max(count, 1)):.4f} of what is promised", p_value)


def check_independence(streams: Floats) -> list[Check]:
    """Correlations of all pairs of steps of a worker, and of all pairs of workers; of the numbers and of their sizes.

    Streams that start alike share their radii even where their angles differ: then only the sizes are correlated.

    Args:
        streams: standard normal numbers by worker, step and position.

    Example:
        >>> twice = np.repeat(np.random.default_rng(0).normal(size=(1, 1, 50)), 2, axis=1)
        >>> [check.found for check in check_independence(twice)]
        ['1.0000 at most, 1 pairs', '1.0000 at most, 1 pairs']
    """
    number, steps, length = streams.shape
    if length < 3:
        return []
    worker = np.repeat(np.arange(number), steps)
    first, second = np.triu_indices(number * steps, k=1)
    kinds = {"steps": worker[first] == worker[second], "workers": worker[first] != worker[second]}
    checks = []
    for what, values in (("noise", streams), ("sizes of noise", _sizes(streams))):
        with np.errstate(invalid="ignore", divide="ignore"):  # no noise at all
            matrix = np.nan_to_num(np.corrcoef(values.reshape(-1, length)))
        for between, chosen in kinds.items():
            if chosen.any():
                checks.append(
                    _check_pairs(f"correlation of {what} between {between}", matrix[first, second][chosen], length)
                )
    return checks


def _sizes(streams: Floats) -> Floats:
    """Absolute values, mapped so that those of standard normal numbers are standard normal again."""
    ratio = np.abs(streams) / np.sqrt(np.square(streams).mean())
    return np.clip(np.asarray(ndtri(2.0 * ndtr(ratio) - 1.0), dtype=np.float64), -8.0, 8.0)


def _check_pairs(name: str, correlations: Floats, length: int) -> Check:
    """The largest of many correlations of independent normal rows, by Student's distribution and a union bound."""
    worst = min(float(np.abs(correlations).max()), 1.0 - 1e-12)
    tail = float(student.sf(worst * math.sqrt((length - 2) / (1.0 - worst**2)), length - 2))
    found = f"{worst:.4f} at most, {len(correlations)} pairs"
    return Check(name, found, min(1.0, 2.0 * tail * len(correlations)))
