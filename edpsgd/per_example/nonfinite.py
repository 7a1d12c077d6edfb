"""Units whose gradients are not finite: which of them broke themselves, and which others broke.

A loss of one example may be infinite and all others finite. Where their rows meet in products with
exact zeros, as packed sequences do under a block mask, zero times infinity is NaN for everyone: one
example would take all others out of the step. So each is computed in isolation by autograd, and one
that is finite then counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from edpsgd import tensors
from edpsgd.per_example.autograd_sums import AutogradSums
from edpsgd.per_example.layout import Units
from edpsgd.per_example.results import BatchGradients

_SPREAD = (
    "NaN or infinities of some examples may have reached others in this model: one example could "
    "take all others out of the step. Remove what makes them, or use one backward and "
    "accumulate() for each example"
)


@dataclass(eq=False)
class IsolatedUnits:
    """Units that are finite in isolation, in a graph in which others are not.

    Attributes:
        autograd: makes the gradients of single units.
        norms: of each such unit, the norms of its layers by their number.
    """

    autograd: AutogradSums
    norms: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)

    def try_unit(self, unit: int) -> bool:
        """Computes a unit in isolation, and keeps it if it is finite; whether it is."""
        gradients = self.autograd.weighted(self.autograd.units.only(unit))
        norms: dict[int, torch.Tensor] = {}
        for number, gradient in gradients.items():
            norms[number] = tensors.layer_norms([gradient], gradient.device)[0]
        is_finite = all(bool(torch.isfinite(norm)) for norm in norms.values())
        if is_finite:
            self.norms[unit] = norms
        return is_finite

    def add_weighted_(self, sums: Sequence[torch.Tensor], factors: torch.Tensor) -> None:
        """Adds these units' gradients times their factors: one for each, or units x layers."""
        for unit in self.norms:
            of_layers = factors[unit].expand(len(sums))
            gradients = self.autograd.weighted(self.autograd.units.only(unit))
            for number, gradient in gradients.items():
                total = sums[number]
                total.add_(gradient.to(total.dtype) * of_layers[number].to(total))

    def write_norms_(self, norms: torch.Tensor) -> None:
        """Writes the norms of these units into those of all, units x layers."""
        for unit, of_layers in self.norms.items():
            norms[unit] = 0.0
            for number, norm in of_layers.items():
                norms[unit, number] = norm.to(norms)


def isolate_broken_units(
    batch: BatchGradients,
    losses: torch.Tensor,
    units: Units,
    norms: torch.Tensor,
) -> IsolatedUnits | None:
    """Drops units whose norms are not finite from a batch, and finds those that others broke.

    Args:
        batch: the gradients of all units.
        losses: of the examples.
        units: of the batch.
        norms: units x layers; those of units that are finite in isolation are written into it.

    Returns:
        The units that are finite in isolation; None if there are none.
    """
    is_broken = ~torch.isfinite(norms).all(1)
    if not bool(is_broken.any()):
        return None
    batch.drop(is_broken)
    suspects = _find_suspects(is_broken, losses, units)
    could_spread = batch.may_spread and int(is_broken.sum()) > 1
    if not suspects or not could_spread:
        return None
    isolated = IsolatedUnits(batch.autograd)
    are_finite = [isolated.try_unit(unit) for unit in suspects]
    # Then nobody can tell who broke those that are not.
    if not all(are_finite) and not batch.keeps_zeros():
        raise RuntimeError(_SPREAD)
    isolated.write_norms_(norms)
    return isolated if isolated.norms else None


def _find_suspects(is_broken: torch.Tensor, losses: torch.Tensor, units: Units) -> list[int]:
    """Units that others may have broken: all of their losses are finite."""
    is_infinite = ~torch.isfinite(losses.detach()).cpu()
    broke_themselves = set(units.of_examples[is_infinite].tolist())
    return [unit for unit in is_broken.nonzero().flatten().tolist() if unit not in broke_themselves]
