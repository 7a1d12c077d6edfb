"""What no factor can be applied to is refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from edpsgd.per_example import UnitGradients, WrongGradients
from edpsgd.per_example.graph import read_graph
from edpsgd.per_example.linearity import refuse_nonlinear
from edpsgd.per_example.probing import Prober
from tests.edpsgd.per_example.zoo import optimizer_of
from tests.helpers.unit_loop import gradients_of, trained

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGES)
def test_one_function_alone(change: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, dtype=dtype, requires_grad=True)
    graph = read_graph(Changed.apply(x, change).float().sum(1))
    function = next(node for node in graph.nodes if node.name() == "ChangedBackward")
    prober = Prober(4, seed=0)
    if change == "scaled":
        refuse_nonlinear(function, prober)
    else:
        with pytest.raises(WrongGradients, match="ChangedBackward is not linear"):
            refuse_nonlinear(function, prober)


class ComplexClamped(torch.autograd.Function):
    """A complex number of a real one, with a backward that clamps."""

    @staticmethod
    def forward(ctx, x):
        return torch.complex(x, x)

    @staticmethod
    def backward(ctx, output_gradient):
        return (output_gradient.real + output_gradient.imag).clamp(-0.1, 0.1)


def test_a_function_with_complex_results_is_tried_too() -> None:
    layer = nn.Linear(3, 2)
    losses = ComplexClamped.apply(layer(torch.randn(4, 3))).abs().sum(1)
    function = next(node for node in read_graph(losses).nodes if node.name() == "ComplexClampedBackward")
    with pytest.raises(WrongGradients, match="ComplexClampedBackward is not linear"):
        refuse_nonlinear(function, Prober(4, seed=0))
