"""The sum of a step: units one after the other or many at once, their divisor and their noise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from edpsgd import FirstStepNorms
from edpsgd.mechanism.accumulator import StepAccumulator
from edpsgd.mechanism.clipping import GUARD, ClipCounter
from edpsgd.mechanism.noise import GaussianSource
from edpsgd.mechanism.parameters import Layers
from edpsgd.per_example import UnitGradients
from tests.helpers.common import assert_std
from tests.helpers.small_steps import settings as settings_of


def made(model: nn.Module, workers: int = 1, **changes: Any) -> tuple[StepAccumulator, Layers, ClipCounter]:
    settings = settings_of(**changes)
    named = dict(model.named_parameters())
    layers = Layers([{"params": list(named.values())}], named, settings.layer_scaling, None, trailer_size=2)
    clips = ClipCounter()
    return StepAccumulator(layers, settings, clips, workers).start(), layers, clips


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))


def gradients(*values: float) -> list[torch.Tensor | None]:
    return [torch.tensor(values[:2]), torch.tensor(values[2:])]


def test_units_are_clipped_and_divided_with_the_last_one() -> None:
    step, layers, clips = made(Pair(), workers=2)
    step.add_gradient(gradients(0.0, 0.6, 0.0), None)
    step.add_gradient(gradients(3.0, 0.0, 4.0), None, is_last=True)
    assert (step.closed, step.divisor) == (2, 4.0)
    torch.testing.assert_close(layers.sum.views[0], torch.tensor([0.6 * GUARD, 0.6]) / 4)
    torch.testing.assert_close(layers.sum.views[1], torch.tensor([0.8 * GUARD]) / 4)
    assert clips.share() == 0.5


def test_a_public_divisor_is_that_of_any_number_of_units() -> None:
    step, layers, _ = made(Pair(), unit="example", divisor=10.0)
    step.add_gradient(gradients(0.5, 0.0, 0.0), None)
    step.close_empty(3)
    assert (step.closed, step.divisor) == (4, 10.0)
    assert float(layers.sum.views[0][0]) == pytest.approx(0.05)


def test_bad_units_are_discarded_and_empty_ones_are_units() -> None:
    step, layers, clips = made(Pair())
    step.add_gradient(gradients(math.nan, 0.0, 0.0), None)
    step.add_gradient([None, None], None)
    step.add_gradient(gradients(0.5, 0.0, 0.0), None, is_last=True)
    assert (step.closed, int(step.discarded)) == (3, 1)
    assert float(layers.sum.views[0][0]) == pytest.approx(0.5 / 3)
    assert clips.share() == 0.0


def test_a_scaled_loss_is_scaled_back() -> None:
    step, layers, _ = made(Pair())
    step.add_gradient(gradients(512.0, 0.0, 0.0), torch.tensor(1024.0), is_last=True)
    assert float(layers.sum.views[0][0]) == pytest.approx(0.5)


def test_an_update_that_was_clipped_before_it_came_is_counted() -> None:
    step, _, clips = made(Pair())
    step.add_gradient(gradients(0.5, 0.0, 0.0), None, was_clipped=torch.tensor(True))
    assert clips.share() == 1.0


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_many_units_at_once_are_those_one_after_the_other(clipping) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data, numbers = torch.randn(6, 3), torch.tensor([0, 0, 1, 3, 3, 3])  # unit 2 is empty

    def losses(rows: torch.Tensor) -> torch.Tensor:
        return 3 * model(rows).square().sum(dim=1)

    at_once, layers, clips = made(model, clipping=clipping)
    at_once.add_losses(UnitGradients(layers.parameters, 1, False), losses(data), numbers, 4, None)
    at_once.close_empty(0)
    one_by_one, looped, looped_clips = made(model, clipping=clipping)
    for unit in range(4):
        rows = data[numbers == unit]
        found: list[torch.Tensor | None] = [None, None]
        if len(rows):
            found = list(torch.autograd.grad(losses(rows).mean(), list(model.parameters())))
        one_by_one.add_gradient(found, None)
    one_by_one.close_empty(0)
    assert at_once.closed == one_by_one.closed == 4
    assert clips.share() == looped_clips.share()
    for view, expected in zip(layers.sum.views, looped.sum.views, strict=True):
        torch.testing.assert_close(view, expected, rtol=1e-5, atol=1e-6)
        assert view.any()


@pytest.mark.parametrize(("noise", "expected"), [(None, [3.0, 4.0]), (1.0, [0.6, 0.8])])
def test_while_scales_are_measured_only_norms_are_kept(noise, expected) -> None:
    step, _, _ = made(Pair(), layer_scaling=FirstStepNorms(noise))
    step.add_gradient(gradients(3.0, 0.0, 4.0), None)
    step.add_gradient(gradients(math.inf, 0.0, 4.0), None)
    assert step.norms.tolist() == pytest.approx(expected)
    assert int(step.discarded) == 1


def test_noise_is_that_of_the_mean() -> None:
    step, layers, _ = made(nn.Linear(200, 100, bias=False), workers=2, noise_placement="per_worker")
    step.close_empty(5)
    assert step.noise_stds(0.5) == pytest.approx([2.0 * 0.5 / math.sqrt(2) / 10])
    step.add_noise_(GaussianSource(3, 0).stream(0), 0.5, rank=0)
    assert_std(layers.sum.views[0].flatten(), 0.1 / math.sqrt(2))


def test_a_sum_that_does_not_fit_into_float16_is_made_smaller() -> None:
    step, layers, _ = made(Pair(), clip_norm=1e6, noise_placement="per_worker")
    step.add_gradient(gradients(1e5, 0.0, 0.0), None, is_last=True)
    factor = step.fit_float16_(1.0)
    assert factor < 1.0
    assert float(layers.sum.views[0][0]) == 1e5 * factor
