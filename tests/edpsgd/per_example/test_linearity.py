"""What no factor can be applied to is refused, and what is far larger or broken beside it hides nothing."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import edpsgd
from edpsgd.per_example import UnitGradients, WrongGradients
from tests.helpers.unit_loop import check, gradients_of, trained

PER_LAYER = ["flat", "per_layer"]


class Changed(torch.autograd.Function):
    """The identity, with a gradient that is changed on its way back."""

    @staticmethod
    def forward(ctx, inputs, change):
        ctx.change = change
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        return CHANGES[ctx.change](gradient), None


CHANGES = {
    "clamped": lambda gradient: gradient.clamp(-1e-3, 1e-3),
    "clamped far away": lambda gradient: gradient.clamp(-1e6, 1e6),
    "normalised": lambda gradient: gradient / gradient.norm().clamp(min=1e-12),
    "sign": torch.sign,
    "size": torch.abs,
    "rounded to zero": lambda gradient: torch.where(gradient.abs() < 1e-3, 0.0, gradient),
    "scaled": lambda gradient: -3.0 * gradient,  # the only one that is linear
}
NOT_LINEAR = [name for name in CHANGES if name != "scaled"]


class Net(nn.Module):
    """Two layers, with something between them that changes gradients."""

    def __init__(self, how: str, change: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 1)
        self.how, self.change = how, change
        if how == "hook of a parameter":
            self.first.weight.register_hook(CHANGES[change])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs).tanh()
        if self.how == "function":
            hidden = Changed.apply(hidden, self.change)
        elif self.how == "hook":
            hidden.register_hook(CHANGES[self.change])
        return (self.last(hidden).squeeze(1) - 1).square()


def optimizer_of(model: nn.Module, verify: str = "spot", clipping: str = "flat") -> edpsgd.PrivateOptimizer:
    return edpsgd.PrivateOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        clip_norm=1.0,
        noise_multiplier=0.0,
        clipping=clipping,
        unit="example",
        divisor=4.0,
        verify=verify,
        collective="local",
    )


@pytest.mark.parametrize("clipping", PER_LAYER)
@pytest.mark.parametrize("verify", ["spot", "always"])
@pytest.mark.parametrize("change", ["clamped", "clamped far away", "normalised"])
@pytest.mark.parametrize("how", ["function", "hook", "hook of a parameter"])
def test_gradients_that_are_not_linear_are_refused(how, change, verify, clipping) -> None:
    model = Net(how, change)
    optimizer = optimizer_of(model, verify, clipping)
    before = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.backward(10 * model(torch.randn(4, 4)))
    with pytest.raises(WrongGradients, match="clamps"):
        optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("change", NOT_LINEAR)
def test_functions_are_tried_in_every_batch(change) -> None:
    """A function that comes later is seen in the first batch that has it, which nothing else would compare."""
    model = Net("nothing", change)
    engine = UnitGradients(trained(model))
    for _ in range(2):
        engine.backward(model(torch.randn(4, 4)))
    model.how = "function"
    with pytest.raises(WrongGradients, match="not linear"):
        engine.backward(model(torch.randn(4, 4)))


@pytest.mark.parametrize("examples", [1, 2, 4])
@pytest.mark.parametrize("how", ["function", "hook", "hook of a parameter"])
def test_linear_changes_are_right(how, examples) -> None:
    model = Net(how, "scaled")
    engine = UnitGradients(trained(model))
    for _ in range(3):
        losses = model(torch.randn(examples, 4))
        expected = gradients_of(losses, list(model.parameters()), torch.arange(examples), examples)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            norms = engine.backward(losses)
        wanted = torch.tensor([[float(one.norm()) for one in unit] for unit in expected])
        torch.testing.assert_close(norms, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1e5, 1e7, 1e9])
def test_a_shared_row_is_shared_beside_an_example_that_is_far_larger(size) -> None:
    """Label embeddings belong to all examples, however little one of them adds to what another one gives."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 3), nn.Embedding(3, 3)])
    engine = UnitGradients(trained(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(4):
            inputs = torch.randn(4, 4)
            inputs[0] *= size if number == 2 else 1.0
            scores = model[0](inputs) @ model[1](torch.arange(3)).t()
            losses = nn.functional.cross_entropy(scores, torch.tensor([0, 1, 2, 0]), reduction="none")
            expected = gradients_of(losses, list(model.parameters()), torch.arange(4), 4)
            wanted = torch.tensor([[float(one.double().norm()) for one in unit] for unit in expected])
            torch.testing.assert_close(engine.backward(losses), wanted, rtol=1e-4, atol=1e-6)


def test_embeddings_that_count_the_batch_are_refused() -> None:
    model = nn.Embedding(7, 3, scale_grad_by_freq=True)
    with pytest.raises(ValueError, match="scale_grad_by_freq"):
        edpsgd.check_model(model)
    edpsgd.check_model(model, unit="micro_batch")
    losses = nn.functional.embedding(torch.tensor([1, 1, 2]), model.weight, scale_grad_by_freq=True).square().sum(1)
    with pytest.raises(ValueError, match="scale_grad_by_freq"):
        UnitGradients(trained(model)).backward(losses)


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


def test_a_gradient_near_the_end_of_single_precision() -> None:
    model = nn.Linear(4, 1)
    inputs = torch.randn(3, 4)
    inputs[1] *= 1e12
    norms = UnitGradients(trained(model)).backward((model(inputs).squeeze(1) - 1).square())
    assert torch.isfinite(norms).all()


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
