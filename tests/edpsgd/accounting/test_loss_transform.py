"""Transformed loss distributions: rounding errors, and what cannot be computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import fft

from edpsgd.accounting import loss_cumulants, loss_grid, loss_transform
from edpsgd.accounting.loss_transform import LossTransform
from edpsgd.accounting.pld import Composition, Steps


def decaying(z: float, q: float, total: int, levels: int) -> list[Steps]:
    return [Steps(z / (1 + 0.1 * k), q, max(1, total // levels)) for k in range(levels)]


@pytest.mark.parametrize(
    ("steps", "delta"),
    [([Steps(1.0, 0.01, 1000)], 1e-5), (decaying(1.0, 1e-3, 10_000, 5), 1e-6), ([Steps(2.0, 0.3, 300)], 1e-8)],
)
def test_the_bound_on_rounding_errors_holds(monkeypatch, steps, delta) -> None:
    """The same composition with 64 instead of 53 bits differs by less than _solve adds to every point."""
    calls: list[tuple[LossTransform, np.ndarray, list[int]]] = []
    original = LossTransform._solve

    def solve(self, whole, total, counts, first, delta, above):
        calls.append((self, whole, counts))
        return original(self, whole, total, counts, first, delta, above)

    monkeypatch.setattr(LossTransform, "_solve", solve)
    Composition().epsilon(steps, delta)
    assert len(calls) >= 2
    for transform, whole, counts in calls:
        grid = transform.grid
        tilted = fft.irfft(whole, grid.size)
        precise = fft.irfft(_composed_precisely(steps, grid), grid.size)
        assert precise.dtype == np.longdouble
        added = loss_cumulants.rounding_error(grid.size) * (
            np.linalg.norm(counts) * np.abs(whole).mean() + np.linalg.norm(tilted)
        )
        error = np.abs(tilted - precise).max()
        print(f"size {grid.size}: {error / added:.2g} of what is added")
        assert 0 < error < added


def _composed_precisely(steps: Sequence[Steps], grid: loss_grid.Grid) -> np.ndarray:
    whole = np.ones(1, dtype=np.clongdouble)
    for s in steps:
        pmf = loss_grid.round_losses(s.noise_multiplier, s.sampling_rate, grid)
        exponents = grid.tilt * grid.spacing * pmf.points
        tilted = pmf.probabilities * np.exp(exponents - pmf.moment(grid.tilt, grid.spacing))
        dense = np.zeros(grid.size, dtype=np.longdouble)
        np.add.at(dense, pmf.points % grid.size, tilted.astype(np.longdouble))
        spectrum = fft.rfft(dense)
        assert spectrum.dtype == np.clongdouble
        whole = whole * spectrum**s.number
    return whole


def test_a_distribution_without_finite_losses_is_infinite(monkeypatch) -> None:
    nothing = loss_grid.LossPmf(np.array([0, 1]), np.zeros(2), 1.0)
    assert nothing.moment(2.0, 0.1) == -math.inf
    monkeypatch.setattr(loss_transform, "round_losses", lambda *args: nothing)
    assert Composition().epsilon([Steps(1.0, 0.1, 3)], 1e-5) == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_probabilities_that_are_not_numbers_are_infinite(monkeypatch, value) -> None:
    original = loss_grid.round_losses

    def broken(z, q, grid):
        pmf = original(z, q, grid)
        pmf.probabilities[len(pmf.points) // 2] = value
        return pmf

    monkeypatch.setattr(loss_transform, "round_losses", broken)
    with np.errstate(invalid="ignore"):
        assert Composition().epsilon([Steps(1.0, 0.1, 3), Steps(0.7, 0.1, 3)], 1e-5) == math.inf


def test_a_grid_without_a_bound_is_made_finer(monkeypatch) -> None:
    """Rényi divergences give an ε meanwhile, of which nobody knows how much comes from the grid."""
    steps, solve, sizes = [Steps(1.0, 0.1, 30)], LossTransform._solve, []

    def unknown_at_first(self, *args):
        sizes.append(self.grid.spacing)
        return loss_transform.UNKNOWN if len(sizes) < 3 else solve(self, *args)

    right = Composition().epsilon(steps, 1e-5)
    monkeypatch.setattr(LossTransform, "_solve", unknown_at_first)
    assert Composition().epsilon(steps, 1e-5) == pytest.approx(right, rel=1e-3)
    assert sizes[0] > sizes[1] > sizes[2]
