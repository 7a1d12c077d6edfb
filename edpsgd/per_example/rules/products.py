"""Products of matrices, and convolutions."""

from __future__ import annotations

import torch

from edpsgd.per_example.ghost import LayerGradients
from edpsgd.per_example.graph import shapes
from edpsgd.per_example.precision import exact
from edpsgd.per_example.rules.rule import Rule
from edpsgd.per_example.uses import Received, Use


def _fits_product(use: Use) -> bool:
    if use.node.name() == "AddmmBackward0":
        is_plain = use.saved("alpha") == 1 and use.saved("beta") == 1
        is_weight = use.slot == 2
        # One number for all columns is broadcast along them too.
        is_bias = use.slot == 0 and use.shape == shapes(use.node)[0][1:]
        return is_plain and (is_weight or is_bias)
    return use.slot == 1


def _add_product(use: Use, received: Received, layer: LayerGradients) -> None:
    """The y = b + x·W of a linear layer, and of the steps of a recurrent one.

    A unit's gradient of W is the sum of xᵢ lᵢᵀ over its rows, with the activation x and the output
    gradient l; that of b is the sum of lᵢ.
    """
    output_gradient = received.output_gradient
    rows = received.units_of(output_gradient)
    if use.slot == 0:
        layer.add_instantiated(rows.sums(exact(output_gradient)))
        return
    name = "mat1" if use.node.name() == "AddmmBackward0" else "self"
    activations = use.saved(name).detach()
    if use.is_turned:  # torch.nn.Linear keeps Wᵀ
        layer.add_products(output_gradient, activations, rows)
    else:
        layer.add_products(activations, output_gradient, rows)


def _fits_convolution(use: Use) -> bool:
    is_plain = use.saved("groups") == 1 and not use.saved("transposed") and not use.is_turned
    has_one_or_two_dims = len(shapes(use.node)[0]) in (3, 4)
    return is_plain and use.slot in (1, 2) and has_one_or_two_dims


def _add_convolution(use: Use, received: Received, layer: LayerGradients) -> None:
    """A product with the patches that the kernel covers: rows are examples x places."""
    output_gradient = received.output_gradient  # examples x channels x places
    if use.slot == 2:
        sums = exact(output_gradient.flatten(2)).sum(2)
        layer.add_instantiated(received.units_of(sums).sums(sums))
        return
    activations, kernel = use.saved("input").detach(), use.shape[2:]
    options = {}
    for name in ("dilation", "padding", "stride"):
        sizes = tuple(use.saved(name))
        if len(sizes) < len(kernel):  # one for all, if padding is a word
            sizes = sizes * len(kernel)
        options[name] = sizes
    if len(kernel) == 1:  # as an image of height 1
        activations, kernel = activations.unsqueeze(2), (1, *kernel)
        options = {name: (0 if name == "padding" else 1, *sizes) for name, sizes in options.items()}
    patches = torch.nn.functional.unfold(exact(activations), kernel, **options)
    rows = output_gradient.flatten(2).mT.flatten(0, 1)
    layer.add_products(rows, patches.mT.flatten(0, 1), received.units_of(rows))


RULES: dict[str, Rule] = {
    "AddmmBackward0": Rule(_add_product, _fits_product, saved={2: ("mat1",)}),
    "MmBackward0": Rule(_add_product, _fits_product, saved={1: ("self",)}),
    "ConvolutionBackward0": Rule(_add_convolution, _fits_convolution, saved={1: ("input",)}),
}
