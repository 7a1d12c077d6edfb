"""Which example each element belongs to, found out by calling an operation's backward.

It is called with random output gradients. In each call some of the examples take part: the output
gradients of all others are exactly zero. A backward is linear, so an element of an argument differs
from zero in the calls in which an example that it depends on takes part, however small the share.
Which examples take part in which call is a code of constant weight, the largest family of sets of
which none holds another (Sperner 1928): an element that depends on one example shows just that
example's code, and one that depends on several shows more calls than any code has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from edpsgd.per_example import owners as own
from edpsgd.per_example.graph import OutputGradients, argument_shapes, result_metadata, saved
from edpsgd.per_example.operations import Results
from edpsgd.per_example.owners import NOBODY, SHARED, Owners

# Of random output gradients: small shares must not be lost below the range.
_SIZES = {torch.float16: 2.0**4, torch.complex32: 2.0**4}
_LARGE_SIZE = 2.0**20


@dataclass(eq=False)
class Prober:
    """Calls the backward of single operations with random output gradients.

    Torch's own random numbers are left alone.

    Attributes:
        examples: how many there are in the batch.
        seed: of the random output gradients.
    """

    examples: int
    seed: int
    _generators: dict[torch.device, torch.Generator] = field(default_factory=dict, repr=False)

    def probe(self, node: Node, results: Results) -> list[Owners]:
        """Owners of the node's arguments.

        Args:
            node: the operation whose backward is called.
            results: owners of its results; None where nobody used one.

        Returns:
            For each argument owners in the argument's shape, with size 1 along dimensions where
            they do not change.
        """
        full = [
            None if owners is None else self.random_output_gradient(result)
            for owners, result in zip(results, result_metadata(node), strict=True)
        ]
        sizes = argument_shapes(node)
        # Of each argument: where it differed, in each call.
        calls: list[list[torch.Tensor]] = [[] for _ in sizes]
        for takes_part in self.codes.T:
            pairs = zip(full, results, strict=True)
            partial = [_of_examples(one, owners, takes_part) for one, owners in pairs]
            for call, found, size in zip(calls, call_backward(node, partial), sizes, strict=True):
                call.append(_differs_from_zero(found, size))
        return [_decoded(torch.stack(call), self.codes) for call in calls]

    @cached_property
    def codes(self) -> torch.Tensor:
        """Examples x calls: whether each takes part in each; in half of them, and no two alike."""
        calls = 2
        while math.comb(calls, calls // 2) < self.examples:
            calls += 1
        chosen = itertools.islice(itertools.combinations(range(calls), calls // 2), self.examples)
        codes = torch.zeros((self.examples, calls), dtype=torch.bool)
        for example, places in enumerate(chosen):
            codes[example, list(places)] = True
        return codes

    def random_output_gradient(self, result: Any) -> torch.Tensor:
        """In the shape of a result: numbers of sizes between 1 and 2, times a power of two.

        None is small, so that none of them is lost.
        """
        device, dtype = result.device, result.dtype
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        generator = self._generators[device]
        # A backward may hand the imaginary parts alone to an argument: they must not be zero.
        parts = (2,) if dtype.is_complex else ()
        shape = (*result.shape, *parts)
        unit_interval = torch.rand(shape, generator=generator, device=device)
        numbers = unit_interval * 4.0 - 2.0
        away_from_zero = numbers.sign() + numbers / 2.0
        scaled = away_from_zero * _SIZES.get(dtype, _LARGE_SIZE)
        return (torch.view_as_complex(scaled) if parts else scaled).to(dtype)


def keep_zeros(nodes: Iterable[Node]) -> bool:
    """Whether the backward of all these nodes makes zeros of zeros, and not NaN."""
    for node in nodes:
        zeros = [_zeros(result) for result in result_metadata(node)]
        for found in call_backward(node, zeros):
            if found is not None and not bool(torch.isfinite(found).all()):
                return False
    return True


def call_backward(node: Node, output_gradients: OutputGradients) -> list[torch.Tensor | None]:
    """What one operation's backward hands to each of its arguments; nothing else is run."""
    with torch.no_grad():
        if isinstance(node, BackwardCFunction):
            return _call_python_backward(node, output_gradients)
        found = node(*output_gradients)  # type: ignore[operator]
    found = found if isinstance(found, tuple) else (found,)
    return [one.detach() if isinstance(one, torch.Tensor) else None for one in found]


def _call_python_backward(
    node: Node,
    output_gradients: OutputGradients,
) -> list[torch.Tensor | None]:
    """Of a ``torch.autograd.Function``, which answers also for arguments that are no tensors."""
    filled = [
        _zeros(result) if one is None else one
        for one, result in zip(output_gradients, result_metadata(node), strict=True)
    ]
    found = saved(node, "apply")(*filled)
    found = found if isinstance(found, tuple) else (found,)
    is_needed = saved(node, "needs_input_grad")
    needed = itertools.compress(found, is_needed)
    return [None if child is None else next(needed, None) for child, _ in node.next_functions]


def _zeros(result: Any) -> torch.Tensor:
    return torch.zeros(tuple(result.shape), dtype=result.dtype, device=result.device)


def _of_examples(
    output_gradient: torch.Tensor | None,
    owners: Owners | None,
    takes_part: torch.Tensor,
) -> torch.Tensor | None:
    """The output gradient of some examples and of what is shared, and zeros elsewhere."""
    if output_gradient is None or owners is None:
        return None
    belongs_to_one = owners >= 0
    is_kept = (owners == SHARED) | (takes_part[owners.clamp(min=0)] & belongs_to_one)
    # All are finite, so that this makes exact zeros.
    return output_gradient * is_kept.to(output_gradient)


def _differs_from_zero(found: torch.Tensor | None, size: Sequence[int]) -> torch.Tensor:
    """For each element of an argument of this size; NaN counts as a difference."""
    if found is None or 0 in size:
        return torch.zeros(tuple(size), dtype=torch.bool)
    # Summed as autograd does with what was broadcast.
    return (found.sum_to_size(tuple(size)) != 0).cpu()


def _decoded(differs: torch.Tensor, codes: torch.Tensor) -> Owners:
    """The owner of each element, by the calls, the first dimension, in which it differed from 0."""
    calls = codes.shape[1]
    if differs[0].numel() == 0:
        return own.everywhere(NOBODY, differs[0].dim())
    # Features mostly have one owner: it is decoded once.
    for dim in range(differs.dim() - 1, 0, -1):
        first = differs.narrow(dim, 0, 1)
        if differs.shape[dim] > 1 and torch.equal(differs, first.expand_as(differs)):
            differs = first
    powers = 2 ** torch.arange(calls)  # a code is read as a binary number
    numbers = (differs * powers.view(-1, *[1] * (differs.dim() - 1))).sum(0)
    owner_of = torch.full((2**calls,), SHARED, dtype=torch.int64)
    owner_of[0] = NOBODY
    owner_of[(codes * powers).sum(1)] = torch.arange(len(codes))
    return owner_of[numbers]
