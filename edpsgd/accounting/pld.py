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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import fft, signal

from edpsgd.accounting.loss_cumulants import CUT, Moments, Window, conversion, rough_epsilon, round_down, rounding_error
from edpsgd.accounting.loss_grid import Grid, Mass, round_losses

Spectrum = npt.NDArray[np.complex128]
TOLERANCE = 7e-5  # relative, on ε
LEAST_NOISE = 1e-3  # multipliers below are taken for 0: whoever is in such a step is seen
MOST_NOISE = 1e5  # larger ones count as this one
LEAST_DELTA = 1e-100  # below, cut probabilities would underflow
_LAST_DIGIT = 4e-4  # the same where more would take long
_ROUNDED_MUCH = 0.01  # share of δ
_MANY = 1000.0  # an ε that is of no use
_LAST_OF_MANY = 0.01  # relative, on such an ε
_COARSE = 0.02  # spacing over ε at which the estimate of its effect would not hold
_COSTLY = 3e7  # how many elements to transform are many
_SMALLEST = 1e-7  # ε to make a grid for
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
        shown = {key: n for key, n in merged.items() if key[0] < LEAST_NOISE}
        loss = _shown_loss(shown)
        left = delta * (1 - 1e-12) + math.expm1(-loss) if shown else delta
        if left < LEAST_DELTA:
            return math.inf
        if not hidden:
            return loss
        removing = self._one_direction(hidden, left, 1, 0.0)
        composed = max(removing, self._one_direction(hidden, delta, -1, removing - loss) + loss)
        return min(composed, _shown_epsilon(merged, delta))

    def _one_direction(self, steps: list[Steps], delta: float, sign: int, floor: float) -> float:
        """ε for removing (sign 1) or adding (sign −1) the example: roughly first, then on a grid that fits.

        Any bound up to ``floor`` is as good as the best.
        """
        count = sum(s.number for s in steps)
        cut = delta * CUT / 4.0 ** math.ceil(math.log(count, 4))  # of each step; the same over many steps
        everything = Moments(steps, sign, cut, math.inf)
        epsilon, tolerance = max(rough_epsilon(steps, sign, cut, delta), _SMALLEST), 0.0
        spacing, least_tilt = everything.spacing(epsilon, 100 * self._tolerance), 0.0
        lowest, bound, error, tried = everything.lowest(delta), math.inf, math.inf, None
        for pass_ in range(6):
            moments = Moments(steps, sign, cut, 4 * round_down(epsilon - lowest, 4.0))
            ratio = 0.02 if pass_ == 0 else min(0.02, 0.5 * math.sqrt(self._tolerance))
            grid, window = moments.plan(epsilon, delta, spacing, ratio, least_tilt)
            if pass_ and grid.size * len(steps) > self._patience:
                tolerance = max(tolerance, _LAST_DIGIT)
                wider = spacing * math.sqrt(tolerance / self._tolerance)
                grid, window = moments.plan(epsilon, delta, wider, ratio, least_tilt)
            is_vain = error < _LAST_OF_MANY and grid.size * len(steps) > self._patience / 8
            if is_vain or grid == tried:
                break
            tried, found = grid, self._transform(sign, pass_, grid, steps).epsilon(steps, delta, window)
            bound = min(bound, found.epsilon)
            error = found.error / found.epsilon if found.epsilon > _MANY else math.inf
            is_fine = found.error <= 1.25 * tolerance * found.epsilon and grid.spacing < _COARSE * found.epsilon
            is_exact = found.rounding < max(tolerance, self._tolerance) / 8 or grid.tilt <= least_tilt / 2
            if bound <= max(floor, _SMALLEST) or (is_fine and is_exact):
                break
            if math.isinf(found.epsilon + found.error):
                spacing = grid.spacing / 2
            elif not is_fine:
                share = self._tolerance * found.epsilon / max(found.error, _SMALLEST * found.epsilon)
                spacing = min(grid.spacing * math.sqrt(min(0.5, share)), _COARSE * found.epsilon)
            if not is_exact and found.epsilon > epsilon / 2:  # else the tilt was for another ε
                least_tilt = 4 * grid.tilt
            epsilon, tolerance = min(epsilon, found.guess, bound), self._tolerance
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


def _shown_loss(steps: _Counts) -> float:
    """−ln of the probability to be in none of the steps."""
    return -math.fsum(n * math.log1p(-q) if q < 1 else -math.inf for (_, q), n in steps.items())


def _shown_epsilon(steps: _Counts, delta: float) -> float:
    """ε if all steps showed who is in them: finite where that is less probable than δ."""
    loss = _shown_loss(steps)
    return loss if -math.expm1(-loss) <= delta * (1 - 1e-12) else math.inf


class _Found(NamedTuple):
    """What a grid gives."""

    epsilon: float
    error: float  # how much of it comes from rounding the losses
    rounding: float  # share of δ that the bound on the transform's rounding errors takes
    guess: float = math.inf  # where to look next, if that is lower


_UNKNOWN = _Found(math.inf, math.inf, 0.0)  # no bound at all


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

    def epsilon(self, steps: list[Steps], delta: float, window: Window) -> _Found:
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
        found = self._solve(whole, total, [s.number for s in steps], window.first, delta, lost)
        if found.rounding < _ROUNDED_MUCH and found.epsilon < math.inf:
            return found
        return found._replace(epsilon=min(found.epsilon, self._renyi_epsilon(steps[-1], mass, delta)))

    def _step(self, s: Steps) -> tuple[Mass, float, Spectrum]:
        key = (s.noise_multiplier, s.sampling_rate)
        if self._last is None or self._last[0] != key:
            mass = round_losses(*key, self.grid)
            shift = mass.moment(self.grid.tilt, self.grid.spacing)
            with np.errstate(invalid="ignore"):  # without any finite loss, _solve has no bound
                tilted = np.exp(mass.exponents(self.grid.tilt, self.grid.spacing) - shift)
            dense = np.bincount(mass.points % self.grid.size, weights=tilted, minlength=self.grid.size)
            self._last = (key, mass, shift, fft.rfft(dense))
        return self._last[1:]

    def _lost(self, last: Steps, mass: Mass, window: Window) -> float:
        """A bound on the probability of losses above the window, infinite ones included."""
        top = (window.first + self.grid.size) * self.grid.spacing
        cumulant = self._cumulant(last, mass, window.order)
        return self._infinite(last, mass) + math.exp(min(0.0, cumulant - window.order * top))

    def _infinite(self, last: Steps, mass: Mass) -> float:
        """The probability that a loss is counted as infinite."""
        return -math.expm1(sum(s.number * _log_kept(m.infinite) for s, m in self._pairs(last, mass)))

    def _cumulant(self, last: Steps, mass: Mass, order: float) -> float:
        """The logarithm of E[exp(order·loss)] over the finite losses of all steps."""
        return sum(s.number * m.moment(order, self.grid.spacing) for s, m in self._pairs(last, mass))

    def _pairs(self, last: Steps, mass: Mass) -> list[tuple[Steps, Mass]]:
        return [*zip(self._done, self._masses, strict=True), (last, mass)]

    def _renyi_epsilon(self, last: Steps, mass: Mass, delta: float) -> float:
        """A bound from moments of the rounded losses, which rounding errors of the transform do not touch."""
        left = delta * (1 - 1e-12) - self._infinite(last, mass)
        if not left > 0.0:
            return math.inf
        bounds = []
        for order in self.grid.tilt * 2.0 ** np.arange(-2, 3):
            cumulant = self._cumulant(last, mass, float(order))
            if math.isfinite(cumulant):
                bounds.append(conversion(cumulant, float(order), left))
        return max(0.0, min(bounds, default=math.inf))

    def _solve(self, whole: Spectrum, total: float, counts: list[int], first: int, delta: float, lost: float) -> _Found:
        """The ε at which the summed loss, tilted back, leaves δ; infinite if that cannot be said."""
        size, spacing, tilt = self.grid.size, self.grid.spacing, self.grid.tilt
        tilted = np.roll(fft.irfft(whole, size), -first)
        error = rounding_error(size) * float(np.linalg.norm(counts) * np.abs(whole).mean() + np.linalg.norm(tilted))
        allowed = 1.0 - lost / delta
        if not (math.isfinite(error) and math.isfinite(total) and 0.0 < allowed <= 1.0):
            return _UNKNOWN
        loss = (first + np.arange(size)) * spacing
        weights = np.exp(np.minimum(total - math.log(delta) - tilt * loss, _HUGE))
        share = (np.maximum(tilted, 0.0) + error) * weights  # of δ, at each loss
        above = np.cumsum(share[::-1])[::-1]
        # δ(ε) = Σ share·(1 − exp(ε − loss)) at each loss; as a difference, nothing would be left at a small spacing.
        factor = -math.expm1(-spacing)
        needed = signal.lfilter([0.0, factor], [1.0, factor - 1.0], above[::-1])[::-1]
        enough = np.flatnonzero(needed >= allowed)
        at = int(enough[-1]) + 1 if len(enough) else 0
        if at == size:
            return _UNKNOWN
        if not len(enough):
            lowest = max(0.0, float(loss[0]))  # or anything below
            return _Found(lowest, lowest, 0.0, max(lowest / 16, _SMALLEST))
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
