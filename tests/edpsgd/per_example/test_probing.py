"""What backward says of examples, by codes of constant weight."""

from __future__ import annotations

import torch
from torch import nn

from edpsgd.per_example.attribution import attribute_examples
from edpsgd.per_example.graph import read_graph, shapes
from tests.edpsgd.per_example.zoo import Reordering


def test_more_examples_than_there_are_powers_of_two() -> None:
    """Tried out in two passes: every example has a number of two digits."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    order = torch.randperm(70)
    graph = read_graph(Reordering.apply(layer(torch.randn(70, 3)), order).square().sum(1))
    trace = attribute_examples(graph)
    product = next(node for node in graph.nodes if node.name() == "AddmmBackward0")
    assert [node.name() for node in trace.probed] == ["ReorderingBackward"]
    assert trace.owners(product).flatten().tolist() == torch.argsort(order).tolist()
    assert shapes(product) == [(70, 2)]
