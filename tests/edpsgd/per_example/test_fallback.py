"""What no rule serves: it is right all the same, begins at the nearest cut, and is said once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from edpsgd.per_example import UnitGradients
from edpsgd.per_example.attribution import Attribution, attribute_examples
from edpsgd.per_example.batch import compute_batch
from edpsgd.per_example.fallback import find_cut
from edpsgd.per_example.graph import read_graph
from edpsgd.per_example.layout import make_units
from tests.edpsgd.per_example.zoo import SAID
from tests.helpers import small_models
from tests.helpers.unit_loop import Fast, check, check_uncompared, trained


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


def attributed(losses: torch.Tensor) -> Attribution:
    return attribute_examples(read_graph(losses))


def test_a_cut_is_the_nearest_place_that_keeps_examples_apart() -> None:
    rows = torch.randn(2, 3, requires_grad=True)
    shared = rows.tanh()  # of which two examples take the same row
    found = attributed(shared[torch.tensor([0, 1, 1])].exp().sum(1))
    tanh = next(node for node in found.graph.nodes if node.name() == "TanhBackward0")
    assert [node.name() for node in find_cut(found, [tanh])] == ["IndexBackward0"]


def test_no_node_of_a_cut_is_below_another_one() -> None:
    """Two ways up, of which one comes back to the other: nothing counts twice."""
    hidden = torch.randn(3, 2, requires_grad=True).tanh()
    found = attributed((hidden.exp() + hidden.exp().sin()).sum(1))
    tanh = next(node for node in found.graph.nodes if node.name() == "TanhBackward0")
    consumers = [node for node, _ in found.graph.consumers[tanh]]
    for begin in ([tanh], consumers, [*consumers, tanh]):
        cut = find_cut(found, begin)
        assert all(not found.graph.below(node) & cut for node in cut)


def test_gradients_below_a_cut_by_hand() -> None:
    """One pass for all units, or one for each where sums would be rounded; dropped units add nothing."""
    torch.manual_seed(0)
    layer = nn.Bilinear(2, 2, 1)
    x = torch.randn(3, 2)
    losses = layer(x, x).squeeze(1)
    units = make_units(losses, None, None)
    named = dict(layer.named_parameters())
    batch = compute_batch(named, losses, torch.ones(3), units, {"weight"}, set(), True)
    [fallback] = [one for one in batch.fallbacks if 0 in one.parameters]
    each = torch.einsum("ni,nj->nij", x, x)
    torch.testing.assert_close(fallback.norms()[0], each.flatten(1).norm(dim=1))
    factors = torch.tensor([1.0, -2.0, 3.0])
    for fallback.has_casts in (False, True):
        total = {0: torch.zeros(1, 2, 2), 1: torch.zeros(1)}
        fallback.add_weighted_(total, factors)
        torch.testing.assert_close(total[0][0], torch.einsum("n,nij->ij", factors, each))
    fallback.drop(torch.tensor([False, True, False]))
    total = {0: torch.zeros(1, 2, 2), 1: torch.zeros(1)}
    fallback.add_weighted_(total, factors)
    torch.testing.assert_close(total[0][0], each[0] + 3.0 * each[2])


class Product(torch.autograd.Function):
    """A product without a rule."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x @ weight

    @staticmethod
    def backward(ctx, output_gradient):
        [x] = ctx.saved_tensors
        return None, x.T @ output_gradient


@pytest.mark.parametrize("place", ["product", "above", "losses", "product that is the losses"])
def test_hooks_that_scale_are_run_once(place: str) -> None:
    """Autograd runs the hooks of a result again where it begins at it."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 2) if place != "product that is the losses" else torch.randn(3))
    found = Product.apply(torch.randn(4, 3), weight)
    steps = {"product": found}
    if found.dim() > 1:
        steps["above"] = found.tanh()
        steps["losses"] = steps["above"].square().sum(1)
    steps.get(place, found).register_hook(lambda gradient: 2.0 * gradient)
    check_uncompared({"weight": weight}, steps.get("losses", found))
