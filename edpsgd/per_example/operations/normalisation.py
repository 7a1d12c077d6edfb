"""Normalisation: elements depend on all others that go into the same mean and variance."""

from __future__ import annotations

from torch.autograd.graph import Node

from edpsgd.per_example import owners as own
from edpsgd.per_example.graph import saved
from edpsgd.per_example.operations.common import (
    Arguments,
    Meaning,
    Results,
    argument_shape,
    named,
    only_first,
    only_result,
    slots,
    undecided,
)

BATCH_NORMS = {f"{kind}BatchNormBackward0" for kind in ("Native", "Cudnn", "Miopen")}


def layer_norm(node: Node, results: Results) -> Arguments:
    """Over the last dimensions; weight and bias are broadcast over all others."""
    owners = only_result(results)
    features = len(saved(node, "_saved_normalized_shape"))
    is_decided = own.is_constant(owners, range(owners.dim() - features, owners.dim()))
    weights = [own.unspread(owners, argument_shape(node, slot)) for slot in slots(node)[1:]]
    return [owners if is_decided else None, *weights]


def group_norm(node: Node, results: Results) -> Arguments:
    """Over all dimensions but the first."""
    owners = only_result(results)
    is_decided = own.is_constant(owners, range(1, owners.dim()))
    return only_first(node, owners) if is_decided else undecided(node)


def batch_norm(node: Node, results: Results) -> Arguments:
    """With statistics that are given, or of its own for each place of the second dimension."""
    owners = only_result(results)
    has_given_statistics = not saved(node, "_saved_training")
    others = [dim for dim in range(owners.dim()) if dim != 1]
    is_decided = has_given_statistics or own.is_constant(owners, others)
    return only_first(node, owners) if is_decided else undecided(node)


MEANINGS: dict[str, Meaning] = {
    **named("NativeLayerNorm FusedRmsNorm", layer_norm),
    **named("NativeGroupNorm", group_norm),
    **dict.fromkeys(BATCH_NORMS, batch_norm),
}
