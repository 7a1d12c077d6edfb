"""What all accountants have in common: no noise, no steps, and bad input."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from edpsgd.accounting import (
    calibrate,
    gaussian_epsilon,
    moments_epsilon,
    pld,
    poisson_epsilon,
    rdp_epsilon,
    zcdp_epsilon,
    zcdp_rho,
)


def test_no_noise_and_no_epochs() -> None:
    assert zcdp_rho([]) == gaussian_epsilon([], 1e-5) == poisson_epsilon([], 0.1, 10, 1e-5) == 0.0
    assert poisson_epsilon([1.0], 0.1, 0, 1e-5) == 0.0
    assert zcdp_rho([1.0, 0.0]) == gaussian_epsilon([1.0, 0.0], 1e-5) == math.inf
    assert zcdp_epsilon(math.inf, 1e-5) == poisson_epsilon([0.0], 0.1, 10, 1e-5) == math.inf
    assert moments_epsilon(0.0, 0.1, 10, 1e-5) == rdp_epsilon([pld.Steps(0.0, 0.1, 10)], 1e-5) == math.inf


NOISE_FUNCTIONS = {
    "zcdp_rho": lambda z: zcdp_rho([1.0, z]),
    "gaussian_epsilon": lambda z: gaussian_epsilon([1.0, z], 1e-5),
    "poisson_epsilon": lambda z: poisson_epsilon([1.0, z], 0.1, 10, 1e-5),
    "moments_epsilon": lambda z: moments_epsilon(z, 0.1, 10, 1e-5),
}
DELTA_FUNCTIONS = {
    "zcdp_epsilon": lambda delta: zcdp_epsilon(1.0, delta),
    "gaussian_epsilon": lambda delta: gaussian_epsilon([1.0], delta),
    "poisson_epsilon": lambda delta: poisson_epsilon([1.0], 0.1, 10, delta),
    "moments_epsilon": lambda delta: moments_epsilon(1.0, 0.1, 10, delta),
    "calibrate": lambda delta: calibrate(1.0, delta, 10),
}
RATE_FUNCTIONS = {
    "poisson_epsilon": lambda rate: poisson_epsilon([1.0], rate, 10, 1e-5),
    "moments_epsilon": lambda rate: moments_epsilon(1.0, rate, 10, 1e-5),
    "calibrate": lambda rate: calibrate(1.0, 1e-5, 2, None, rate, 10),
}


@pytest.mark.parametrize("name", NOISE_FUNCTIONS)
@pytest.mark.parametrize("z", [-0.1, -math.inf, math.nan, math.inf, True, "1", None])
def test_bad_noise(name, z) -> None:
    with pytest.raises(ValueError, match=r"noise_multiplier.* must be a finite number >= 0, got"):
        NOISE_FUNCTIONS[name](z)


@pytest.mark.parametrize("name", DELTA_FUNCTIONS)
@pytest.mark.parametrize("delta", [0, 0.0, 1.0, 1.5, -1e-5, math.nan, math.inf, True, "1e-5", None])
def test_bad_delta(name, delta) -> None:
    with pytest.raises(ValueError, match="delta must be between 0 and 1, both excluded, got"):
        DELTA_FUNCTIONS[name](delta)


@pytest.mark.parametrize("name", RATE_FUNCTIONS)
@pytest.mark.parametrize("rate", [0, 0.0, -0.1, 1.01, math.nan, math.inf, True, "0.1"])
def test_bad_sampling_rate(name, rate) -> None:
    with pytest.raises(ValueError, match="sampling_rate must be > 0 and <= 1, got"):
        RATE_FUNCTIONS[name](rate)


def test_kinds_of_numbers_that_are_welcome() -> None:
    expected = gaussian_epsilon([2.0, 2.0], 1e-5)
    for z in ([2, 2], (2.0, 2.0), np.array([2.0, 2.0]), np.float32([2, 2]), (v for v in (2.0, 2)), [np.int64(2)] * 2):
        assert gaussian_epsilon(z, 1e-5) == expected
    for a, b in itertools.product([1.0, 1], [np.int64(10), 10]):
        assert poisson_epsilon([a], np.float64(0.1), b, np.float64(1e-5)) == poisson_epsilon([1.0], 0.1, 10, 1e-5)
