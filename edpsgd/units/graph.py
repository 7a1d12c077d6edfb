"""The graph that autograd recorded: where parameters come in, and which example each row belongs to on the way.

A node is one recorded operation. Its consumers are the nodes that used its result: nearer to the loss. The gradient
that a node receives has the shape of the operation's result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

LEAF = "torch::autograd::AccumulateGrad"
TURNING = {"TBackward0", "TransposeBackward0", "PermuteBackward0"}  # of a matrix
VIEWS = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}
PASSING = {*VIEWS, "ToCopyBackward0", "UnsqueezeBackward0", "SqueezeBackward1"}
PICKING = {"IndexBackward0", "IndexSelectBackward0", "GatherBackward0"}  # rows that numbers in the data choose
SCATTERING = {
    "IndexAddBackward0",
    "IndexPutBackward0",
    "IndexCopyBackward0",
    "ScatterBackward0",
    "ScatterAddBackward0",
    "ScatterReduceBackward0",
    "MaskedSelectBackward0",
    "MaskedScatterBackward0",
    "TakeBackward0",
    "EmbeddingBackward0",
    "EmbeddingBagBackward0",
    "RepeatInterleaveBackward0",
}

_PLACES = {  # what says where rows go, beside the data
    "AsStridedBackward0": ("size", "storage_offset", "stride"),
    "CatBackward0": ("dim",),
    "ConstantPadNdBackward0": ("pad",),
    "FlipBackward0": ("dims",),
    "PermuteBackward0": ("dims",),
    "RollBackward0": ("dims", "shifts"),
    "SelectBackward0": ("dim", "index"),
    "SliceBackward0": ("dim", "start", "step"),
    "SplitBackward0": ("dim", "split_size"),
    "SplitWithSizesBackward0": ("dim", "split_sizes"),
    "StackBackward0": ("dim",),
    "TransposeBackward0": ("dim0", "dim1"),
    "UnbindBackward0": ("dim",),
    "UnfoldBackward0": ("dimension", "size", "step"),
    "UnsafeSplitBackward0": ("dim", "split_size"),
}
Pattern = frozenset[tuple[object, ...]]


class Graph:
    """All nodes below some losses, nearest to the losses first.

    Attributes:
        examples: how many losses there are.
        root: the node of the losses, and which of its results they are.
        nodes: every node after all of its consumers.
        consumers: of each node, with the place of its result among the consumer's arguments.
        leaves: the nodes of parameters, by the parameter's id.
        moving: the nodes in which numbers of the data say which rows of an activation go where.
        reshaped: the first sizes before and after each change of shape.
        used: which results of a node go on to the losses.
    """

    def __init__(self, losses: torch.Tensor) -> None:
        self.examples = len(losses)
        self.root = (node_of(losses), losses.output_nr)
        self.consumers: dict[Node, list[tuple[Node, int]]] = {self.root[0]: []}
        self.used: dict[Node, set[int]] = {self.root[0]: {losses.output_nr}}
        self.leaves: dict[int, Node] = {}
        self.moving: set[Node] = set()
        self.reshaped: set[frozenset[int]] = set()
        self._written: list[Node] = []  # where something was written into a part of a tensor
        self.nodes = self._walk()

    def _walk(self) -> list[Node]:
        finished: list[Node] = []
        stack: list[tuple[Node, bool]] = [(self.root[0], False)]
        seen: set[Node] = set()
        while stack:
            node, is_done = stack.pop()
            if is_done:
                finished.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack.extend((below, False) for below in self._note(node) if below not in seen)
        finished.reverse()
        return finished

    def _note(self, node: Node) -> list[Node]:
        """Writes down whose consumer the node is, and returns what is below it."""
        below = []
        for slot, (child, output) in enumerate(node.next_functions):
            if child is not None:
                self.consumers.setdefault(child, []).append((node, slot))
                self.used.setdefault(child, set()).add(output)
                below.append(child)
        name = node.name()
        if name == LEAF:
            self.leaves[id(saved(node, "variable"))] = node
        elif (name in PICKING or name in SCATTERING) and _takes_activations(node):
            self.moving.add(node)
        elif name == "torch::autograd::CopySlices":
            self._written.append(node)
        elif name in VIEWS:
            sizes = (saved(node, "_saved_self_sym_sizes"), shapes(node)[0])
            self.reshaped.add(frozenset(size[0] if size else 1 for size in sizes))
        return below

    def pattern(self, steps: Collection[int]) -> Pattern:
        """Which operations follow which, and with what constants: a model that does something new has a new pattern.

        Args:
            steps: where the steps of packed sequences begin, and their sizes. They differ in every batch, and slices
                at them count as alike.
        """
        marks = {node: _mark(node, steps) for node in self.nodes}
        return frozenset(
            (marks[node], slot, marks[child], output)
            for node in self.nodes
            for slot, (child, output) in enumerate(node.next_functions)
            if child is not None
        )

    def hides_places(self, steps: Collection[int]) -> bool:
        """Whether rows were written somewhere, for autograd does not say where; but for packed sequences' steps."""
        return any(not _is_unpacked(node, steps) for node in self._written)

    def edges(self, node: Node) -> list[GradientEdge]:
        """What autograd can be asked for: the gradients that the node receives."""
        return [GradientEdge(node, output) for output in sorted(self.used[node])]

    def gradients(
        self, begin: torch.Tensor | GradientEdge, gradient: torch.Tensor, nodes: Iterable[Node], is_last: bool = False
    ) -> dict[Node, Sequence[torch.Tensor | None]]:
        """What the nodes receive if something above them receives a gradient. The last time frees the graph."""
        edges = [edge for node in dict.fromkeys(nodes) for edge in self.edges(node)]
        if not edges:
            return {}
        found = torch.autograd.grad(begin, edges, gradient, retain_graph=not is_last, allow_unused=True)
        received: dict[Node, list[torch.Tensor | None]] = {}
        for edge, one in zip(edges, found, strict=True):
            results = received.setdefault(edge.node, [None] * len(shapes(edge.node)))
            results[edge.output_nr] = one
        return dict(received)

    def release(self, node: Node) -> None:
        """Lets go of what a node kept, without its own backward: it receives nothing, so that it does nothing."""
        shape, kind = shapes(node)[0], saved(node, "_input_metadata")[0].dtype
        handle = node.register_prehook(lambda gradients: (None,) * len(gradients))
        below = next(GradientEdge(child, output) for child, output in node.next_functions if child is not None)
        nothing = torch.zeros((), dtype=kind, device=saved(node, "_input_metadata")[0].device).expand(shape)
        torch.autograd.grad(GradientEdge(node, 0), below, nothing, allow_unused=True)
        handle.remove()

    def above(self, node: Node, most: int) -> list[Node]:
        """The nearest nodes that the node's result went into, directly or not."""
        found = [node]
        for one in found:
            if len(found) > most:
                break
            found.extend({consumer for consumer, _ in self.consumers[one]} - set(found))
        return found[1:]

    def below(self, node: Node, stops: Collection[Node] = ()) -> set[Node]:
        """All nodes that the node's result was made of, but for what is below the stops."""
        seen: set[Node] = set()
        stack = [] if node in stops else [node]
        while stack:
            for child, _ in stack.pop().next_functions:
                if child is not None and child not in seen:
                    seen.add(child)
                    stack.extend([] if child in stops else [child])
        return seen


def node_of(losses: torch.Tensor) -> Node:
    """The node that made the losses."""
    if losses.grad_fn is None:
        raise ValueError("losses must come from the model and need a gradient, but they were computed without one")
    return losses.grad_fn


def saved(node: Node, name: str) -> Any:
    """What autograd kept of the operation's arguments and results."""
    return getattr(node, name)


def shapes(node: Node) -> list[tuple[int, ...]]:
    """Of the operation's results."""
    return [tuple(one.shape) for one in saved(node, "_input_metadata")]


def _mark(node: Node, steps: Collection[int]) -> tuple[object, ...]:
    """The operation, and the constants that say where its rows go."""
    name = node.name()
    constants = [getattr(node, f"_saved_{constant}", None) for constant in _PLACES.get(name, ())]
    if name == "SliceBackward0" and constants[1] in steps:
        constants[1] = "a step"
    return (name, *(tuple(one) if isinstance(one, list) else one for one in constants))


def _is_unpacked(node: Node, steps: Collection[int]) -> bool:
    """Whether the node writes some steps of packed sequences, as pad_packed_sequence does."""
    value = node.next_functions[1][0]
    while value is not None and value.name() in VIEWS:
        value = value.next_functions[0][0]
    if value is None or value.name() != "SliceBackward0":
        return False
    return bool(steps) and saved(value, "_saved_start") in {0, *steps}


class Mixed:
    """Stands for rows that may belong to several examples."""


MIXED = Mixed()
Order = torch.Tensor | Mixed | None  # the example at each place of the batch dimension; None: as in the losses


def orders(graph: Graph, place_of: Callable[[Node, Order], tuple[int, torch.Tensor] | None]) -> dict[Node, Order]:
    """How the examples are ordered at each node, by the numbers with which this batch reordered them.

    Args:
        graph: of this batch.
        place_of: for a node and its order, the dimension of the examples in its result and the example at each place
            of it; None if that is not known.
    """
    at: dict[Node, Order] = {}
    below: dict[Node, Order] = {}
    for node in graph.nodes:
        order = _merged([below[consumer] for consumer, _ in graph.consumers[node]])
        at[node] = below[node] = order
        if node in graph.moving and order is not MIXED:
            place = place_of(node, order)
            below[node] = MIXED if place is None else _order_below(node, order, graph.examples, *place)
    return at


def _takes_activations(node: Node) -> bool:
    """Whether the node picks from something else than a parameter."""
    first = node.next_functions[0][0]
    while first is not None and first.name() in PASSING | TURNING:
        first = first.next_functions[0][0]
    return first is not None and first.name() != LEAF


def _merged(found: list[Order]) -> Order:
    """One order for a result that several nodes used; they must agree."""
    if all(order is None for order in found):
        return None
    first = found[0]
    for order in found:
        if not isinstance(order, torch.Tensor) or not isinstance(first, torch.Tensor):
            return MIXED
        if order is not first and not torch.equal(order, first):
            return MIXED
    return first


def _order_below(node: Node, order: Order, examples: int, dim: int, labels: torch.Tensor) -> Order:
    """The order of the examples in the argument that the node picked rows of."""
    name = node.name()
    if name == "IndexBackward0":
        return _below_index(node, order, examples, dim, labels)
    if name not in PICKING:
        return MIXED
    picked = saved(node, "_saved_dim") % len(shapes(node)[0])
    if picked != dim:
        return order
    if name == "GatherBackward0" or saved(node, "_saved_self_sym_sizes")[dim] != examples:
        return MIXED
    return _turned(saved(node, "_saved_index"), labels, examples)


def _below_index(node: Node, order: Order, examples: int, dim: int, labels: torch.Tensor) -> Order:
    indices, sizes = saved(node, "_saved_indices"), saved(node, "_saved_self_sym_sizes")
    indexed = [place for place, index in enumerate(indices) if index is not None]
    if dim < indexed[0]:
        return order
    if any(indices[place].dtype is not torch.int64 for place in indexed) or indexed[-1] - indexed[0] >= len(indexed):
        return MIXED
    numbers = spread_alike([indices[place] for place in indexed])
    within = dim - indexed[0]
    if within >= numbers[0].dim() or numbers[0].shape[within] != len(labels):
        return MIXED
    shape = [-1 if place == within else 1 for place in range(numbers[0].dim())]
    owners = labels.view(shape).expand(numbers[0].shape)
    found = [_turned(n, owners, examples) for p, n in zip(indexed, numbers, strict=True) if sizes[p] == examples]
    known = [order for order in found if order is not MIXED]  # also a dimension that is as long by chance
    return _merged(known) if known else MIXED


def spread_alike(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All of them in the shape that they have together."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call]
    return [tensor.expand(shape) for tensor in tensors]


def _turned(index: torch.Tensor, owners: torch.Tensor, examples: int) -> Order:
    """The owner of each of the rows that were picked; MIXED if one has two. Rows that nobody picked keep theirs."""
    index, owners = index.cpu().reshape(-1), owners.reshape(-1)
    unchanged = torch.arange(examples)
    order = unchanged.clone()
    order[index] = owners
    if not torch.equal(order[index], owners):
        return MIXED
    return None if torch.equal(order, unchanged) else order
