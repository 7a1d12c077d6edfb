"""Weights that are moved at random, or rounded otherwise for a while."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edpsgd.validation.perturbed_weights import move_parameters, rounded_otherwise


def test_moved_weights_differ_by_their_size_and_frozen_ones_stay() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 1))
    nn.init.zeros_(model[0].bias)
    model[1].requires_grad_(False)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    move_parameters([model, model], seed=1, distance=0.1)
    moved = []
    for now, old in zip(model.parameters(), before, strict=True):
        moved.append(float((now.detach() - old).square().mean().sqrt()))
    size = float(before[0].square().mean().sqrt())
    assert moved[0] == pytest.approx(0.1 * size, rel=0.1)  # once, though the module is there twice
    assert moved[1] == pytest.approx(0.1, rel=0.3)  # zeros too
    assert moved[2:] == [0.0, 0.0]


def test_rounding_is_undone_after_an_error_too() -> None:
    layer = nn.Linear(50, 50)
    before = layer.weight.detach().clone()

    def fail() -> None:
        with rounded_otherwise([layer], torch.bfloat16, seed=1):
            change = float((layer.weight.detach() - before).abs().max() / before.abs().max())
            assert 0 < change < 10 * torch.finfo(torch.bfloat16).eps
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(layer.weight, before)
