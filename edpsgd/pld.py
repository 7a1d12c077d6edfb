"""Privacy loss distributions of Poisson-sampled Gaussian steps, composed by a tilted FFT.

A step includes an example with probability q and adds Gaussian noise of multiplier z. Its privacy loss, with or
without the example, is a random variable; the losses of all steps add up, and ε follows from the distribution of the
sum. Four things keep this fast and tight for many noise levels and small q:

- The loss of a step is rounded to a grid, pessimistically (``losses.py``). Where the loss is large the grid is coarse,
  so a step has about a thousand points, whatever the length of the transform. Far above ε, where it makes no difference
  any more, the grid ends with an interval to infinity.
- Distributions are multiplied by exp(λ·loss) before the transform and divided after it (exponential tilting), which
  moves the precision of the FFT to the tail that δ asks for. λ is found from the moments, as in Rényi accounting.
- A rough pass tells ε, and how much of it comes from the rounding; the spacing of the next pass follows from that.
- Grids are made of powers of two and four, so that a list that grows keeps its grid, and its transforms, for a while.

Whatever is cut off is added to δ, and so is a bound on the rounding errors: the result is rounded up, never down. What
cannot be computed, because a value is not finite or no probability is left, makes ε infinite.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import fft, signal

from edpsgd.losses import Array, Grid, Mass, cuts, loss_of, round_losses

Spectrum = npt.NDArray[np.complex128]

TOLERANCE = 7e-5  # relative, on ε
LEAST_NOISE = 1e-3  # multipliers below are taken for 0: whoever is in such a step is seen
MOST_NOISE = 1e5  # larger ones count as this one
LEAST_DELTA = 1e-100  # below, cut probabilities would underflow
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
        '1.828'
    """

    def __init__(self, tolerance: float = TOLERANCE, patience: float = _COSTLY) -> None:
        self._tolerance = tolerance
        self._patience = patience
        self._kept: dict[tuple[int, int], _Transform] = {}
        self._answers: deque[_Answer] = deque(maxlen=64)

    def epsilon(self, steps: Sequence[Steps], delta: float) -> float:
        """An upper bound on the smallest ε at which the steps together are (ε, δ)-private for add/remove.

        It is never below what the same object said of some of the steps. By itself, a bound that is rounded up could be
        lower for more steps, in its last digit.
        """
        merged = _merge(steps)
        if not merged:
            return 0.0
        if delta < LEAST_DELTA or any(z == 0 for z, _ in merged):
            return math.inf
        known = [a.epsilon for a in self._answers if a.delta >= delta and a.is_part_of(merged)]
        epsilon = max([self._composed(merged, delta), *known])
        self._answers.append(_Answer(merged, delta, epsilon))
        return epsilon

    def _composed(self, merged: _Counts, delta: float) -> float:
        """ε of the steps by themselves.

        A step with next to no noise is taken for one without: it shows an example that is in it (probability q, part of
        δ), and otherwise says that it is not, a loss of −ln(1 − q) for adding it.
        """
        hidden = [Steps(z, q, n) for (z, q), n in merged.items() if z >= LEAST_NOISE]
        shown = [(q, n) for (z, q), n in merged.items() if z < LEAST_NOISE]
        if any(q == 1 for q, _ in shown):
            return math.inf
        loss = -math.fsum(n * math.log1p(-q) for q, n in shown)
        left = delta * (1 - 1e-12) + math.expm1(-loss) if shown else delta
        if left < LEAST_DELTA:
            return math.inf
        if not hidden:
            return loss
        removing = self._one_direction(hidden, left, 1, 0.0)
        return max(removing, self._one_direction(hidden, delta, -1, removing - loss) + loss)

    def _one_direction(self, steps: list[Steps], delta: float, sign: int, floor: float) -> float:
        """ε for removing (sign 1) or adding (sign −1) the example: roughly first, then on a grid that fits.

        Any bound up to ``floor`` is as good as the best.
        """
        count = sum(s.number for s in steps)
        cut = delta * _CUT / 4.0 ** math.ceil(math.log(count, 4))  # of each step; the same over many steps
        everything = _Moments(steps, sign, cut, math.inf)
        epsilon, tolerance = max(everything.renyi_epsilon(delta), _SMALLEST), 0.0
        spacing, least_tilt = everything.spacing(epsilon, 100 * self._tolerance), 0.0
        lowest, bound = everything.lowest(delta), math.inf
        for pass_ in range(6):
            moments = _Moments(steps, sign, cut, 4 * _round_down(epsilon - lowest, 4.0))
            ratio = 0.02 if pass_ == 0 else min(0.02, 0.5 * math.sqrt(self._tolerance))
            grid, window = moments.plan(epsilon, delta, spacing, ratio, least_tilt)
            if pass_ and grid.size * len(steps) > self._patience:
                tolerance = max(tolerance, _LAST_DIGIT)
                wider = spacing * math.sqrt(tolerance / self._tolerance)
                grid, window = moments.plan(epsilon, delta, wider, ratio, least_tilt)
            found = self._transform(sign, pass_, grid, steps).epsilon(steps, delta, window)
            bound = min(bound, found.epsilon)
            is_fine = found.error <= 1.25 * tolerance * found.epsilon and grid.spacing < _COARSE * found.epsilon
            is_exact = found.rounding < max(tolerance, self._tolerance) / 8 or grid.tilt <= least_tilt / 2
            if bound <= floor or (is_fine and is_exact):
                break
            if math.isinf(found.epsilon):
                spacing = grid.spacing / 2
            elif not is_fine:
                share = self._tolerance * found.epsilon / max(found.error, _SMALLEST * found.epsilon)
                spacing = min(grid.spacing * math.sqrt(min(0.5, share)), _COARSE * found.epsilon)
            least_tilt = least_tilt if is_exact else 4 * grid.tilt
            epsilon, tolerance = min(epsilon, bound), self._tolerance
        return bound * (1 + self._tolerance / 16)  # for the rounding errors that no bound above covers

    def _transform(self, sign: int, pass_: int, grid: Grid, steps: list[Steps]) -> _Transform:
        """The one of the last call, if it has the same grid and has seen the first of the steps; or a new one."""
        kept = self._kept.get((sign, pass_))
        if kept is None or kept.grid != grid or not kept.leads_to(steps):
            kept = self._kept[sign, pass_] = _Transform(grid)
        return kept


_Counts = dict[tuple[float, float], int]  # of steps, by noise multiplier and sampling rate


class _Answer(NamedTuple):
    """What was said of a list of steps."""

    steps: _Counts
    delta: float
    epsilon: float

    def is_part_of(self, steps: _Counts) -> bool:
        """Whether all of its steps are among the given ones."""
        return all(steps.get(key, 0) >= count for key, count in self.steps.items())


def _merge(steps: Sequence[Steps]) -> _Counts:
    counts: _Counts = {}
    for s in steps:
        if s.number and s.sampling_rate:
            key = (min(float(s.noise_multiplier), MOST_NOISE), float(s.sampling_rate))
            counts[key] = counts.get(key, 0) + s.number
    return counts


class _Window(NamedTuple):
    """Which losses the circular transform shows."""

    first: int  # multiple of the spacing
    order: float  # of the Chernoff bound on what lies above


class _Found(NamedTuple):
    """What a grid gives."""

    epsilon: float
    error: float  # how much of it comes from rounding the losses
    rounding: float  # share of δ that the bound on the transform's rounding errors takes


_UNKNOWN = _Found(math.inf, math.inf, 0.0)  # no bound at all


# -------------------------------------------------------------------- moments: where to look, and how finely


class _Moments:
    """Cumulants of the summed loss by numerical integration. They choose the grid; no bound depends on them."""

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
        """The usual conversion of Rényi divergences (Balle et al. 2020)."""

        def bound(order: float) -> float:
            extra = math.log(delta) + math.log1p(order)
            return (self.cumulant(order) - extra) / order - math.log1p(1 / order)

        return bound(_least(bound))

    def spacing(self, epsilon: float, tolerance: float) -> float:
        """A spacing that moves ε by about the tolerance: rounding adds (λ + 1)·spacing²/12 for each step."""
        best = _least(lambda order: self.cumulant(order) - order * epsilon)
        return math.sqrt(12 * tolerance * epsilon / (1 + best) / self._counts.sum())

    def plan(
        self, epsilon: float, delta: float, spacing: float, ratio: float, least_tilt: float
    ) -> tuple[Grid, _Window]:
        """A grid of about the given spacing, and where on it to look, if the result is about ε."""
        count = self._counts.sum()
        best = _least(lambda order: self.cumulant(order) - order * epsilon)
        spacing = _round_down(spacing)
        low, high, order, tilt = self._shortest_extent(best, least_tilt, epsilon, delta)
        margin = math.ceil(min(count, 8 * math.sqrt(count)))  # what rounding may add to the extent
        size = _transform_size(2 * margin + 1.01 * (high - low) / spacing)
        if size > _LONGEST:
            size, spacing = _LONGEST, 2 * _round_down((high - low + 2 * margin * spacing) / _LONGEST)
        order = min(order, math.sqrt(12 / count) / spacing)  # beyond, rounding would show
        widest = 0.05 / (1 + 4 * _round_down(best, 4.0))
        grid = Grid(self._sign, self._cut, self._top, tilt, spacing, ratio, widest, size)
        return grid, _Window(math.floor(low / spacing) - margin, order)

    def _shortest_extent(
        self, best: float, least: float, epsilon: float, delta: float
    ) -> tuple[float, float, float, float]:
        """Tilting less than best can shorten the transform, as long as its rounding errors stay small beside δ."""
        errors = math.log(_rounding(_LONGEST) * float(np.linalg.norm(self._counts)) / delta)

        def share(tilt: float) -> float:
            return errors + self.cumulant(tilt) - tilt * epsilon

        limit = max(math.log(_ROUNDED), share(best) + 1.0)
        tilts = [best, *(t for t in (best / 2, best / 4, best / 16) if share(t) < limit and t >= least)]
        return min(((*self._extent(t, epsilon, delta), t) for t in tilts), key=lambda extent: extent[1] - extent[0])

    def lowest(self, delta: float) -> float:
        """A loss that the sum is hardly ever below."""

        def bound(order: float) -> float:
            return (self.cumulant(-order) - math.log(delta * _CUT)) / order

        return -bound(_least(bound))

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


def _rounding(size: int) -> float:
    """The relative error of a transform, ten times as much as is seen."""
    return float(np.finfo(np.float64).eps) * math.log2(size)


def _transform_size(least: float) -> int:
    """The next power of two."""
    return int(2.0 ** math.ceil(math.log2(max(64.0, least))))


def _round_down(value: float, base: float = 2.0) -> float:
    """To a power, so that a list that grows keeps its grid for a while."""
    return float(base ** math.floor(math.log(value, base)))


# -------------------------------------------------------------------- composition


@dataclass
class _Transform:
    """Transformed loss distributions of the steps so far, on one grid."""

    grid: Grid
    _done: list[Steps] = field(default_factory=list)
    _masses: list[Mass] = field(default_factory=list)
    _shift: float = 0.0  # ln of what tilting multiplied the finished steps by
    _products: dict[int, Spectrum] = field(default_factory=dict)  # by count
    _last: tuple[tuple[float, float], Mass, float, Spectrum] | None = None

    def leads_to(self, steps: list[Steps]) -> bool:
        """Whether the finished steps are the first of the given ones."""
        return len(self._done) < len(steps) and self._done == steps[: len(self._done)]

    def epsilon(self, steps: list[Steps], delta: float, window: _Window) -> _Found:
        """The bound on this grid."""
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
        lost = self._lost(steps[-1], mass, window)
        return self._solve(whole, total, [s.number for s in steps], window.first, delta, lost)

    def _step(self, s: Steps) -> tuple[Mass, float, Spectrum]:
        key = (s.noise_multiplier, s.sampling_rate)
        if self._last is None or self._last[0] != key:
            mass = round_losses(*key, self.grid)
            shift = mass.moment(self.grid.tilt, self.grid.spacing)
            tilted = np.exp(mass.exponents(self.grid.tilt, self.grid.spacing) - shift)
            dense = np.bincount(mass.points % self.grid.size, weights=tilted, minlength=self.grid.size)
            self._last = (key, mass, shift, fft.rfft(dense))
        return self._last[1:]

    def _lost(self, last: Steps, mass: Mass, window: _Window) -> float:
        """A bound on the probability of losses above the window, infinite ones included."""
        top = (window.first + self.grid.size) * self.grid.spacing
        pairs = [*zip(self._done, self._masses, strict=True), (last, mass)]
        cumulant = sum(s.number * m.moment(window.order, self.grid.spacing) for s, m in pairs)
        kept = sum(s.number * _log_kept(m.infinite) for s, m in pairs)
        return -math.expm1(kept) + math.exp(min(0.0, cumulant - window.order * top))

    def _solve(self, whole: Spectrum, total: float, counts: list[int], first: int, delta: float, lost: float) -> _Found:
        """The ε at which the summed loss, tilted back, leaves δ; infinite if that cannot be said."""
        size, spacing, tilt = self.grid.size, self.grid.spacing, self.grid.tilt
        tilted = np.roll(fft.irfft(whole, size), -first)
        error = _rounding(size) * float(np.linalg.norm(counts) * np.abs(whole).mean() + np.linalg.norm(tilted))
        allowed = 1.0 - lost / delta
        if not (math.isfinite(error) and math.isfinite(total) and 0.0 < allowed <= 1.0):
            return _UNKNOWN
        loss = (first + np.arange(size)) * spacing
        weights = np.exp(np.minimum(total - math.log(delta) - tilt * loss, _HUGE))
        share = (np.maximum(tilted, 0.0) + error) * weights  # of δ, at each loss
        above = np.cumsum(share[::-1])[::-1]
        # δ(ε) = Σ share·(1 − exp(ε − loss)) at each loss, without differences: with a small spacing nothing is left of them.
        factor = -math.expm1(-spacing)
        needed = signal.lfilter([0.0, factor], [1.0, factor - 1.0], above[::-1])[::-1]
        enough = np.flatnonzero(needed >= allowed)
        at = int(enough[-1]) + 1 if len(enough) else 0
        if at == size:
            return _UNKNOWN
        if not len(enough):
            return _Found(max(0.0, float(loss[0])), 0.0, 0.0)
        discounted = float(above[at] - needed[at])
        if not discounted > 0.0:
            return _UNKNOWN
        epsilon = float(loss[at]) + math.log1p(max(-factor, float(needed[at] - allowed) / discounted))
        # Rounding adds a variance of spacing²/6 for each step: δ grows by half of it times the density at ε.
        widened = sum(counts) * spacing / 6 * float(share[at]) / discounted
        return _Found(max(0.0, epsilon), widened, error * float(weights[at:].sum()))


def _log_kept(infinite: float) -> float:
    """The logarithm of the probability of finite losses."""
    return math.log1p(-infinite) if infinite < 1.0 else -math.inf


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
