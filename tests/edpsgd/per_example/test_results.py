"""Sums into tensors of every form."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edpsgd.per_example import UnitGradients
from edpsgd.per_example.batch import compute_batch
from edpsgd.per_example.layout import make_units
from tests.helpers.common import private
from tests.helpers.unit_loop import check, trained


def channels_last() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, padding="valid"))
    inputs = torch.randn(5, 3, 8, 8).to(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), inputs


def turned() -> tuple[nn.Module, torch.Tensor]:
    """A parameter that is the transposed view of another tensor, and one with gaps."""
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(torch.randn(3, 4).T)
    model.bias = nn.Parameter(torch.randn(8)[::2])
    return model, torch.randn(5, 3)


@pytest.mark.parametrize("made", [channels_last, turned])
def test_parameters_that_are_not_contiguous(made) -> None:
    torch.manual_seed(0)
    model, inputs = made()
    assert not all(parameter.is_contiguous() for parameter in model.parameters())
    engine = UnitGradients(trained(model))
    for _ in range(2):
        check(engine, model, model(inputs).flatten(1).square().sum(1))
    sums = [torch.zeros_like(parameter, requires_grad=False) for parameter in model.parameters()]  # not contiguous
    expected = torch.autograd.grad(model(inputs).square().sum(), list(model.parameters()))
    engine.backward(model(inputs).flatten(1).square().sum(1))
    engine.add_weighted_(sums, torch.ones(5))
    torch.testing.assert_close(sums, list(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("made", [channels_last, turned])
def test_steps_with_parameters_that_are_not_contiguous(made) -> None:
    """backward(losses) and accumulate() move the model alike, by the clipped gradients."""
    torch.manual_seed(0)
    model, inputs = made()
    before, moved = [p.detach().clone() for p in model.parameters()], []
    for is_by_hand in (True, False):
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.data.copy_(value)
            parameter.grad = None
        optimizer = private(model, clip_norm=0.5, noise_multiplier=0.0, unit="example", divisor=5)
        if is_by_hand:
            for one in inputs.unbind():
                model(one.unsqueeze(0)).square().sum().backward()
                optimizer.accumulate()
        else:
            optimizer.backward(model(inputs).flatten(1).square().sum(1))
        optimizer.step()
        moved.append([p.detach() - value for p, value in zip(model.parameters(), before, strict=True)])
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-4, atol=1e-5)
    assert 0.0 < float(torch.cat([one.flatten() for one in moved[0]]).norm()) <= 0.5


def test_norms_and_sums_by_rules_and_by_autograd_together() -> None:
    """The first layer is distrusted, the second has rules, the third is not used, the fourth frozen."""
    torch.manual_seed(0)
    names = ("first", "second", "unused", "frozen")
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in names})
    model["frozen"].requires_grad_(False)
    losses = model["frozen"](model["second"](model["first"](torch.randn(4, 3)).tanh())).sum(1)
    named = {name: model[name].weight for name in names}
    units = make_units(losses, None, None)
    batch = compute_batch(named, losses, torch.ones(4), units, {"first"}, set(), True)
    assert batch.numbers == [1, 0]
    norms = batch.norms()
    assert norms.shape == (4, 4)
    assert not norms[:, 2:].any()
    factors = torch.rand(4, 4)
    sums = dict(batch.sums(factors))
    assert list(sums) == [0, 1, 2]
    into = [torch.zeros(3, 3) for _ in names]
    batch.add_weighted_(into, factors)
    for number in (0, 1):
        expected = batch.autograd.weighted(factors[:, number])[number]
        torch.testing.assert_close(sums[number], expected)
        torch.testing.assert_close(into[number], expected)
    for unit in range(4):
        [(number, norm)] = batch.norms_of(unit)
        assert (number, norm) == (1, pytest.approx(float(norms[unit, 1]), rel=1e-5))
    batch.drop(torch.tensor([True, False, True, False]))
    factors[[0, 2]] = 0.0
    expected = batch.autograd.weighted(factors[:, 1])[1]
    torch.testing.assert_close(dict(batch.sums(torch.ones(4, 4) * factors))[1], expected)
