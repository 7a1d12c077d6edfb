"""The message of the step that measures scales."""

from __future__ import annotations

import math

import pytest
import torch

from edpsgd import FirstStepNorms
from edpsgd.mechanism.layer_scales import unit_rms
from edpsgd.mechanism.noise import GaussianSource
from edpsgd.mechanism.scale_measurement import ScaleMeasurement
from tests.helpers.common import assert_std

CPU = torch.device("cpu")


def test_norms_and_trailer_share_the_message() -> None:
    measurement = ScaleMeasurement(FirstStepNorms(), 2, 3, CPU)
    measurement.add_norms(torch.tensor([1.0, 3.0]))
    measurement.trailer.fill_(7.0)
    assert measurement.message.tolist() == [1.0, 3.0, 7.0, 7.0, 7.0]
    assert measurement.noise_multiplier == 0.0


def test_scales_follow_from_the_sum() -> None:
    measurement = ScaleMeasurement(FirstStepNorms(), 2, 1, CPU)
    measurement.message.copy_(torch.tensor([1.0, 3.0, 9.0]))  # as the workers have added it up
    assert measurement.scales(["a", "b"]) == pytest.approx(dict(zip("ab", unit_rms([1.0, 3.0]), strict=True)))


def test_without_noise_nothing_is_added() -> None:
    measurement = ScaleMeasurement(FirstStepNorms(), 5, 0, CPU)
    measurement.add_noise_(GaussianSource(1, 0).stream(0), workers=2)
    assert not measurement.message.any()


def test_the_shares_of_the_workers_make_the_noise() -> None:
    total = torch.zeros(20_000)
    for rank in range(4):
        measurement = ScaleMeasurement(FirstStepNorms(2.0), 20_000, 3, CPU)
        measurement.add_noise_(GaussianSource(1, rank).stream(0), workers=4)
        assert not measurement.trailer.any()
        total += measurement.message[:-3]
    assert_std(total, 2.0 * math.sqrt(2.0))
