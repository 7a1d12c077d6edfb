"""LSTM layers that oneDNN runs as one operation: the output gradients of their gates.

An LSTM is a linear layer for each step: its four gates are made of the step's input and of the
state before. If the output gradients of these products are known for all steps, the units'
gradients of the weights are those of a linear layer with steps x sequences rows. oneDNN does not
keep them, so that they are computed here.

Elsewhere torch records every step of an LSTM or GRU, and the rule for products serves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.autograd.graph import Node

from edpsgd.per_example.fast_products import add_product_, multiply
from edpsgd.per_example.ghost import LayerGradients
from edpsgd.per_example.graph import OutputGradients
from edpsgd.per_example.layout import Layout
from edpsgd.per_example.precision import exact
from edpsgd.per_example.rules.rule import Rule
from edpsgd.per_example.uses import Received, Use

NAME = "MkldnnRnnLayerBackward0"
WORKSPACE = "result3"
_INPUT_WEIGHT, _STATE_WEIGHT = 1, 2  # which arguments they are; two biases follow
_PARAMETERS = range(1, 5)
_READ = ("input", "weight0", "weight1", "weight2", "weight3", "hx_", "cx_", "result0")
_IN, _FORGET, _NEW, _OUT = range(4)  # the gates, in torch's order
_ALIGNMENT = 16  # numbers of single precision in 64 bytes


def has_constant_start(node: Node) -> bool:
    """Whether it is such a layer, and the states that it began with need no gradient."""
    return node.name() == NAME and all(child is None for child, _ in node.next_functions[5:])


def fits(use: Use) -> bool:
    """Whether ``add_layer`` is right for the argument that a parameter is."""
    return use.slot in _PARAMETERS and not use.is_turned


def add_layer(use: Use, received: Received, layer: LayerGradients) -> None:
    """Adds what one layer in one direction gives to its weight or bias."""
    layout = Layout(1, received.layout.labels)  # of states: steps x sequences x features
    states, common = replace(received, layout=layout), received.common
    if "rows" not in common:  # the same ones for all weights, so that their products are made once
        if "gates" not in common:
            common["gates"] = gate_gradients(use, received.output_gradients)
        common["rows"] = states.as_rows(common.pop("gates"), 1)
    gates = common["rows"]
    rows = states.units_of(gates)
    is_bias = use.slot > _STATE_WEIGHT
    if is_bias:
        layer.add_instantiated(rows.sums(gates))
        return
    reads_input = use.slot == _INPUT_WEIGHT
    activations = _in_reading_order(use, "input") if reads_input else _states_before(use)
    layer.add_products(gates, states.as_rows(activations, 1), rows)


def input_gradient(use: Use, gates: torch.Tensor) -> torch.Tensor:
    """What the layer hands to its input, steps x sequences x features.

    Args:
        use: of one of the layer's weights.
        gates: the output gradients of the gates, as ``gate_gradients`` returns them.
    """
    weight: torch.Tensor = use.saved("weight0").detach()
    gradient = multiply(gates.to(weight).flatten(0, 1), weight).view(*gates.shape[:2], -1)
    return gradient.flip(0) if use.saved("reverse") else gradient


def gate_gradients(
    use: Use,
    received: OutputGradients,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradients of the losses by what goes into the gates' sigmoid and tanh.

    Args:
        use: of one of the layer's weights.
        received: the output gradients of the layer: of the states of all steps, the last state and
            the last cell.
        workspace: where oneDNN kept the gates; without it they are computed again.

    Returns:
        Steps in reading order x sequences x (in, forget, new, out) features.
    """
    inputs, states = _in_reading_order(use, "input"), _states_before(use)
    gates = None if workspace is None else _kept_gates(use, workspace, inputs, states)
    if gates is None:
        gates = _computed_gates(use, inputs.flatten(0, 1), states.flatten(0, 1)).view(
            *states.shape[:2],
            4,
            -1,
        )
    first_cell = exact(use.saved("cx_").detach()).reshape(states.shape[1:])
    return _back_through_steps(
        use.saved("weight1").detach(),
        gates,
        first_cell,
        *_from_outside(use, received),
    )


def _in_reading_order(use: Use, name: str) -> torch.Tensor:
    """A saved sequence in the order in which the layer reads it: steps x sequences x features."""
    sequence: torch.Tensor = use.saved(name).detach()
    return sequence.flip(0) if use.saved("reverse") else sequence


def _states_before(use: Use) -> torch.Tensor:
    """The hidden state that each step begins with: steps x sequences x features."""
    first = use.saved("hx_").detach()
    states = _in_reading_order(use, "result0")
    return torch.cat([first.reshape(1, *states.shape[1:]), states[:-1]])


def _computed_gates(use: Use, inputs: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Rows x gates x features, by one product: the state before each step is known."""
    weights = [use.saved(f"weight{number}").detach() for number in range(4)]
    bias = weights[0].new_zeros(len(weights[0]))
    if use.saved("has_biases"):
        bias = weights[2] + weights[3]
    flat = bias.repeat(len(inputs), 1)
    add_product_(flat, inputs, weights[0].T)
    add_product_(flat, states, weights[1].T)
    gates = exact(flat).view(len(flat), 4, -1)
    gates[:, _IN].sigmoid_()
    gates[:, _FORGET].sigmoid_()
    gates[:, _NEW].tanh_()
    gates[:, _OUT].sigmoid_()
    return gates


def _kept_gates(
    use: Use,
    workspace: torch.Tensor,
    inputs: torch.Tensor,
    states: torch.Tensor,
) -> torch.Tensor | None:
    """Steps x sequences x gates x features, as they lie in the workspace of known oneDNN.

    None if they do not. Rows begin at multiples of 64 bytes that are not multiples of 1024. Some
    are computed again, to be sure.
    """
    steps, sequences, features = states.shape
    width = -(-4 * features // _ALIGNMENT) * _ALIGNMENT
    if width % (16 * _ALIGNMENT) == 0:
        width += _ALIGNMENT
    numbers = steps * sequences * width
    if inputs.dtype is not torch.float32 or workspace.nbytes < 4 * numbers:
        return None
    padded = workspace.view(torch.float32)[:numbers].view(steps, sequences, width)
    gates = padded[:, :, : 4 * features].view(steps, sequences, 4, features)
    places = [(0, 0), (steps // 2, sequences // 2), (steps - 1, sequences - 1)]
    some_inputs = torch.stack([inputs[place] for place in places])
    some_states = torch.stack([states[place] for place in places])
    some_gates = torch.stack([gates[place] for place in places])
    is_same = torch.allclose(
        some_gates,
        _computed_gates(use, some_inputs, some_states),
        rtol=1e-3,
        atol=1e-4,
    )
    return gates if is_same else None


def _from_outside(use: Use, received: OutputGradients) -> Sequence[torch.Tensor]:
    """Output gradients of the states in reading order, of the last state and the last cell."""
    like = use.saved("result0")
    at_steps, last_state, last_cell = received[:3]
    steps = torch.zeros_like(like) if at_steps is None else at_steps
    if use.saved("reverse"):
        steps = steps.flip(0)
    found = [exact(steps)]
    for end in (last_state, last_cell):
        found.append(
            exact(torch.zeros_like(like[0]) if end is None else end.reshape(like.shape[1:])),
        )
    return found


def _back_through_steps(
    state_weight: torch.Tensor,
    gates: torch.Tensor,
    first_cell: torch.Tensor,
    at_steps: torch.Tensor,
    at_state: torch.Tensor,
    at_cell: torch.Tensor,
) -> torch.Tensor:
    """Goes back from the last step to the first.

    What does not depend on later steps is made for all at once. Each step computed cell = forget ·
    cell before + in · new, and state = out · tanh(cell).

    Args:
        state_weight: the weight of the states, (gates x features) x features.
        gates: after their sigmoid or tanh, steps x sequences x gates x features.
        first_cell: sequences x features.
        at_steps: output gradients of the states, steps x sequences x features.
        at_state: that of the last state, sequences x features.
        at_cell: that of the last cell, sequences x features.

    Returns:
        Gradients by what goes into the gates: steps x sequences x (gates x features).
    """
    ins, forgets, news, outs = gates.unbind(2)
    cells = _all_cells(gates, first_cell)
    squashed = cells[1:].tanh()
    # ∂state / ∂cell = out · (1 - tanh²(cell))
    cell_slopes = torch.addcmul(outs, outs * squashed, squashed, value=-1)
    # The slope of sigmoid is g · (1 - g), that of tanh 1 - g², each times what the gate is
    # multiplied by.
    slopes = torch.addcmul(gates, gates, gates, value=-1).contiguous()
    slopes[:, :, _IN] *= news
    slopes[:, :, _FORGET] *= cells[:-1]
    slopes[:, :, _NEW] = torch.addcmul(ins, ins * news, news, value=-1)
    slopes[:, :, _OUT] *= squashed
    for step in range(len(gates) - 1, -1, -1):
        at_state = at_state + at_steps[step]
        at_cell = torch.addcmul(at_cell, at_state, cell_slopes[step])
        gradient = slopes[step]  # is made in place of the slopes
        gradient[:, :_OUT] *= at_cell.unsqueeze(1)
        gradient[:, _OUT] *= at_state
        at_cell = at_cell * forgets[step]
        at_state = exact(multiply(gradient.flatten(1).to(state_weight), state_weight))
    return slopes.flatten(2)


def _all_cells(gates: torch.Tensor, first_cell: torch.Tensor) -> torch.Tensor:
    """The cell before the first step and after each: steps + 1 x sequences x features."""
    ins, forgets, news, _ = gates.unbind(2)
    cells = first_cell.new_empty((len(gates) + 1, *first_cell.shape))
    cells[0] = first_cell
    torch.mul(ins, news, out=cells[1:])
    for step, forget in enumerate(forgets):
        cells[step + 1].addcmul_(forget, cells[step])
    return cells


RULES: dict[str, Rule] = {
    NAME: Rule(add_layer, fits, saved=dict.fromkeys(_PARAMETERS, _READ)),
}
