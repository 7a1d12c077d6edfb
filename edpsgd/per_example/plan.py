"""Which nodes of a graph are watched in the backward pass: the plan of a batch.

A parameter is served by rules if there is one for everything that is done with it, and if it is
known for each of them how the examples lie in the output gradient. All others are left to autograd,
from a cut downwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import Node

from edpsgd.per_example.attribution import Attribution
from edpsgd.per_example.fallback import find_cut
from edpsgd.per_example.graph import shapes
from edpsgd.per_example.layout import Layout
from edpsgd.per_example.operations import lstm_sequences
from edpsgd.per_example.rules import Rule, find_rule, lstm
from edpsgd.per_example.uses import Use, find_uses


@dataclass(frozen=True, eq=False)
class ServedUse:
    """A use of a parameter that a rule serves.

    Attributes:
        use: where the parameter goes into an operation.
        rule: for it.
        layout: of the examples in the output gradient.
    """

    use: Use
    rule: Rule
    layout: Layout


@dataclass(eq=False)
class Plan:
    """How each parameter of a batch is computed.

    Attributes:
        served: by rules: all uses of a parameter, by its name.
        cuts: from which autograd computes others unit by unit: the names of these.
        without_rule: names of parameters that are left to autograd, for an operation that has no
            rule.
        shared: names of those with rows that belong to several examples.
    """

    served: dict[str, list[ServedUse]] = field(default_factory=dict)
    cuts: dict[frozenset[Node], list[str]] = field(default_factory=dict)
    without_rule: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)

    def all_served(self) -> list[ServedUse]:
        """Of all parameters."""
        return [one for served in self.served.values() for one in served]

    def watched(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes whose output gradients are needed.

        Args:
            nodes: all of the graph, whose order those of the cuts follow.
        """
        in_cuts = {node for cut in self.cuts for node in cut}
        receivers = [one.use.receiver for one in self.all_served()]
        return [*receivers, *(node for node in nodes if node in in_cuts)]


@dataclass(eq=False)
class Planner:
    """Makes the plan of a batch.

    Attributes:
        parameters: by name.
        attribution: of the batch's graph.
    """

    parameters: Mapping[str, torch.Tensor]
    attribution: Attribution
    _layouts: dict[tuple[object, ...], Layout] = field(default_factory=dict, repr=False)

    def make_plan(self, distrusted: Set[str]) -> Plan:
        """Rules where they can be used for all that is done with a parameter; else a cut.

        Args:
            distrusted: names of parameters to leave to autograd.
        """
        plan = Plan()
        graph = self.attribution.graph
        uses = {
            name: find_uses(graph, graph.leaves[id(parameter)], parameter.shape)
            for name, parameter in self.parameters.items()
            if id(parameter) in graph.leaves
        }
        for name, found in uses.items():
            if name in distrusted:
                at_losses = frozenset([graph.root[0]])
                plan.cuts.setdefault(at_losses, []).append(name)
            else:
                self._plan_parameter(plan, name, found)
        return plan

    def _plan_parameter(self, plan: Plan, name: str, found: Sequence[Use]) -> None:
        # A part of the batch may be empty; but of several results, as of a split, all must be.
        uses = [use for use in found if any(0 not in shape for shape in shapes(use.receiver))]
        served = [self._serve(use) for use in uses]
        with_rule = [one for one in served if one is not None]
        if len(with_rule) == len(uses):
            plan.served[name] = with_rule
            return
        is_shared = any(not self.attribution.is_separable(use.receiver) for use in uses)
        (plan.shared if is_shared else plan.without_rule).append(name)
        cut = find_cut(self.attribution, [use.node for use in uses])
        plan.cuts.setdefault(cut, []).append(name)

    def _serve(self, use: Use) -> ServedUse | None:
        rule = find_rule(use)
        layout = None if rule is None else self.find_layout(use, rule)
        return None if rule is None or layout is None else ServedUse(use, rule, layout)

    def find_layout(self, use: Use, rule: Rule) -> Layout | None:
        """How the examples lie in what the rule looks at; None if it is not right for that."""
        if not self.attribution.is_separable(use.receiver):
            return None
        if use.node.name() == lstm.NAME:
            return self._find_lstm_layout(use)
        has_one_result = self.attribution.graph.used[use.receiver] == {0}
        if not has_one_result:
            return None
        owners, shape = self.attribution.owners(use.receiver), shapes(use.receiver)[0]
        changing = [dim for dim, size in enumerate(owners.shape) if size > 1]
        if len(changing) > 1:
            return None
        # If all belongs to one example, any dimension will do.
        for dim in changing or range(len(shape)):
            if rule.allows(use, dim):
                return self.share_layout(dim, owners.flatten(), shape[dim])
        return None

    def _find_lstm_layout(self, use: Use) -> Layout | None:
        sequences = lstm_sequences(use.node, self.attribution.results(use.node))
        if sequences is None:
            return None
        steps_sequences_features = shapes(use.node)[0]
        return self.share_layout(1, sequences, steps_sequences_features[1])

    def share_layout(self, dim: int, labels: torch.Tensor, size: int) -> Layout:
        """The same object for the same labels, so that what follows from them is computed once.

        Args:
            dim: along which the examples lie.
            labels: the example at each place, or one for all places.
            size: of the dimension.
        """
        key = (dim, size, labels.numpy().tobytes())
        if key not in self._layouts:
            # Places that nobody owns have output gradients of zero, and may count as anyone's.
            self._layouts[key] = Layout(dim, labels.clamp(min=0).expand(size).contiguous())
        return self._layouts[key]
