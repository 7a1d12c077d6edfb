"""Rows or elements of a parameter that numbers choose: embeddings, and indexing."""

from __future__ import annotations

import torch

from edpsgd.per_example.ghost import LayerGradients
from edpsgd.per_example.graph import shapes, spread_alike
from edpsgd.per_example.rules.rule import Rule
from edpsgd.per_example.uses import Received, Use


def _fits_embedding(use: Use) -> bool:
    return not (use.saved("scale_grad_by_freq") or use.saved("sparse") or use.is_turned)


def _is_outside_of_row(use: Use, dim: int) -> bool:
    return dim < len(shapes(use.receiver)[0]) - 1


def _add_embedding(use: Use, received: Received, layer: LayerGradients) -> None:
    """The output gradient of each token is added to the row of the table that was looked up."""
    output_gradient = received.output_gradient
    numbers = use.saved("indices").expand(output_gradient.shape[:-1])
    flat_numbers = received.as_rows(numbers.unsqueeze(-1), 1).squeeze(-1)
    rows = received.as_rows(output_gradient, 1)
    padding = use.saved("padding_idx")
    if 0 <= padding < use.shape[0]:
        rows = rows * (flat_numbers != padding).unsqueeze(1)
    layer.add_chosen(flat_numbers, rows, received.units_of(rows))


def _count_indices(use: Use) -> int:
    return sum(index is not None for index in use.saved("indices"))


def _fits_index(use: Use) -> bool:
    leading = use.saved("indices")[: _count_indices(use)]
    are_numbers = all(index is not None and index.dtype is torch.int64 for index in leading)
    return are_numbers and not use.is_turned


def _is_chosen_dim(use: Use, dim: int) -> bool:
    features = len(use.shape) - _count_indices(use)
    return dim < len(shapes(use.receiver)[0]) - features


def _add_index(use: Use, received: Received, layer: LayerGradients) -> None:
    """Elements of a parameter that numbers choose."""
    chosen = spread_alike([index for index in use.saved("indices") if index is not None])
    features = len(use.shape) - len(chosen)
    rows = received.as_rows(received.output_gradient, features)
    places = []
    for index in chosen:
        with_features = index.reshape(*index.shape, *[1] * features)
        places.append(received.as_rows(with_features, features).flatten())
    gradients = layer.instantiated().view(-1, *use.shape)
    gradients.index_put_(
        (received.units_of(rows).units, *places),
        rows.to(gradients.dtype),
        accumulate=True,
    )


RULES: dict[str, Rule] = {
    "EmbeddingBackward0": Rule(
        _add_embedding,
        _fits_embedding,
        _is_outside_of_row,
        {0: ("indices",)},
    ),
    "IndexBackward0": Rule(
        _add_index,
        _fits_index,
        _is_chosen_dim,
        {0: ("indices",)},
        takes_any_shape=True,
    ),
}
