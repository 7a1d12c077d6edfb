"""What backward says of examples, by codes of constant weight."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edpsgd.per_example.attribution import attribute_examples
from edpsgd.per_example.graph import read_graph, shapes
from edpsgd.per_example.owners import NOBODY, SHARED
from edpsgd.per_example.probing import Prober, call_backward, keep_zeros
from tests.edpsgd.per_example.zoo import Reordering
from tests.helpers.unit_loop import check_uncompared


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


@pytest.mark.parametrize("examples", [1, 2, 3, 20, 70])
def test_no_code_holds_another_one(examples: int) -> None:
    """Each has as many calls, so that two examples together have more than any one."""
    codes = Prober(examples, seed=0).codes
    assert len(codes) == examples
    assert len({tuple(code) for code in codes.tolist()}) == examples
    assert set(codes.sum(1).tolist()) == {codes.shape[1] // 2}


def test_owners_that_a_product_with_zeros_keeps_apart() -> None:
    """Rows 0 and 1 of the second matrix are for one example each, 2 for both, and 3 for nobody."""
    mask = torch.tensor([[1.0, 0.0, 1e-6, 0.0], [0.0, 1.0, 1e6, 0.0]])
    rows = torch.randn(4, 3, requires_grad=True)
    graph = read_graph((mask @ rows).sum(1))
    product = next(node for node in graph.nodes if node.name() == "MmBackward0")
    owners = Prober(2, seed=0).probe(product, [torch.tensor([[0], [1]])])[1]
    assert owners.shape == (4, 1)
    assert owners.flatten().tolist() == [0, 1, SHARED, NOBODY]


def test_random_output_gradients_are_not_small_and_leave_torch_alone() -> None:
    state = torch.get_rng_state()
    numbers = Prober(2, seed=0).random_output_gradient(torch.empty(1000))
    assert torch.equal(state, torch.get_rng_state())
    sizes = numbers.abs() / numbers.abs().min()
    assert float(numbers.min()) < 0 < float(numbers.max())
    assert float(sizes.max()) <= 2.0


def test_a_saved_infinity_makes_nan_of_zeros() -> None:
    x = torch.randn(3, requires_grad=True)
    for factor, keeps in ((1.0, True), (torch.inf, False)):
        node = (x * torch.full((3,), factor)).grad_fn
        assert keep_zeros([node]) == keeps


def test_a_function_answers_for_its_tensors_only() -> None:
    layer, order = nn.Linear(3, 2), torch.tensor([2, 0, 1])
    losses = Reordering.apply(layer(torch.randn(3, 3)), order).sum(1)
    function = next(node for node in read_graph(losses).nodes if "Reordering" in node.name())
    [rows, nothing] = call_backward(function, [torch.eye(3)[:, :2]])
    assert rows[order].tolist() == torch.eye(3)[:, :2].tolist()
    assert nothing is None


def test_imaginary_parts_belong_to_somebody() -> None:
    """An argument may receive nothing but the imaginary parts of what the result receives."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"real": nn.Linear(3, 2), "imaginary": nn.Linear(3, 2)})
    x = torch.randn(4, 3)
    losses = torch.complex(model["real"](x), model["imaginary"](x)).abs().sum(1)
    check_uncompared(dict(model.named_parameters()), losses)
