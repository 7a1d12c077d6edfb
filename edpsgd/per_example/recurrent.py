"""LSTM layers that oneDNN runs as one operation: the gradients at the gates, from a second pass over the steps.

Elsewhere torch records every step of an LSTM or GRU, and the rule for products serves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import Node

from edpsgd.per_example.ghost import LayerGradients, exact
from edpsgd.per_example.layout import Layout

if TYPE_CHECKING:
    from edpsgd.per_example.rules import Received, Use

NAME = "MkldnnRnnLayerBackward0"
WORKSPACE = "result3"
_NEW = 2  # of the gates
NEEDED = ("input", "weight0", "weight1", "weight2", "weight3", "hx_", "cx_", "result0")


def is_by_hand(node: Node) -> bool:
    """Whether it is such a layer, and nobody asks for the gradients of the states that it began with."""
    return node.name() == NAME and all(child is None for child, _ in node.next_functions[5:])


def add_layer(use: Use, received: Received, layer: LayerGradients) -> None:
    """Adds what one layer in one direction gives to its weight or bias."""
    layout = Layout(1, received.layout.labels)  # of states: steps x sequences x features
    states, made = replace(received, layout=layout), received.made
    if "rows" not in made:  # the same ones for all weights, so that their products are made once
        gates = made.pop("gates") if "gates" in made else gate_gradients(use, received.gradients)
        made["rows"] = states.rows(gates, 1)
    gates, rows = made["rows"], states.units_of(made["rows"])
    if use.slot > 2:
        layer.add_own(rows.sums(gates))
        return
    inputs = _steps(use, "input") if use.slot == 1 else _states_before(use)
    layer.add_products(gates, states.rows(inputs, 1), rows)


def input_gradient(use: Use, gates: torch.Tensor) -> torch.Tensor:
    """What the layer's input receives, if the gates received that."""
    weight: torch.Tensor = use.saved("weight0").detach()
    gradient = gates.to(weight) @ weight
    return gradient.flip(0) if use.saved("reverse") else gradient


def _steps(use: Use, name: str) -> torch.Tensor:
    """A saved sequence in the order in which the layer reads it: steps x sequences x features."""
    sequence: torch.Tensor = use.saved(name).detach()
    return sequence.flip(0) if use.saved("reverse") else sequence


def _states_before(use: Use) -> torch.Tensor:
    """The hidden state that each step begins with."""
    first = use.saved("hx_").detach()
    states = _steps(use, "result0")
    return torch.cat([first.reshape(1, *states.shape[1:]), states[:-1]])


def gate_gradients(
    use: Use, received: Sequence[torch.Tensor | None], workspace: torch.Tensor | None = None
) -> torch.Tensor:
    """Gradients of what goes into the gates, for each step.

    Args:
        use: of one of the layer's weights.
        received: by the layer's results.
        workspace: where oneDNN kept the gates; without it they are computed again.
    """
    inputs, before = _steps(use, "input"), _states_before(use)
    opened = None if workspace is None else _kept_gates(use, workspace, inputs, before)
    if opened is None:
        opened = _gates(use, inputs.flatten(0, 1), before.flatten(0, 1)).view(*before.shape[:2], 4, -1)
    first = exact(use.saved("cx_").detach()).reshape(before.shape[1:])
    return _backwards(use.saved("weight1").detach(), opened, first, _outside(use, received))


def _gates(use: Use, inputs: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Rows x (in, forget, new, out) x features: all states are known, so that one product gives all gates."""
    weights = [use.saved(f"weight{number}").detach() for number in range(4)]
    bias = weights[2] + weights[3] if use.saved("has_biases") else weights[0].new_zeros(len(weights[0]))
    gates = torch.addmm(bias, inputs, weights[0].T).addmm_(before, weights[1].T)
    opened = exact(gates).view(len(gates), 4, -1)
    for number in range(4):
        (torch.Tensor.tanh_ if number == _NEW else torch.Tensor.sigmoid_)(opened[:, number])
    return opened


def _kept_gates(use: Use, workspace: torch.Tensor, inputs: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
    """Steps x sequences x gates x features, if they lie in the workspace as they do in the known versions of oneDNN.

    Rows begin at multiples of 64 bytes that are not multiples of 1024. Some are computed again, to be sure.
    """
    steps, sequences, features = before.shape
    width = -(-4 * features // 16) * 16
    width += 16 * (width % 256 == 0)
    if inputs.dtype is not torch.float32 or workspace.nbytes < 4 * steps * sequences * width:
        return None
    whole = workspace.view(torch.float32)[: steps * sequences * width].view(steps, sequences, width)
    gates = whole[:, :, : 4 * features].view(steps, sequences, 4, features)
    some = [(0, 0), (steps // 2, sequences // 2), (steps - 1, sequences - 1)]
    again = _gates(use, torch.stack([inputs[at] for at in some]), torch.stack([before[at] for at in some]))
    is_same = torch.allclose(torch.stack([gates[at] for at in some]), again, rtol=1e-3, atol=1e-4)
    return gates if is_same else None


def _outside(use: Use, received: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Gradients of the states at all steps, of the last state, and of the last cell."""
    like = use.saved("result0")
    at_steps, state, cell = received[:3]
    steps = torch.zeros_like(like) if at_steps is None else at_steps
    ends = [torch.zeros_like(like[0]) if one is None else one.reshape(like.shape[1:]) for one in (state, cell)]
    return [exact(one) for one in (steps.flip(0) if use.saved("reverse") else steps, *ends)]


def _backwards(
    recurrent: torch.Tensor, opened: torch.Tensor, first: torch.Tensor, outside: list[torch.Tensor]
) -> torch.Tensor:
    """Goes back from the last step to the first; what does not depend on later steps is made for all at once."""
    at_steps, at_state, at_cell = outside
    ins, forgets, news, outs = opened.unbind(2)
    cells = first.new_empty((len(opened) + 1, *first.shape))
    cells[0] = first
    torch.mul(ins, news, out=cells[1:])
    for step, forget in enumerate(forgets):
        cells[step + 1].addcmul_(forget, cells[step])
    squashed = cells[1:].tanh()
    to_cell = torch.addcmul(outs, outs * squashed, squashed, value=-1)
    slopes = torch.addcmul(opened, opened, opened, value=-1).contiguous()
    slopes[:, :, 0] *= news
    slopes[:, :, 1] *= cells[:-1]
    slopes[:, :, _NEW] = torch.addcmul(ins, ins * news, news, value=-1)
    slopes[:, :, 3] *= squashed
    for step in range(len(opened) - 1, -1, -1):
        at_state = at_state + at_steps[step]
        at_cell = torch.addcmul(at_cell, at_state, to_cell[step])
        gates = slopes[step]  # from here on they hold gradients
        gates[:, :3] *= at_cell.unsqueeze(1)
        gates[:, 3] *= at_state
        at_cell = at_cell * forgets[step]
        at_state = exact(gates.flatten(1).to(recurrent) @ recurrent)
    return slopes.flatten(2)
