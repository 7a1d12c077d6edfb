"""Parameters that are added to activations or multiplied by them, element by element."""

from __future__ import annotations

from dataclasses import replace

import torch

from edpsgd.per_example.ghost import LayerGradients
from edpsgd.per_example.graph import shapes
from edpsgd.per_example.precision import exact
from edpsgd.per_example.rules.rule import Rule
from edpsgd.per_example.uses import Received, Use


def _fits_layer_norm(use: Use) -> bool:
    # Several dimensions may be normalised, and the parameter of two be a transposed one.
    return use.slot in (1, 2) and not use.is_turned


def _is_outside_of_norm(use: Use, dim: int) -> bool:
    return dim < len(shapes(use.receiver)[0]) - len(use.shape)


def _add_layer_norm(use: Use, received: Received, layer: LayerGradients) -> None:
    """The bias is added to, and the weight multiplied by, what was normalised."""
    terms = exact(received.output_gradient)
    if use.slot == 1:
        names = ("input", "result1", "result2")
        activations, mean, scale = (use.saved(name).detach() for name in names)
        terms = terms * (exact(activations) - mean) * scale
    rows = received.as_rows(terms, len(use.shape))
    layer.add_instantiated(received.units_of(rows).sums(rows))


def _fits_broadcast(use: Use) -> bool:
    return not use.is_turned


def _aligned_shape(use: Use, ndim: int) -> tuple[int, ...]:
    """The parameter's shape in the number of dimensions that it is broadcast to."""
    return (1,) * (ndim - len(use.shape)) + use.shape


def _is_broadcast_along(use: Use, dim: int) -> bool:
    return _aligned_shape(use, len(shapes(use.receiver)[0]))[dim] == 1


def _other_factor(use: Use) -> torch.Tensor:
    """What the parameter is multiplied by."""
    factor: torch.Tensor = use.saved(("other", "self")[use.slot])
    return factor.detach()


def _add_broadcast(use: Use, received: Received, layer: LayerGradients) -> None:
    """A sum or product with a parameter that is broadcast, or a parameter that is expanded."""
    terms, name = exact(received.output_gradient), use.node.name()
    if name == "MulBackward0":
        terms = terms * _other_factor(use)
    elif use.slot == 1:
        sign = -1 if name == "SubBackward0" else 1
        terms = terms * (use.saved("alpha") * sign)
    aligned = _aligned_shape(use, terms.dim())
    summed = [dim for dim, size in enumerate(aligned) if size == 1 and dim != received.layout.dim]
    if summed:
        terms = terms.sum(summed, keepdim=True)
    rows = received.as_rows(terms, terms.dim() - 1)
    layer.add_instantiated(received.units_of(rows).sums(rows))


_BROADCAST = Rule(_add_broadcast, _fits_broadcast, _is_broadcast_along, takes_any_shape=True)
RULES: dict[str, Rule] = {
    "NativeLayerNormBackward0": Rule(
        _add_layer_norm,
        _fits_layer_norm,
        _is_outside_of_norm,
        {1: ("input", "result1", "result2")},
    ),
    "AddBackward0": _BROADCAST,
    "SubBackward0": _BROADCAST,
    "MulBackward0": replace(_BROADCAST, saved={0: ("other",), 1: ("self",)}),
    "ExpandBackward0": _BROADCAST,
}
