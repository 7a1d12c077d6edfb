"""Where the examples are: what operations mean against what their backward does, and models that once were misread."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from edpsgd.per_example import UnitGradients
from edpsgd.per_example.attribution import Trace
from edpsgd.per_example.graph import Graph, shapes
from edpsgd.per_example.operations import MEANINGS, arguments
from edpsgd.per_example.owners import NOBODY, SHARED, merged, merged_along, reshaped, scattered
from tests.helpers.networks.network import Network, make_plan
from tests.helpers.unit_loop import Fast, check, trained

SIZES = [(10, 13), (14, 11), (9, 15), (12, 10), (16, 14), (12, 12), (7, 7), (1, 1), (1, 6), (6, 1)]


def test_meanings_say_what_backward_does() -> None:
    """An operation may be taken for sharing what it keeps apart, but never the other way round."""
    compared = Counter[str]()
    for seed in range(60):
        torch.manual_seed(seed)
        plan = make_plan(seed)
        network = Network(plan)
        network.wake()
        for batch in [one for one in plan.data() if one.examples > 1][:2]:
            graph = Graph(network(batch))
            trace = Trace(graph)
            for node in graph.nodes:
                results = trace.results(node)
                if node.name() not in MEANINGS or all(one is None or bool((one < 0).all()) for one in results):
                    continue
                for said, found in zip(arguments(node, results), trace._try(node, results), strict=True):
                    if said is not None:
                        is_right = (said == SHARED) | (found == NOBODY) | (said == found)
                        assert bool(is_right.all()), (seed, node.name())
                        compared[node.name()] += 1
    assert len(compared) > 45, sorted(compared)


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


class Reordering(torch.autograd.Function):
    """Rows in an order that no graph tells."""

    @staticmethod
    def forward(context, rows, order):
        context.order = order
        return rows[order]

    @staticmethod
    def backward(context, gradient):
        back = torch.zeros_like(gradient)
        back[context.order] = gradient
        return back, None


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


def test_owners_by_hand() -> None:
    rows = torch.tensor([[0], [1], [2]])
    assert reshaped(rows, (3, 4), (12,)).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert reshaped(rows, (3, 4), (3, 2, 2)).shape == (3, 1, 1)
    assert reshaped(rows.T, (4, 3), (12,)).tolist() == [0, 1, 2] * 4
    assert merged_along(rows, [0]).tolist() == [[SHARED]]
    assert merged(rows, torch.tensor([[0], [NOBODY], [1]])).flatten().tolist() == [0, 1, SHARED]
    picked = torch.tensor([0, 2, 2, 4])
    assert scattered(torch.tensor([5, 6, 6, 7]), picked, (5,)).tolist() == [5, NOBODY, 6, NOBODY, 7]
    assert scattered(torch.tensor([5, 6, 7, 7]), picked, (5,)).tolist() == [5, NOBODY, SHARED, NOBODY, 7]


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


def test_more_examples_than_there_are_powers_of_two() -> None:
    """Tried out in two passes: every example has a number of two digits."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    order = torch.randperm(70)
    graph = Graph(Reordering.apply(layer(torch.randn(70, 3)), order).square().sum(1))
    trace = Trace(graph)
    product = next(node for node in graph.nodes if node.name() == "AddmmBackward0")
    assert [node.name() for node in trace.tried] == ["ReorderingBackward"]
    assert trace.owners(product).flatten().tolist() == torch.argsort(order).tolist()
    assert shapes(product) == [(70, 2)]
