"""The privacy loss of one Poisson-sampled Gaussian step, and how it is rounded to a grid.

A step with noise multiplier z includes an example with probability q. Its output x, in units of the
sensitivity, has the law N(0, z²) without the example and (1 − q)·N(0, z²) + q·N(1, z²) with it.

"Connect the dots" (Doroshenko et al. 2022): each interval's two probabilities, with and without the
example, move to the interval's ends so that both are kept. The result is always pessimistic, and its
error falls with the square of the spacing. The last interval extends to infinity.
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
    """ln(1 − q + q·e^u), u = (x − ½)/z²: the log-likelihood ratio of outputs x, elementwise."""
    u = (x - 0.5) / (z * z)
    with np.errstate(divide="ignore"):
        small = np.where(q == 1.0, u, np.log1p(q * np.expm1(np.minimum(u, 30.0))))
    large = u + np.log(q) + np.log1p((1.0 - q) / q * np.exp(-np.maximum(u, 30.0)))
    return np.where(u < 30.0, small, large)


def output_of(loss: Array, z: float, q: float) -> Array:
    """The outputs x with the given losses, elementwise; −∞ for losses that are too low to happen."""
    if q == 1.0:
        return z * z * loss + 0.5
    with np.errstate(divide="ignore"):
        small = np.log1p(np.maximum(np.expm1(np.minimum(loss, 1.0)) / q, -1.0))
        large = loss - math.log(q) + np.log1p(-(1.0 - q) * np.exp(-np.maximum(loss, 1.0)))
    return z * z * np.where(loss < 1.0, small, large) + 0.5


def between(x: Array) -> Array:
    """Standard normal probabilities between neighbouring entries of x, (n − 1,) of (n,); exact in both tails."""
    low, high = x[:-1], x[1:]
    # Above 0 the difference is that of the mirrored interval, whose probabilities are not near 1.
    is_above = low > 0
    upper = np.where(is_above, -low, high)
    lower = np.where(is_above, -high, low)
    return np.asarray(special.ndtr(upper) - special.ndtr(lower))


def cuts(z: float, q: float, cut: float) -> tuple[float, float]:
    """Outputs (low, high): below the first and above the second there is a probability of at most ``cut`` each."""
    quantile_without = -float(special.ndtri(cut / 2))
    quantile_with = -float(special.ndtri(min(0.5, cut / (2 * q))))
    return -z * quantile_without, max(z * quantile_without, 1.0 + z * quantile_with)


@dataclass(frozen=True)
class Grid:
    """Where losses are rounded to: multiples of ``spacing``, all of them near 0, fewer where the loss is large.

    Attributes:
        sign: 1 for the loss of removing the example, −1 for that of adding it.
        cut: probability that a step's loss is above the grid, or below it.
        top: the highest loss of the grid, where that is less than what ``cut`` gives.
        tilt: λ; probabilities are multiplied by exp(λ·loss) before the transform.
        spacing: of the losses.
        ratio: distance of neighbouring points over the loss, where that is more than the spacing.
        widest: largest distance of neighbouring points where losses are positive.
        size: of the transform.
    """

    sign: int
    cut: float
    top: float
    tilt: float
    spacing: float
    ratio: float
    widest: float
    size: int

    def points(self, low: int, high: int) -> npt.NDArray[np.int64]:
        """Multiples of the spacing from low to high, both included, ascending.

        The side that tilting favours is never too coarse for it.
        """
        widest = self.widest / self.spacing
        below_zero = -self._distances_from_zero(-low, math.inf)
        above_zero = self._distances_from_zero(high, widest)
        points = np.concatenate([below_zero, above_zero, [low, high]])
        return np.unique(points[(points >= low) & (points <= high)])

    def _distances_from_zero(self, farthest: int, widest: float) -> npt.NDArray[np.int64]:
        """0, 1, 2, …, then with gaps that grow up to ``widest``, as far as ``farthest``."""
        dense = math.ceil(1 / self.ratio)
        if farthest <= dense:
            return np.arange(max(0, farthest) + 1)
        # From here on the gaps are even.
        turn = min(max(dense, widest / self.ratio), farthest)
        growing = dense * np.exp(np.arange(0.0, math.log(turn / dense), self.ratio))
        even = np.empty(0)
        if turn < farthest:
            even = np.arange(turn, farthest, max(1.0, widest))
        return np.concatenate([np.arange(dense), growing, even]).astype(np.int64)


class LossPmf(NamedTuple):
    """A rounded loss distribution.

    Attributes:
        points: multiples of the spacing, (n,), ascending.
        probabilities: of the losses there, (n,).
        infinite: the probability that is counted as an infinite loss.
    """

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
        """The logarithms of probability·exp(order·loss), (n,); −∞ at points without probability.

        These must not count: at the far end order·loss is largest just where nothing is left.
        """
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.probabilities) + order * spacing * self.points)


def round_losses(z: float, q: float, grid: Grid) -> LossPmf:
    """The loss of one step on the grid: every interval's two probabilities move to its ends, so that both are kept.

    The last interval extends to infinity. What is below the first point moves up to it.
    """
    low, high = _loss_range(z, q, grid.sign, grid.cut, grid.top)
    points = grid.points(math.floor(low / grid.spacing), math.ceil(high / grid.spacing))
    x = output_of(np.asarray(grid.sign * grid.spacing * points, dtype=np.float64), z, q)
    below = float(special.ndtr(grid.sign * x[0] / z))
    if grid.sign > 0:
        without, mixed = _probabilities(np.append(x, np.inf), z, q)
        return _connect_dots(points, grid.spacing, mixed, without, below)
    # For adding the example, a larger loss is a smaller output: intervals are counted from the end.
    without, mixed = _probabilities(np.append(x, -np.inf)[::-1], z, q)
    return _connect_dots(points, grid.spacing, without[::-1], mixed[::-1], below)


def _loss_range(z: float, q: float, sign: int, cut: float, top: float) -> tuple[float, float]:
    """The lowest and the highest loss to look at."""
    losses = [sign * float(loss_of(np.array(x), z, q)) for x in cuts(z, q, cut)]
    return min(min(losses), top), min(max(losses), top)


def _probabilities(x: Array, z: float, q: float) -> tuple[Array, Array]:
    """The probabilities of outputs between neighbouring entries of x: without the example, and if it may be there."""
    without = between(x / z)
    return without, (1.0 - q) * without + q * between((x - 1.0) / z)


def _connect_dots(points: npt.NDArray[np.int64], spacing: float, upper: Array, lower: Array, below: float) -> LossPmf:
    """Moves the probability of each interval to the points at its ends, and that of the last one to infinity.

    Doroshenko et al. 2022: what moves up is what keeps both probabilities of the interval.

    Args:
        points: (n,), the lower ends of the intervals.
        spacing: of the losses.
        upper: probabilities of the intervals, (n,), under the law that the loss is taken under.
        lower: the same under the other law, whose ratio to ``upper`` is exp(−loss).
        below: probability of what is below the first point.
    """
    loss = points * spacing
    width = np.append(-np.expm1(loss[:-1] - loss[1:]), 1.0)
    moved_up = (upper - np.exp(np.minimum(loss, _HUGE)) * lower) / width
    moved_up = np.where(loss < _HUGE, np.clip(moved_up, 0.0, upper), upper)
    probabilities = upper - moved_up
    probabilities[1:] += moved_up[:-1]
    probabilities[0] += below
    return LossPmf(points, probabilities, float(moved_up[-1]))
