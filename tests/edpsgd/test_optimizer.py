"""PrivateOptimizer: bad arguments, and calls in the wrong order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import edpsgd
from tests.helpers.common import Bag, private, set_gradients


def test_no_other_keywords_and_no_positions() -> None:
    model = Bag()
    with pytest.raises(TypeError):
        private(model, batch_size=3)
    with pytest.raises(TypeError):
        edpsgd.PrivateOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters(), 1.0, 1.0)


@pytest.mark.parametrize("epoch", [-1, 1.0, True, None])
def test_epochs(epoch) -> None:
    with pytest.raises(ValueError, match="epoch must be an int >= 0"):
        private(Bag()).set_epoch(epoch)


def test_order_of_calls() -> None:
    model = Bag()
    optimizer = private(model)
    optimizer.accumulate()
    with pytest.raises(RuntimeError, match=r"set_epoch\(\) between"):
        optimizer.set_epoch(1)
    with pytest.raises(RuntimeError, match=r"add_param_group\(\) between"):
        optimizer.add_param_group({"params": [model.p0]})
    model.p0.requires_grad_(False)
    with pytest.raises(RuntimeError, match="added, frozen or moved between"):
        optimizer.accumulate()


def test_closures_and_sparse_gradients() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = private(model)
    with pytest.raises(ValueError, match=r"step\(closure\)"):
        optimizer.step(lambda: 0.0)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="weight has a sparse gradient"):
        optimizer.step()
    assert not any(event.steps for event in optimizer.ledger.events)


def test_parameters() -> None:
    model = Bag()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    def wrap(named, optimizer=inner):
        return edpsgd.PrivateOptimizer(optimizer, named, clip_norm=1.0, noise_multiplier=1.0)

    with pytest.raises(ValueError, match="pairs"):
        wrap(model.parameters())
    with pytest.raises(ValueError, match="is empty"):
        wrap([])
    with pytest.raises(ValueError, match="twice"):
        wrap([*model.named_parameters(), ("again", model.p0)])
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        wrap((f"module.{name}", p) for name, p in model.named_parameters())
    with pytest.raises(ValueError, match="must be a torch.optim.Optimizer, got Bag"):
        wrap(model.named_parameters(), model)
    with pytest.raises(ValueError, match="LBFGS"):
        wrap(model.named_parameters(), torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="private already"):
        wrap(model.named_parameters(), wrap(model.named_parameters()))
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        wrap(model.named_parameters())


def test_everything_frozen_during_training() -> None:
    model = Bag()
    optimizer = private(model)
    set_gradients(model)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        optimizer.step()
