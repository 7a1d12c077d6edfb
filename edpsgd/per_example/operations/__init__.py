"""What operations mean for owners: from those of their results to those of their arguments.

A meaning follows from the operation and its constants alone, such as the dimensions that are
swapped; nothing is learned from other batches. Where a meaning does not decide, or an operation has
none, ``probing`` looks at what the operation's backward does to random output gradients.

A meaning is a function of a node and the owners of its results. It returns the owners of each
argument, in the argument's number of dimensions, or None where it does not decide. Each module here
ends with a table of its meanings.
"""

from __future__ import annotations

from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from edpsgd.per_example.operations import (
    elementwise,
    indexing,
    joining,
    lstm,
    normalisation,
    products,
    reductions,
    views,
)
from edpsgd.per_example.operations.common import Arguments, Meaning, Results, Undecided
from edpsgd.per_example.operations.indexing import EMBEDDINGS
from edpsgd.per_example.operations.lstm import lstm_sequences
from edpsgd.per_example.operations.normalisation import BATCH_NORMS

__all__ = [
    "BATCH_NORMS",
    "EMBEDDINGS",
    "MEANINGS",
    "Arguments",
    "Results",
    "argument_owners",
    "lstm_sequences",
]

MEANINGS: dict[str, Meaning] = {
    **elementwise.MEANINGS,
    **views.MEANINGS,
    **indexing.MEANINGS,
    **joining.MEANINGS,
    **reductions.MEANINGS,
    **normalisation.MEANINGS,
    **products.MEANINGS,
    **lstm.MEANINGS,
}


def argument_owners(node: Node, results: Results) -> Arguments:
    """Owners of the arguments; None where the operation's meaning does not decide.

    Args:
        node: the operation.
        results: owners of its results; None where nobody used one.
    """
    undecided: Arguments = [None] * len(node.next_functions)
    meaning = MEANINGS.get(node.name())
    # Somebody's own function may have any name.
    if meaning is None or isinstance(node, BackwardCFunction):
        return undecided
    try:
        return meaning(node, results)
    except (
        Undecided,
        AttributeError,
    ):  # another version of torch keeps other constants under other names
        return undecided
