"""LSTM layers that oneDNN runs as one operation: the gradients at the gates, from a second pass over the steps.

Elsewhere torch records every step of an LSTM or GRU, and the rule for products serves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from edpsgd.units.rows import Layout

if TYPE_CHECKING:
    from edpsgd.units.rules import Received, Use
    from edpsgd.units.sums import LayerGradients


NEEDED = ("input", "weight0", "weight1", "weight2", "weight3", "hx_", "cx_", "result0")


def add_layer(use: Use, received: Received, layer: LayerGradients) -> None:
    """Adds what one layer in one direction gives to its weight or bias."""
    if "gates" not in received.made:
        received.made["gates"] = _gate_gradients(use, received.gradients)
    layout = Layout(1, received.layout.labels, received.layout.is_plain)  # of states: steps x sequences x features
    received = replace(received, layout=layout)
    gates = received.rows(received.made["gates"], 1)
    rows = received.units_of(gates)
    if use.slot > 2:
        layer.add_own(rows.sums(gates))
        return
    inputs = _steps(use, "input") if use.slot == 1 else _states_before(use)
    layer.add_products(gates, received.rows(inputs, 1), rows)


def _steps(use: Use, name: str) -> torch.Tensor:
    """A saved sequence in the order in which the layer reads it: steps x sequences x features."""
    sequence: torch.Tensor = use.saved(name).detach()
    return sequence.flip(0) if use.saved("reverse") else sequence


def _states_before(use: Use) -> torch.Tensor:
    """The hidden state that each step begins with."""
    first = use.saved("hx_").detach()
    states = _steps(use, "result0")
    return torch.cat([first.reshape(1, *states.shape[1:]), states[:-1]])


def _gate_gradients(use: Use, received: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Gradients of what goes into the gates, for each step: all states are known, so the gates are one product."""
    weights = [use.saved(f"weight{number}").detach() for number in range(4)]
    before = _states_before(use)
    gates = _steps(use, "input") @ weights[0].T + before @ weights[1].T
    if use.saved("has_biases"):
        gates = gates + weights[2] + weights[3]
    ins, forgets, news, outs = gates.chunk(4, 2)
    ins, forgets, news, outs = ins.sigmoid(), forgets.sigmoid(), news.tanh(), outs.sigmoid()
    cells = [use.saved("cx_").detach().reshape(before.shape[1:])]
    for step in range(len(gates)):
        cells.append(forgets[step] * cells[-1] + ins[step] * news[step])
    return _backwards(weights[1], torch.stack([ins, forgets, news, outs]), torch.stack(cells), _outside(use, received))


def _outside(use: Use, received: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Gradients of the states at all steps, of the last state, and of the last cell."""
    like = use.saved("result0")
    at_steps, state, cell = received[:3]
    steps = torch.zeros_like(like) if at_steps is None else at_steps
    ends = [torch.zeros_like(like[0]) if one is None else one.reshape(like.shape[1:]) for one in (state, cell)]
    return [steps.flip(0) if use.saved("reverse") else steps, *ends]


def _backwards(
    recurrent: torch.Tensor, opened: torch.Tensor, cells: torch.Tensor, outside: list[torch.Tensor]
) -> torch.Tensor:
    """Goes back from the last step to the first."""
    at_steps, at_state, at_cell = outside
    squashed = cells[1:].tanh()
    found: list[torch.Tensor] = []
    for step in range(len(at_steps) - 1, -1, -1):
        ins, forgets, news, outs = opened[:, step]
        at_state = at_state + at_steps[step]
        at_cell = at_cell + at_state * outs * (1 - squashed[step].square())
        parts = [
            at_cell * news * ins * (1 - ins),
            at_cell * cells[step] * forgets * (1 - forgets),
            at_cell * ins * (1 - news.square()),
            at_state * squashed[step] * outs * (1 - outs),
        ]
        found.append(torch.cat(parts, 1))
        at_cell = at_cell * forgets
        at_state = found[-1] @ recurrent
    return torch.stack(found[::-1])
