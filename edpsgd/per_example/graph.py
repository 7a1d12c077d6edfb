"""The graph that autograd recorded.

A node is one recorded operation. Its consumers are the nodes that used its result: nearer to the loss. The gradient
that a node receives has the shape of the operation's result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

LEAF = "torch::autograd::AccumulateGrad"
TURNING = {"TBackward0", "TransposeBackward0", "PermuteBackward0"}  # of a matrix
VIEWS = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}
PASSING = {*VIEWS, "ToCopyBackward0", "UnsqueezeBackward0", "SqueezeBackward1"}
PICKING = {"Embedding", "EmbeddingBag", "Gather", "Index", "IndexSelect", "MaskedSelect", "RepeatInterleave", "Take"}
Gradients = Sequence[torch.Tensor | None]  # of a node's results


class Graph:
    """All nodes below some losses, nearest to the losses first.

    Attributes:
        examples: how many losses there are.
        root: the node of the losses, and which of its results they are.
        nodes: every node after all of its consumers.
        consumers: of each node, with the place of its result among the consumer's arguments.
        leaves: the nodes of parameters, by the parameter's id.
        used: which results of a node go on to the losses.
    """

    def __init__(self, losses: torch.Tensor) -> None:
        self.examples = len(losses)
        self.root = (node_of(losses), losses.output_nr)
        self.consumers: dict[Node, list[tuple[Node, int]]] = {self.root[0]: []}
        self.used: dict[Node, set[int]] = {self.root[0]: {losses.output_nr}}
        self.leaves: dict[int, Node] = {}
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
        if node.name() == LEAF:
            self.leaves[id(saved(node, "variable"))] = node
        return below

    def precisions(self) -> set[torch.dtype]:
        """Of all results."""
        return {one.dtype for node in self.nodes for one in saved(node, "_input_metadata")}

    def edges(self, node: Node) -> list[GradientEdge]:
        """What autograd can be asked for: the gradients that the node receives."""
        return [GradientEdge(node, output) for output in sorted(self.used[node])]

    def gradients(
        self, begin: torch.Tensor | GradientEdge, gradient: torch.Tensor, nodes: Iterable[Node], is_last: bool = False
    ) -> dict[Node, Gradients]:
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


def swaps(node: Node) -> bool:
    """Whether an operation that may turn a matrix does so: its dimensions may be named in their order, or twice."""
    if node.name() == "TransposeBackward0":
        first, second = (int(saved(node, f"_saved_{name}")) for name in ("dim0", "dim1"))
        return first % 2 != second % 2  # negative ones are kept as unsigned numbers, which are as odd
    if node.name() == "PermuteBackward0":
        dims = list(saved(node, "_saved_dims"))
        return bool(dims) and dims[0] % 2 == 1
    return True


def is_weight(node: Node | None) -> bool:
    """Whether a result is a parameter, or made of parameters and nothing else."""
    stack, most = [node], 12  # larger ones are taken for what they may be
    for _ in range(most):
        if not stack:
            return True
        one = stack.pop()
        if one is None or one.name().removesuffix("Backward0") in PICKING:  # numbers of the data choose
            return False
        stack += [child for child, _ in one.next_functions]
    return not stack


def spread_alike(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All of them in the shape that they have together."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call]
    return [tensor.expand(shape) for tensor in tensors]
