"""Follows the examples of one batch through its graph: from the losses down to every operation.

Each operation hands the owners of its results on to its arguments. What it means decides where it can (``meanings``).
Elsewhere it is tried out: its own backward is called with random gradients, and again with those of every example
scaled by a power of two of its own. An operation's backward is linear, so that an element of an argument that is scaled
like one example belongs to it alone, and one that is scaled otherwise is shared. Nothing is kept for other batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from edpsgd.per_example import owners as own
from edpsgd.per_example.graph import LEAF, Graph, saved, shapes
from edpsgd.per_example.operations import BATCH_NORMS, Arguments, Results, arguments
from edpsgd.per_example.owners import NOBODY, SHARED, Owners

_POWERS = {torch.float16: 8}  # of two, that tell examples apart; half precision has few
_MANY_POWERS = 32
_CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5}  # a power of two is exact, but not the order of additions
_CLOSE_IN_HALF = 1e-3


class Trace:
    """Which example each element of each node's results belongs to.

    Args:
        graph: of the batch.

    Attributes:
        tried: the nodes whose backward was called to find out.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.tried: list[Node] = []
        self._results: dict[Node, list[Owners | None]] = {}
        root, output = graph.root
        first: list[Owners | None] = [None] * len(shapes(root))
        first[output] = torch.arange(graph.examples)
        self._results[root] = first
        self._generators: dict[torch.device, torch.Generator] = {}
        self._made: dict[int, tuple[Owners, Owners]] = {}
        for node in graph.nodes:
            self._hand_on(node)

    def owners(self, node: Node, output: int = 0) -> Owners:
        """Of one result."""
        found = self._results[node][output]
        return own.everywhere(NOBODY, len(shapes(node)[output])) if found is None else found

    def results(self, node: Node) -> Results:
        """Of all results; None where nobody used one."""
        return self._results[node]

    def keep_zero(self) -> bool:
        """Whether all operations that were tried out make zeros of zeros, and not NaN."""
        for node in self.tried:
            metadata = saved(node, "_input_metadata")
            zeros = [torch.zeros(tuple(one.shape), dtype=one.dtype, device=one.device) for one in metadata]
            if any(one is not None and not bool(torch.isfinite(one).all()) for one in _backward(node, zeros)):
                return False
        return True

    # ---------------------------------------------------------------- from results to arguments

    def _hand_on(self, node: Node) -> None:
        handed = self._results.setdefault(node, [None] * len(shapes(node)))
        results = self._results[node] = [
            None if one is None else own.everywhere(NOBODY, len(shape)) if 0 in shape else self._compressed(one)
            for one, shape in zip(handed, shapes(node), strict=True)
        ]
        used = [one for one in results if one is not None]
        if node.name() == LEAF or not used:
            return
        found = self._arguments(node, results, used)
        for (child, output), owners in zip(node.next_functions, found, strict=True):
            if child is not None and owners is not None:
                at = self._results.setdefault(child, [None] * len(shapes(child)))
                before = at[output]
                at[output] = owners if before is None else own.merged(before, owners)

    def _compressed(self, owners: Owners) -> Owners:
        """Made once for owners that many nodes have in common; they are kept, so that no others get their id."""
        if id(owners) not in self._made:
            found = own.compressed(owners)
            self._made[id(owners)] = (owners, found)
            self._made[id(found)] = (found, found)
        return self._made[id(owners)][1]

    def _arguments(self, node: Node, results: Results, used: Sequence[Owners]) -> Arguments:
        sizes = [() if child is None else shapes(child)[output] for child, output in node.next_functions]
        if self._graph.examples == 1:
            return [own.everywhere(0, len(size)) for size in sizes]
        if node.name() in BATCH_NORMS and saved(node, "_saved_training"):
            _refuse_statistics(used)
        if all(own.is_all_shared(one) for one in used):
            return [own.everywhere(SHARED, len(size)) for size in sizes]
        found = list(arguments(node, results))
        open_ones = [n for n, one in enumerate(found) if one is None and node.next_functions[n][0] is not None]
        if open_ones:
            self.tried.append(node)
            tried = self._try(node, results)
            for number in open_ones:
                found[number] = tried[number]
        return found

    # ---------------------------------------------------------------- trying out

    def _try(self, node: Node, results: Results) -> list[Owners]:
        """Owners of the arguments, by what the node's backward does to gradients that are scaled."""
        metadata = saved(node, "_input_metadata")
        base = min(_POWERS.get(one.dtype, _MANY_POWERS) for one in metadata)
        gradients = [None if one is None else self._random(at) for one, at in zip(results, metadata, strict=True)]
        plain = _backward(node, [_scaled(g, o, None, base) for g, o in zip(gradients, results, strict=True)])
        digits, places = [], 1
        while places < self._graph.examples:
            powers = [_scaled(g, o, places, base) for g, o in zip(gradients, results, strict=True)]
            digits.append((places, _backward(node, powers)))
            places *= base
        found = []
        for number, (child, output) in enumerate(node.next_functions):
            shape = () if child is None else shapes(child)[output]
            parts = [(place, one[number]) for place, one in digits]
            found.append(_decoded(plain[number], parts, base, self._graph.examples, shape))
        return found

    def _random(self, metadata: object) -> torch.Tensor:
        """Numbers between 1 and 2, and between -2 and -1: none is small. Torch's own random numbers are left alone."""
        device, shape, dtype = metadata.device, tuple(metadata.shape), metadata.dtype  # type: ignore[attr-defined]
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(len(self._graph.nodes))
        generator = self._generators[device]
        numbers = torch.rand(shape, generator=generator, device=device) * 4.0 - 2.0
        return (numbers.sign() + numbers / 2.0).to(dtype)


def _refuse_statistics(used: Sequence[Owners]) -> None:
    """Batch normalisation that computes its statistics; those of single examples lie in the second dimension."""
    for owners in used:
        if own.is_shared(owners) or not own.is_constant(owners, [d for d in range(owners.dim()) if d != 1]):
            raise ValueError(
                "batch normalisation in training mode mixes the examples of a batch: every loss depends on all of "
                "them, and no clipping bounds the influence of one. Use LayerNorm or GroupNorm, or put the layer into "
                "eval() mode"
            )


def _scaled(gradient: torch.Tensor | None, owners: Owners | None, place: int | None, base: int) -> torch.Tensor | None:
    """Each example's gradients by a power of two that is one digit of its number; what is shared by no power of two."""
    if gradient is None or owners is None:
        return None
    scales = torch.ones(owners.shape)
    if place is not None:
        scales = 2.0 ** -(owners.clamp(min=0) // place % base).float()
        scales[owners == SHARED] = 0.7
    scales[owners == NOBODY] = 0.0
    return gradient * scales.to(gradient)


def _decoded(
    plain: torch.Tensor | None,
    digits: Sequence[tuple[int, torch.Tensor | None]],
    base: int,
    examples: int,
    shape: Sequence[int],
) -> Owners:
    """The example whose number the scales spell, for each element."""
    if plain is None or 0 in shape:
        return own.everywhere(NOBODY, len(shape))
    plain = plain.sum_to_size(tuple(shape))  # as autograd does with what was spread
    number = torch.zeros(plain.shape, dtype=torch.int64, device=plain.device)
    is_apart = torch.ones_like(number, dtype=torch.bool)
    is_zero = plain == 0
    close = _CLOSE.get(plain.dtype, _CLOSE_IN_HALF)
    for place, scaled in digits:
        one = torch.zeros_like(plain) if scaled is None else scaled.sum_to_size(tuple(shape))
        power = torch.log2((plain / one).abs()).round().nan_to_num(-1.0, -1.0, -1.0)
        expected = torch.ldexp(plain, -power)
        is_apart &= (power >= 0) & (power < base)
        is_apart &= (one - expected).abs() <= close * expected.abs()
        is_zero &= one == 0
        number += power.long().clamp(min=0) * place
    is_apart &= number < examples
    found = torch.where(is_zero, NOBODY, torch.where(is_apart, number, SHARED))
    return own.thinned(found.cpu())


def _backward(node: Node, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """What one operation hands to its arguments; nothing else is run."""
    with torch.no_grad():
        if isinstance(node, BackwardCFunction):
            return _python_backward(node, gradients)
        found = node(*gradients)  # type: ignore[operator]
    found = found if isinstance(found, tuple) else (found,)
    return [one.detach() if isinstance(one, torch.Tensor) else None for one in found]


def _python_backward(node: Node, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """An operation that somebody wrote: it answers for all arguments, also for those that are no tensors."""
    filled = [
        torch.zeros(tuple(at.shape), dtype=at.dtype, device=at.device) if one is None else one
        for one, at in zip(gradients, saved(node, "_input_metadata"), strict=True)
    ]
    found = saved(node, "apply")(*filled)
    found = found if isinstance(found, tuple) else (found,)
    needed = iter([one for one, is_needed in zip(found, saved(node, "needs_input_grad"), strict=False) if is_needed])
    return [None if child is None else next(needed, None) for child, _ in node.next_functions]
