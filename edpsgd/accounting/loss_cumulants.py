"""Where a privacy loss distribution is to be looked at, and how finely: cumulants of the summed loss.

They choose the grid of ``pld.py``; no bound depends on them. The cumulant of order λ is
K(λ) = ln E[exp(λ·loss)], over the losses of all steps together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from edpsgd.accounting.loss_grid import Array, Grid, cuts, loss_of
from edpsgd.accounting.steps import Steps

CUT = 1e-7  # share of δ that may be cut off at each place
_ROUNDED = 1e-5  # share of δ that a bound on rounding errors may take
_WRAPPED = 1e-12  # tilted probability below the window, which wraps around to its top
_LONGEST = 1 << 23  # transform
_NODES = 120  # of each half of an integral, which spans at most some twenty standard deviations


class Window(NamedTuple):
    """Which losses the circular transform shows.

    Attributes:
        first: the lowest of them, as a multiple of the spacing.
        order: of the Chernoff bound on the probability of larger losses.
    """

    first: int
    order: float


class Moments:
    """Cumulants of the summed loss by numerical integration over the output of one step of each group.

    Args:
        sign: 1 for removing the example, −1 for adding it.
        cut: the probability that is left out at each end of the outputs.
        top: losses above are counted as this one, and the rest of their weight as infinite.
        losses: at the nodes, (groups, nodes), at most ``top``.
        log_weights: logarithms of the nodes' probabilities, (groups, nodes).
        counts: how many steps there are in each group, (groups,).
    """

    def __init__(self, sign: int, cut: float, top: float, losses: Array, log_weights: Array, counts: Array) -> None:
        self._sign, self._cut, self._top = sign, cut, top
        self._losses, self._log_weights, self._counts = losses, log_weights, counts
        self._known: dict[float, float] = {}  # cumulants by order

    @classmethod
    def of_steps(cls, steps: list[Steps], sign: int, cut: float, top: float) -> Moments:
        """Evaluates losses and weights at the nodes of each group."""
        nodes, log_widths = [], []
        for group in steps:
            x, log_width = _nodes(group.noise_multiplier, group.sampling_rate, cut)
            nodes.append(x)
            log_widths.append(log_width)
        outputs = np.stack(nodes)
        z = np.array([[group.noise_multiplier] for group in steps])
        q = np.array([[group.sampling_rate] for group in steps])
        loss = loss_of(outputs, z, q)
        # The density without the example; removing is judged under the law with it, e^loss times as dense.
        log_weights = np.stack(log_widths) - 0.5 * (outputs / z) ** 2 + (loss if sign > 0 else 0.0)
        log_weights -= _log_sum(log_weights)
        kept = np.minimum(sign * loss, top)
        log_weights = log_weights - (sign * loss - kept)  # the rest is counted as infinite
        counts = np.array([group.number for group in steps], dtype=float)
        return cls(sign, cut, top, kept, log_weights, counts)

    def cumulant(self, order: float) -> float:
        """The logarithm of E[exp(order·loss)], of all steps together."""
        if order not in self._known:
            self._known[order] = float(self._counts @ self._cumulants(order))
        return self._known[order]

    def _cumulants(self, order: float) -> Array:
        exponents = order * self._losses
        if np.abs(exponents).max() < 1.0:  # without the rounding errors of a sum near 1
            return np.asarray(np.log1p((np.exp(self._log_weights) * np.expm1(exponents)).sum(axis=1)))
        return _log_sum(self._log_weights + exponents)[:, 0]

    def renyi_epsilon(self, delta: float) -> float:
        """The least ε that any order gives at δ."""

        def bound(order: float) -> float:
            return conversion(self.cumulant(order), order, delta)

        return bound(_least(bound))

    def infinite(self) -> float:
        """A bound on the probability that some loss is counted as infinite."""
        of_one_step = np.maximum(0.0, -np.expm1(_log_sum(self._log_weights)[:, 0]))
        return float(self._counts @ of_one_step)

    def spacing(self, epsilon: float, tolerance: float) -> float:
        """A spacing that moves ε by about the tolerance: rounding adds (λ + 1)·spacing²/12 for each step."""
        best = _least(lambda order: self.cumulant(order) - order * epsilon)
        return math.sqrt(12 * tolerance * epsilon / (1 + best) / self._counts.sum())

    def plan(
        self, epsilon: float, delta: float, spacing: float, ratio: float, least_tilt: float
    ) -> tuple[Grid, Window]:
        """A grid of about the given spacing, and where on it to look, if the result is about ε.

        Args:
            epsilon: what the result is expected to be.
            delta: its δ.
            spacing: of the losses; it is made wider if the transform would be too long.
            ratio: as in ``Grid``.
            least_tilt: smaller tilts are not tried.
        """
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
        """Where the transform begins and ends, the order of its Chernoff bound, and the tilt.

        Tilting less than best can shorten it, as long as its rounding errors stay small beside δ.
        """
        errors = math.log(rounding_error(_LONGEST) * float(np.linalg.norm(self._counts)) / delta)

        def share(tilt: float) -> float:
            """Logarithm of the share of δ that the rounding errors take at ε."""
            return errors + self.cumulant(tilt) - tilt * epsilon

        limit = max(math.log(_ROUNDED), share(best) + 1.0)
        shortest = (*self._extent(best, epsilon, delta), best)
        for tilt in (best / 2, best / 4, best / 16):
            is_allowed = share(tilt) < limit and tilt >= least
            if not is_allowed:
                continue
            low, high, order = self._extent(tilt, epsilon, delta)
            if high - low < shortest[1] - shortest[0]:
                shortest = (low, high, order, tilt)
        return shortest

    def lowest(self, delta: float) -> float:
        """A loss that the sum is hardly ever below: with a probability of at most ``CUT``·δ (Chernoff)."""

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
    """ε by Rényi divergences; where that is large, also with high losses counted as infinite.

    Losses that are high and rare, of little noise and a small rate, decide about all divergences, and fit into δ.
    """
    epsilon = Moments.of_steps(steps, sign, cut, math.inf).renyi_epsilon(delta)
    top = 4.0
    while top < epsilon / 4:
        moments = Moments.of_steps(steps, sign, cut, top)
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
    end_of_first, begin_of_second = min(12 * z, 0.5), max(1.0 - 12 * z, 0.5)
    first = np.linspace(low, end_of_first, _NODES)
    second = np.linspace(begin_of_second, high, _NODES)
    weights = np.concatenate([_trapezoid(first), _trapezoid(second)])
    return np.concatenate([first, second]), np.log(weights)


def _trapezoid(x: Array) -> Array:
    """The weights of evenly spaced nodes by the trapezoidal rule, (n,)."""
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
    """The next lower power of the base, so that a list that grows keeps its grid for a while."""
    return float(base ** math.floor(math.log(value, base)))
