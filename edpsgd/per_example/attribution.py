"""Follows the examples of one batch through its graph: from the losses down to every operation.

Each operation hands the owners of its results on to its arguments. What it means decides where it can (``operations``).
Elsewhere it is tried out: its own backward is called with random gradients of some of the examples, those of all others
being exactly zero, several times with other examples. An operation's backward is linear, so that an element of an
argument differs from zero where an example that reaches it takes part, however small its share is. Which examples take
part in which call is a code of constant weight: one example alone leaves its own pattern, two leave more. Nothing is
kept for other batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from edpsgd import tensors
from edpsgd.per_example import owners as own
from edpsgd.per_example.errors import NOT_LINEAR_ADVICE, WrongGradients
from edpsgd.per_example.graph import LEAF, Graph, saved, shapes
from edpsgd.per_example.operations import BATCH_NORMS, EMBEDDINGS, Arguments, Results, arguments
from edpsgd.per_example.owners import NOBODY, SHARED, Owners

_SIZE = {torch.float16: 2.0**4}  # of gradients that try operations out: small shares must not be lost below the range
_LARGE_SIZE = 2.0**20
_HALF_GAINS = (2.0**-3, 2.0**3)  # by which a backward that clamps, normalises or rounds shows itself
_FAR_GAINS = (2.0**-60, 2.0**30)
_NOT_LINEAR = 1e-3  # relative; in half precision ten times as much


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
        self._codes: torch.Tensor | None = None
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
        if isinstance(node, BackwardCFunction):
            self._check_linear(node)
        if self._graph.examples == 1:
            return [own.everywhere(0, len(size)) for size in sizes]
        if node.name() in BATCH_NORMS and saved(node, "_saved_training"):
            _refuse_statistics(used)
        if node.name() in EMBEDDINGS:
            _refuse_frequencies(node)
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
        """Owners of the arguments, by which examples' gradients the node's backward hands to each element."""
        metadata = saved(node, "_input_metadata")
        gradients = [None if one is None else self._random(at) for one, at in zip(results, metadata, strict=True)]
        codes = self._example_codes()
        sizes = [() if child is None else shapes(child)[output] for child, output in node.next_functions]
        patterns: list[list[torch.Tensor]] = [[] for _ in sizes]
        for takes_part in codes.T:
            some = [_of_examples(g, o, takes_part) for g, o in zip(gradients, results, strict=True)]
            for pattern, found, size in zip(patterns, _backward(node, some), sizes, strict=True):
                pattern.append(_differs_from_zero(found, size))
        return [_owners_of(torch.stack(pattern), codes) for pattern in patterns]

    def _example_codes(self) -> torch.Tensor:
        """Whether each example takes part in each call, examples x calls: each in half of them, no two alike."""
        if self._codes is None:
            calls = 2
            while math.comb(calls, calls // 2) < self._graph.examples:
                calls += 1
            chosen = itertools.islice(itertools.combinations(range(calls), calls // 2), self._graph.examples)
            codes = torch.zeros((self._graph.examples, calls), dtype=torch.bool)
            for example, places in enumerate(chosen):
                codes[example, list(places)] = True
            self._codes = codes
        return self._codes

    def _check_linear(self, node: Node) -> None:
        """Refuses a backward that somebody wrote and that is not linear: no factor can be applied to its result."""
        metadata = saved(node, "_input_metadata")
        first, second = ([self._random_or_none(one) for one in metadata] for _ in range(2))
        halves = {one.dtype for one in metadata} & {torch.float16, torch.bfloat16}
        tolerance = _NOT_LINEAR * (10 if halves else 1)
        of_first, of_second = _backward(node, first), _backward(node, second)
        mixed = _backward(node, [_difference(two, one) for one, two in zip(first, second, strict=True)])
        expected = [_difference(two, one) for one, two in zip(of_first, of_second, strict=True)]
        pairs = [*zip(mixed, expected, strict=True)]
        for gain in _HALF_GAINS if torch.float16 in halves else _FAR_GAINS:
            scaled = _backward(node, [None if one is None else gain * one for one in first])
            pairs += [(None if one is None else one / gain, plain) for one, plain in zip(scaled, of_first, strict=True)]
        if not all(_are_close(found, plain, tolerance) for found, plain in pairs):
            raise WrongGradients(
                f"the backward of {node.name()} is not linear in the gradient: it clamps, normalises or rounds it. "
                f"{NOT_LINEAR_ADVICE}"
            )

    def _random_or_none(self, metadata: Any) -> torch.Tensor | None:
        """The same, but nothing for results without gradients, such as numbers of rows."""
        return self._random(metadata) if metadata.dtype.is_floating_point else None

    def _random(self, metadata: object) -> torch.Tensor:
        """Numbers between 1 and 2, and between -2 and -1, times a power of two: none is small.

        Torch's own random numbers are left alone.
        """
        device, shape, dtype = metadata.device, tuple(metadata.shape), metadata.dtype  # type: ignore[attr-defined]
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(len(self._graph.nodes))
        generator = self._generators[device]
        numbers = torch.rand(shape, generator=generator, device=device) * 4.0 - 2.0
        return ((numbers.sign() + numbers / 2.0) * _SIZE.get(dtype, _LARGE_SIZE)).to(dtype)


def _refuse_statistics(used: Sequence[Owners]) -> None:
    """Batch normalisation that computes its statistics; those of single examples lie in the second dimension."""
    for owners in used:
        if own.is_shared(owners) or not own.is_constant(owners, [d for d in range(owners.dim()) if d != 1]):
            raise ValueError(
                "batch normalisation in training mode mixes the examples of a batch: every loss depends on all of "
                "them, and no clipping bounds the influence of one. Use LayerNorm or GroupNorm, or put the layer into "
                "eval() mode"
            )


def _refuse_frequencies(node: Node) -> None:
    """An embedding that divides by how often a row is used in the batch, by whomever."""
    if saved(node, "_saved_scale_grad_by_freq"):
        raise ValueError(
            "an embedding with scale_grad_by_freq=True divides the gradient of an example by how often others use the "
            "same rows: no clipping bounds the influence of one. Use scale_grad_by_freq=False"
        )


def _of_examples(gradient: torch.Tensor | None, owners: Owners | None, takes_part: torch.Tensor) -> torch.Tensor | None:
    """The gradients of some examples, and of what is shared; all others are exactly zero."""
    if gradient is None or owners is None:
        return None
    is_kept = (owners == SHARED) | (takes_part[owners.clamp(min=0)] & (owners >= 0))
    return gradient * is_kept.to(gradient)  # all are finite, so that this makes exact zeros


def _differs_from_zero(found: torch.Tensor | None, size: Sequence[int]) -> torch.Tensor:
    """For each element of an argument of this size; NaN counts as a difference."""
    if found is None or 0 in size:
        return torch.zeros(tuple(size), dtype=torch.bool)
    return (found.sum_to_size(tuple(size)) != 0).cpu()  # summed as autograd does with what was spread


def _owners_of(patterns: torch.Tensor, codes: torch.Tensor) -> Owners:
    """Of each element, by the calls in which it differed from zero: calls x the argument's shape."""
    calls = codes.shape[1]
    if patterns[0].numel() == 0:
        return own.everywhere(NOBODY, patterns[0].dim())
    for dim in range(patterns.dim() - 1, 0, -1):  # features mostly have one owner: it is decoded once
        first = patterns.narrow(dim, 0, 1)
        if patterns.shape[dim] > 1 and torch.equal(patterns, first.expand_as(patterns)):
            patterns = first
    powers = 2 ** torch.arange(calls)
    numbers = (patterns * powers.view(-1, *[1] * (patterns.dim() - 1))).sum(0)
    owner_of = torch.full((2**calls,), SHARED, dtype=torch.int64)
    owner_of[0] = NOBODY
    owner_of[(codes * powers).sum(1)] = torch.arange(len(codes))
    return owner_of[numbers]


def _difference(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return None if one is None or other is None else one - other


def _are_close(found: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float) -> bool:
    if found is None or expected is None:
        return found is expected
    if not bool(torch.isfinite(found).all() & torch.isfinite(expected).all()):
        return True  # beyond the range of numbers nothing can be said
    distance, size = tensors.vector_norm(found - expected), tensors.vector_norm(expected)
    return distance <= tolerance * size


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
