"""Forward passes without dropout, after which everything is as before."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from edpsgd.validation.quiet_forward import WithoutDropout, quiet_training, seed_generators


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: nn.functional.dropout(x, 0.9),
        lambda x: nn.functional.dropout2d(x, 0.9),
        lambda x: nn.functional.alpha_dropout(x, 0.9, training=True),
        lambda x: torch.native_dropout(x, 0.9, True)[0],
        lambda x: (
            nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.9)
            - nn.functional.scaled_dot_product_attention(x, x, x)
            + x
        ),
    ],
)
def test_functions_of_torch_drop_nothing(drop) -> None:
    x = torch.randn(2, 3, 4)
    with WithoutDropout():
        assert torch.equal(drop(x), x)


def test_recurrent_networks_drop_nothing() -> None:
    lstm = nn.LSTM(3, 4, num_layers=2, dropout=0.9)
    x = torch.randn(5, 1, 3)
    with quiet_training([lstm]):
        assert torch.equal(lstm(x)[0], lstm(x)[0])


def test_the_coarsest_precision_is_noted() -> None:
    with WithoutDropout() as watch:
        torch.ones(2, dtype=torch.float64) * 2
        assert watch.precision is torch.float64
        torch.ones(2).bfloat16() * 2
        torch.ones(2) * 2
    assert watch.precision is torch.bfloat16


def test_modes_gradients_and_generators_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval()
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with quiet_training([model]):
        assert (model.training, model[1].training) == (True, False)
        seed_generators(3)
        model(torch.rand(1, 2)).sum().backward()
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert (np.random.get_state()[1] == generators[2]).all()
