"""LSTM layers that oneDNN runs as one operation."""

from __future__ import annotations

from torch.autograd.graph import Node

from edpsgd.per_example import owners as own
from edpsgd.per_example.graph import shapes
from edpsgd.per_example.operations.common import (
    Arguments,
    Meaning,
    Results,
    argument_shape,
    named,
    shared,
    slots,
    undecided,
)
from edpsgd.per_example.owners import Owners

_WEIGHTS = range(1, 5)  # slots of the two weights and the two biases


def lstm_sequences(node: Node, results: Results) -> Owners | None:
    """The owner of each sequence, as a vector; None, if a sequence does not belong to one example.

    The results are the states of all steps, steps x sequences x features, the last state and the
    last cell.
    """
    found: Owners | None = None
    for owners, shape in zip(results[:3], shapes(node)[:3], strict=True):
        if owners is None:
            continue
        sequences = len(shape) - 2
        if not own.is_constant(owners, [dim for dim in range(len(shape)) if dim != sequences]):
            return None
        flat = owners.flatten()
        found = flat if found is None else own.merged(found, flat)
    return None if found is None or own.is_shared(found) else found


def lstm(node: Node, results: Results) -> Arguments:
    """Sequences do not see each other, and all of them read the same weights."""
    sequences = lstm_sequences(node, results)
    if sequences is None:
        return undecided(node)
    found: list[Owners] = []
    for slot in slots(node):
        ndim = len(argument_shape(node, slot))
        if slot in _WEIGHTS or ndim < 2:
            found.append(shared(node, slot))
        else:
            places = [-1 if dim == ndim - 2 else 1 for dim in range(ndim)]
            found.append(sequences.reshape(places))
    return found


MEANINGS: dict[str, Meaning] = {**named("MkldnnRnnLayer", lstm)}
