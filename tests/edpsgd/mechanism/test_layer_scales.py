"""Layer scales: given ones and measured ones."""

from __future__ import annotations

import math

import pytest
import torch

import edpsgd
from edpsgd import FirstStepNorms
from edpsgd.mechanism.layer_scales import FLOOR, given_scales, measured_scales, norm_contribution, unit_rms


@pytest.mark.parametrize("z", [0.0, -1.0, math.nan])
def test_first_step_norms(z) -> None:
    with pytest.raises(ValueError, match="noise_multiplier of FirstStepNorms"):
        edpsgd.FirstStepNorms(z)


def test_scales_have_unit_rms() -> None:
    assert given_scales({"a": 2.0, "b": 2.0}, ["a", "b"]) == pytest.approx([1.0, 1.0])
    scales = measured_scales([1.0, 2.0, -3.0, 0.0])
    assert sum(s * s for s in scales) == pytest.approx(4.0)
    assert scales[1] == pytest.approx(2 * scales[0])
    assert scales[2] == scales[3] > 0
    assert measured_scales([-1.0, 0.0]) == [1.0, 1.0]


def test_a_common_factor_does_not_matter() -> None:
    assert unit_rms([1.0, 3.0]) == pytest.approx(unit_rms([10.0, 30.0]))
    assert given_scales({"b": 3.0, "a": 1.0}, ["a", "b"]) == pytest.approx(unit_rms([1.0, 3.0]))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_given_scales_are_above_zero(scale) -> None:
    with pytest.raises(ValueError, match=r"layer_scaling\['b'\] must be a finite number > 0"):
        given_scales({"a": 1.0, "b": scale}, ["a", "b"])


def test_measured_scales_have_a_floor() -> None:
    scales = measured_scales([1000.0, 1.0])
    large = math.sqrt(2.0)  # of (1000, 1) at root mean square 1, nearly
    assert scales == pytest.approx(unit_rms([large, FLOOR]), rel=1e-5)


def test_what_a_unit_tells_of_its_norms() -> None:
    norms = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 1e-30]])
    assert norm_contribution(norms, private=False) is norms
    expected = torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, 1.0]])
    torch.testing.assert_close(norm_contribution(norms, private=True), expected)
    torch.testing.assert_close(norm_contribution(norms[0], private=True), expected[0])


def test_the_noise_of_a_measurement() -> None:
    assert FirstStepNorms().noise_std == 0.0
    assert FirstStepNorms(2.0).noise_std == pytest.approx(2.0 * math.sqrt(2.0))
    assert FirstStepNorms(2).describe() == {"measured": True, "noise_multiplier": 2.0}
