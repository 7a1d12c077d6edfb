"""What operations mean, against what their backward does."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from edpsgd.per_example import UnitGradients
from edpsgd.per_example.attribution import attribute_examples
from edpsgd.per_example.graph import read_graph
from edpsgd.per_example.operations import MEANINGS, argument_owners
from edpsgd.per_example.owners import NOBODY, SHARED
from tests.helpers.networks.network import Network, make_plan
from tests.helpers.unit_loop import check_uncompared


def test_meanings_say_what_backward_does() -> None:
    """An operation may be taken for sharing what it keeps apart, but never the other way round."""
    compared = Counter[str]()
    for seed in range(60):
        torch.manual_seed(seed)
        plan = make_plan(seed)
        network = Network(plan)
        network.wake()
        for batch in [one for one in plan.data() if one.examples > 1][:2]:
            graph = read_graph(network(batch))
            trace = attribute_examples(graph)
            for node in graph.nodes:
                results = trace.results(node)
                if node.name() not in MEANINGS or all(one is None or bool((one < 0).all()) for one in results):
                    continue
                for said, found in zip(argument_owners(node, results), trace.prober.probe(node, results), strict=True):
                    if said is not None:
                        is_right = (said == SHARED) | (found == NOBODY) | (said == found)
                        assert bool(is_right.all()), (seed, node.name())
                        compared[node.name()] += 1
    assert len(compared) > 45, sorted(compared)


def test_one_packed_sequence_with_the_examples_along_its_features() -> None:
    """Their rows are not those of the first one; or a comparison would distrust the layer, with a warning."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 1)
    engine = UnitGradients(dict(layer.named_parameters()))
    examples = torch.randn(2, 4, 3)  # examples x steps x features
    outputs = layer(examples).squeeze(2).T.unsqueeze(1)  # steps x one sequence x examples
    losses = pack_padded_sequence(outputs, torch.tensor([4])).data.square().sum(0)
    expected = []
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
        expected.append(torch.stack([gradient.norm() for gradient in gradients]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(engine.backward(losses), torch.stack(expected))


def test_a_flip_of_no_dimension_leaves_examples_where_they_are() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    losses = layer(torch.randn(4, 3)).flip(()).square().sum(1)
    check_uncompared(dict(layer.named_parameters()), losses)


@pytest.mark.parametrize("change", ["cumsum", "log_softmax", "gather", "gather twice"])
def test_operations_along_the_dimension_of_a_number(change: str) -> None:
    """Torch takes a number for a vector of length 1."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 1)
    found = []
    for x in torch.randn(4, 3):
        number = layer(x).square().sum()
        if change.startswith("gather"):
            places = torch.tensor([0, 0] if change == "gather twice" else 0)
            number = number.gather(0, places).sum()
        elif change == "cumsum":
            number = number.cumsum(0)
        else:
            number = number + number.log_softmax(0)
        found.append(number)
    check_uncompared(dict(layer.named_parameters()), torch.stack(found))
