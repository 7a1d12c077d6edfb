"""What the meanings of all operations have in common: types, and how to read a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.autograd.graph import Node

from edpsgd.per_example import owners as own
from edpsgd.per_example.graph import saved, shapes
from edpsgd.per_example.owners import SHARED, Owners

Results = Sequence[Owners | None]  # of each result of a node; None where nobody used it
Arguments = Sequence[Owners | None]  # of each argument; None where the operation must be probed
Meaning = Callable[[Node, Results], Arguments]

_FORMS = 4  # autograd numbers the forms of an operation, as in MaxBackward0 and MaxBackward1


class Undecided(Exception):
    """An operation's meaning says nothing about its arguments in this case."""


def named(kinds: str, meaning: Meaning) -> dict[str, Meaning]:
    """The same meaning for all forms of some operations.

    Args:
        kinds: autograd's names without their end, separated by spaces; "CopyBackwards" is a whole
            one.
        meaning: of all of them.

    Returns:
        The meaning by the names that nodes have.
    """
    names: list[str] = []
    for kind in kinds.split():
        whole = kind if kind.endswith("Backwards") else f"{kind}Backward"
        names += [f"{whole}{form}" for form in range(_FORMS)]
        names.append(f"torch::autograd::{whole}")
    return dict.fromkeys(names, meaning)


def slots(node: Node) -> range:
    """The numbers of a node's arguments."""
    return range(len(node.next_functions))


def argument_shape(node: Node, slot: int) -> tuple[int, ...]:
    """The shape of an argument; () if it needs no gradient."""
    child, output = node.next_functions[slot]
    return () if child is None else shapes(child)[output]


def only_result(results: Results) -> Owners:
    """The owners of the first result, if it is the only one that is used."""
    first, *others = results
    if first is None or any(owners is not None for owners in others):
        raise Undecided("other results are used")
    return first


def first_result(results: Results) -> Owners:
    """The owners of the first result, if it is used; those of others say nothing else."""
    first = results[0]
    if first is None:
        raise Undecided("the first result is not used")
    return first


def signed(number: int) -> int:
    """A number that torch keeps as an unsigned one."""
    return number - (1 << 64) if number >= 1 << 63 else number


def saved_dim(node: Node, name: str, ndim: int) -> int:
    """A dimension that the node keeps under a name, counted from the front."""
    return signed(saved(node, f"_saved_{name}")) % max(1, ndim)


def saved_dims(node: Node, name: str, ndim: int) -> list[int]:
    """One or several dimensions, counted from the front; all of them if the node keeps none."""
    kept = saved(node, f"_saved_{name}")
    if kept is None:
        kept = ()
    numbers = [kept] if isinstance(kept, int) else list(kept)
    return [signed(number) % max(1, ndim) for number in numbers] or list(range(ndim))


def undecided(node: Node) -> Arguments:
    """Nothing is known of any argument."""
    return [None] * len(node.next_functions)


def only_first(node: Node, owners: Owners) -> Arguments:
    """The first argument has these owners; all others are weights, which all examples share."""
    return [owners if slot == 0 else shared(node, slot) for slot in slots(node)]


def shared(node: Node, slot: int) -> Owners:
    """All examples share the argument."""
    return own.everywhere(SHARED, len(argument_shape(node, slot)))
