"""What the backward pass runs, and what it leaves out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edpsgd.per_example import UnitGradients
from edpsgd.per_example.attribution import attribute_examples
from edpsgd.per_example.backward_pass import BackwardPass
from edpsgd.per_example.graph import read_graph, saved
from edpsgd.per_example.plan import Planner
from tests.edpsgd.per_example.zoo import Sequences, lstm_layers, made
from tests.helpers.unit_loop import check, trained


@pytest.mark.parametrize(
    ("name", "layers"),
    [("LSTM, padded, both ways, 2 layers", 4), ("LSTM, of the data", 1), ("LSTM, way around it", 0)],
)
def test_lstm_layers_are_gone_through_once(name: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, as their own backward makes gradients of the weights as well; but not where there is a way around."""
    model = made(name)
    engine = UnitGradients(trained(model))
    check(engine, model, model(Sequences(4, 3, 0)))
    losses = model(Sequences(4, 3, 1))
    nodes = lstm_layers(losses)
    engine._batches = 2  # no check is due
    monkeypatch.setattr(engine, "_seldom", 1 << 60)
    run: list[bool] = []
    for node in nodes:
        node.register_hook(lambda below, _: run.append(below[0] is not None))
    engine.backward(losses)
    assert sum(run) == len(nodes) - layers
    for node in nodes:
        with pytest.raises(RuntimeError, match="already been freed"):
            saved(node, "_saved_input")


def test_no_gradient_of_a_parameter_is_made() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    seen: list[torch.Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(seen.append)
    losses = model(torch.randn(5, 3)).square().sum(1)
    graph = read_graph(losses)
    plan = Planner(trained(model), attribute_examples(graph)).make_plan(set())
    backward = BackwardPass(graph, plan, losses, torch.ones(5), is_last=True)
    backward.run()
    shapes = sorted(tuple(results[0].shape) for results in backward.received.values())
    assert shapes == [(5, 2), (5, 4)]
    assert not seen
    assert not backward.gates
    with pytest.raises(RuntimeError, match="a second time|already been freed"):
        losses.sum().backward()
