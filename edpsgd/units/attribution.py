"""Finds out, and remembers, how the examples lie in the results of operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.graph import Node

from edpsgd.units.graph import MIXED, Graph, Order, orders, shapes
from edpsgd.units.rows import LAST_PLACE, WAYS, Layout, Layouts, Packing

Key = tuple[object, ...]
Gradients = Sequence[torch.Tensor | None]
_NEAR = 40  # nodes
_SUMS = 8  # of features


class Knowledge:
    """What was found out in earlier batches.

    Attributes:
        ways: in which the examples lay in the results of each operation, in all batches that were looked at.
        unproven: operations whose gradients were zero whenever they were looked at.
        looks: how often gradients were looked at.
        patterns: which operations followed which, in batches that agreed with autograd.
    """

    def __init__(self) -> None:
        self.ways: dict[Key, frozenset[str]] = {}
        self.unproven: set[Key] = set()
        self.looks = 0
        self.patterns: set[tuple[object, ...]] = set()


class Attribution:
    """Where the examples of one batch are.

    Args:
        graph: of the batch.
        gradients: gives the gradients of nodes for given weights of the losses.
        knowledge: of earlier batches; it grows.
        packings: of the batch's packed sequences.
        candidates: nodes that will be asked for.
        is_due: whether to look again at what is known.

    Attributes:
        has_probed: whether anything had to be looked at.
        is_changed: whether the examples lie otherwise somewhere than what is known would have said.
        doubtful: nodes that were taken for what they seem, though their gradients have been zero so far.
    """

    def __init__(
        self,
        graph: Graph,
        gradients: Callable[[Sequence[Node], torch.Tensor], dict[Node, Gradients]],
        knowledge: Knowledge,
        packings: Iterable[Packing],
        candidates: Iterable[Node],
        is_due: bool,
    ) -> None:
        self._graph, self._gradients, self._knowledge = graph, gradients, knowledge
        self._layouts = Layouts(graph.examples, packings, graph.reshaped)
        self._candidates = list(dict.fromkeys([*candidates, *graph.moving]))
        knowledge.looks += 1
        self._scales = _scales(graph.examples, knowledge.looks)
        self._plain: dict[Node, Gradients] = {}
        self._scaled: dict[Node, Gradients] = {}
        self._found: dict[Node, Layout | None] = {}
        self._is_due = is_due
        self.has_probed = False
        self.doubtful: list[Node] = []
        self.is_changed = False
        self._orders = orders(graph, self._place)

    def _place(self, node: Node, order: Order) -> tuple[int, torch.Tensor] | None:
        layout = self._look(node, (node.name(), len(shapes(node)[0]), getattr(node, "_saved_dim", None)), order)
        return None if layout is None else (layout.dim, layout.labels)

    def layout(self, node: Node, key: Key) -> Layout | None:
        """How the examples lie in the node's result; None if its rows do not belong to single examples."""
        return self._look(node, key, self._orders[node])

    def _look(self, node: Node, key: Key, order: Order) -> Layout | None:
        if node not in self._found:
            self._found[node] = None if order is MIXED else self._find(node, key, order)
        return self._found[node]

    def _find(self, node: Node, key: Key, order: Order) -> Layout | None:
        known = self._knowledge.ways.get(key)
        shape = self._shapes(node)[0]
        if self._graph.examples == 1:  # all rows are its own, which tells nothing about other batches
            return Layout(0, torch.zeros(shape[0], dtype=torch.int64), True) if shape and shape[0] else None
        if known is not None and not self._is_due:
            layout, is_agreed = self._layouts.agreed(known, shape, order)
            if is_agreed or not known:
                self.doubtful.extend([node] if key in self._knowledge.unproven else [])
                return layout
        fitting = self._fitting(node, order)
        if not all(bool(torch.isfinite(one).all()) for one in self._plain[node] if one is not None):
            ways = fitting if known is None else known & fitting  # for this batch: NaN is nothing to learn from
            return self._layouts.agreed(ways, shape, order)[0]
        is_surprise = known is not None and key not in self._knowledge.unproven and not known & fitting
        self.is_changed |= is_surprise and self._layouts.agreed(known or (), shape, order)[1]
        is_zero = not any(bool(one.any()) for one in self._plain[node] if one is not None)
        (self._knowledge.unproven.add if is_zero else self._knowledge.unproven.discard)(key)
        kept = (
            fitting
            if known is None
            else frozenset(way for way in known if way in fitting or self._layouts.make(way, shape, order) is None)
        )
        self._knowledge.ways[key] = kept
        return self._layouts.agreed((kept & fitting) or fitting, shape, order)[0]

    def _shapes(self, node: Node) -> list[tuple[int, ...]]:
        return [shapes(node)[output] for output in sorted(self._graph.used[node])]

    # ---------------------------------------------------------------- trying all ways

    def _fitting(self, node: Node, order: Order) -> frozenset[str]:
        """The ways that explain how the gradient of the node's first result changes when the losses are scaled.

        None, if nothing explains that of another result.
        """
        if node not in self._plain:
            self._probe(node)
        found = [self._explaining(node, output, order) for output in sorted(self._graph.used[node])]
        return found[0] if all(found) else frozenset()

    def _probe(self, node: Node) -> None:
        self.has_probed = True
        wanted = [*self._candidates, node, *self._graph.above(node, _NEAR)]  # those above may be asked for next
        nodes = [one for one in dict.fromkeys(wanted) if one not in self._plain]
        for found, weights in ((self._plain, torch.ones_like(self._scales)), (self._scaled, self._scales)):
            found.update({one: self._mixed(results) for one, results in self._gradients(nodes, weights).items()})

    def _mixed(self, results: Gradients) -> Gradients:
        """Some random sums of the features instead of all of them, which need little memory and scale alike."""
        return [None if one is None else self._mixed_features(one) for one in results]

    def _mixed_features(self, gradient: torch.Tensor) -> torch.Tensor:
        size, place = gradient.shape[-1] if gradient.dim() else 0, gradient.dim() - 1
        if size <= _SUMS or place == 0 or (place <= LAST_PLACE and size == self._graph.examples):
            return gradient
        generator = torch.Generator().manual_seed(self._knowledge.looks)
        return gradient @ torch.randn((size, _SUMS), generator=generator).to(gradient)

    def _explaining(self, node: Node, output: int, order: Order) -> frozenset[str]:
        """The ways that explain the change of one result's gradient."""
        shape, pair = shapes(node)[output], (self._plain[node][output], self._scaled[node][output])
        return frozenset(way for way in WAYS if self._explains(way, order, shape, *pair))

    def _explains(
        self, way: str, order: Order, shape: Sequence[int], plain: torch.Tensor | None, scaled: torch.Tensor | None
    ) -> bool:
        if plain is None or scaled is None:
            return True
        layout = self._layouts.make(way, shape, order)
        if layout is None:
            return False
        expected = plain * layout.along(self._scales.to(plain), plain)
        precision = 1e-6 if scaled.dtype in (torch.float32, torch.float64) else 1e-3
        slack = precision * scaled.nan_to_num(0.0, 0.0, 0.0).abs().max()
        return not bool(((scaled - expected).abs() > 1e-3 * expected.abs() + slack).any())


def _scales(examples: int, seed: int) -> torch.Tensor:
    """Powers of two, by which results scale without rounding; torch's own random numbers are left alone."""
    shuffled = torch.randperm(examples, generator=torch.Generator().manual_seed(seed))
    return 2.0 ** -(shuffled % 8).float()
