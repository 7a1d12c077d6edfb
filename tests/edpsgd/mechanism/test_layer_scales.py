"""Layer scales: given ones and measured ones."""

from __future__ import annotations

import math

import pytest

import edpsgd
from edpsgd.mechanism.layer_scales import given_scales, measured_scales


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
