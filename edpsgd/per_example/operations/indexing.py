"""Operations whose results are some of the elements of an argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import Node

from edpsgd.per_example import owners as own
from edpsgd.per_example.graph import is_weight, saved, shapes
from edpsgd.per_example.operations.common import (
    Arguments,
    Meaning,
    Results,
    Undecided,
    argument_shape,
    named,
    only_result,
    saved_dim,
    shared,
    signed,
    slots,
)
from edpsgd.per_example.owners import Owners

EMBEDDINGS = {"EmbeddingBackward0", "EmbeddingBagBackward0"}
_NUMBERS = (torch.int64, torch.int32)


def select(node: Node, results: Results) -> Arguments:
    """One place of a dimension, which is taken away."""
    dim = saved_dim(node, "dim", len(argument_shape(node, 0)))
    place = signed(saved(node, "_saved_index"))
    return [_picked(lambda x: x.select(dim, place), [dim], node, only_result(results))]


def slice_(node: Node, results: Results) -> Arguments:
    """Some places of a dimension at equal distances."""
    size = argument_shape(node, 0)
    dim = saved_dim(node, "dim", len(size))
    begin, end, step = (signed(saved(node, f"_saved_{name}")) for name in ("start", "end", "step"))
    owners = only_result(results)
    if step == 1 and shapes(node)[0] == size:  # all of it
        return [owners]
    before = [slice(None)] * dim
    places = (*before, slice(begin, end, step))
    return [_picked(lambda x: x[places], [dim], node, owners)]


def index_select(node: Node, results: Results) -> Arguments:
    """Numbers that pick places of a dimension."""
    dim = saved_dim(node, "dim", len(argument_shape(node, 0)))
    numbers = saved(node, "_saved_index").cpu().long()
    return [_picked(lambda x: x.index_select(dim, numbers), [dim], node, only_result(results))]


def index(node: Node, results: Results) -> Arguments:
    """Numbers that pick places in dimensions that are neighbours."""
    if is_weight(node.next_functions[0][0]):
        return [shared(node, slot) for slot in slots(node)]
    indices = saved(node, "_saved_indices")
    dims = [dim for dim, numbers in enumerate(indices) if numbers is not None]
    are_neighbours = dims == list(range(dims[0], dims[-1] + 1))
    are_numbers = all(indices[dim].dtype in _NUMBERS for dim in dims)  # and not masks
    if not are_neighbours or not are_numbers:
        return [None]
    before = (slice(None),) * dims[0]
    on_cpu = tuple(indices[dim].cpu().long() for dim in dims)
    return [_picked(lambda x: x[before + on_cpu], dims, node, only_result(results))]


def gather(node: Node, results: Results) -> Arguments:
    """Numbers that pick along one dimension, at each place of the others."""
    owners, size, shape = only_result(results), argument_shape(node, 0), shapes(node)[0]
    if not size:  # a number may be picked several times, and has no dimension to do it along
        return [own.unspread(owners, size)]
    dim = saved_dim(node, "dim", len(size))
    are_others_whole = own.without(size, dim) == own.without(shape, dim)
    is_decided = own.is_constant(owners, [dim]) and are_others_whole
    return [owners if is_decided else None]


def embedding(node: Node, results: Results) -> Arguments:
    """A table of weights, from which numbers pick."""
    return [shared(node, slot) for slot in slots(node)]


def _picked(
    pick: Callable[[torch.Tensor], torch.Tensor],
    dims: Sequence[int],
    node: Node,
    owners: Owners,
) -> Owners:
    """Owners of an argument of which the result holds some elements.

    Args:
        pick: does to a tensor of the argument's shape what the operation did.
        dims: of the argument, from which it picks: they are neighbours. All others are the same in
            the result.
        node: the operation.
        owners: of its result.
    """
    argument, result = argument_shape(node, 0), list(shapes(node)[0])
    kept_in_argument = [dim for dim in range(len(argument)) if dim not in dims]
    new = _new_dims(argument, result, dims)
    kept_in_result = [dim for dim in range(len(result)) if dim not in new]
    sizes = list(argument)
    for dim, place in zip(kept_in_argument, kept_in_result, strict=True):
        if owners.shape[place] == 1:  # one place stands for all
            sizes[dim] = result[place] = 1
    positions = pick(torch.arange(torch.Size(sizes).numel()).view(sizes))
    if list(positions.shape) != result:
        raise Undecided("the operation is not what it seems")
    return own.scattered(owners, positions, sizes)


def _new_dims(argument: Sequence[int], result: Sequence[int], dims: Sequence[int]) -> range:
    """The dimensions of the result that took the place of those of the argument."""
    begin = min(dims)
    count = len(dims) + len(result) - len(argument)
    return range(begin, begin + count)


MEANINGS: dict[str, Meaning] = {
    **named("Select", select),
    **named("Slice", slice_),
    **named("IndexSelect", index_select),
    **named("Index", index),
    **named("Gather", gather),
    **named("Embedding EmbeddingBag", embedding),
}
