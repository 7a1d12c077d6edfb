"""Products of matrices, convolutions and attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch.autograd.graph import Node

from edpsgd.per_example import owners as own
from edpsgd.per_example.graph import is_weight
from edpsgd.per_example.operations.common import (
    Arguments,
    Meaning,
    Results,
    argument_shape,
    named,
    only_result,
    slots,
    undecided,
)
from edpsgd.per_example.owners import Owners


def mm(node: Node, results: Results) -> Arguments:
    """A product of two matrices."""
    return _probe_shared(node, _factors(only_result(results)))


def addmm(node: Node, results: Results) -> Arguments:
    """The same, and something that is added."""
    owners = only_result(results)
    return _probe_shared(node, [own.unspread(owners, argument_shape(node, 0)), *_factors(owners)])


def bmm(node: Node, results: Results) -> Arguments:
    """Products of many pairs of matrices, one pair for each place of the first dimension."""
    owners = only_result(results)
    found = _factors(owners)
    if node.name().startswith("Baddbmm"):
        found = [own.unspread(owners, argument_shape(node, 0)), *found]
    return _probe_shared(node, found)


def mv(node: Node, results: Results) -> Arguments:
    """A matrix times a vector."""
    owners = only_result(results)
    return _probe_shared(node, [owners.unsqueeze(1), own.merged_along(owners, [0])])


def _factors(owners: Owners) -> list[Owners]:
    """Of both matrices: a row of the first gives a row, a column of the second a column."""
    rows, columns = owners.dim() - 2, owners.dim() - 1
    return [own.merged_along(owners, [columns]), own.merged_along(owners, [rows])]


def _probe_shared(node: Node, found: Sequence[Owners]) -> Arguments:
    """Zeros, as of a mask, may keep examples apart: what looks shared is probed, but no weights."""
    kept: list[Owners | None] = []
    for owners, (child, _) in zip(found, node.next_functions, strict=True):
        must_probe = own.is_shared(owners) and not is_weight(child)
        kept.append(None if must_probe else owners)
    return kept


def convolution(node: Node, results: Results) -> Arguments:
    """Examples lie in the first dimension of input and result; they share weight and bias."""
    owners = only_result(results)
    if not own.is_constant(owners, range(1, owners.dim())):
        return undecided(node)
    weight = own.merged_along(owners, [0])
    bias = weight.flatten()
    return [owners, weight, bias][: len(slots(node))]


def attention(node: Node, results: Results) -> Arguments:
    """Queries, keys and values: examples and heads come first. A mask is spread over them."""
    owners = only_result(results)
    if owners.dim() < 3 or not own.is_constant(owners, range(1, owners.dim())):
        return undecided(node)
    queries_keys_values = [owners] * min(3, len(slots(node)))
    masks = [own.unspread(owners, argument_shape(node, slot)) for slot in slots(node)[3:]]
    return [*queries_keys_values, *masks]


_ATTENTIONS = """
    ScaledDotProductFlashAttentionForCpu ScaledDotProductEfficientAttention
    ScaledDotProductFlashAttention ScaledDotProductCudnnAttention
"""
MEANINGS: dict[str, Meaning] = {
    **named("Mm", mm),
    **named("Addmm", addmm),
    **named("Bmm Baddbmm", bmm),
    **named("Mv", mv),
    **named("Convolution", convolution),
    **named(_ATTENTIONS, attention),
}
