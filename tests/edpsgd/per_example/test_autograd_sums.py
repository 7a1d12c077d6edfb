"""Weighted sums by autograd."""

from __future__ import annotations

import torch
from torch import nn

from edpsgd.per_example.attribution import attribute_examples
from edpsgd.per_example.autograd_sums import AutogradSums
from edpsgd.per_example.graph import read_graph
from edpsgd.per_example.layout import make_units
from tests.helpers.unit_loop import gradients_of, trained

FACTORS = torch.tensor([0.5, -2.0])


def sums_of(
    model: nn.Module,
    losses: torch.Tensor,
    units: torch.Tensor,
    has_room: bool = True,
) -> AutogradSums:
    groups = make_units(losses, units, None)
    weights = 1.0 / groups.sizes()[units].to(losses)
    attribution = attribute_examples(read_graph(losses))
    return AutogradSums(trained(model), losses, weights, groups, attribution, has_room)


def test_sums_are_those_of_a_loop_over_units() -> None:
    torch.manual_seed(0)
    model, units = nn.Linear(3, 2), torch.tensor([0, 1, 1])
    losses = model(torch.randn(3, 3)).square().sum(1)
    sums = sums_of(model, losses, units)
    of_units = gradients_of(losses, list(model.parameters()), units, 2)
    for found in (sums.weighted(FACTORS), sums.weighted_far_off(FACTORS)):
        assert list(found) == [0, 1]
        for number, total in found.items():
            wanted = 0.5 * of_units[0][number] - 2.0 * of_units[1][number]
            torch.testing.assert_close(total, wanted)


def test_a_hook_that_clamps_shows_itself_far_off() -> None:
    torch.manual_seed(0)
    model, units = nn.Linear(3, 2), torch.tensor([0, 1, 1])
    hidden = model(torch.randn(3, 3))
    hidden.register_hook(lambda gradient: gradient.clamp(-10.0, 10.0))
    losses = hidden.square().sum(1)
    for has_room in (True, False):
        sums = sums_of(model, losses, units, has_room)
        is_same = torch.allclose(sums.weighted(FACTORS)[0], sums.weighted_far_off(FACTORS)[0])
        assert is_same == (not has_room)


def test_a_broken_unit_is_kept_from_the_others() -> None:
    torch.manual_seed(0)
    model, units = nn.Linear(3, 2), torch.tensor([0, 1])
    inputs = torch.randn(2, 3)
    losses = (model(inputs) * torch.tensor([[torch.inf], [1.0]])).square().sum(1)
    sums, only_second = sums_of(model, losses, units), torch.tensor([0.0, 1.0])
    assert not torch.isfinite(sums.weighted(only_second)[0]).all()
    sums.has_broken = True
    expected = torch.autograd.grad(model(inputs[1]).square().sum(), list(model.parameters()))
    torch.testing.assert_close(list(sums.weighted(only_second).values()), list(expected))


def test_noise_is_seen_in_half_precision_only() -> None:
    torch.manual_seed(0)
    model, units = nn.Linear(8, 4), torch.tensor([0, 1])
    inputs = torch.randn(2, 8)
    exact = sums_of(model, model(inputs).square().sum(1), units).rounding_noise(FACTORS)
    half = nn.Linear(8, 4).bfloat16()
    losses = half(inputs.bfloat16()).square().sum(1).float()
    rounded = sums_of(half, losses, units).rounding_noise(FACTORS)
    assert max(exact.values()) < 1e-4 < 1e-3 < max(rounded.values())
