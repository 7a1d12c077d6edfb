"""Operations that put tensors together, or take them apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
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
    slots,
    undecided,
)
from edpsgd.per_example.owners import NOBODY, Owners


def cat(node: Node, results: Results) -> Arguments:
    """Each argument has the owners of its part of the result."""
    owners, shape = only_result(results), shapes(node)[0]
    dim = saved_dim(node, "dim", len(shape))
    sizes = [argument_shape(node, slot) for slot in slots(node)]
    if owners.shape[dim] == 1:
        return [owners if len(size) == len(shape) else None for size in sizes]
    if any(child is None for child, _ in node.next_functions):
        return undecided(node)  # autograd does not say how long the arguments without gradients are
    # An empty vector joins anything.
    lengths = [size[dim] if len(size) == len(shape) else 0 for size in sizes]
    if sum(lengths) != shape[dim]:
        return undecided(node)
    parts = zip(torch.split(owners, lengths, dim), sizes, strict=True)
    return [part if len(size) == len(shape) else None for part, size in parts]


def stack(node: Node, results: Results) -> Arguments:
    """Each argument is one place of a new dimension."""
    owners, shape = only_result(results), shapes(node)[0]
    dim = saved_dim(node, "dim", len(shape))
    return list(own.along(owners, shape, [dim]).unbind(dim))


def split(node: Node, results: Results) -> Arguments:
    """The results are parts of one argument."""
    ndim = len(argument_shape(node, 0))
    dim = saved_dim(node, "dim", ndim)
    parts = []
    for owners, shape in zip(results, shapes(node), strict=True):
        known = own.everywhere(NOBODY, ndim) if owners is None else owners
        parts.append(own.along(known, shape, [dim]))
    return [_joined(parts, dim)]


def unbind(node: Node, results: Results) -> Arguments:
    """Each result is one place of a dimension."""
    ndim = len(argument_shape(node, 0))
    dim = saved_dim(node, "dim", ndim)
    parts = [own.everywhere(NOBODY, ndim - 1) if owners is None else owners for owners in results]
    return [_joined([part.unsqueeze(dim) for part in parts], dim)]


def _joined(parts: Sequence[Owners], dim: int) -> Owners:
    """Owners of all parts in one tensor."""
    shapes_of_parts = [part.shape for part in parts]
    widest = [max(sizes) for sizes in zip(*shapes_of_parts, strict=True)]
    alike = [part.expand([*widest[:dim], part.shape[dim], *widest[dim + 1 :]]) for part in parts]
    return torch.cat(alike, dim)


def pack(node: Node, results: Results) -> Arguments:
    """Padded sequences to packed ones: the first step of all of them, then the second ..."""
    owners, shape = only_result(results), argument_shape(node, 0)
    counts = saved(node, "_saved_result1").tolist()  # how many sequences have each step
    if not own.is_constant(owners, range(1, owners.dim())):  # examples lie along the features
        return [None]
    if owners.shape[0] == 1:
        return [own.everywhere(int(owners.flatten()[0]), len(shape))]
    is_batch_first = saved(node, "_saved_batch_first")
    sequences, steps = (shape[0], shape[1]) if is_batch_first else (shape[1], shape[0])
    found = torch.full((steps, sequences), NOBODY, dtype=torch.int64)
    ends = itertools.accumulate(counts)
    for step, (count, end) in enumerate(zip(counts, ends, strict=True)):
        found[step, :count] = owners.flatten()[end - count : end]
    if is_batch_first:
        found = found.T
    features = [1] * (len(shape) - 2)
    return [found.reshape(*found.shape, *features)]


MEANINGS: dict[str, Meaning] = {
    **named("Cat", cat),
    **named("Stack", stack),
    **named("Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes", split),
    **named("Unbind", unbind),
    **named("PackPaddedSequence", pack),
}
