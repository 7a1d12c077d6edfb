"""Operations that reduce dimensions, or let elements depend on others along one of them."""

from __future__ import annotations

from torch.autograd.graph import Node

from edpsgd.per_example import owners as own
from edpsgd.per_example.graph import saved
from edpsgd.per_example.operations.common import (
    Arguments,
    Meaning,
    Results,
    argument_shape,
    first_result,
    named,
    only_result,
    saved_dim,
    saved_dims,
)

_NO_REDUCTION = 0


def reduction(node: Node, results: Results) -> Arguments:
    """A sum, a mean, a largest element: of elements that all have the owner of the result."""
    owners, ndim = first_result(results), len(argument_shape(node, 0))
    if owners.dim() == ndim:  # the dimensions are kept with size 1
        return [owners]
    reduced = sorted(saved_dims(node, "dim", ndim)) if hasattr(node, "_saved_dim") else range(ndim)
    for dim in reduced:
        owners = owners.unsqueeze(dim)
    return [owners if owners.dim() == ndim else None]


def along_dim(node: Node, results: Results) -> Arguments:
    """Elements depend on others along one dimension, which is decided if that has one owner."""
    owners = first_result(results)
    if owners.dim() == 0:  # a number has no others
        return [owners]
    is_decided = own.is_constant(owners, [saved_dim(node, "dim", owners.dim())])
    return [owners if is_decided else None]


def nll(node: Node, results: Results) -> Arguments:
    """Negative log-likelihood; classes lie in the second dimension, or the first of one row."""
    owners, ndim = only_result(results), len(argument_shape(node, 0))
    if saved(node, "_saved_reduction") != _NO_REDUCTION:
        return [own.everywhere(int(owners.flatten()[0]), ndim)]
    return [owners.unsqueeze(1 if ndim > 1 else 0)]


MEANINGS: dict[str, Meaning] = {
    **named("Sum Mean Amax Amin Logsumexp LinalgVectorNorm Norm Var Std Max Min", reduction),
    **named("Softmax SafeSoftmax LogSoftmax Cumsum Logcumsumexp Cumprod Sort Topk Glu", along_dim),
    **named("NllLoss NllLoss2D", nll),
}
