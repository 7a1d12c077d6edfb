"""Tests of noise: sound noise passes as often as promised, and what is wrong with it is found."""

from __future__ import annotations

import math

import numpy as np

from mia.noise_checks import NoiseFinding, check_independence, check_std


# -------------------------------------------------------------------- the noise
def checked(streams: np.ndarray, error_rate: float) -> NoiseFinding:
    return NoiseFinding((check_std("all", streams), *check_independence(streams)), error_rate)


def test_sound_noise_is_refuted_as_seldom_as_promised() -> None:
    random = np.random.default_rng(8)
    refuted = sum(checked(random.normal(size=(3, 3, 40)), 0.05).is_refuted for _ in range(400))
    assert 4 < refuted < 0.05 * 400 + 3 * math.sqrt(0.05 * 0.95 * 400)


def test_wrong_size() -> None:
    noise = np.random.default_rng(1).normal(size=(1, 2, 5000))
    for factor in (0.95, 1.05):
        assert [check.name for check in checked(factor * noise, 1e-3).failed] == ["std of all"]


def test_correlated_streams() -> None:
    noise = np.random.default_rng(2).normal(size=(3, 4, 1000))
    shared = noise.copy()
    shared[2] = 0.6 * noise[2] + 0.8 * noise[0]  # still of std 1
    assert [c.name for c in checked(shared, 1e-3).failed] == [
        "correlation of noise between workers",
        "correlation of sizes of noise between workers",
    ]
    repeated = noise.copy()
    repeated[:, 3] = noise[:, 0]
    assert all("between steps" in check.name for check in checked(repeated, 1e-3).failed)
    assert checked(repeated, 1e-3).is_refuted


def test_streams_with_the_same_radii() -> None:
    """Box and Muller's method with the same radii and other angles: no correlation, but the same sizes."""
    random = np.random.default_rng(4)
    radius, angle = np.sqrt(random.chisquare(2, size=(1, 2, 2000))), random.uniform(0, 2 * np.pi, size=(2, 2, 2000))
    assert [c.name for c in checked(radius * np.cos(angle), 1e-3).failed] == [
        "correlation of sizes of noise between workers"
    ]
