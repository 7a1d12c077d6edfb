"""The graph that autograd recorded of a batch's losses.

A node is one recorded operation. Its consumers are the nodes that used its result: nearer to the
losses. What a node receives in the backward pass is its output gradient: the gradient of the losses
by the operation's result, with the shape of that result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

LEAF = "torch::autograd::AccumulateGrad"
TURNING = {"TBackward0", "TransposeBackward0", "PermuteBackward0"}  # of a matrix
VIEWS = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}
PASSING = {*VIEWS, "ToCopyBackward0", "UnsqueezeBackward0", "SqueezeBackward1"}
PICKING = {
    "Embedding",
    "EmbeddingBag",
    "Gather",
    "Index",
    "IndexSelect",
    "MaskedSelect",
    "RepeatInterleave",
    "Take",
}
_MOST_NODES_OF_A_WEIGHT = 12
# Of each result of a node; None where nobody used it.
OutputGradients = Sequence[torch.Tensor | None]


@dataclass(eq=False)
class Graph:
    """All nodes below some losses.

    Attributes:
        examples: how many losses there are.
        root: the node of the losses, and which of its results they are.
        nodes: every node after all of its consumers, so that the root is the first.
        consumers: of each node, with the place of its result among the consumer's arguments.
        leaves: the nodes of parameters, by the parameter's id.
        used: which results of a node go on to the losses.
    """

    examples: int
    root: tuple[Node, int]
    nodes: list[Node] = field(default_factory=list)
    consumers: dict[Node, list[tuple[Node, int]]] = field(default_factory=dict)
    leaves: dict[int, Node] = field(default_factory=dict)
    used: dict[Node, set[int]] = field(default_factory=dict)

    def precisions(self) -> set[torch.dtype]:
        """The number formats of all results."""
        return {result.dtype for node in self.nodes for result in result_metadata(node)}

    def edges(self, node: Node) -> list[GradientEdge]:
        """What autograd is asked for to get a node's output gradients: one for each used result."""
        return [GradientEdge(node, output) for output in sorted(self.used[node])]

    def output_gradients(
        self,
        begin: torch.Tensor | GradientEdge,
        gradient: torch.Tensor,
        nodes: Iterable[Node],
        is_last: bool = False,
    ) -> dict[Node, OutputGradients]:
        """What the nodes receive if something above them receives a gradient.

        Args:
            begin: the losses, or a result of a node.
            gradient: that it receives, in its shape.
            nodes: below it.
            is_last: whether nobody will go through this part of the graph again: it is freed.

        Returns:
            Of each node, an output gradient for each of its results, in the shape of the result.
        """
        edges: list[GradientEdge] = []
        for node in dict.fromkeys(nodes):
            edges += self.edges(node)
        if not edges:
            return {}
        found = torch.autograd.grad(
            begin,
            edges,
            gradient,
            retain_graph=not is_last,
            allow_unused=True,
        )
        received: dict[Node, list[torch.Tensor | None]] = {}
        for edge, output_gradient in zip(edges, found, strict=True):
            results = received.setdefault(edge.node, [None] * len(shapes(edge.node)))
            results[edge.output_nr] = output_gradient
        return dict(received)

    def free(self, node: Node) -> None:
        """Lets go of what a node saved for its backward, without running that.

        Autograd frees a node when a backward pass has gone through it. Here the pass has nothing to
        hand to the node, which then skips its computation.
        """
        result = result_metadata(node)[0]
        leaf = self._own_leaf(node)
        if leaf is None:  # it goes with the losses
            return
        zeros = torch.zeros((), dtype=result.dtype, device=result.device).expand(
            tuple(result.shape),
        )
        handle = node.register_prehook(lambda gradients: (None,) * len(gradients))
        torch.autograd.grad(GradientEdge(node, 0), leaf, zeros, allow_unused=True)
        handle.remove()

    def _own_leaf(self, node: Node) -> GradientEdge | None:
        """A parameter that goes into this node alone and has no hook, which would be handed None.

        So might one of any other argument; and nodes on other ways to a parameter would be run.
        """
        for child, output in node.next_functions:
            if child is None or child.name() != LEAF or len(self.consumers[child]) > 1:
                continue
            if not saved(child, "variable")._backward_hooks:
                return GradientEdge(child, output)
        return None

    def below(self, node: Node, stops: Collection[Node] = ()) -> set[Node]:
        """All nodes that the node's results were made of, but for what is below the stops."""
        seen: set[Node] = set()
        stack = [] if node in stops else [node]
        while stack:
            for child, _ in stack.pop().next_functions:
                if child is None or child in seen:
                    continue
                seen.add(child)
                if child not in stops:
                    stack.append(child)
        return seen


def read_graph(losses: torch.Tensor) -> Graph:
    """The graph below some losses, one for each example."""
    root = node_of(losses)
    graph = Graph(len(losses), (root, losses.output_nr))
    graph.consumers[root] = []
    graph.used[root] = {losses.output_nr}
    graph.nodes = _walk(graph)
    return graph


def _walk(graph: Graph) -> list[Node]:
    """Notes all consumers, depth first; returns the nodes, each after all of its consumers."""
    finished: list[Node] = []
    stack: list[tuple[Node, bool]] = [(graph.root[0], False)]
    seen: set[Node] = set()
    while stack:
        node, is_done = stack.pop()
        if is_done:
            finished.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))  # comes up again when all that is below it is finished
            children = _note_consumer(graph, node)
            stack.extend((child, False) for child in children if child not in seen)
    finished.reverse()
    return finished


def _note_consumer(graph: Graph, node: Node) -> list[Node]:
    """Writes down whose consumer the node is; those nodes."""
    children = []
    for slot, (child, output) in enumerate(node.next_functions):
        if child is not None:
            graph.consumers.setdefault(child, []).append((node, slot))
            graph.used.setdefault(child, set()).add(output)
            children.append(child)
    if node.name() == LEAF:
        graph.leaves[id(saved(node, "variable"))] = node
    return children


def node_of(losses: torch.Tensor) -> Node:
    """The node that made the losses."""
    if losses.grad_fn is None:
        problem = "but they were computed without one"
        raise ValueError(f"losses must come from the model and need a gradient, {problem}")
    return losses.grad_fn


def saved(node: Node, name: str) -> Any:
    """An attribute of a node, such as what autograd saved of its arguments and results."""
    return getattr(node, name)


def result_metadata(node: Node) -> Sequence[Any]:
    """Shape, dtype and device of each of the operation's results."""
    # Results are the inputs of the backward.
    metadata: Sequence[Any] = saved(node, "_input_metadata")
    return metadata


def shapes(node: Node) -> list[tuple[int, ...]]:
    """Of the operation's results."""
    return [tuple(result.shape) for result in result_metadata(node)]


def argument_shapes(node: Node) -> list[tuple[int, ...]]:
    """Of the operation's arguments; () where one needs no gradient."""
    return [() if child is None else shapes(child)[output] for child, output in node.next_functions]


def swaps(node: Node) -> bool:
    """Whether an operation that may turn a matrix does so: its dimensions may stay in order."""
    if node.name() == "TransposeBackward0":
        first, second = (int(saved(node, f"_saved_{name}")) for name in ("dim0", "dim1"))
        # Negative ones are kept as unsigned numbers, which are as odd.
        return first % 2 != second % 2
    if node.name() == "PermuteBackward0":
        dims = list(saved(node, "_saved_dims"))
        return bool(dims) and dims[0] % 2 == 1
    return True


def is_weight(node: Node | None) -> bool:
    """Whether a result is a parameter, or made of parameters and nothing else.

    Where it would take long to find out, the answer is no.
    """
    stack = [node]
    for _ in range(_MOST_NODES_OF_A_WEIGHT):
        if not stack:
            return True
        one = stack.pop()
        if one is None:
            return False
        is_chosen_by_data = one.name().removesuffix("Backward0") in PICKING
        if is_chosen_by_data:
            return False
        stack += [child for child, _ in one.next_functions]
    return not stack


def spread_alike(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All of them in the shape that they broadcast to together."""
    return list(torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]
