"""Where the examples are: models that once were misread, and what mixes examples."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import edpsgd
from edpsgd.per_example import UnitGradients
from edpsgd.per_example.attribution import attribute_examples
from edpsgd.per_example.graph import read_graph
from tests.edpsgd.per_example.zoo import SIZES, Reordering
from tests.helpers.unit_loop import Fast, check, gradients_of, trained


@pytest.mark.parametrize("seed", range(3))
def test_one_norm_in_two_layouts(seed: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.norm, self.rnn, self.out = nn.Embedding(50, 8), nn.LayerNorm(8), nn.LSTM(8, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            states = self.rnn(self.norm(self.e(x)).transpose(0, 1))[0]
            return (self.out(self.norm(states)).mean((0, 2)) - y).square()

    torch.manual_seed(seed)
    model = Net()
    engine = UnitGradients(trained(model))
    for examples, tokens in SIZES:
        y = torch.randn(examples)
        y[0] = 1e4
        with Fast():
            check(engine, model, model(torch.randint(50, (examples, tokens)), y))


@pytest.mark.parametrize("how", ["multiplied", "added"])
def test_one_parameter_in_two_layouts(how: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.loose = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def with_it(y: torch.Tensor) -> torch.Tensor:
                return y * self.loose if how == "multiplied" else y + self.loose

            hidden = with_it(self.first(x)).tanh().transpose(0, 1)
            return with_it(hidden).square().sum((0, 2))

    torch.manual_seed(0)
    model = Net()
    engine = UnitGradients(trained(model))
    for examples, tokens in SIZES:
        with Fast():
            check(engine, model, model(torch.randn(examples, tokens, 4)))


class Mul(Reordering):
    """The same under a name that torch has too."""


def moved(how: str, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    if how in ("custom function", "name of another"):
        return (Reordering if how == "custom function" else Mul).apply(rows, order)
    if how == "index_reduce":
        return torch.zeros_like(rows).index_reduce(0, order, rows, "mean", include_self=False)
    if how == "_unsafe_index":
        return torch.ops.aten._unsafe_index(rows, [order])
    back = torch.zeros_like(rows)
    back[order] = rows
    return back


@pytest.mark.parametrize(
    "how", ["custom function", "name of another", "index_reduce", "_unsafe_index", "written in place"]
)
def test_rows_in_another_order_in_every_batch(how: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)])
    engine = UnitGradients(trained(model))
    for _ in range(8):
        order = torch.randperm(6)
        with Fast():
            check(engine, model, model[1](moved(how, model[0](torch.randn(6, 3)).tanh(), order)).square().sum(1))


def test_operations_in_place() -> None:
    """A ReLU on what a linear layer makes of three dimensions, and a mask on a part of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    engine = UnitGradients(trained(model))
    for examples, tokens in SIZES:
        with Fast():
            check(engine, model, model(torch.randn(examples, tokens, 3)).square().sum((1, 2)))
            hidden = model[0](torch.randn(examples, tokens, 3))
            part = hidden[:, :1]
            part.masked_fill_(torch.rand(part.shape) > 0.5, 0.0)
            check(engine, model, model[2](hidden).square().sum((1, 2)))


def test_parts_without_rows_belong_to_nobody() -> None:
    """Experts and halves of a batch may be empty; what is added to them keeps its owners."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)])
    engine = UnitGradients(trained(model))
    for number in (0, 3, 6):
        hidden = model[0](torch.randn(6, 3)).tanh()
        order = torch.randperm(6)
        parts = [model[1](hidden.index_select(0, some)) for some in (order[:number], order[number:])]
        losses = torch.zeros(6).index_add(0, order, torch.cat(parts).square().sum(1))
        with Fast():
            check(engine, model, losses)


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


def test_batch_statistics_are_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    engine = UnitGradients(trained(model))
    with pytest.raises(ValueError, match="batch normalisation in training mode mixes the examples"):
        engine.backward(model(torch.randn(5, 3)).squeeze(1))
    model[1].eval()
    check(engine, model, model(torch.randn(5, 3)).squeeze(1))


def test_statistics_of_single_examples_are_none_of_a_batch() -> None:
    """Instance normalisation is a batch normalisation with a channel for each example and feature."""
    model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.InstanceNorm1d(4), nn.Conv1d(4, 2, 1))
    for batch in (5, 4, 1):
        check(UnitGradients(trained(model)), model, model(torch.randn(batch, 3, 4)).square().sum((1, 2)))


def test_owners_of_every_result_by_hand() -> None:
    """Tokens first; all examples share the bias."""
    layer = nn.Linear(3, 2)
    found = attribute_examples(read_graph(layer(torch.randn(5, 4, 3)).tanh().sum((0, 2))))
    nodes = {node.name(): node for node in found.graph.nodes}
    assert found.owners(found.graph.root[0]).tolist() == [0, 1, 2, 3]
    assert found.owners(nodes["TanhBackward0"]).tolist() == [[[0], [1], [2], [3]]]
    rows = found.owners(nodes["AddmmBackward0"])
    assert rows.flatten().tolist() == [0, 1, 2, 3] * 5
    assert found.is_separable(nodes["AddmmBackward0"])
    assert not found.is_separable(found.graph.leaves[id(layer.bias)])
    assert not found.probed
