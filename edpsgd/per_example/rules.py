"""For each operation that takes a parameter: what it adds to the units' gradients for that parameter.

A rule sees what autograd kept of the operation, the gradient of its result, and to which unit each row of it belongs.
Operations without a rule are left to autograd, one unit at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import Node

from edpsgd.per_example import recurrent
from edpsgd.per_example.ghost import LayerGradients, exact
from edpsgd.per_example.graph import PASSING, TURNING, Graph, saved, shapes, spread_alike, swaps
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
        receiver: the node whose gradient is looked at: as a rule the same, but the sum that spreads a result over all
            examples, where there is one.
    """

    node: Node
    slot: int
    is_turned: bool
    is_reshaped: bool
    shape: tuple[int, ...]
    receiver: Node
    _held: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def hold(self) -> None:
        """Keeps what the rule will need, for the backward pass lets go of it."""
        for name in _NEEDED.get(self.node.name(), {}).get(self.slot, ()):
            self._held[name] = saved(self.node, f"_saved_{name}")

    def saved(self, name: str) -> Any:
        """An argument or result that was kept."""
        return self._held[name] if name in self._held else saved(self.node, f"_saved_{name}")

    @property
    def rule(self) -> Rule | None:
        """The rule for it, if there is one."""
        name = self.node.name()
        rule, fits = RULES.get(name, (None, None))
        if fits is None or (self.is_reshaped and (self.is_turned or name not in _ANY_SHAPE)):
            return None
        return rule if fits(self) else None


@dataclass(frozen=True)
class Received:
    """The gradients of an operation's results, and how the examples lie in them."""

    gradients: Sequence[torch.Tensor | None]
    layout: Layout
    units: Units
    made: dict[str, torch.Tensor] = field(default_factory=dict)  # what rules have in common

    @property
    def gradient(self) -> torch.Tensor:
        """Of the first result."""
        gradient = self.gradients[0]
        if gradient is None:
            raise RuntimeError("a rule was asked for the gradient of a result that nobody used")
        return gradient

    def rows(self, values: torch.Tensor, features: int) -> torch.Tensor:
        """A tensor with the layout of the gradient as rows, whose last dimensions are the features."""
        moved = values.movedim(self.layout.dim, 0)
        return moved.reshape(-1, *moved.shape[moved.dim() - features :])

    def units_of(self, rows: torch.Tensor) -> Rows:
        """The units of such rows."""
        return self.units.rows(self.layout, len(rows) // len(self.layout.labels), rows.device)


Rule = Callable[[Use, Received, LayerGradients], None]


def uses(graph: Graph, leaf: Node, shape: Sequence[int]) -> list[Use]:
    """All operations that a parameter goes into, also in another shape or precision."""
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
            elif name in PASSING:
                then = shapes(consumer)[0]
                stack.append((consumer, is_turned, is_reshaped or then != now, then))
            else:
                found.append(Use(consumer, slot, is_turned, is_reshaped, now, _receiver(graph, consumer)))
    return found


def _receiver(graph: Graph, node: Node) -> Node:
    """The sum that spreads an embedding of shape (1, ...) over all examples; or else the node itself."""
    consumers = graph.consumers.get(node, [])
    if node.name() != "EmbeddingBackward0" or len(consumers) != 1 or consumers[0][0].name() != "AddBackward0":
        return node
    add, slot = consumers[0]
    is_plain = slot == 0 or saved(add, "_saved_alpha") == 1
    before, after = shapes(node)[0], shapes(add)[0]
    has_same_rows = before[-1] == after[-1]  # an embedding of width 1 may be spread over columns too
    return add if is_plain and has_same_rows and before != after else node


# -------------------------------------------------------------------- products of matrices


def _fits_product(use: Use) -> bool:
    if use.node.name() == "AddmmBackward0":
        are_plain = use.saved("alpha") == 1 and use.saved("beta") == 1
        return are_plain and use.slot in (0, 2) and (use.slot == 2 or len(use.shape) == 1)
    return use.slot == 1


def _product(use: Use, received: Received, layer: LayerGradients) -> None:
    """The y = b + x·W of a linear layer, and of the steps of a recurrent one."""
    gradient = received.gradient
    if use.slot == 0:
        layer.add_own(received.units_of(gradient).sums(exact(gradient)))
        return
    inputs = use.saved("mat1" if use.node.name() == "AddmmBackward0" else "self").detach()
    left, right = (gradient, inputs) if use.is_turned else (inputs, gradient)
    layer.add_products(left, right, received.units_of(gradient))


def _fits_convolution(use: Use) -> bool:
    is_plain = use.saved("groups") == 1 and not use.saved("transposed") and not use.is_turned
    return is_plain and use.slot in (1, 2) and len(shapes(use.node)[0]) in (3, 4)


def _convolution(use: Use, received: Received, layer: LayerGradients) -> None:
    """A product with the patches of the input that the kernel covers."""
    gradient = received.gradient
    if use.slot == 2:
        sums = exact(gradient.flatten(2)).sum(2)
        layer.add_own(received.units_of(sums).sums(sums))
        return
    inputs, kernel = use.saved("input").detach(), use.shape[2:]
    options = {}
    for name in ("dilation", "padding", "stride"):
        sizes = tuple(use.saved(name))
        options[name] = sizes if len(sizes) == len(kernel) else sizes * len(kernel)  # one for all, if padding is a word
    if len(kernel) == 1:  # as an image of height 1
        inputs, kernel = inputs.unsqueeze(2), (1, *kernel)
        options = {name: (int(name != "padding"), *value) for name, value in options.items()}
    patches = torch.nn.functional.unfold(exact(inputs), kernel, **options)
    rows = gradient.flatten(2).mT.flatten(0, 1)
    layer.add_products(rows, patches.mT.flatten(0, 1), received.units_of(rows))


# -------------------------------------------------------------------- tables and normalisation


def _fits_embedding(use: Use) -> bool:
    return not (use.saved("scale_grad_by_freq") or use.saved("sparse") or use.is_turned)


def _embedding(use: Use, received: Received, layer: LayerGradients) -> None:
    gradient, numbers = received.gradient, use.saved("indices")
    numbers = numbers.expand(gradient.shape[:-1])
    flat, rows = received.rows(numbers.unsqueeze(-1), 1).squeeze(-1), received.rows(gradient, 1)
    padding = use.saved("padding_idx")
    if 0 <= padding < use.shape[0]:
        rows = rows * (flat != padding).unsqueeze(1)
    layer.add_chosen(flat, rows, received.units_of(rows))


def _layer_norm(use: Use, received: Received, layer: LayerGradients) -> None:
    gradient = exact(received.gradient)
    if use.slot == 1:
        inputs, mean, scale = (use.saved(name).detach() for name in ("input", "result1", "result2"))
        gradient = gradient * (exact(inputs) - mean) * scale
    rows = received.rows(gradient, len(use.shape))
    layer.add_own(received.units_of(rows).sums(rows))


# -------------------------------------------------------------------- loose parameters


def _fits_spread(use: Use) -> bool:
    return not use.is_turned


def _factor(use: Use) -> torch.Tensor:
    factor: torch.Tensor = use.saved(("other", "self")[use.slot])
    return factor.detach()


def _spread(use: Use, received: Received, layer: LayerGradients) -> None:
    """A sum or product with a parameter that is spread over the examples, or a parameter expanded to them."""
    gradient, name = exact(received.gradient), use.node.name()
    if name == "MulBackward0":
        gradient = gradient * _factor(use)
    elif use.slot == 1:
        gradient = gradient * (use.saved("alpha") * (-1 if name == "SubBackward0" else 1))
    aligned = (1,) * (gradient.dim() - len(use.shape)) + use.shape
    summed = [place for place, size in enumerate(aligned) if size == 1 and place != received.layout.dim]
    if summed:
        gradient = gradient.sum(summed, keepdim=True)
    rows = received.rows(gradient, gradient.dim() - 1)
    layer.add_own(received.units_of(rows).sums(rows))


def _fits_index(use: Use) -> bool:
    indices = use.saved("indices")
    count = sum(index is not None for index in indices)
    leading = indices[:count]
    return not use.is_turned and all(index is not None and index.dtype is torch.int64 for index in leading)


def _index(use: Use, received: Received, layer: LayerGradients) -> None:
    """Elements of a parameter that numbers choose."""
    gradient = received.gradient
    chosen = spread_alike([index for index in use.saved("indices") if index is not None])
    features = len(use.shape) - len(chosen)
    values = received.rows(gradient, features)
    places = [received.rows(index.reshape(*index.shape, *[1] * features), features).flatten() for index in chosen]
    own = layer.own().view(-1, *use.shape)
    own.index_put_((received.units_of(values).units, *places), values.to(own.dtype), accumulate=True)


def allows(use: Use, dim: int) -> bool:
    """Whether the rule can do with examples that lie along this dimension."""
    ndim, name = len(shapes(use.receiver)[0]), use.node.name()
    if name in _SPREADING:
        aligned = (1,) * (ndim - len(use.shape)) + use.shape
        return aligned[dim] == 1
    if name == "IndexBackward0":
        count = sum(index is not None for index in use.saved("indices"))
        return dim < ndim - (len(use.shape) - count)
    if name == recurrent.NAME:
        return True
    features = {"EmbeddingBackward0": 1, "NativeLayerNormBackward0": len(use.shape)}
    return dim < ndim - features[name] if name in features else dim == 0


_NEEDED: dict[str, dict[int, tuple[str, ...]]] = {  # tensors, by slot
    "AddmmBackward0": {2: ("mat1",)},
    "MmBackward0": {1: ("self",)},
    "ConvolutionBackward0": {1: ("input",)},
    "EmbeddingBackward0": {0: ("indices",)},
    "NativeLayerNormBackward0": {1: ("input", "result1", "result2")},
    "IndexBackward0": {0: ("indices",)},
    "MulBackward0": {0: ("other",), 1: ("self",)},
    recurrent.NAME: dict.fromkeys(range(1, 5), recurrent.NEEDED),
}
_ANY_SHAPE = ("AddBackward0", "SubBackward0", "MulBackward0", "ExpandBackward0", "IndexBackward0")
_SPREADING = _ANY_SHAPE[:4]
RULES: dict[str, tuple[Rule, Callable[[Use], bool]]] = {
    "AddmmBackward0": (_product, _fits_product),
    "MmBackward0": (_product, _fits_product),
    "ConvolutionBackward0": (_convolution, _fits_convolution),
    "EmbeddingBackward0": (_embedding, _fits_embedding),
    "NativeLayerNormBackward0": (_layer_norm, lambda use: use.slot in (1, 2)),
    "IndexBackward0": (_index, _fits_index),
    recurrent.NAME: (recurrent.add_layer, lambda use: 1 <= use.slot <= 4 and not use.is_turned),
    **dict.fromkeys(_SPREADING, (_spread, _fits_spread)),
}
