"""Operations that give the same elements another shape or order, or repeat them."""

from __future__ import annotations

from torch.autograd.graph import Node

from edpsgd.per_example import owners as own
from edpsgd.per_example.graph import saved, shapes
from edpsgd.per_example.operations.common import (
    Arguments,
    Meaning,
    Results,
    argument_shape,
    named,
    only_result,
    saved_dim,
    saved_dims,
    signed,
)
from edpsgd.per_example.owners import Owners


def reshape(node: Node, results: Results) -> Arguments:
    """The same elements in the same order."""
    return [own.reshaped(only_result(results), shapes(node)[0], argument_shape(node, 0))]


def transpose(node: Node, results: Results) -> Arguments:
    """Two dimensions are swapped, and so they are back."""
    owners = only_result(results)
    first, second = (saved_dim(node, name, owners.dim()) for name in ("dim0", "dim1"))
    return [owners.transpose(first, second)]


def turn(node: Node, results: Results) -> Arguments:
    """The transpose of a matrix."""
    return [only_result(results).t()]


def permute(node: Node, results: Results) -> Arguments:
    """The inverse of the permutation leads back."""
    owners = only_result(results)
    dims = saved_dims(node, "dims", owners.dim())
    inverse = sorted(range(len(dims)), key=dims.__getitem__)
    return [owners.permute(inverse) if dims else owners]


def flip(node: Node, results: Results) -> Arguments:
    """The same dimensions in the other direction."""
    owners = only_result(results)
    # None of them may be given: then nothing is flipped, where a sum would be over all.
    dims = [signed(dim) for dim in saved(node, "_saved_dims")]
    return [owners.flip(dims)]


def repeat(node: Node, results: Results) -> Arguments:
    """Copies beside each other: an element belongs to whom all of its copies belong to."""
    owners, size = only_result(results), argument_shape(node, 0)
    new_dims = owners.dim() - len(size)
    owners = own.merged_along(owners, range(new_dims))
    owners = owners.reshape(owners.shape[new_dims:])
    for dim, length in enumerate(size):
        if owners.shape[dim] > 1:
            owners = _merge_copies(owners, dim, length)
    return [owners]


def _merge_copies(owners: Owners, dim: int, length: int) -> Owners:
    """Owners of what was copied to make a dimension longer."""
    copies = owners.reshape(*owners.shape[:dim], -1, length, *owners.shape[dim + 1 :])
    return own.merged_along(copies, [dim]).squeeze(dim)


MEANINGS: dict[str, Meaning] = {
    **named("View UnsafeView ReshapeAlias Squeeze Unsqueeze", reshape),
    **named("Transpose", transpose),
    **named("T", turn),
    **named("Permute", permute),
    **named("Flip", flip),
    **named("Repeat", repeat),
}
