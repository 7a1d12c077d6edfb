"""Parameters without a rule: gradients by autograd, unit by unit, from the nearest place that tells units apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.autograd.graph import GradientEdge, Node

from edpsgd import tensors
from edpsgd.per_example.graph import Graph
from edpsgd.per_example.layout import Units
from edpsgd.per_example.owners import Owners

Sums = Sequence[torch.Tensor] | Mapping[int, torch.Tensor]
_FAR = 40  # nodes to look at before the losses themselves are taken


def find_cut(graph: Graph, begin: Sequence[Node], tells_apart: Callable[[Node], bool]) -> frozenset[Node]:
    """The nodes nearest above some others that tell units apart: every way to the losses goes through one of them.

    None of them is below another one, so that nothing counts twice.
    """
    refused: set[Node] = set()

    def is_taken(node: Node) -> bool:
        return node not in refused and tells_apart(node)

    while True:
        cut = _climb(graph, begin, is_taken)
        doubled = {node for one in cut for node in graph.below(one) & cut}
        if not doubled:
            return frozenset(cut)
        refused |= doubled


def _climb(graph: Graph, begin: Sequence[Node], tells_apart: Callable[[Node], bool]) -> set[Node]:
    root = graph.root[0]
    cut: set[Node] = set()
    seen, stack = set(begin), list(begin)
    while stack:
        node = stack.pop()
        if node is root or tells_apart(node):
            cut.add(node)
            continue
        above = [one for one in dict.fromkeys(consumer for consumer, _ in graph.consumers[node]) if one not in seen]
        seen.update(above)
        stack.extend(above)
        if len(seen) > _FAR:
            return {root}
    return cut


class Cut:
    """Gradients of some parameters for each unit, by autograd from a cut downwards.

    Args:
        edges: of the nodes of the cut.
        gradients: what they receive, and the owners of its elements.
        parameters: the layers, by number.
        units: of the batch.
        is_rounded: whether something is cast on the way. Autograd would then round sums over units to half precision,
            and one unit would move what others have added: they are added one by one instead.
    """

    def __init__(
        self,
        edges: Sequence[GradientEdge],
        gradients: Sequence[tuple[torch.Tensor, Owners]],
        parameters: dict[int, torch.Tensor],
        units: Units,
        is_rounded: bool,
    ) -> None:
        self._edges, self._gradients, self.parameters, self._units = list(edges), gradients, parameters, units
        halves = {torch.float16, torch.bfloat16}
        dtypes = {one.dtype for one, _ in gradients} | {p.dtype for p in parameters.values()}
        self._is_rounded = is_rounded or bool(halves & dtypes)
        self._dropped: torch.Tensor | None = None

    def _backward(self, factors: torch.Tensor, numbers: Sequence[int]) -> list[torch.Tensor | None]:
        """Gradients of the sum over all units, each times its factor."""
        if self._dropped is not None:
            factors = factors.masked_fill(self._dropped.to(factors.device), 0.0)
        scaled = []
        for gradient, owners in self._gradients:
            units = self._units.of_examples[owners.clamp(min=0)]  # elements that nobody owns are zero
            weights = factors.to(gradient)[units.to(gradient.device)]
            scaled.append(torch.where(weights == 0, 0.0, gradient * weights))  # also if the gradient is NaN
        wanted = [self.parameters[number] for number in numbers]
        return list(torch.autograd.grad(self._edges, wanted, scaled, retain_graph=True, allow_unused=True))

    def drop(self, units: torch.Tensor) -> None:
        """Leaves some units out of all sums."""
        self._dropped = units

    def _are_all_dropped(self) -> bool:
        """Whether no unit is left; if one is, its norm is finite, and so nothing of the others reaches it."""
        return self._dropped is not None and bool(self._dropped.cpu()[self._units.present].all())

    def norms(self) -> dict[int, torch.Tensor]:
        """Of all units, for each layer."""
        numbers = list(self.parameters)
        found = {n: self._zeros(parameter) for n, parameter in self.parameters.items()}
        for unit in self._units.present:
            for number, gradient in zip(numbers, self._of_unit(unit, numbers), strict=True):
                if gradient is not None:
                    found[number][unit] = tensors.layer_norms([gradient], gradient.device)[0]
        return found

    def _of_unit(self, unit: int, numbers: Sequence[int]) -> list[torch.Tensor | None]:
        only = torch.zeros(self._units.count)
        only[unit] = 1.0
        return self._backward(only, numbers)

    def _zeros(self, parameter: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return torch.zeros(self._units.count, dtype=dtype, device=parameter.device)

    def add_weighted_(self, sums: Sums, factors: torch.Tensor) -> None:
        """Adds the weighted sums of the units' gradients; one pass if all layers have the same factors."""
        numbers = list(self.parameters)
        if self._are_all_dropped():  # zero times NaN that was saved on the way would be NaN
            return
        if factors.dim() == 1:
            self._add(sums, factors, numbers)
        else:
            for number in numbers:
                self._add(sums, factors[:, number], [number])

    def _add(self, sums: Sums, factors: torch.Tensor, numbers: Sequence[int]) -> None:
        for unit in self._units.present if self._is_rounded else ():
            for number, gradient in zip(numbers, self._of_unit(unit, numbers), strict=True):
                if gradient is not None:
                    sums[number].add_(gradient.to(sums[number].dtype) * factors[unit].to(sums[number]))
        if self._is_rounded:
            return
        for number, gradient in zip(numbers, self._backward(factors, numbers), strict=True):
            if gradient is not None:
                sums[number].add_(gradient)
