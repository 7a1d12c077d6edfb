"""GradScalers: what they must be told, and what of them is a condition."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.common import assert_same, layers_of, private


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def exact(model: nn.Module, inner: torch.optim.Optimizer, **settings):
    """A wrapper that changes nothing, to compare with the plain optimizer."""
    return private(model, inner, clip_norm=1e9, noise_multiplier=0.0, **settings)


def test_disabled_grad_scaler() -> None:
    model, plain = build(), build()
    optimizer = exact(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    optimizer.accumulate(scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    plain(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same(model, layers_of(plain))


DATA = torch.ones(2, 4)


def test_a_scaler_that_was_forgotten_is_refused() -> None:
    """Else every micro-batch but the last one would be clipped as if it were as large as its scaled loss."""
    model = build()
    optimizer = private(model)
    scaler = torch.amp.GradScaler("cpu")
    for forget in (lambda: optimizer.accumulate(), lambda: optimizer.backward(scaler.scale(model(DATA).sum(1)))):
        scaler.scale(model(DATA).sum()).backward()
        forget()
        scaler.scale(model(DATA).sum()).backward()
        with pytest.raises(RuntimeError, match="Pass scaler=scaler to them"):
            scaler.step(optimizer)
        assert not optimizer.ledger.events


@pytest.mark.parametrize("is_unscaled", [False, True])
def test_what_a_scaler_does_is_a_condition(is_unscaled) -> None:
    model = build()
    optimizer = private(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(DATA).sum()).backward()
    if is_unscaled:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert "a GradScaler follows the micro-batches that were discarded" in str(optimizer.epsilon(1e-5))


def test_unscaling_twice_is_refused() -> None:
    model = build()
    optimizer = private(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale twice"):
        optimizer.accumulate(scaler=scaler)
