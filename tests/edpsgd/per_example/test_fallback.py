"""What no rule serves: it is right all the same, begins at the nearest cut, and is said once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from edpsgd.per_example import UnitGradients
from tests.edpsgd.per_example.zoo import SAID
from tests.helpers import small_models
from tests.helpers.unit_loop import Fast, check, trained


def test_word_rows_that_utterances_share_are_left_to_autograd() -> None:
    model = small_models.tiny("clc")
    engine = UnitGradients(trained(model))
    with pytest.warns(RuntimeWarning, match="words.weight, characters.weight, convolution.weight, convolution.bias"):
        engine.backward(model(small_models.batch("clc", SAID)))
    with Fast():  # says it once
        engine.backward(model(small_models.batch("clc", SAID)))


def test_a_model_that_shares_no_words_needs_no_loop() -> None:
    model = small_models.tiny("clc").train()
    model.keeps_apart = True
    engine = UnitGradients(trained(model))
    with Fast():
        for said in (SAID, SAID[::-1], SAID[2:5], SAID[:1]):
            check(engine, model, model(small_models.batch("clc", said)))
        check(engine, model, model(small_models.batch("clc", SAID)), torch.tensor([1, 0, 1, 0, 3, 3, 0, 1]), 4)


class Odd(nn.Module):
    """Operations without rules, and rows that no single example owns."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(4, 4)
        self.normal = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.mixed = nn.Bilinear(4, 4, 3)
        self.places = nn.Parameter(torch.randn(9, 4))
        self.masked = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.below(x).tanh() + self.places[: x.shape[1]]
        hidden = self.normal(hidden).tanh()
        kept = torch.zeros(*mask.shape, 2).index_put((mask,), self.masked(hidden[mask]))
        pooled = hidden.mean(1)
        return self.mixed(pooled, pooled).square().sum(1) + kept.square().sum((1, 2))


def test_what_has_no_rule_is_right_all_the_same() -> None:
    torch.manual_seed(0)
    model = Odd()
    engine = UnitGradients(trained(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for examples, steps in ((4, 3), (3, 3), (6, 2)):
            x = torch.randn(examples, steps, 4)
            check(engine, model, model(x, torch.rand(examples, steps) > 0.3))
        check(engine, model, model(x, torch.ones(6, 2, dtype=torch.bool)), torch.tensor([0, 2, 0, 2, 2, 0]), 4)
