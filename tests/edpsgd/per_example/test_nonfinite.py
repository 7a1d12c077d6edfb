"""Examples with NaN or infinities: they leave a step alone, and hide nothing."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from edpsgd.per_example import UnitGradients, rules
from edpsgd.per_example.uses import Received
from tests.edpsgd.per_example.zoo import optimizer_of
from tests.helpers.common import private
from tests.helpers.unit_loop import trained

EXAMPLES, TOKENS, WIDTH = 8, 3, 6


class Packed(nn.Module):
    """Sequences one after the other in one attention, with a block mask; two layers, so that NaN can spread."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        examples, tokens, width = inputs.shape
        owners = torch.arange(examples).repeat_interleave(tokens)
        mask = owners.unsqueeze(0) != owners.unsqueeze(1)
        rows = inputs.reshape(-1, width)
        for layer in (self.first, self.second):
            rows = layer(rows)
            weights = (rows @ rows.T).masked_fill(mask, -torch.inf).softmax(1)
            rows = weights @ rows
        return self.out(rows).view(examples, tokens).mean(1)


def losses_of(model: Packed, inputs: torch.Tensor, broken: list[int]) -> torch.Tensor:
    """Some have gradients that are not finite; the first of them also has such a loss."""
    found = model(inputs)
    factors = torch.ones(len(inputs))
    losses = found.square()
    for number, example in enumerate(broken):
        factors[example] = torch.inf if number == 0 else 1.0
    losses = losses * factors
    for example in broken[1:]:
        losses = losses + nn.functional.one_hot(torch.tensor(example), len(inputs)) * (found * 0.0).sqrt()
    return losses


@pytest.mark.filterwarnings("ignore:gradients for .* are computed unit by unit")
@pytest.mark.parametrize("broken", [[2], [2, 5], [0, 1, 7]])
@pytest.mark.parametrize("verifies_all", [False, True])
def test_a_broken_example_leaves_the_others(broken: list[int], verifies_all: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Packed(), torch.randn(EXAMPLES, TOKENS, WIDTH)
    engine = UnitGradients(trained(model), verifies_all=verifies_all)
    for _ in range(2):
        if len(broken) > 1:  # whether the second one broke itself cannot be told where rows are shared
            with pytest.raises(RuntimeError, match="may have reached others"):
                engine.backward(losses_of(model, inputs, broken))
            continue
        norms = engine.backward(losses_of(model, inputs, broken))
        assert (~torch.isfinite(norms).all(1)).nonzero().flatten().tolist() == broken
        sums = [torch.zeros_like(p, requires_grad=False) for p in model.parameters()]
        factors = torch.arange(1.0, EXAMPLES + 1)
        factors[broken] = 0.0
        engine.add_weighted_(sums, factors)
        alone = torch.stack([model(one.unsqueeze(0)).square().squeeze() for one in inputs])
        expected = torch.autograd.grad((alone * factors).sum(), list(model.parameters()))
        torch.testing.assert_close(sums, list(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:gradients for .* are computed unit by unit", "ignore:.* held NaN")
def test_a_broken_example_moves_a_step_by_its_own_share_only() -> None:
    torch.manual_seed(0)
    model, inputs = Packed(), torch.randn(EXAMPLES, TOKENS, WIDTH)
    before = [p.detach().clone() for p in model.parameters()]
    moved = []
    for broken in ([], [2]):
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.data.copy_(value)
        optimizer = private(model, clip_norm=0.5, noise_multiplier=0.0, unit="example", divisor=1)
        optimizer.backward(losses_of(model, inputs, broken))
        optimizer.step()
        moved.append(
            torch.cat([(p.detach() - value).flatten() for p, value in zip(model.parameters(), before, strict=True)])
        )
    assert 0.0 < float((moved[0] - moved[1]).norm()) <= 0.5


class Apart(nn.Module):
    """A root of zero has a gradient that is not finite; a group norm has no rule, and is computed unit by unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.GroupNorm(2, WIDTH)

    def forward(self, inputs: torch.Tensor, broken: list[int]) -> torch.Tensor:
        hidden = self.norm(self.layer(inputs).transpose(1, 2)).square().mean((1, 2))
        kept = torch.ones(len(inputs)).index_fill(0, torch.tensor(broken, dtype=torch.int64), 0.0)
        return hidden + (hidden * kept).sqrt()


@pytest.mark.filterwarnings("ignore:gradients for .* are computed unit by unit")
def test_several_that_broke_themselves_are_left_out() -> None:
    """Their losses are finite, and a layer is computed unit by unit: each is looked at alone."""
    torch.manual_seed(0)
    model, inputs = Apart(), torch.randn(EXAMPLES, TOKENS, WIDTH)
    norms = UnitGradients(trained(model)).backward(model(inputs, [1, 4]))
    assert (~torch.isfinite(norms).all(1)).nonzero().flatten().tolist() == [1, 4]


@pytest.mark.parametrize("broken", [[], [3], [3, 6]])
def test_a_broken_example_hides_no_wrong_rule(broken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    plain = rules.RULES["AddmmBackward0"]

    def swapped(use, received, layer):
        order = torch.arange(EXAMPLES)
        order[[1, 2]] = order[[2, 1]]
        plain.add(use, Received([received.output_gradient[order]], received.layout, received.units), layer)

    monkeypatch.setitem(rules.RULES, "AddmmBackward0", replace(plain, add=swapped))
    losses = model(torch.randn(EXAMPLES, WIDTH)).square().squeeze(1)
    factors = torch.ones(EXAMPLES).index_fill(0, torch.tensor(broken, dtype=torch.int64), torch.inf)
    with pytest.warns(RuntimeWarning, match="do not agree with autograd"):
        UnitGradients(trained(model)).backward(losses * factors)


def test_units_with_nan_harm_no_others() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    engine = UnitGradients(trained(model))
    numbers = torch.tensor([[0, 1], [2, 2], [3, 4]])
    for number in range(5):  # batches that are checked, and one that is not
        hidden = model(numbers)
        sick = hidden * torch.tensor([1.0, math.nan if number % 2 else math.inf, 1.0]).view(3, 1, 1)
        norms = engine.backward(sick.square().sum((1, 2)))
        sums = [torch.zeros_like(p) for p in model.parameters()]
        engine.add_weighted_(sums, torch.ones(3))
        well = model(numbers[[0, 2]]).square().sum((1, 2))
        expected = torch.autograd.grad(well.sum(), list(model.parameters()))
        assert torch.isfinite(norms).all(1).tolist() == [True, False, True]
        torch.testing.assert_close(sums, list(expected))


@pytest.mark.parametrize("verify", ["spot", "always"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 2, 3])
def test_an_example_with_a_broken_input_is_left_out_of_a_compared_batch(place, bad, verify) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer, other = optimizer_of(model, verify), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    other.load_state_dict(model.state_dict())
    alone = optimizer_of(other, verify)
    for step in range(5):
        inputs = torch.randn(4, 4)
        kept = [0, 2, 3] if step == place else [0, 1, 2, 3]
        if step == place:
            inputs[1, 2] = bad
        for trained_one, rows in ((optimizer, [0, 1, 2, 3]), (alone, kept)):
            network = model if trained_one is optimizer else other
            trained_one.backward((network(inputs[rows]).squeeze(1) - 1).square())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trained_one.step()
    assert optimizer.discarded == 1
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    conditions = " ".join(optimizer.epsilon(1e-5).conditions)
    assert ("kept autograd from the comparison" in conditions) == (verify == "always")
