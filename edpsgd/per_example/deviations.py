"""How far a batch's sums are from plain autograd's, and its norms from instantiated gradients.

Autograd has no gradient for each unit. So norms are compared with gradients that are instantiated
from the same rows, and these rows with autograd by a random mixture of the units.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from edpsgd import tensors
from edpsgd.per_example.results import BatchGradients

LITTLE = 0.01  # of the usual size: what is smaller than that share is compared less closely
_FINE = 1e-2  # a tolerance below this is one of single precision
_FEW_UNITS = 8  # in a mixture in half precision
_SOME_NORMS = 3
# Half precision may round away so many times more of the engine's sums than of autograd's own.
_NOISE = 4


@dataclass(frozen=True)
class Deviation:
    """How far something of a layer is from what autograd says.

    Attributes:
        number: of the layer.
        distance: between both.
        size: to which the tolerance is relative.
        is_comparable: whether autograd says anything: not if NaN of other units is in its sum.
    """

    number: int
    distance: float
    size: float
    is_comparable: bool = True


def find_deviations(
    batch: BatchGradients,
    norms: torch.Tensor,
    of_all_norms: bool,
) -> Iterator[Deviation]:
    """Of the sums of a random mixture of units, and of the norms of some units.

    Units that are not finite are dropped from the batch, and left out.

    Args:
        batch: the gradients of all units.
        norms: units x layers.
        of_all_norms: whether to compare the norms of all units.
    """
    is_finite = torch.isfinite(norms).all(1).cpu()
    finite = [unit for unit in batch.units.present if is_finite[unit]]
    if not finite:
        return
    has_broken = len(finite) < len(batch.units.present)
    if has_broken:
        batch.drop(~is_finite.to(norms.device))
    yield from _deviations_of_sums(batch, norms, finite, has_broken)
    chosen = finite
    if not of_all_norms:
        chosen = secrets.SystemRandom().sample(finite, min(_SOME_NORMS, len(finite)))
    yield from _deviations_of_norms(batch, norms, finite, chosen)


def _deviations_of_sums(
    batch: BatchGradients,
    norms: torch.Tensor,
    finite: Sequence[int],
    has_broken: bool,
) -> Iterator[Deviation]:
    """Of the weighted sum of a mixture of units, in each layer."""
    is_coarse = batch.tolerance > _FINE
    chosen = finite
    if is_coarse:  # then one wrong unit would be lost among many
        chosen = secrets.SystemRandom().sample(finite, min(_FEW_UNITS, len(finite)))
    factors = mixing_factors(norms, chosen)
    weighted_norms = norms[chosen].double() * factors[chosen].double().unsqueeze(1)
    whole = tensors.vector_norm(weighted_norms)
    expected = dict(batch.autograd.weighted_far_off(factors))
    noise = batch.autograd.rounding_noise(factors) if is_coarse else {}
    for number, found in batch.sums(factors):
        right = expected.pop(number, torch.zeros_like(found))
        size = tensors.vector_norm(right)
        if has_broken and not math.isfinite(size):
            # Autograd sums NaN of the broken units too, whatever their factors.
            yield Deviation(number, 0.0, size, is_comparable=False)
            continue
        distance = tensors.vector_norm(found.sub_(right)) - _NOISE * noise.get(number, 0.0)
        if not math.isnan(distance):
            distance = max(0.0, distance)
        yield Deviation(number, distance, size + LITTLE * whole)


def _deviations_of_norms(
    batch: BatchGradients,
    norms: torch.Tensor,
    finite: Sequence[int],
    chosen: Sequence[int],
) -> Iterator[Deviation]:
    """Of the norms of some units from those of their instantiated gradients."""
    usual = tensors.vector_norm(norms[finite]) / len(finite) ** 0.5
    for unit in chosen:
        for number, size in batch.norms_of(unit):
            # Where rows cancel, norms are too large on purpose.
            too_small = max(0.0, size - float(norms[unit, number]))
            yield Deviation(number, too_small, size + LITTLE * usual)


def mixing_factors(norms: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
    """A factor for each unit with which the chosen ones count about alike, 0 for all others.

    Norms below 1/64 of the largest count less. Nobody can foresee the factors, and no two units of
    one size have the same, so that sums hardly agree unless the gradients of all chosen units do.
    Up to eight are powers of two, by which half precision scales without rounding.
    """
    sizes, factors = tensors.row_lengths(norms).tolist(), [0.0] * len(norms)
    largest = max(sizes[unit] for unit in chosen)
    if len(chosen) <= _FEW_UNITS:
        amounts = [2.0**-power for power in range(4)]
    else:
        amounts = [0.125 + 0.875 * step / len(chosen) for step in range(len(chosen))]
    options = [-amount for amount in amounts] + amounts
    drawn = secrets.SystemRandom().sample(options, len(chosen))
    for unit, factor in zip(chosen, drawn, strict=True):
        share = max(sizes[unit] / largest, 2.0**-6) if largest else 1.0
        factors[unit] = factor * 2.0 ** -round(math.log2(share))
    return torch.tensor(factors, dtype=norms.dtype, device=norms.device)
