"""Parameters without a rule: gradients by autograd, unit by unit.

A backward pass for each unit need not begin at the losses. It is enough to begin at a cut: nodes
above the parameters such that every way from there to the losses goes through one of them, and
whose output gradients belong to one example for each element. Those of one unit are kept, and those
of all others set to zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, Node

from edpsgd import tensors
from edpsgd.per_example.attribution import Attribution
from edpsgd.per_example.graph import Graph, result_metadata
from edpsgd.per_example.layout import Units
from edpsgd.per_example.owners import Owners

Sums = Sequence[torch.Tensor] | Mapping[int, torch.Tensor]
_FAR = 40  # nodes to look at before the losses themselves are taken
_HALVES = {torch.float16, torch.bfloat16}


def find_cut(attribution: Attribution, begin: Sequence[Node]) -> frozenset[Node]:
    """The nearest cut above some nodes. No node of it is below another: nothing counts twice."""
    graph = attribution.graph
    refused: set[Node] = set()
    while True:
        cut = _climb(attribution, begin, refused)
        doubled: set[Node] = set()
        for node in cut:
            doubled |= graph.below(node) & cut
        if not doubled:
            return frozenset(cut)
        refused |= doubled


def _climb(attribution: Attribution, begin: Sequence[Node], refused: set[Node]) -> set[Node]:
    """Goes up from some nodes, on each way to the first one that can be in a cut."""
    graph = attribution.graph
    root = graph.root[0]
    cut: set[Node] = set()
    seen, stack = set(begin), list(begin)
    while stack:
        node = stack.pop()
        if node is root or (node not in refused and _can_be_cut(attribution, node)):
            cut.add(node)
            continue
        for consumer, _ in graph.consumers[node]:
            if consumer not in seen:
                seen.add(consumer)
                stack.append(consumer)
        if len(seen) > _FAR:
            return {root}
    return cut


def _can_be_cut(attribution: Attribution, node: Node) -> bool:
    has_one_result = attribution.graph.used[node] == {0}
    return has_one_result and attribution.is_separable(node) and not _has_hook(attribution, node)


def _has_hook(attribution: Attribution, node: Node) -> bool:
    """Whether a hook of the node's result changes its output gradient.

    The output gradient that was received is what the hook made. Autograd runs the hook again where
    it begins at the node.
    """
    given = attribution.prober.random_output_gradient(result_metadata(node)[0])
    edge = GradientEdge(node, 0)
    found = torch.autograd.grad(edge, edge, given, retain_graph=True)[0]
    return not torch.equal(found, given)


def has_casts(graph: Graph, cut: frozenset[Node]) -> bool:
    """Whether something is cast to another precision from the cut downwards."""
    reached = set(cut)
    for node in cut:
        reached |= graph.below(node)
    return any(node.name() == "ToCopyBackward0" for node in reached)


@dataclass(eq=False)
class FallbackGradients:
    """Gradients of some parameters for each unit, by autograd from a cut downwards.

    Attributes:
        edges: of the nodes of the cut.
        output_gradients: what they received, and the owners of its elements.
        parameters: the layers, by number.
        units: of the batch.
        has_casts: whether something is cast to another precision on the way.
    """

    edges: Sequence[GradientEdge]
    output_gradients: Sequence[tuple[torch.Tensor, Owners]]
    parameters: dict[int, torch.Tensor]
    units: Units
    has_casts: bool
    _dropped: torch.Tensor | None = None

    def norms(self) -> dict[int, torch.Tensor]:
        """A norm for each unit, for each layer."""
        numbers = list(self.parameters)
        found = {number: self._zeros(parameter) for number, parameter in self.parameters.items()}
        for unit in self.units.present:
            gradients = self._backward(self.units.only(unit), numbers)
            for number, gradient in zip(numbers, gradients, strict=True):
                if gradient is not None:
                    found[number][unit] = tensors.layer_norms([gradient], gradient.device)[0]
        return found

    def add_weighted_(self, sums: Sums, factors: torch.Tensor) -> None:
        """Adds the weighted sums; in one pass if all layers have the same factors."""
        numbers = list(self.parameters)
        if self._are_all_dropped():  # zero times NaN that was saved on the way would be NaN
            return
        add = self._add_unit_by_unit if self._is_rounded() else self._add_together
        if factors.dim() == 1:
            add(sums, factors, numbers)
        else:
            for number in numbers:
                add(sums, factors[:, number], [number])

    def drop(self, units: torch.Tensor) -> None:
        """Leaves some units out of all sums."""
        self._dropped = units

    def _backward(self, factors: torch.Tensor, numbers: Sequence[int]) -> list[torch.Tensor | None]:
        """Gradients of the sum over all units, each times its factor; None where there is none."""
        if self._dropped is not None:
            factors = factors.masked_fill(self._dropped.to(factors.device), 0.0)
        scaled = []
        for output_gradient, owners in self.output_gradients:
            # Elements that nobody owns are zero.
            units = self.units.of_examples[owners.clamp(min=0)]
            weights = factors.to(output_gradient)[units.to(output_gradient.device)]
            # Also if it is NaN.
            scaled.append(torch.where(weights == 0, 0.0, output_gradient * weights))
        wanted = [self.parameters[number] for number in numbers]
        return list(
            torch.autograd.grad(
                list(self.edges),
                wanted,
                scaled,
                retain_graph=True,
                allow_unused=True,
            )
        )

    def _is_rounded(self) -> bool:
        """Whether autograd would round sums over units to half precision.

        One unit would then move what others have added: they are added one by one instead.
        """
        dtypes = {output_gradient.dtype for output_gradient, _ in self.output_gradients}
        dtypes |= {parameter.dtype for parameter in self.parameters.values()}
        return self.has_casts or bool(_HALVES & dtypes)

    def _are_all_dropped(self) -> bool:
        """Whether no unit is left; if one is, its norm is finite: nothing of others is in it."""
        return self._dropped is not None and bool(self._dropped.cpu()[self.units.present].all())

    def _add_together(self, sums: Sums, factors: torch.Tensor, numbers: Sequence[int]) -> None:
        for number, gradient in zip(numbers, self._backward(factors, numbers), strict=True):
            if gradient is not None:
                sums[number].add_(gradient)

    def _add_unit_by_unit(self, sums: Sums, factors: torch.Tensor, numbers: Sequence[int]) -> None:
        for unit in self.units.present:
            gradients = self._backward(self.units.only(unit), numbers)
            for number, gradient in zip(numbers, gradients, strict=True):
                if gradient is not None:
                    total = sums[number]
                    total.add_(gradient.to(total.dtype) * factors[unit].to(total))

    def _zeros(self, parameter: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return torch.zeros(self.units.count, dtype=dtype, device=parameter.device)
