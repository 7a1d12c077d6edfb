"""Which parameters rules serve, and where the others are cut."""

from __future__ import annotations

import torch
from torch import nn

from edpsgd.per_example.attribution import attribute_examples
from edpsgd.per_example.graph import read_graph
from edpsgd.per_example.plan import Plan, Planner
from tests.helpers.unit_loop import check_uncompared, trained


def planned(model: nn.Module, losses: torch.Tensor, *distrusted: str) -> tuple[Plan, Planner]:
    planner = Planner(trained(model), attribute_examples(read_graph(losses)))
    return planner.make_plan(set(distrusted)), planner


def test_a_linear_layer_is_served_where_its_rows_are() -> None:
    """Tokens come first: the examples lie along the second dimension."""
    layer = nn.Linear(3, 2)
    plan, planner = planned(layer, layer(torch.randn(5, 4, 3)).square().sum((0, 2)))
    assert set(plan.served) == {"weight", "bias"}
    assert not plan.cuts
    [weight], [bias] = plan.served["weight"], plan.served["bias"]
    assert weight.layout is bias.layout  # what follows from it is computed once
    assert weight.layout.labels.tolist() == [0, 1, 2, 3] * 5
    assert plan.watched(planner.attribution.graph.nodes) == [weight.use.receiver, bias.use.receiver]


def test_what_has_no_rule_is_cut_above_it() -> None:
    model = nn.Sequential(nn.Bilinear(3, 3, 2))
    x = torch.randn(4, 3)
    hidden = model[0](x, x)
    plan, planner = planned(model, hidden.tanh().sum(1))
    assert set(plan.without_rule) == {"0.weight", "0.bias"} - set(plan.served)
    assert plan.without_rule
    assert not plan.shared
    root = planner.attribution.graph.root[0]
    assert all(root not in cut for cut in plan.cuts)


def test_rows_of_several_examples_are_cut_where_they_part() -> None:
    below, above = nn.Linear(3, 3), nn.Linear(3, 1)
    model = nn.ModuleDict({"below": below, "above": above})
    shared = below(torch.randn(2, 3))  # no example owns these
    losses = above(shared[torch.tensor([0, 1, 1, 0])].tanh()).squeeze(1)
    plan, _ = planned(model, losses)
    assert set(plan.shared) == {"below.weight", "below.bias"}
    assert set(plan.served) == {"above.weight", "above.bias"}


def test_a_distrusted_parameter_is_cut_at_the_losses() -> None:
    layer = nn.Linear(3, 1)
    plan, planner = planned(layer, layer(torch.randn(4, 3)).squeeze(1), "weight")
    assert set(plan.served) == {"bias"}
    assert plan.cuts == {frozenset([planner.attribution.graph.root[0]]): ["weight"]}


def test_a_parameter_whose_first_part_is_empty() -> None:
    """The second part is not, and its gradient counts."""
    weight = nn.Parameter(torch.randn(3, 2))
    _, part = weight.split([0, 2], dim=1)
    check_uncompared({"weight": weight}, (torch.randn(4, 3) @ part).square().sum(1))
