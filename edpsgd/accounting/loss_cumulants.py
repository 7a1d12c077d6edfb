"""Where a privacy loss distribution is to be looked at, and how finely: cumulants of the summed loss.

They choose the grid of ``pld.py``; no bound depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edpsgd.accounting.loss_grid import Array, Grid, cuts, loss_of

if TYPE_CHECKING:
    from edpsgd.accounting.pld import Steps

CUT = 1e-7  # share of δ that may be cut off at each place
_ROUNDED = 1e-5  # share of δ that a bound on rounding errors may take
_WRAPPED = 1e-12  # tilted mass below the window, which wraps around to its top
_LONGEST = 1 << 23  # transform
_NODES = 120  # of each half of an integral, which spans at most some twenty standard deviations


class Window(NamedTuple):
    """Which losses the circular transform shows."""

    first: int  # multiple of the spacing
    order: float  # of the Chernoff bound on what lies above


class Moments:
    """Cumulants of the summed loss by numerical integration."""

    def __init__(self, steps: list[Steps], sign: int, cut: float, top: float) -> None:
        rows = [_nodes(s.noise_multiplier, s.sampling_rate, cut) for s in steps]
        x, log_width = np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])
        z = np.array([[s.noise_multiplier] for s in steps])
        loss = loss_of(x, z, np.array([[s.sampling_rate] for s in steps]))
        weight = log_width - 0.5 * (x / z) ** 2 + (loss if sign > 0 else 0.0)
        weight -= _log_sum(weight)
        self._sign, self._cut, self._top = sign, cut, top
        self._loss = np.minimum(sign * loss, top)
        self._weight = weight - (sign * loss - self._loss)  # the rest is counted as infinite
        self._counts = np.array([s.number for s in steps], dtype=float)
        self._known: dict[float, float] = {}

    def cumulant(self, order: float) -> float:
        """The logarithm of E[exp(order·loss)], of all steps together."""
        if order not in self._known:
            self._known[order] = float(self._counts @ self._cumulants(order))
        return self._known[order]

    def _cumulants(self, order: float) -> Array:
        exponents = order * self._loss
        if np.abs(exponents).max() < 1.0:  # without the rounding errors of a sum near 1
            return np.asarray(np.log1p((np.exp(self._weight) * np.expm1(exponents)).sum(axis=1)))
        return _log_sum(self._weight + exponents)[:, 0]

    def renyi_epsilon(self, delta: float) -> float:
        """The least over all orders."""

        def bound(order: float) -> float:
            return conversion(self.cumulant(order), order, delta)

        return bound(_least(bound))

    def infinite(self) -> float:
        """A bound on the probability that some loss is counted as infinite."""
        return float(self._counts @ np.maximum(0.0, -np.expm1(_log_sum(self._weight)[:, 0])))

    def spacing(self, epsilon: float, tolerance: float) -> float:
        """A spacing that moves ε by about the tolerance: rounding adds (λ + 1)·spacing²/12 for each step."""
        best = _least(lambda order: self.cumulant(order) - order * epsilon)
        return math.sqrt(12 * tolerance * epsilon / (1 + best) / self._counts.sum())

    def plan(
        self, epsilon: float, delta: float, spacing: float, ratio: float, least_tilt: float
    ) -> tuple[Grid, Window]:
        """A grid of about the given spacing, and where on it to look, if the result is about ε."""
        count = self._counts.sum()
        best = _least(lambda order: self.cumulant(order) - order * epsilon)
        spacing = round_down(spacing)
        low, high, order, tilt = self._shortest_extent(best, least_tilt, epsilon, delta)
        margin = math.ceil(min(count, 8 * math.sqrt(count)))  # what rounding may add to the extent
        size = _transform_size(2 * margin + 1.01 * (high - low) / spacing)
        if size > _LONGEST:
            size, spacing = _LONGEST, 2 * round_down((high - low + 2 * margin * spacing) / _LONGEST)
        order = min(order, math.sqrt(12 / count) / spacing)  # beyond, rounding would show
        widest = 0.05 / (1 + 4 * round_down(best, 4.0))
        grid = Grid(self._sign, self._cut, self._top, tilt, spacing, ratio, widest, size)
        return grid, Window(math.floor(low / spacing) - margin, order)

    def _shortest_extent(
        self, best: float, least: float, epsilon: float, delta: float
    ) -> tuple[float, float, float, float]:
        """Tilting less than best can shorten the transform, as long as its rounding errors stay small beside δ."""
        errors = math.log(rounding_error(_LONGEST) * float(np.linalg.norm(self._counts)) / delta)

        def share(tilt: float) -> float:
            return errors + self.cumulant(tilt) - tilt * epsilon

        limit = max(math.log(_ROUNDED), share(best) + 1.0)
        tilts = [best, *(t for t in (best / 2, best / 4, best / 16) if share(t) < limit and t >= least)]
        return min(((*self._extent(t, epsilon, delta), t) for t in tilts), key=lambda extent: extent[1] - extent[0])

    def lowest(self, delta: float) -> float:
        """A loss that the sum is hardly ever below."""

        def bound(order: float) -> float:
            return (self.cumulant(-order) - math.log(delta * CUT)) / order

        return -bound(_least(bound))

    def _extent(self, tilt: float, epsilon: float, delta: float) -> tuple[float, float, float]:
        """Chernoff bounds: where the tilted loss begins, where the loss ends, and the order that tells so.

        The transform is circular: losses above the end come back below the beginning or, if they are larger by yet
        another length, above ε, where tilting makes much of them. The end is far enough for that, too.
        """
        rest = math.log(delta * CUT)

        def below(order: float) -> float:
            return (self.cumulant(tilt - order) - self.cumulant(tilt) - math.log(_WRAPPED)) / order

        def above(order: float) -> float:
            return (self.cumulant(order) - rest) / order

        def length(more: float) -> float:
            return (self.cumulant(tilt + more) - (tilt + more) * epsilon - rest) / more

        begin, order = -below(_least(below)), _least(above)
        return begin, max(above(order), begin + length(_least(length))), order


def conversion(cumulant: float, order: float, delta: float) -> float:
    """ε from ln E[exp(order·loss)], the usual one of Rényi divergences (Balle et al. 2020)."""
    return (cumulant - math.log(delta) - math.log1p(order)) / order - math.log1p(1 / order)


def rough_epsilon(steps: list[Steps], sign: int, cut: float, delta: float) -> float:
    """By Rényi divergences; where that is large, also with high losses counted as infinite.

    Losses that are high and rare, of little noise and a small rate, decide about all divergences, and fit into δ.
    """
    epsilon, top = Moments(steps, sign, cut, math.inf).renyi_epsilon(delta), 4.0
    while top < epsilon / 4:
        moments = Moments(steps, sign, cut, top)
        left = delta - moments.infinite()
        if left > 1e-3 * delta:
            epsilon = min(epsilon, moments.renyi_epsilon(left))
        top *= 4
    return epsilon


def _log_sum(exponents: Array) -> Array:
    """The logarithm of Σ exp(row), for each row; scipy's takes several times as long."""
    highest = exponents.max(axis=1, keepdims=True)
    return np.asarray(highest + np.log(np.exp(exponents - highest).sum(axis=1, keepdims=True)))


def _nodes(z: float, q: float, cut: float) -> tuple[Array, Array]:
    """Outputs to integrate over, dense around 0 and 1, and the logarithms of their weights."""
    low, high = cuts(z, q, cut)
    left, right = min(12 * z, 0.5), max(1.0 - 12 * z, 0.5)
    first, second = np.linspace(low, left, _NODES), np.linspace(right, high, _NODES)
    weights = np.concatenate([_trapezoid(first), _trapezoid(second)])
    return np.concatenate([first, second]), np.log(weights)


def _trapezoid(x: Array) -> Array:
    weights = np.full(len(x), x[1] - x[0])
    weights[[0, -1]] /= 2
    return weights


def _least(function: Callable[[float], float]) -> float:
    """The power of two at which a function that falls and then rises is least."""
    low, high = -100, 30
    while low < high:
        middle = (low + high) // 2
        if function(2.0**middle) < function(2.0 ** (middle + 1)):
            high = middle
        else:
            low = middle + 1
    return float(2.0**low)


def rounding_error(size: int) -> float:
    """The relative error of a transform, ten times as much as is seen."""
    return float(np.finfo(np.float64).eps) * math.log2(size)


def _transform_size(least: float) -> int:
    """The next power of two."""
    return int(2.0 ** math.ceil(math.log2(max(64.0, least))))


def round_down(value: float, base: float = 2.0) -> float:
    """To a power, so that a list that grows keeps its grid for a while."""
    return float(base ** math.floor(math.log(value, base)))
