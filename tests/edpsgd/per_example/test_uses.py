"""Where parameters go into operations."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from edpsgd.per_example import UnitGradients
from tests.helpers.unit_loop import check, trained


def test_an_embedding_of_width_one_that_is_spread_over_columns() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 3), nn.Embedding(7, 1)])
    engine = UnitGradients(trained(model))
    losses = (model[0](torch.randn(4, 4)) + model[1](torch.tensor([0, 3, 3, 6]))).square().sum(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(engine, model, losses)


@pytest.mark.parametrize("turn", ["permute(0, 1)", "permute(1, 0)", "transpose(0, 0)", "transpose(-2, -1)", "t()"])
def test_a_matrix_that_is_turned_or_not(turn) -> None:
    """Square, so that its shape does not tell; the operation comes after batches without it."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False)
    engine = UnitGradients(trained(model))
    for number in range(5):
        turned = eval(f"model.weight.{turn}") if number == 2 else model.weight
        losses = (torch.randn(4, 3) @ turned).tanh().square().sum(1)
        check(engine, model, losses)
