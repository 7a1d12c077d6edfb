"""Privacy loss distributions of Poisson-sampled Gaussian steps, composed by a tilted FFT.

A step includes an example with probability q and adds Gaussian noise of multiplier z. Its privacy loss, with or
without the example, is a random variable; the losses of all steps add up, and ε follows from the distribution of the
sum. Three things keep this fast and tight for many noise levels and small q:

- The loss of a step is rounded to a grid so that both probabilities of every interval are kept ("connect the dots",
  Doroshenko et al. 2022): always pessimistic, and the error falls with the square of the spacing. Where the loss is
  large the grid is coarse, so a step has about a thousand points, whatever the length of the transform.
- Distributions are multiplied by exp(λ·loss) before the transform and divided after it (exponential tilting), which
  moves the precision of the FFT to the tail that δ asks for. λ is found from the moments, as in Rényi accounting.
- The spacing follows from λ and ε so that its effect on ε is below a given relative tolerance.

Whatever is cut off is added to δ, and so is a bound on the rounding errors: the result is rounded up, never down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import fft, signal, special

Array = npt.NDArray[np.float64]
Spectrum = npt.NDArray[np.complex128]

TOLERANCE = 7e-5  # relative, on ε
_LAST_DIGIT = 4e-4  # the same where more would take long
_COARSE = 0.02  # spacing over ε at which the estimate of its effect would not hold
_COSTLY = 3e7  # how many elements to transform are many
_CUT = 1e-7  # share of δ that may be cut off at each place
_ROUNDED = 1e-5  # share of δ that a bound on rounding errors may take
_WRAPPED = 1e-12  # tilted mass below the window, which wraps around to its top
_SMALLEST = 1e-7  # ε to make a grid for
_LONGEST = 1 << 23  # transform
_NODES = 120  # of each half of an integral, which spans at most some twenty standard deviations
_HUGE = 600.0  # exp() of more than this is left alone


class Steps(NamedTuple):
    """Steps that are alike: each includes an example with probability ``sampling_rate``, 1 meaning always."""

    noise_multiplier: float
    sampling_rate: float
    number: int


class Composition:
    """ε of a growing list of steps; what was composed before is not composed again.

    Example:
        >>> f"{Composition().epsilon([Steps(1.0, 0.01, 1000)], delta=1e-5):.3f}"
        '2.101'
    """

    def __init__(self, tolerance: float = TOLERANCE, patience: float = _COSTLY) -> None:
        self._tolerance = tolerance
        self._patience = patience
        self._kept: dict[tuple[int, int], _Transform] = {}

    def epsilon(self, steps: Sequence[Steps], delta: float) -> float:
        """An upper bound on the smallest ε at which the steps together are (ε, δ)-private for add/remove."""
        merged = _merge(steps)
        if not merged:
            return 0.0
        if any(s.noise_multiplier == 0 for s in merged):
            return math.inf
        removing = self._one_direction(merged, delta, 1, 0.0)
        return max(removing, self._one_direction(merged, delta, -1, removing))

    def _one_direction(self, steps: list[Steps], delta: float, sign: int, floor: float) -> float:
        """ε for removing (sign 1) or adding (sign −1) the example: roughly first, then on a grid that fits.

        Any bound up to ``floor`` is as good as the best.
        """
        count = sum(s.number for s in steps)
        cut = delta * _CUT / 2.0 ** math.ceil(math.log2(count))  # of each step; the same over many steps
        everything = _Moments(steps, sign, cut, math.inf)
        epsilon, tolerance = max(everything.renyi_epsilon(delta), _SMALLEST), 0.0
        spacing = everything.spacing(epsilon, 100 * self._tolerance)
        lowest = everything.lowest(delta)
        for pass_ in range(4):
            moments = _Moments(steps, sign, cut, _round_up(epsilon - lowest))
            grid, window = moments.plan(epsilon, delta, spacing)
            if pass_ and grid.size * len(steps) > self._patience:
                tolerance = max(tolerance, _LAST_DIGIT)
                grid, window = moments.plan(epsilon, delta, spacing * math.sqrt(tolerance / self._tolerance))
            kept = self._kept.get((sign, pass_))
            if kept is None or kept.grid != grid or not kept.leads_to(steps):
                kept = self._kept[sign, pass_] = _Transform(grid)
            found, error = kept.epsilon(steps, delta, window)
            if found <= floor or (error <= 1.25 * tolerance * found and grid.spacing < _COARSE * found):
                break
            spacing = min(grid.spacing * math.sqrt(min(0.5, self._tolerance * found / error)), _COARSE * found)
            epsilon, tolerance = min(epsilon, found), self._tolerance
        return found


def _merge(steps: Sequence[Steps]) -> list[Steps]:
    counts: dict[tuple[float, float], int] = {}
    for s in steps:
        if s.number and s.sampling_rate:
            key = (float(s.noise_multiplier), float(s.sampling_rate))
            counts[key] = counts.get(key, 0) + s.number
    return [Steps(z, q, count) for (z, q), count in counts.items()]


# -------------------------------------------------------------------- one step


def _loss(x: Array, z: float | Array, q: float | Array) -> Array:
    """ln(1 − q + q·e^u), u = (x − ½)/z²: what output x says for the example being there."""
    u = (x - 0.5) / (z * z)
    with np.errstate(divide="ignore"):
        small = np.where(q == 1.0, u, np.log1p(q * np.expm1(np.minimum(u, 30.0))))
    large = u + np.log(q) + np.log1p((1.0 - q) / q * np.exp(-np.maximum(u, 30.0)))
    return np.where(u < 30.0, small, large)


def _output(loss: Array, z: float, q: float) -> Array:
    """The output x with the given loss, −∞ for losses that are too low to happen."""
    if q == 1.0:
        return z * z * loss + 0.5
    with np.errstate(divide="ignore"):
        small = np.log1p(np.maximum(np.expm1(np.minimum(loss, 1.0)) / q, -1.0))
        large = loss - math.log(q) + np.log1p(-(1.0 - q) * np.exp(-np.maximum(loss, 1.0)))
    return z * z * np.where(loss < 1.0, small, large) + 0.5


def _between(x: Array) -> Array:
    """Standard normal probabilities between neighbouring entries of x, exact in both tails."""
    low, high = x[:-1], x[1:]
    upper = low > 0
    return np.asarray(special.ndtr(np.where(upper, -low, high)) - special.ndtr(np.where(upper, -high, low)))


def _cuts(z: float, q: float, cut: float) -> tuple[float, float]:
    """Outputs below the first and above the second have a probability of at most ``cut`` each."""
    far = -float(special.ndtri(cut / 2))
    near = -float(special.ndtri(min(0.5, cut / (2 * q))))
    return -z * far, max(z * far, 1.0 + z * near)


@dataclass(frozen=True)
class _Grid:
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


class _Window(NamedTuple):
    """Which losses the circular transform shows."""

    first: int  # multiple of the spacing
    order: float  # of the Chernoff bound on what lies above


class _Mass(NamedTuple):
    """A rounded loss distribution: probabilities at multiples of the spacing, and what is counted as infinite."""

    points: npt.NDArray[np.int64]
    probabilities: Array
    infinite: float

    def moment(self, order: float, spacing: float) -> float:
        exponents = order * spacing * self.points
        highest = exponents.max()
        return float(highest + np.log(self.probabilities @ np.exp(exponents - highest)))


def _round_losses(z: float, q: float, grid: _Grid) -> _Mass:
    """The loss of one step on the grid: every interval's two probabilities move to its ends, so that both are kept.

    The last interval reaches to infinity. What is below the first point moves up to it.
    """
    low, high = _range(z, q, grid.sign, grid.cut, grid.top)
    points = grid.points(math.floor(low / grid.spacing), math.ceil(high / grid.spacing))
    x = _output(np.asarray(grid.sign * grid.spacing * points, dtype=np.float64), z, q)
    below = float(special.ndtr(grid.sign * x[0] / z))
    if grid.sign > 0:
        without, mixed = _probabilities(np.append(x, np.inf), z, q)
        return _connect(points, grid.spacing, mixed, without, below)
    without, mixed = _probabilities(np.append(x, -np.inf)[::-1], z, q)
    return _connect(points, grid.spacing, without[::-1], mixed[::-1], below)


def _range(z: float, q: float, sign: int, cut: float, top: float) -> tuple[float, float]:
    """The lowest and the highest loss to look at."""
    ends = sorted(sign * float(_loss(np.array(x), z, q)) for x in _cuts(z, q, cut))
    return min(ends[0], top), min(ends[1], top)


def _probabilities(x: Array, z: float, q: float) -> tuple[Array, Array]:
    """Of the output being between neighbouring entries of x, if the example is not there and if it may be."""
    without = _between(x / z)
    return without, (1.0 - q) * without + q * _between((x - 1.0) / z)


def _connect(points: npt.NDArray[np.int64], spacing: float, upper: Array, lower: Array, below: float) -> _Mass:
    """Moves the probabilities of the intervals from each point to the next to the points, the last one to infinity."""
    loss = points * spacing
    width = np.append(-np.expm1(loss[:-1] - loss[1:]), 1.0)
    moved = (upper - np.exp(np.minimum(loss, _HUGE)) * lower) / width
    moved = np.where(loss < _HUGE, np.clip(moved, 0.0, upper), upper)
    probabilities = upper - moved
    probabilities[1:] += moved[:-1]
    probabilities[0] += below
    return _Mass(points, probabilities, float(moved[-1]))


# -------------------------------------------------------------------- moments: where to look, and how finely


class _Moments:
    """Cumulants of the summed loss by numerical integration. They choose the grid; no bound depends on them."""

    def __init__(self, steps: list[Steps], sign: int, cut: float, top: float) -> None:
        rows = [_nodes(s.noise_multiplier, s.sampling_rate, cut) for s in steps]
        x, log_width = np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])
        z = np.array([[s.noise_multiplier] for s in steps])
        loss = _loss(x, z, np.array([[s.sampling_rate] for s in steps]))
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
        """The usual conversion of Rényi divergences (Balle et al. 2020)."""

        def bound(order: float) -> float:
            extra = math.log(delta) + math.log1p(order)
            return (self.cumulant(order) - extra) / order - math.log1p(1 / order)

        return bound(_least(bound))

    def spacing(self, epsilon: float, tolerance: float) -> float:
        """A spacing that moves ε by about the tolerance: rounding adds (λ + 1)·spacing²/12 for each step."""
        best = _least(lambda order: self.cumulant(order) - order * epsilon)
        return math.sqrt(12 * tolerance * epsilon / (1 + best) / self._counts.sum())

    def plan(self, epsilon: float, delta: float, spacing: float) -> tuple[_Grid, _Window]:
        """A grid of about the given spacing, and where on it to look, if the result is about ε."""
        count = self._counts.sum()
        best = _least(lambda order: self.cumulant(order) - order * epsilon)
        spacing = _round_down(spacing)
        ratio = min(0.02, _round_down(spacing * math.sqrt(count / self._mean_square(best))))
        low, high, order, tilt = self._shortest_extent(best, epsilon, delta)
        margin = math.ceil(min(count, 8 * math.sqrt(count)))  # what rounding may add to the extent
        size = _transform_size(2 * margin + 1.01 * (high - low) / spacing)
        if size > _LONGEST:
            size, spacing = _LONGEST, _round_down((high - low) / _LONGEST) * math.sqrt(2)
        order = min(order, math.sqrt(12 / count) / spacing)  # beyond, rounding would show
        widest = 0.05 / (1 + best)
        grid = _Grid(self._sign, self._cut, self._top, tilt, spacing, ratio, widest, size)
        return grid, _Window(math.floor(low / spacing) - margin, order)

    def _shortest_extent(self, best: float, epsilon: float, delta: float) -> tuple[float, float, float, float]:
        """Tilting less than best can shorten the transform, as long as its rounding errors stay small beside δ."""
        errors = math.log(_rounding(_LONGEST) * float(np.linalg.norm(self._counts)) / delta)

        def share(tilt: float) -> float:
            return errors + self.cumulant(tilt) - tilt * epsilon

        limit = max(math.log(_ROUNDED), share(best) + 1.0)
        tilts = [best, *(t for t in (best * 2.0**-k for k in range(1, 9)) if share(t) < limit)]
        return min(((*self._extent(t, epsilon, delta), t) for t in tilts), key=lambda extent: extent[1] - extent[0])

    def lowest(self, delta: float) -> float:
        """A loss that the sum is hardly ever below."""

        def bound(order: float) -> float:
            return (self.cumulant(-order) - math.log(delta * _CUT)) / order

        return -bound(_least(bound))

    def _mean_square(self, tilt: float) -> float:
        """E[loss²] of the tilted steps, all of them together."""
        exponents = self._weight + tilt * self._loss
        tilted = np.exp(exponents - _log_sum(exponents))
        return float(self._counts @ (tilted * self._loss**2).sum(axis=1))

    def _extent(self, tilt: float, epsilon: float, delta: float) -> tuple[float, float, float]:
        """Chernoff bounds: where the tilted loss begins, where the loss ends, and the order that tells so.

        The transform is circular: losses above the end come back below the beginning or, if they are larger by yet
        another length, above ε, where tilting makes much of them. The end is far enough for that, too.
        """
        rest = math.log(delta * _CUT)

        def below(order: float) -> float:
            return (self.cumulant(tilt - order) - self.cumulant(tilt) - math.log(_WRAPPED)) / order

        def above(order: float) -> float:
            return (self.cumulant(order) - rest) / order

        def length(more: float) -> float:
            return (self.cumulant(tilt + more) - (tilt + more) * epsilon - rest) / more

        begin, order = -below(_least(below)), _least(above)
        return begin, max(above(order), begin + length(_least(length))), order


def _log_sum(exponents: Array) -> Array:
    """The logarithm of Σ exp(row), for each row; scipy's takes several times as long."""
    highest = exponents.max(axis=1, keepdims=True)
    return np.asarray(highest + np.log(np.exp(exponents - highest).sum(axis=1, keepdims=True)))


def _nodes(z: float, q: float, cut: float) -> tuple[Array, Array]:
    """Outputs to integrate over, dense around 0 and 1, and the logarithms of their weights."""
    low, high = _cuts(z, q, cut)
    left, right = min(12 * z, 0.5), max(1.0 - 12 * z, 0.5)
    first, second = np.linspace(low, left, _NODES), np.linspace(right, high, _NODES)
    weights = np.concatenate([_trapezoid(first), _trapezoid(second)])
    return np.concatenate([first, second]), np.log(weights)


def _trapezoid(x: Array) -> Array:
    weights = np.full(len(x), x[1] - x[0])
    weights[[0, -1]] /= 2
    return weights


def _least(function: Callable[[float], float]) -> float:
    """The power of √2 at which a function that falls and then rises is least."""
    low, high = -200, 60
    while low < high:
        middle = (low + high) // 2
        if function(2.0 ** (middle / 2)) < function(2.0 ** ((middle + 1) / 2)):
            high = middle
        else:
            low = middle + 1
    return float(2.0 ** (low / 2))


def _rounding(size: int) -> float:
    """The relative error of a transform, ten times as much as is seen."""
    return float(np.finfo(np.float64).eps) * math.log2(size)


def _transform_size(least: float) -> int:
    """The next power of two, or three quarters of it."""
    size: int = 2 ** math.ceil(math.log2(max(64.0, least)))
    return size * 3 // 4 if size * 3 // 4 >= least else size


def _round_down(value: float) -> float:
    """To a power of √2, so that a list that grows keeps its grid for a while."""
    return float(2.0 ** (math.floor(2 * math.log2(value)) / 2))


def _round_up(value: float) -> float:
    """The same, upwards."""
    return float(2.0 ** (math.ceil(2 * math.log2(value)) / 2))


# -------------------------------------------------------------------- composition


@dataclass
class _Transform:
    """Transformed loss distributions of the steps so far, on one grid."""

    grid: _Grid
    _done: list[Steps] = field(default_factory=list)
    _masses: list[_Mass] = field(default_factory=list)
    _shift: float = 0.0  # ln of what tilting multiplied the finished steps by
    _products: dict[int, Spectrum] = field(default_factory=dict)  # by count
    _last: tuple[tuple[float, float], _Mass, float, Spectrum] | None = None

    def leads_to(self, steps: list[Steps]) -> bool:
        """Whether the finished steps are the first of the given ones."""
        return len(self._done) < len(steps) and self._done == steps[: len(self._done)]

    def epsilon(self, steps: list[Steps], delta: float, window: _Window) -> tuple[float, float]:
        """ε, and how much of it comes from the rounding of the losses."""
        for s in steps[len(self._done) : -1]:
            mass, shift, spectrum = self._step(s)
            self._done.append(s)
            self._masses.append(mass)
            self._shift += s.number * shift
            self._products[s.number] = self._products[s.number] * spectrum if s.number in self._products else spectrum
        mass, shift, spectrum = self._step(steps[-1])
        products = dict(self._products)
        count = steps[-1].number
        products[count] = products[count] * spectrum if count in products else spectrum
        whole = _product([_power(s, n) for n, s in products.items()])
        total = self._shift + count * shift
        lost = self._lost(steps, [*self._masses, mass], window)
        return self._solve(whole, total, [s.number for s in steps], window.first, delta, lost)

    def _step(self, s: Steps) -> tuple[_Mass, float, Spectrum]:
        key = (s.noise_multiplier, s.sampling_rate)
        if self._last is None or self._last[0] != key:
            mass = _round_losses(*key, self.grid)
            exponents = self.grid.tilt * self.grid.spacing * mass.points
            shift = mass.moment(self.grid.tilt, self.grid.spacing)
            tilted = mass.probabilities * np.exp(exponents - shift)
            dense = np.bincount(mass.points % self.grid.size, weights=tilted, minlength=self.grid.size)
            self._last = (key, mass, shift, fft.rfft(dense))
        return self._last[1:]

    def _lost(self, steps: list[Steps], masses: list[_Mass], window: _Window) -> float:
        """A bound on the probability of losses above the window, infinite ones included."""
        top = (window.first + self.grid.size) * self.grid.spacing
        cumulant = sum(s.number * m.moment(window.order, self.grid.spacing) for s, m in zip(steps, masses, strict=True))
        infinite = sum(s.number * m.infinite for s, m in zip(steps, masses, strict=True))
        return infinite + math.exp(min(0.0, cumulant - window.order * top))

    def _solve(
        self, whole: Spectrum, total: float, counts: list[int], first: int, delta: float, lost: float
    ) -> tuple[float, float]:
        """The ε at which the summed loss, tilted back, leaves δ."""
        size, spacing, tilt = self.grid.size, self.grid.spacing, self.grid.tilt
        tilted = np.roll(fft.irfft(whole, size), -first)
        error = _rounding(size) * float(np.linalg.norm(counts) * np.abs(whole).mean() + np.linalg.norm(tilted))
        loss = (first + np.arange(size)) * spacing
        exponents = np.minimum(total - math.log(delta) - tilt * loss, _HUGE)
        share = (np.maximum(tilted, 0.0) + error) * np.exp(exponents)  # of δ, at each loss
        above = np.cumsum(share[::-1])[::-1]
        discounted = signal.lfilter([1.0], [1.0, -math.exp(-spacing)], share[::-1])[::-1]
        allowed = 1.0 - lost / delta
        enough = np.flatnonzero(above - discounted >= allowed)
        at = int(enough[-1]) + 1 if len(enough) else 0
        if at == size or allowed <= 0.0:
            return math.inf, math.inf
        if not len(enough):
            return max(0.0, float(loss[0])), 0.0
        epsilon = float(loss[at]) + math.log((above[at] - allowed) / discounted[at])
        # Rounding adds a variance of spacing²/6 for each step: δ grows by half of it times the density at ε.
        return max(0.0, epsilon), sum(counts) * spacing / 6 * float(share[at] / discounted[at])


def _product(spectra: list[Spectrum]) -> Spectrum:
    whole = spectra[0]
    for spectrum in spectra[1:]:
        whole = whole * spectrum
    return whole


def _power(spectrum: Spectrum, exponent: int) -> Spectrum:
    """By squaring: many times faster than numpy's complex power."""
    result = None
    while exponent:
        if exponent & 1:
            result = spectrum if result is None else result * spectrum
        exponent >>= 1
        if exponent:
            spectrum = spectrum * spectrum
    return np.ones(1, dtype=np.complex128) if result is None else result
