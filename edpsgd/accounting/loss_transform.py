"""Loss distributions of many steps on one grid: transformed, multiplied, and solved for ε.

Exponential tilting and the transform are described in ``pld.py``, which chooses the grids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import fft, signal

from edpsgd.accounting.loss_cumulants import Window, conversion, rounding_error
from edpsgd.accounting.loss_grid import Array, Grid, LossPmf, round_losses
from edpsgd.accounting.steps import Steps

Spectrum = npt.NDArray[np.complex128]
SMALLEST = 1e-7  # ε to make a grid for
_ROUNDED_MUCH = 0.01  # share of δ
_HUGE = 600.0  # exp() of more than this is left alone


class GridBound(NamedTuple):
    """The bound that a grid gives.

    Attributes:
        epsilon: the bound on ε.
        error: how much of it comes from rounding the losses.
        rounding: share of δ that the bound on the transform's rounding errors takes.
        guess: where to look next, if that is lower.
    """

    epsilon: float
    error: float
    rounding: float
    guess: float = math.inf


UNKNOWN = GridBound(math.inf, math.inf, 0.0)  # no bound at all


class _TransformedStep(NamedTuple):
    """One step on the grid.

    Attributes:
        pmf: its rounded losses.
        shift: logarithm of what its tilted probabilities were divided by, so that they sum to 1.
        spectrum: their transform, (size/2 + 1,).
    """

    pmf: LossPmf
    shift: float
    spectrum: Spectrum


@dataclass
class LossTransform:
    """Transformed loss distributions of the steps so far, on one grid.

    All groups but the last are kept as finished: a list that grows by steps like its last ones, or by
    further groups, is continued without computing them again.
    """

    grid: Grid
    _finished: list[Steps] = field(default_factory=list)
    _pmfs: list[LossPmf] = field(default_factory=list)  # of one step of each finished group
    _shift: float = 0.0  # ln of what tilting multiplied the finished steps by
    # Products of the spectra of finished groups, by how often each is to be multiplied by itself.
    _products: dict[int, Spectrum] = field(default_factory=dict)
    # The step that was transformed last, with its noise multiplier and sampling rate.
    _latest: tuple[tuple[float, float], _TransformedStep] | None = None

    def leads_to(self, steps: list[Steps]) -> bool:
        """Whether the finished groups are the first of the given ones, and not all of them."""
        return len(self._finished) < len(steps) and self._finished == steps[: len(self._finished)]

    def epsilon(self, steps: list[Steps], delta: float, window: Window) -> GridBound:
        """The bound on ε of the steps at δ, by looking at the losses of the window."""
        for group in steps[len(self._finished) : -1]:
            self._finish(group)
        last = steps[-1]
        pmf, shift, spectrum = self._transformed(last)
        products = dict(self._products)
        _multiply_in(products, last.number, spectrum)
        whole = _product([_power(of_one, number) for number, of_one in products.items()])
        total = self._shift + last.number * shift
        above = self._probability_above(last, pmf, window)
        counts = [group.number for group in steps]
        found = self._solve(whole, total, counts, window.first, delta, above)
        if found.rounding < _ROUNDED_MUCH and found.epsilon < math.inf:
            return found
        return found._replace(epsilon=min(found.epsilon, self._renyi_epsilon(last, pmf, delta)))

    def _finish(self, group: Steps) -> None:
        pmf, shift, spectrum = self._transformed(group)
        self._finished.append(group)
        self._pmfs.append(pmf)
        self._shift += group.number * shift
        _multiply_in(self._products, group.number, spectrum)

    def _transformed(self, group: Steps) -> _TransformedStep:
        """One step of the group: rounded, tilted and transformed."""
        key = (group.noise_multiplier, group.sampling_rate)
        if self._latest is None or self._latest[0] != key:
            grid = self.grid
            pmf = round_losses(*key, grid)
            shift = pmf.moment(grid.tilt, grid.spacing)
            with np.errstate(invalid="ignore"):  # without any finite loss, _solve has no bound
                tilted = np.exp(pmf.exponents(grid.tilt, grid.spacing) - shift)
            dense = np.bincount(pmf.points % grid.size, weights=tilted, minlength=grid.size)
            self._latest = (key, _TransformedStep(pmf, shift, fft.rfft(dense)))
        return self._latest[1]

    def _probability_above(self, last: Steps, pmf: LossPmf, window: Window) -> float:
        """A bound on the probability of losses above the window, infinite ones included (Chernoff)."""
        top = (window.first + self.grid.size) * self.grid.spacing
        cumulant = self._cumulant(last, pmf, window.order)
        return self._infinite(last, pmf) + math.exp(min(0.0, cumulant - window.order * top))

    def _infinite(self, last: Steps, pmf: LossPmf) -> float:
        """The probability that a loss is counted as infinite."""
        log_finite = sum(
            group.number * _log_finite(of_one.infinite) for group, of_one in self._groups_with_pmfs(last, pmf)
        )
        return -math.expm1(log_finite)

    def _cumulant(self, last: Steps, pmf: LossPmf, order: float) -> float:
        """The logarithm of E[exp(order·loss)] over the finite losses of all steps."""
        return sum(
            group.number * of_one.moment(order, self.grid.spacing)
            for group, of_one in self._groups_with_pmfs(last, pmf)
        )

    def _groups_with_pmfs(self, last: Steps, pmf: LossPmf) -> list[tuple[Steps, LossPmf]]:
        return [*zip(self._finished, self._pmfs, strict=True), (last, pmf)]

    def _renyi_epsilon(self, last: Steps, pmf: LossPmf, delta: float) -> float:
        """A bound from moments of the rounded losses, which rounding errors of the transform do not touch."""
        left = delta * (1 - 1e-12) - self._infinite(last, pmf)
        if not left > 0.0:
            return math.inf
        bounds = []
        for order in self.grid.tilt * 2.0 ** np.arange(-2, 3):
            cumulant = self._cumulant(last, pmf, float(order))
            if math.isfinite(cumulant):
                bounds.append(conversion(cumulant, float(order), left))
        return max(0.0, min(bounds, default=math.inf))

    def _solve(
        self, whole: Spectrum, total: float, counts: list[int], first: int, delta: float, above: float
    ) -> GridBound:
        """The ε at which the summed loss, tilted back, leaves δ; infinite if that cannot be said.

        Args:
            whole: spectrum of the tilted sum.
            total: logarithm of what tilting multiplied it by.
            counts: numbers of steps of the groups.
            first: the window's first loss, as a multiple of the spacing.
            delta: δ.
            above: probability of losses above the window.
        """
        size, spacing, tilt = self.grid.size, self.grid.spacing, self.grid.tilt
        tilted = np.roll(fft.irfft(whole, size), -first)
        # What rounding errors of the transforms may make of any point, added to all of them.
        magnitude = float(np.linalg.norm(counts) * np.abs(whole).mean() + np.linalg.norm(tilted))
        error = rounding_error(size) * magnitude
        allowed = 1.0 - above / delta
        if not (math.isfinite(error) and math.isfinite(total) and 0.0 < allowed <= 1.0):
            return UNKNOWN
        loss = (first + np.arange(size)) * spacing
        untilting = np.exp(np.minimum(total - math.log(delta) - tilt * loss, _HUGE))
        share = (np.maximum(tilted, 0.0) + error) * untilting  # of δ, at each loss
        share_above, needed = _shares_of_delta(share, spacing)
        is_too_low = np.flatnonzero(needed >= allowed)
        if not len(is_too_low):
            lowest = max(0.0, float(loss[0]))  # or anything below
            return GridBound(lowest, lowest, 0.0, max(lowest / 16, SMALLEST))
        place = int(is_too_low[-1]) + 1
        if place == size:
            return UNKNOWN
        discounted = float(share_above[place] - needed[place])
        if not discounted > 0.0:
            return UNKNOWN
        # Between two points of the grid δ(ε) is a straight line in e^ε.
        least_factor = math.expm1(-spacing)
        step = max(least_factor, float(needed[place] - allowed) / discounted)
        epsilon = float(loss[place]) + math.log1p(step)
        # Rounding adds a variance of spacing²/6 for each step: δ grows by half of it times the density at ε.
        widened = sum(counts) * spacing / 6 * float(share[place]) / discounted
        return GridBound(max(0.0, epsilon), widened, error * float(untilting[place:].sum()))


def _shares_of_delta(share: Array, spacing: float) -> tuple[Array, Array]:
    """What is left at each loss of the grid, if ε were that loss.

    Args:
        share: probability of each loss over δ, (size,).
        spacing: of the losses.

    Returns:
        The share of δ at the loss and above, Σ share, and the share that (ε, δ) needs there,
        Σ share·(1 − exp(ε − loss)); (size,) each.
    """
    above = np.cumsum(share[::-1])[::-1]
    # As a difference of two sums, nothing would be left at a small spacing: hence the recursion.
    factor = -math.expm1(-spacing)
    needed = signal.lfilter([0.0, factor], [1.0, factor - 1.0], above[::-1])[::-1]
    return above, needed


def _log_finite(infinite: float) -> float:
    """The logarithm of the probability of finite losses."""
    return math.log1p(-infinite) if infinite < 1.0 else -math.inf


def _multiply_in(products: dict[int, Spectrum], number: int, spectrum: Spectrum) -> None:
    """Puts a further spectrum among those that are taken to the same power."""
    products[number] = products[number] * spectrum if number in products else spectrum


def _product(spectra: list[Spectrum]) -> Spectrum:
    whole = spectra[0]
    for spectrum in spectra[1:]:
        whole = whole * spectrum
    return whole


def _power(spectrum: Spectrum, exponent: int) -> Spectrum:
    """The spectrum to a power, elementwise, by squaring: many times faster than numpy's complex power."""
    result = None
    while exponent:
        if exponent & 1:
            result = spectrum if result is None else result * spectrum
        exponent >>= 1
        if exponent:
            spectrum = spectrum * spectrum
    return np.ones(1, dtype=np.complex128) if result is None else result
