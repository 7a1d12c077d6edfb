"""The graph that autograd recorded."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import Node

from edpsgd.per_example.graph import (
    argument_shapes,
    is_weight,
    node_of,
    read_graph,
    saved,
    shapes,
    swaps,
)


def small_losses() -> tuple[nn.Linear, torch.Tensor]:
    layer = nn.Linear(3, 2)
    hidden = layer(torch.randn(4, 3)).tanh()
    return layer, (hidden * hidden.exp()).sum(1)  # hidden is used twice


def find(nodes: list[Node], name: str) -> Node:
    [found] = [node for node in nodes if node.name() == name]
    return found


def test_every_node_comes_after_all_of_its_consumers() -> None:
    layer, losses = small_losses()
    graph = read_graph(losses)
    assert graph.examples == 4
    assert graph.root == (losses.grad_fn, 0)
    place = {node: number for number, node in enumerate(graph.nodes)}
    assert place[graph.root[0]] == 0
    for node, consumers in graph.consumers.items():
        assert all(place[consumer] < place[node] for consumer, _ in consumers)
    tanh = find(graph.nodes, "TanhBackward0")
    assert {node.name() for node, _ in graph.consumers[tanh]} == {"MulBackward0", "ExpBackward0"}
    assert set(graph.leaves) == {id(layer.weight), id(layer.bias)}


def test_shapes_of_results_and_arguments() -> None:
    _, losses = small_losses()
    product = find(read_graph(losses).nodes, "AddmmBackward0")
    assert shapes(product) == [(4, 2)]
    assert argument_shapes(product) == [(2,), (), (3, 2)]  # the input needs no gradient


def test_output_gradients_are_those_of_hooks() -> None:
    _, losses = small_losses()
    graph = read_graph(losses)
    tanh = find(graph.nodes, "TanhBackward0")
    seen: list[torch.Tensor] = []
    handle = tanh.register_prehook(lambda gradients: seen.append(gradients[0]))
    weights = torch.tensor([1.0, 2.0, 0.0, -1.0])
    losses.backward(weights, retain_graph=True)
    handle.remove()
    received = graph.output_gradients(losses, weights, [tanh])
    torch.testing.assert_close(received[tanh][0], seen[0], rtol=0, atol=0)
    assert graph.output_gradients(losses, weights, []) == {}


def test_a_node_is_freed_without_its_own_backward() -> None:
    _, losses = small_losses()
    graph = read_graph(losses)
    product = find(graph.nodes, "AddmmBackward0")
    graph.free(product)
    with pytest.raises(RuntimeError, match="already been freed"):
        saved(product, "_saved_mat1")


def test_what_is_below_a_node_ends_at_the_stops() -> None:
    _, losses = small_losses()
    graph = read_graph(losses)
    product = find(graph.nodes, "AddmmBackward0")
    assert graph.below(graph.root[0]) == set(graph.nodes[1:])
    above = graph.below(graph.root[0], [product])
    assert set(graph.nodes[1:]) - above == graph.below(product)


def test_weights_are_told_from_data() -> None:
    table, weight = nn.Embedding(5, 3), torch.randn(3, 3, requires_grad=True)
    assert is_weight(node_of(weight.T.exp()))
    assert not is_weight(node_of(table(torch.tensor([1]))))  # the data choose the row
    assert not is_weight(None)


@pytest.mark.parametrize("first", [0, -2])
def test_a_transpose_of_a_dimension_with_itself_swaps_nothing(first: int) -> None:
    matrix = torch.randn(2, 2, requires_grad=True)
    assert not swaps(node_of(matrix.transpose(first, 0)))
    assert swaps(node_of(matrix.transpose(first, 1)))
