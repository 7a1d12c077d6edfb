"""Where a parameter goes into operations, and what such an operation receives in the backward pass.

The rules work on these two: a use says what autograd saved of the forward pass, as the activations
that a layer read, and what was received are the output gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import Node

from edpsgd.per_example.graph import PASSING, TURNING, Graph, OutputGradients, saved, shapes, swaps
from edpsgd.per_example.layout import Layout, Rows, Units


@dataclass(frozen=True)
class Use:
    """Where a parameter goes into an operation.

    Attributes:
        node: the operation.
        slot: which of its arguments the parameter is.
        is_turned: whether it is the transposed parameter.
        is_reshaped: whether it has been given another shape.
        shape: of the argument.
        receiver: the node whose output gradient is looked at: as a rule the same, but the sum that
            broadcasts a result over all examples, where there is one.
    """

    node: Node
    slot: int
    is_turned: bool
    is_reshaped: bool
    shape: tuple[int, ...]
    receiver: Node
    _held: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def hold(self, names: Iterable[str]) -> None:
        """Keeps some of what autograd saved, for the backward pass may let go of it."""
        for name in names:
            self._held[name] = saved(self.node, f"_saved_{name}")

    def saved(self, name: str) -> Any:
        """What autograd saved under a name: an argument, a result or a constant."""
        return self._held[name] if name in self._held else saved(self.node, f"_saved_{name}")


@dataclass(frozen=True)
class Received:
    """The output gradients of an operation, and how the examples lie in them.

    Attributes:
        output_gradients: of each result.
        layout: of the examples in them.
        units: of the batch.
        common: what the rules for several parameters of the operation have in common, by name.
    """

    output_gradients: OutputGradients
    layout: Layout
    units: Units
    common: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def output_gradient(self) -> torch.Tensor:
        """Of the first result, in its shape."""
        first = self.output_gradients[0]
        if first is None:
            raise RuntimeError("a rule asked for the output gradient of a result that nobody used")
        return first

    def as_rows(self, values: torch.Tensor, features: int) -> torch.Tensor:
        """A tensor in the output gradient's layout as rows x so many of its last dimensions."""
        moved = values.movedim(self.layout.dim, 0)
        return moved.reshape(-1, *moved.shape[moved.dim() - features :])

    def units_of(self, rows: torch.Tensor) -> Rows:
        """The units of such rows."""
        return self.units.rows(self.layout, len(rows) // len(self.layout.labels), rows.device)


def find_uses(graph: Graph, leaf: Node, shape: Sequence[int]) -> list[Use]:
    """All operations that a parameter goes into, also in another shape or precision.

    Where the losses themselves are the parameter in another shape, that is the operation.

    Args:
        graph: of the batch.
        leaf: the node of the parameter.
        shape: of the parameter.
    """
    found = []
    stack: list[tuple[Node, bool, bool, tuple[int, ...]]] = [(leaf, False, False, tuple(shape))]
    while stack:
        node, is_turned, is_reshaped, now = stack.pop()
        for consumer, slot in graph.consumers.get(node, ()):
            name = consumer.name()
            if name in TURNING and len(now) == 2:
                if swaps(consumer):
                    stack.append((consumer, not is_turned, is_reshaped, now[::-1]))
                else:
                    stack.append((consumer, is_turned, is_reshaped, now))
            elif name in PASSING and consumer is not graph.root[0]:
                then = shapes(consumer)[0]
                stack.append((consumer, is_turned, is_reshaped or then != now, then))
            else:
                found.append(
                    Use(consumer, slot, is_turned, is_reshaped, now, _receiver(graph, consumer)),
                )
    return found


def _receiver(graph: Graph, node: Node) -> Node:
    """The sum that broadcasts an embedding of shape (1, ...) over all examples, or the node.

    Nothing of the embedding's own result belongs to one example, but what the sum receives does.
    """
    consumers = graph.consumers.get(node, [])
    if node.name() != "EmbeddingBackward0" or len(consumers) != 1:
        return node
    add, slot = consumers[0]
    if add.name() != "AddBackward0":
        return node
    is_plain = slot == 0 or saved(add, "_saved_alpha") == 1
    before, after = shapes(node)[0], shapes(add)[0]
    # An embedding of width 1 may be broadcast over columns too.
    has_same_rows = before[-1] == after[-1]
    return add if is_plain and has_same_rows and before != after else node
