"""The gates of LSTM layers that oneDNN runs as one operation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edpsgd.per_example import UnitGradients
from edpsgd.per_example.graph import read_graph
from edpsgd.per_example.rules import lstm
from edpsgd.per_example.uses import find_uses
from tests.edpsgd.per_example.zoo import Sequences, lstm_layers, made
from tests.helpers.unit_loop import Fast, check, check_uncompared, trained


@pytest.mark.parametrize("is_garbage", [True, False])
def test_gates_that_were_kept(is_garbage: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken, unless they are not what the weights make of the states."""
    used: list[bool] = []
    kept_gates = lstm._kept_gates

    def spy(use: object, workspace: torch.Tensor, *states: torch.Tensor) -> torch.Tensor | None:
        gates = kept_gates(use, torch.zeros_like(workspace) if is_garbage else workspace, *states)
        used.append(gates is not None)
        return gates

    monkeypatch.setattr(lstm, "_kept_gates", spy)
    model = made("LSTM, padded, both ways, 2 layers")
    losses = model(Sequences(4, 3, 0))
    lstm_layers(losses)
    with Fast():
        check(UnitGradients(trained(model)), model, losses)
    assert used
    assert not any(used) if is_garbage else all(used)


@pytest.mark.parametrize("is_reverse", [False, True])
def test_gradients_of_gates_are_those_of_single_steps(is_reverse: bool) -> None:
    """Held against the gradients of biases, one for each step, of an LSTM cell that is called in a loop."""
    torch.manual_seed(0)
    steps, sequences, features = 4, 3, 2
    layer, cell = nn.LSTM(5, features, bidirectional=True), nn.LSTMCell(5, features)
    suffix = "_reverse" if is_reverse else ""
    for name, parameter in cell.named_parameters():
        parameter.data.copy_(getattr(layer, f"{name.replace('_', '_', 1)}_l0{suffix}"))
    x = torch.randn(steps, sequences, 5)
    states = layer(x)[0][:, :, features:] if is_reverse else layer(x)[0][:, :, :features]
    losses = states.square().sum((0, 2))
    lstm_layers(losses)
    graph = read_graph(losses)
    weight = getattr(layer, f"weight_ih_l0{suffix}")
    [use] = find_uses(graph, graph.leaves[id(weight)], weight.shape)
    received = graph.output_gradients(losses, torch.ones(sequences), [use.node])[use.node]
    gates = lstm.gate_gradients(use, received)

    state, added, losses = None, [], torch.zeros(sequences)
    for step in x.flip(0) if is_reverse else x:
        added.append(torch.zeros(sequences, 4 * features, requires_grad=True))
        state = one_step(cell, step, state, added[-1])
        losses = losses + state[0].square().sum(1)
    expected = torch.stack(torch.autograd.grad(losses.sum(), added))
    torch.testing.assert_close(gates, expected, rtol=1e-4, atol=1e-6)


def one_step(
    cell: nn.LSTMCell,
    inputs: torch.Tensor,
    before: tuple[torch.Tensor, torch.Tensor] | None,
    added: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step by its formulas, with something added to what goes into the gates."""
    zeros = inputs.new_zeros(len(inputs), cell.hidden_size)
    state, memory = (zeros, zeros) if before is None else before
    linear = inputs @ cell.weight_ih.T + cell.bias_ih + state @ cell.weight_hh.T + cell.bias_hh
    into, forget, new, out = (linear + added).chunk(4, 1)
    memory = forget.sigmoid() * memory + into.sigmoid() * new.tanh()
    return out.sigmoid() * memory.tanh(), memory


def test_hooks_around_a_layer_that_is_gone_through_by_hand() -> None:
    """They are never handed None, as when the layer is freed without its backward."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"below": nn.Linear(3, 3), "lstm": nn.LSTM(3, 3)})
    hidden = model["below"](torch.randn(5, 4, 3))
    hidden.register_hook(lambda gradient: 2.0 * gradient)
    states, _ = model["lstm"](hidden)
    states.register_hook(lambda gradient: 3.0 * gradient)
    check_uncompared(trained(model), states.square().sum((0, 2)))


def test_one_layer_after_itself() -> None:
    """Its weights go into both: freeing the upper one must not run the lower one."""
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 3)
    states, _ = lstm(lstm(torch.randn(5, 4, 3))[0])
    check_uncompared(trained(lstm), states.square().sum((0, 2)))
