"""Where parameters go into operations."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from edpsgd.per_example import UnitGradients
from edpsgd.per_example.graph import read_graph
from edpsgd.per_example.layout import Layout, make_units
from edpsgd.per_example.uses import Received, Use, find_uses
from tests.helpers.unit_loop import check, check_uncompared, trained


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


def uses_of(parameter: torch.Tensor, losses: torch.Tensor) -> list[Use]:
    graph = read_graph(losses)
    return find_uses(graph, graph.leaves[id(parameter)], parameter.shape)


def test_a_weight_is_found_behind_a_transpose_a_cast_and_another_shape() -> None:
    weight, x = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, dtype=torch.float64)
    [use] = uses_of(weight, (x @ weight.double().T).sum(1))
    assert (use.node.name(), use.slot, use.shape) == ("MmBackward0", 1, (3, 2))
    assert use.is_turned
    assert not use.is_reshaped
    [use] = uses_of(weight, (x @ weight.double().view(3, 2)).sum(1))
    assert not use.is_turned
    assert use.is_reshaped


def test_all_uses_of_a_parameter_are_found() -> None:
    layer = nn.Linear(3, 3)
    uses = uses_of(layer.weight, layer(layer(torch.randn(4, 3)).tanh()).sum(1))
    assert [use.node.name() for use in uses] == ["AddmmBackward0"] * 2
    assert uses[0].node is not uses[1].node


def test_the_sum_that_broadcasts_positions_receives_for_them() -> None:
    table = nn.Embedding(5, 3)
    places = table(torch.arange(2).unsqueeze(0))
    [use] = uses_of(table.weight, (torch.randn(4, 2, 3) + places).sum((1, 2)))
    assert (use.node.name(), use.receiver.name()) == ("EmbeddingBackward0", "AddBackward0")


def test_what_is_held_outlives_the_backward_pass() -> None:
    layer, x = nn.Linear(3, 1), torch.randn(4, 3)
    losses = layer(x).squeeze(1)
    [use] = uses_of(layer.weight, losses)
    use.hold(["mat1"])
    losses.sum().backward()
    assert torch.equal(use.saved("mat1"), x)


def test_rows_of_an_output_gradient() -> None:
    """Examples lie along the second dimension; each row is a token."""
    units = make_units(torch.ones(2), None, None)
    gradient = torch.randn(3, 2, 4)
    received = Received([gradient], Layout(1, torch.tensor([1, 0])), units)
    rows = received.as_rows(received.output_gradient, 1)
    assert torch.equal(rows, gradient.transpose(0, 1).reshape(6, 4))
    assert received.units_of(rows).units.tolist() == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_losses_that_are_a_parameter_in_another_shape(shape: tuple[int, ...]) -> None:
    """Nothing comes after the change of shape, but each loss has a gradient of 1."""
    parameter = nn.Parameter(torch.randn(shape))
    check_uncompared({"parameter": parameter}, parameter.view(4))
