"""Owners: to which example each element of a result belongs.

An owner is the number of the one loss that the gradient of an element comes from. Owners are a small integer tensor
with as many dimensions as the result: a dimension along which they do not change has size 1. All of them stay on the
CPU, for there are few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

NOBODY = -1  # no loss depends on the element: its gradient is zero
SHARED = -2  # several losses do, or may
Owners = torch.Tensor
Shape = Sequence[int]


def everywhere(owner: int, ndim: int) -> Owners:
    """The same owner for all elements of a result with so many dimensions."""
    return torch.full((1,) * ndim, owner, dtype=torch.int64)


def is_shared(owners: Owners) -> bool:
    """Whether some element belongs to several examples."""
    return bool((owners == SHARED).any())


def is_all_shared(owners: Owners) -> bool:
    """Whether nothing is left that belongs to a single example."""
    return bool((owners == SHARED).all())


def merged(first: Owners, second: Owners) -> Owners:
    """Owners of a sum."""
    if first is second:
        return first
    shape = torch.broadcast_shapes(first.shape, second.shape)  # type: ignore[no-untyped-call]
    first, second = first.expand(shape), second.expand(shape)
    both = torch.where(first == second, first, SHARED)
    return torch.where(first == NOBODY, second, torch.where(second == NOBODY, first, both))


def merged_along(owners: Owners, dims: Iterable[int]) -> Owners:
    """Owners of the sum over some dimensions, which are kept with size 1."""
    for dim in dims:
        if owners.shape[dim] > 1:
            largest = owners.amax(dim, keepdim=True)
            others = torch.where(owners == NOBODY, largest, owners)
            owners = torch.where((others == largest).all(dim, keepdim=True), largest, SHARED)
    return owners


def is_constant(owners: Owners, dims: Iterable[int]) -> bool:
    """Whether the owners do not change along some dimensions."""
    return all(owners.shape[dim] == 1 for dim in dims)


def compressed(owners: Owners) -> Owners:
    """The same owners with as few elements as can be. Elements that nobody owns may get an owner: zero is zero."""
    for dim in range(owners.dim() - 1, -1, -1):
        if owners.shape[dim] > 1:
            one = merged_along(owners, [dim])
            if not bool(((one == SHARED) & (owners != SHARED)).any()):
                owners = one
    return owners


def without(shape: Shape, dim: int) -> list[int]:
    """The other sizes."""
    return [size for place, size in enumerate(shape) if place != dim]


def unspread(owners: Owners, shape: Shape) -> Owners:
    """Owners of an argument of this shape that was spread over the result."""
    missing = owners.dim() - len(shape)
    if missing == 0 and all(one == 1 or size > 1 for one, size in zip(owners.shape, shape, strict=True)):
        return owners
    summed = [*range(missing), *(missing + dim for dim, size in enumerate(shape) if size == 1)]
    kept = merged_along(owners, summed)
    return kept.reshape(kept.shape[missing:])


def along(owners: Owners, shape: Shape, dims: Iterable[int]) -> Owners:
    """The same owners, one for each place of some dimensions."""
    wanted = set(dims)
    return owners.expand([shape[dim] if dim in wanted else size for dim, size in enumerate(owners.shape)])


def reshaped(owners: Owners, shape: Shape, new: Shape) -> Owners:
    """Owners of the same elements in another shape."""
    if tuple(shape) == tuple(new):
        return owners
    if 0 in shape:
        return everywhere(NOBODY, len(new))
    sizes: list[int] = []
    filled: list[int] = []  # the dimensions of the old shape in which owners must be made explicit
    for old_dims, new_dims in _blocks(shape, new):
        if is_constant(owners, old_dims):
            sizes += [1] * len(new_dims)
        else:
            filled += old_dims
            sizes += [new[dim] for dim in new_dims]
    found = along(owners, shape, filled).reshape(sizes)
    return thinned(found)


def thinned(owners: Owners) -> Owners:
    """Without the dimensions along which the owners are all the same."""
    for dim, size in enumerate(owners.shape):
        if size > 1:
            first = owners.narrow(dim, 0, 1)
            if bool((owners == first).all()):
                owners = first
    return owners


def _blocks(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions that hold the same elements before and after a change of shape."""
    blocks: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        before, after = [], []
        here = there = 1
        is_begun = False
        while not is_begun or here != there:
            is_begun = True
            if i < len(old) and (here <= there or j >= len(new)):
                here *= old[i]
                before.append(i)
                i += 1
            else:
                there *= new[j]
                after.append(j)
                j += 1
        blocks.append((before, after))
    return blocks


def scattered(owners: Owners, positions: torch.Tensor, shape: Shape) -> Owners:
    """Owners of a tensor of which a result took the elements at some positions.

    Args:
        owners: of the result.
        positions: where each element of the result came from, counted in the tensor of this shape.
        shape: of the tensor.
    """
    count = 1
    for size in shape:
        count *= size
    found = torch.full((count,), NOBODY, dtype=torch.int64)
    places, values = positions.reshape(-1), owners.expand(positions.shape).reshape(-1)
    is_known = values != NOBODY
    places, values = places[is_known], values[is_known]
    found[places] = values
    found[places[found[places] != values]] = SHARED
    return found.view(tuple(shape))
