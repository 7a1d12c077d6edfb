"""Losses of one step, and how they are rounded."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import special

from edpsgd.accounting import loss_grid


def test_special_functions_invert_each_other() -> None:
    for z, q in itertools.product([0.3, 1.0, 5.0], [1e-5, 0.1, 0.999, 1.0]):
        x = np.linspace(-5 * z, 1 + 5 * z, 101)
        loss = loss_grid.loss_of(x, z, q)
        mixed = (1 - q) * np.exp(-0.5 * (x / z) ** 2) + q * np.exp(-0.5 * ((x - 1) / z) ** 2)
        assert loss == pytest.approx(np.log(mixed) + 0.5 * (x / z) ** 2, rel=1e-6, abs=1e-10)
        kept = loss > np.log1p(-q) * 0.99 if q < 1 else np.full(len(x), True)
        assert loss_grid.output_of(loss, z, q)[kept] == pytest.approx(x[kept], rel=1e-5, abs=1e-5)
    edges = np.array([-40.0, -8.0, -1.0, 0.0, 1.0, 8.0, 9.0, 40.0])
    assert loss_grid.between(edges) == pytest.approx(np.diff(special.ndtr(edges)), abs=1e-16)
    assert loss_grid.between(edges)[-1] == pytest.approx(special.ndtr(-9.0), rel=1e-12)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("z", "q"), [(0.5, 1.0), (1.0, 0.1), (3.0, 1e-3)])
def test_rounded_losses_keep_both_probabilities(z, q, sign) -> None:
    """Σ p = 1 and, but for what is cut off, Σ p·e^(−loss) = 1: the other law's probabilities."""
    grid = loss_grid.Grid(sign, 1e-12, math.inf, 1.0, 2.0**-8, 0.01, 0.05, 1 << 12)
    pmf = loss_grid.round_losses(z, q, grid)
    assert (np.diff(pmf.points) > 0).all()
    assert (pmf.probabilities >= 0).all()
    assert pmf.probabilities.sum() + pmf.infinite == pytest.approx(1.0, rel=1e-12)
    other = float((pmf.probabilities * np.exp(-grid.spacing * pmf.points)).sum())
    assert other == pytest.approx(1.0, rel=1e-5)
