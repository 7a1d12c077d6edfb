"""Sensitivity, divisor and noise, against the figures and the laws of privacy.md."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edpsgd.mechanism import sensitivity


@pytest.mark.parametrize(
    ("unit", "factor", "expected"),
    [("micro_batch", 1.0, 3.0), ("example", 1.0, 1.5), ("user", 1.0, 1.5), ("user", 2.0, 3.0)],
)
def test_sensitivity_of_the_sum(unit, factor, expected) -> None:
    assert sensitivity.sum_sensitivity(unit, 1.5, factor) == expected


def test_a_micro_batch_moves_across_the_ball_and_an_example_to_its_middle() -> None:
    """The farthest that a clipped mean, or one of several clipped examples, can be moved."""
    rng = np.random.default_rng(1)

    def clip(vector: np.ndarray) -> np.ndarray:
        return vector * min(1.0, 1.5 / np.linalg.norm(vector))

    others = rng.normal(size=(3, 4))
    direction = rng.normal(size=4)
    means = [clip((others.sum(axis=0) + sign * 1e6 * direction) / 4) for sign in (1, -1)]
    moved = float(np.linalg.norm(means[0] - means[1]))
    assert moved == pytest.approx(sensitivity.sum_sensitivity("micro_batch", 1.5), rel=1e-5)
    assert np.linalg.norm(clip(1e6 * direction)) == pytest.approx(sensitivity.sum_sensitivity("example", 1.5))


def test_the_divisor_is_public() -> None:
    assert sensitivity.public_divisor(None, 3, 4) == 12.0
    assert sensitivity.public_divisor(7.5, 3, 4) == 7.5


def test_noise_on_the_mean() -> None:
    assert sensitivity.noise_on_mean(2.0, 3.0, 12.0) == 0.5


def test_the_multiplier_of_the_paper() -> None:
    found = sensitivity.paper_multiplier(1.0, workers=8, micro_batches=1, largest_scale=1.5118578920369088)
    assert found == pytest.approx(0.11692679, rel=1e-7)


@pytest.mark.parametrize(("workers", "micro_batches"), [(1, 1), (8, 1), (2, 4)])
def test_the_noise_of_the_paper_has_its_multiplier(workers, micro_batches) -> None:
    """What all workers add to the sum, over the sensitivity 2C."""
    std = sensitivity.paper_worker_std(1.5, 0.8, workers, micro_batches)
    on_sum = math.sqrt(workers) * std
    expected = sensitivity.paper_multiplier(0.8, workers, micro_batches)
    assert on_sum / (2 * 1.5) == pytest.approx(expected)


@pytest.mark.parametrize("shares", [1, 4])
def test_calibrated_noise_adds_up(shares) -> None:
    stds = sensitivity.calibrated_worker_stds(3.0, 0.8, shares, [0.5, 2.0])
    assert [math.sqrt(shares) * std for std in stds] == pytest.approx([0.5 * 2.4, 2.0 * 2.4])
