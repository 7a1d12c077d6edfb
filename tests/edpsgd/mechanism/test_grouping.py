"""From losses of examples to units, and losses that are none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edpsgd import PoissonBatches
from tests.helpers.common import layers_of, private


def losses_of(model: nn.Module, examples: int = 4) -> torch.Tensor:
    return model(torch.arange(2.0 * examples).reshape(examples, 2)).square().sum(1)


def test_a_mean_over_a_batch_is_not_one_example() -> None:
    model = nn.Linear(2, 1)
    optimizer = private(model, unit="example", divisor=4)
    before = layers_of(model)
    losses_of(model).mean().backward()
    with pytest.raises(RuntimeError, match="a gradient that was not closed as that of one example"):
        optimizer.step()
    assert all(torch.equal(before[name], p.detach()) for name, p in model.named_parameters())
    for loss in losses_of(model):
        loss.backward(retain_graph=True)
        optimizer.accumulate()
    optimizer.step()
    optimizer.backward(losses_of(model))
    optimizer.step()
    optimizer.step()  # no data
    assert sum(event.steps for event in optimizer.ledger.events) == 3


def test_losses_of_tokens_are_compared_with_the_draw() -> None:
    model = nn.Linear(2, 1)
    batches = PoissonBatches(8, 1.0, unit="example", collective="local")
    optimizer = private(model, unit="example", batches=batches, collective="local")
    optimizer.set_epoch(0)
    assert len(next(iter(batches))) == 8
    optimizer.backward(losses_of(model, 16))
    with pytest.raises(RuntimeError, match="the step has 16 micro-batches, and the sampler made 8 for it"):
        optimizer.step()


@pytest.mark.parametrize("unit", [{"unit": "example", "divisor": 4}, {"unit": "micro_batch"}])
def test_two_optimizers_on_one_loss(unit) -> None:
    body, head = nn.Linear(2, 3), nn.Linear(3, 1)
    first, second = private(body, **unit), private(head, **unit)
    for _ in range(3):
        losses = losses_of(nn.Sequential(body, head))
        first.backward(losses)
        with pytest.raises(RuntimeError, match=r"went through backward\(\) of another PrivateOptimizer"):
            second.backward(losses)
        with pytest.raises(RuntimeError, match="every example would count twice"):
            first.backward(losses)
        first.step()
    second.backward(losses_of(nn.Sequential(body, head)))
    second.step()
