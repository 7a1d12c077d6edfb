"""The rules against the loop over units, on a zoo of operations and ways to lay out a batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edpsgd.per_example import UnitGradients, ghost
from tests.edpsgd.per_example.zoo import ZOO, Sequences, made
from tests.helpers.unit_loop import Fast, check, check_uncompared, trained


@pytest.mark.parametrize("name", ZOO)
def test_units_of_one_two_and_eight_examples(name: str) -> None:
    """Several batches of other sizes, also with as many steps as examples; nothing is left to autograd."""
    model = made(name)
    engine = UnitGradients(trained(model))
    with Fast():
        for seed, (examples, steps) in enumerate([(4, 3), (4, 4), (2, 5), (1, 3)]):
            check(engine, model, model(Sequences(examples, steps, seed)))
        for seed, size in enumerate((2, 8)):
            units = torch.arange(16) // size
            check(engine, model, model(Sequences(16, 3, seed)), units, 16 // size)


@pytest.mark.parametrize("name", ["LSTM, packed", "LSTM, time first", "characters", "tied", "loose"])
def test_units_in_any_order(name: str) -> None:
    """Of unequal sizes, and one of them empty."""
    model = made(name)
    check(UnitGradients(trained(model)), model, model(Sequences(5, 4, 1)), torch.tensor([3, 0, 3, 2, 3]), 5)


@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize(
    "name", ["tied", "characters", "LSTM, packed", "tokens first", "twice", "positions", "LSTM, time first"]
)
def test_layers_that_are_too_large_for_gradients_of_their_own(
    name: str, is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms through products of rows, or through gradients that are made a few at a time and thrown away."""
    monkeypatch.setattr(ghost.LayerGradients, "_should_instantiate", lambda self: False)
    monkeypatch.setattr(ghost.LayerGradients, "_prefers_ghost_norm", lambda self, *rows: is_wide)
    monkeypatch.setattr(ghost, "_CHUNK", 50)
    model = made(name)
    engine = UnitGradients(trained(model))
    with Fast():
        check(engine, model, model(Sequences(5, 4, 1)))
        check(engine, model, model(Sequences(5, 4, 2)), torch.tensor([3, 0, 3, 2, 3]), 5)


SIZES = {1: (11,), 2: (9, 8)}

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d}


def check_convolution(layer: nn.Module, spatial: tuple[int, ...]) -> None:
    engine = UnitGradients(trained(layer))
    for examples in (6, 4):
        inputs = torch.randn(examples, 4, *spatial)
        check(engine, layer, layer(inputs).flatten(1).square().sum(1))


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("padding", ["valid", "same", 1])
def test_convolutions(dims: int, stride: int, dilation: int, padding: str | int) -> None:
    if padding == "same" and stride > 1:
        stride = 1  # torch has no others
    torch.manual_seed(0)
    for channels in (6, 64):
        layer = CONVOLUTIONS[dims](4, channels, 3, stride=stride, dilation=dilation, padding=padding)
        with Fast():
            check_convolution(layer, SIZES[dims])


@pytest.mark.filterwarnings("ignore:gradients for .* are computed unit by unit")
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, groups=2, padding="valid"),
        nn.Conv1d(4, 8, 2, groups=4, padding="same"),
        nn.ConvTranspose1d(4, 6, 3, stride=2),
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2),
        nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular"),
    ],
    ids=lambda layer: str(layer),
)
def test_other_convolutions(layer: nn.Module) -> None:
    torch.manual_seed(0)
    check_convolution(layer, SIZES[1] if "1d" in type(layer).__name__ else SIZES[2])


@pytest.mark.parametrize("how", ["multiplied", "added", "product"])
def test_real_parameters_in_complex_operations(how: str) -> None:
    """Their gradients are the real parts of products with conjugates."""
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.randn(3, 3)), torch.randn(4, 3, dtype=torch.complex64)
    found = {"multiplied": x * weight[0] + x, "added": x + weight[0], "product": x @ weight.to(x.dtype)}[how]
    check_uncompared({"weight": weight}, found.abs().sum(1))
    vector = nn.Parameter(torch.randn(3))
    found = {"multiplied": x * vector + x, "added": x + vector, "product": x @ vector.diag().to(x.dtype)}[how]
    check_uncompared({"vector": vector}, found.abs().sum(1))


def test_a_layer_norm_with_a_transposed_weight() -> None:
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))
    normed = nn.functional.layer_norm(torch.randn(4, 3, 3), (3, 3), weight.T, bias.T)
    check_uncompared({"weight": weight, "bias": bias}, normed.pow(3).sum((1, 2)))


def test_a_bias_of_one_number_for_all_features() -> None:
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(1))
    losses = nn.functional.linear(torch.randn(4, 3), weight, bias).square().sum(1)
    check_uncompared({"weight": weight, "bias": bias}, losses)


def test_a_product_over_no_features() -> None:
    """A matrix without rows has a width all the same."""
    torch.manual_seed(0)
    parameters = {"empty": nn.Parameter(torch.randn(0, 2)), "weight": nn.Parameter(torch.randn(3, 2))}
    x = torch.randn(4, 3)
    losses = (x[:, :0] @ parameters["empty"] + x @ parameters["weight"]).square().sum(1)
    check_uncompared(parameters, losses)
