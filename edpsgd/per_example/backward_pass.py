"""The backward pass of a batch: what the watched nodes receive.

Autograd is asked for the output gradients of these nodes, and never for those of parameters, so
that no gradient of a parameter is computed. An LSTM layer of oneDNN is the exception: its own
backward always makes the gradients of its weights as well, summed over the batch. Where all ways
lead through it, the pass stops above such a layer, ``rules/lstm`` computes what it hands to its
input, and a second pass goes on from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node

from edpsgd.per_example.graph import Graph, OutputGradients
from edpsgd.per_example.plan import Plan
from edpsgd.per_example.rules import lstm
from edpsgd.per_example.uses import Use


@dataclass(eq=False)
class BackwardPass:
    """One pass through a graph, from the losses to the watched nodes.

    Attributes:
        graph: of the losses.
        plan: which nodes are watched.
        losses: one for each example.
        weights: of the losses.
        is_last: whether nobody will go through the graph again: it is freed on the way.
        received: the output gradients of the watched nodes.
        gates: of LSTM layers that were gone through by hand: the output gradients of their gates.
    """

    graph: Graph
    plan: Plan
    losses: torch.Tensor
    weights: torch.Tensor
    is_last: bool
    received: dict[Node, OutputGradients] = field(default_factory=dict)
    gates: dict[Node, torch.Tensor] = field(default_factory=dict)

    def run(self) -> None:
        """Fills ``received`` and ``gates``."""
        for one in self.plan.all_served():
            one.rule.hold_saved(one.use)
        watched = self.plan.watched(self.graph.nodes)
        served = {one.use.node: one.use for one in self.plan.all_served()}
        by_hand = {node for node in served if lstm.has_constant_start(node)}
        layers = [node for node in self.graph.nodes if node in by_hand]
        stretches = _cut_into_stretches(self.graph, layers)
        if not _can_stop_between(self.graph, stretches, watched):
            self.received = self._from_losses(watched)
            return
        first, *others = stretches
        self.received = self._from_losses([node for node in watched if node in first.nodes])
        for stretch in others:
            self._pass_lstm_layers(stretch.layers, served)
            self._go_on(stretch, served, watched)

    def _from_losses(self, nodes: Sequence[Node]) -> dict[Node, OutputGradients]:
        return self.graph.output_gradients(
            self.losses,
            self.weights.to(self.losses),
            nodes,
            self.is_last,
        )

    def _pass_lstm_layers(self, layers: Sequence[Node], served: dict[Node, Use]) -> None:
        """Computes the gates of layers that have received all that they will."""
        for node in layers:
            use = served[node]
            workspace = use.saved(lstm.WORKSPACE)
            self.gates[node] = lstm.gate_gradients(use, self.received[node], workspace)
            if self.is_last:
                self.graph.free(node)

    def _go_on(self, stretch: _Stretch, served: dict[Node, Use], watched: Sequence[Node]) -> None:
        """Goes from the input of LSTM layers to the nodes below it."""
        if stretch.begin is None:  # the input is data
            return
        parts = []
        for node in stretch.layers:
            parts.append(lstm.input_gradient(served[node], self.gates[node]))
        gradient = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
        below = [node for node in watched if node in stretch.nodes]
        edge = GradientEdge(stretch.begin, stretch.output)
        self.received |= self.graph.output_gradients(edge, gradient, below, self.is_last)


@dataclass(frozen=True, eq=False)
class _Stretch:
    """Nodes between LSTM layers that one backward pass goes through.

    Attributes:
        layers: the LSTM layers that lie above, which read the same input: as a rule the two
            directions.
        begin: the node of their input, None if that is data; in the first stretch that of the
            losses.
        output: which of the node's results it is.
        nodes: all of the stretch, down to the next LSTM layers.
    """

    layers: Sequence[Node]
    begin: Node | None
    output: int
    nodes: set[Node]


def _cut_into_stretches(graph: Graph, layers: Sequence[Node]) -> list[_Stretch]:
    """From the losses to the first LSTM layers, and from the input of those to the next ones."""
    root, output = graph.root
    stretches = [_Stretch([], root, output, {root} | graph.below(root, layers))]
    for (begin, begin_output), same_input in itertools.groupby(
        layers,
        lambda node: node.next_functions[0],
    ):
        nodes = set[Node]() if begin is None else {begin} | graph.below(begin, layers)
        stretches.append(_Stretch(list(same_input), begin, begin_output, nodes))
    return stretches


def _can_stop_between(graph: Graph, stretches: Sequence[_Stretch], watched: Sequence[Node]) -> bool:
    """Whether each node lies in one stretch only: no way leads around the LSTM layers."""
    leaves = set(graph.leaves.values())
    passed: list[Node] = []
    for stretch in stretches:
        passed += stretch.nodes - leaves
    is_each_in_one = len(passed) == len(set(passed))
    return is_each_in_one and set(watched) <= set(passed)
