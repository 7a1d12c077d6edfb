"""The privacy loss of one Poisson-sampled Gaussian step, and how it is rounded to a grid.

"Connect the dots" (Doroshenko et al. 2022): each interval's two probabilities, with and without the example, move to
the interval's ends so that both are kept. The result is always pessimistic, and its error falls with the square of the
spacing. The last interval may reach to infinity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

Array = npt.NDArray[np.float64]
_HUGE = 600.0  # exp() of more than this is left alone


def loss_of(x: Array, z: float | Array, q: float | Array) -> Array:
    """ln(1 − q + q·e^u), u = (x − ½)/z²: what output x says for the example being there."""
    u = (x - 0.5) / (z * z)
    with np.errstate(divide="ignore"):
        small = np.where(q == 1.0, u, np.log1p(q * np.expm1(np.minimum(u, 30.0))))
    large = u + np.log(q) + np.log1p((1.0 - q) / q * np.exp(-np.maximum(u, 30.0)))
    return np.where(u < 30.0, small, large)


def output_of(loss: Array, z: float, q: float) -> Array:
    """The output x with the given loss, −∞ for losses that are too low to happen."""
    if q == 1.0:
        return z * z * loss + 0.5
    with np.errstate(divide="ignore"):
        small = np.log1p(np.maximum(np.expm1(np.minimum(loss, 1.0)) / q, -1.0))
        large = loss - math.log(q) + np.log1p(-(1.0 - q) * np.exp(-np.maximum(loss, 1.0)))
    return z * z * np.where(loss < 1.0, small, large) + 0.5


def between(x: Array) -> Array:
    """Standard normal probabilities between neighbouring entries of x, exact in both tails."""
    low, high = x[:-1], x[1:]
    upper = low > 0
    return np.asarray(special.ndtr(np.where(upper, -low, high)) - special.ndtr(np.where(upper, -high, low)))


def cuts(z: float, q: float, cut: float) -> tuple[float, float]:
    """Outputs below the first and above the second have a probability of at most ``cut`` each."""
    far = -float(special.ndtri(cut / 2))
    near = -float(special.ndtri(min(0.5, cut / (2 * q))))
    return -z * far, max(z * far, 1.0 + z * near)


@dataclass(frozen=True)
class Grid:
    """Where losses are rounded to: multiples of ``spacing``, all of them near 0, fewer where the loss is large."""

    sign: int
    cut: float  # probability that a step's loss is above the grid or below
    top: float  # the same as a loss, where that is less
    tilt: float
    spacing: float
    ratio: float  # distance of neighbouring points over the loss, where that is more than the spacing
    widest: float  # distance on the side where losses are positive
    size: int  # of the transform

    def points(self, low: int, high: int) -> npt.NDArray[np.int64]:
        """Multiples from low to high, both included; the side that tilting favours is never too coarse for it."""
        widest = self.widest / self.spacing
        points = np.concatenate([-self._outwards(-low, math.inf), self._outwards(high, widest), [low, high]])
        return np.unique(points[(points >= low) & (points <= high)])

    def _outwards(self, reach: int, widest: float) -> npt.NDArray[np.int64]:
        """0, 1, 2, …, then with growing distances up to ``widest``, until ``reach``."""
        dense = math.ceil(1 / self.ratio)
        if reach <= dense:
            return np.arange(max(0, reach) + 1)
        turn = min(max(dense, widest / self.ratio), reach)
        growing = dense * np.exp(np.arange(0.0, math.log(turn / dense), self.ratio))
        even = np.arange(turn, reach, max(1.0, widest)) if turn < reach else np.empty(0)
        return np.concatenate([np.arange(dense), growing, even]).astype(np.int64)


class Mass(NamedTuple):
    """A rounded loss distribution: probabilities at multiples of the spacing, and what is counted as infinite."""

    points: npt.NDArray[np.int64]
    probabilities: Array
    infinite: float

    def moment(self, order: float, spacing: float) -> float:
        """The logarithm of E[exp(order·loss)] over the finite losses, −∞ if there are none."""
        exponents = self.exponents(order, spacing)
        highest = exponents.max()
        if highest == -math.inf:
            return -math.inf
        return float(highest + np.log(np.exp(exponents - highest).sum()))

    def exponents(self, order: float, spacing: float) -> Array:
        """The logarithms of probability·exp(order·loss), −∞ at points without probability.

        These must not count: far out, order·loss is largest just where nothing is left.
        """
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.probabilities) + order * spacing * self.points)


def round_losses(z: float, q: float, grid: Grid) -> Mass:
    """The loss of one step on the grid: every interval's two probabilities move to its ends, so that both are kept.

    The last interval reaches to infinity. What is below the first point moves up to it.
    """
    low, high = _range(z, q, grid.sign, grid.cut, grid.top)
    points = grid.points(math.floor(low / grid.spacing), math.ceil(high / grid.spacing))
    x = output_of(np.asarray(grid.sign * grid.spacing * points, dtype=np.float64), z, q)
    below = float(special.ndtr(grid.sign * x[0] / z))
    if grid.sign > 0:
        without, mixed = _probabilities(np.append(x, np.inf), z, q)
        return _connect(points, grid.spacing, mixed, without, below)
    without, mixed = _probabilities(np.append(x, -np.inf)[::-1], z, q)
    return _connect(points, grid.spacing, without[::-1], mixed[::-1], below)


def _range(z: float, q: float, sign: int, cut: float, top: float) -> tuple[float, float]:
    """The lowest and the highest loss to look at."""
    ends = sorted(sign * float(loss_of(np.array(x), z, q)) for x in cuts(z, q, cut))
    return min(ends[0], top), min(ends[1], top)


def _probabilities(x: Array, z: float, q: float) -> tuple[Array, Array]:
    """Of the output being between neighbouring entries of x, if the example is not there and if it may be."""
    without = between(x / z)
    return without, (1.0 - q) * without + q * between((x - 1.0) / z)


def _connect(points: npt.NDArray[np.int64], spacing: float, upper: Array, lower: Array, below: float) -> Mass:
    """Moves the probabilities of the intervals from each point to the next to the points, the last one to infinity."""
    loss = points * spacing
    width = np.append(-np.expm1(loss[:-1] - loss[1:]), 1.0)
    moved = (upper - np.exp(np.minimum(loss, _HUGE)) * lower) / width
    moved = np.where(loss < _HUGE, np.clip(moved, 0.0, upper), upper)
    probabilities = upper - moved
    probabilities[1:] += moved[:-1]
    probabilities[0] += below
    return Mass(points, probabilities, float(moved[-1]))
