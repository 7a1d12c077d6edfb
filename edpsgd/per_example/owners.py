"""Owners: to which example each element of a result belongs.

The owner of an element is the number of the one example whose loss depends on it: the only one that
its output gradient comes from. Owners are a small integer tensor with as many dimensions as the
result: a dimension along which they do not change has size 1. All of them stay on the CPU, for
there are few.
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
    """Owners of what is used twice: its output gradient is the sum of two."""
    if first is second:
        return first
    first, second = torch.broadcast_tensors(first, second)  # type: ignore[no-untyped-call]
    both = torch.where(first == second, first, SHARED)
    return torch.where(first == NOBODY, second, torch.where(second == NOBODY, first, both))


def merged_along(owners: Owners, dims: Iterable[int]) -> Owners:
    """Owners of what was broadcast along some dimensions, which are kept with size 1."""
    for dim in dims:
        if owners.shape[dim] > 1:
            largest = owners.amax(dim, keepdim=True)
            without_nobody = torch.where(owners == NOBODY, largest, owners)
            are_same = (without_nobody == largest).all(dim, keepdim=True)
            owners = torch.where(are_same, largest, SHARED)
    return owners


def is_constant(owners: Owners, dims: Iterable[int]) -> bool:
    """Whether the owners do not change along some dimensions."""
    return all(owners.shape[dim] == 1 for dim in dims)


def compressed(owners: Owners) -> Owners:
    """The same in as few elements as can be. What nobody owns may get an owner: zero is zero."""
    for dim in range(owners.dim() - 1, -1, -1):
        if owners.shape[dim] > 1:
            shorter = merged_along(owners, [dim])
            loses_owners = (shorter == SHARED) & (owners != SHARED)
            if not bool(loses_owners.any()):
                owners = shorter
    return owners


def without(shape: Shape, dim: int) -> list[int]:
    """The sizes of all other dimensions."""
    return [size for place, size in enumerate(shape) if place != dim]


def unspread(owners: Owners, shape: Shape) -> Owners:
    """Owners of an argument of this shape that was broadcast to the result."""
    new_dims = owners.dim() - len(shape)
    spread = [dim for dim, size in enumerate(shape) if size == 1]
    if new_dims == 0 and is_constant(owners, spread):
        return owners
    merged_dims = [*range(new_dims), *(new_dims + dim for dim in spread)]
    kept = merged_along(owners, merged_dims)
    return kept.reshape(kept.shape[new_dims:])


def along(owners: Owners, shape: Shape, dims: Iterable[int]) -> Owners:
    """The same owners, one for each place of some dimensions."""
    sizes = list(owners.shape)
    for dim in dims:
        sizes[dim] = shape[dim]
    return owners.expand(sizes)


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
    old_dim = new_dim = 0
    while old_dim < len(old) or new_dim < len(new):
        old_run: list[int] = []
        new_run: list[int] = []
        old_elements = new_elements = 1
        is_begun = False
        # The run that holds fewer elements goes on.
        while not is_begun or old_elements != new_elements:
            is_begun = True
            takes_old = old_elements <= new_elements or new_dim >= len(new)
            if old_dim < len(old) and takes_old:
                old_elements *= old[old_dim]
                old_run.append(old_dim)
                old_dim += 1
            else:
                new_elements *= new[new_dim]
                new_run.append(new_dim)
                new_dim += 1
        blocks.append((old_run, new_run))
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
    is_overwritten = found[places] != values  # an element that was taken twice, for two examples
    found[places[is_overwritten]] = SHARED
    return found.view(tuple(shape))
