"""Refuses functions with a backward of their own that is not linear.

A clipping factor is applied to a loss, and only in a linear backward does the gradient grow with
it. One that clamps, normalises or rounds would give other gradients for the sum than the norms were
made of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import Node

from edpsgd import tensors
from edpsgd.per_example.errors import NOT_LINEAR_ADVICE, WrongGradients
from edpsgd.per_example.graph import OutputGradients, result_metadata
from edpsgd.per_example.probing import Prober, call_backward

_HALF_GAINS = (
    2.0**-3,
    2.0**3,
)  # by which a backward that clamps, normalises or rounds shows itself
_FAR_GAINS = (2.0**-60, 2.0**30)
_TOLERANCE = 1e-3  # relative; in half precision ten times as much


def refuse_nonlinear(node: Node, prober: Prober) -> None:
    """Tries the backward of a function that somebody wrote: on a difference, and scaled."""
    metadata = result_metadata(node)
    first = [_random_or_none(result, prober) for result in metadata]
    second = [_random_or_none(result, prober) for result in metadata]
    halves = {result.dtype for result in metadata} & {torch.float16, torch.bfloat16}
    tolerance = _TOLERANCE * (10 if halves else 1)
    of_first, of_second = call_backward(node, first), call_backward(node, second)

    found = call_backward(node, _differences(second, first))
    is_linear = _are_close(found, _differences(of_second, of_first), tolerance)
    for gain in _HALF_GAINS if torch.float16 in halves else _FAR_GAINS:
        found = call_backward(node, _scaled(first, gain))
        is_linear = is_linear and _are_close(_divided(found, gain), of_first, tolerance)
    if not is_linear:
        raise WrongGradients(
            f"the backward of {node.name()} is not linear in the gradient: it clamps, normalises "
            f"or rounds it. {NOT_LINEAR_ADVICE}"
        )


def _random_or_none(result: Any, prober: Prober) -> torch.Tensor | None:
    """A random output gradient; None for results without any, such as numbers of rows."""
    has_gradient = result.dtype.is_floating_point or result.dtype.is_complex
    return prober.random_output_gradient(result) if has_gradient else None


def _scaled(values: OutputGradients, gain: float) -> list[torch.Tensor | None]:
    return [None if one is None else gain * one for one in values]


def _divided(values: OutputGradients, gain: float) -> list[torch.Tensor | None]:
    return [None if one is None else one / gain for one in values]


def _differences(
    minuends: OutputGradients,
    subtrahends: OutputGradients,
) -> list[torch.Tensor | None]:
    pairs = zip(minuends, subtrahends, strict=True)
    return [None if one is None or other is None else one - other for one, other in pairs]


def _are_close(found: OutputGradients, expected: OutputGradients, tolerance: float) -> bool:
    """Whether all pairs agree; what is beyond the range of numbers on either side says nothing."""
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            if one is not other:
                return False
            continue
        if not bool(torch.isfinite(one).all() & torch.isfinite(other).all()):
            continue
        distance = tensors.vector_norm(one - other)
        if not distance <= tolerance * tensors.vector_norm(other):
            return False
    return True
