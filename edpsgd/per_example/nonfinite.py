"""Units whose gradients are not finite: which of them are broken themselves, and which by others in the same batch.

A loss of one example may be infinite and all others finite. Where their rows meet in products with exact zeros, as
packed sequences do under a block mask, zero times infinity is NaN for everyone: one example would take all others out
of the step. So each is looked at alone, and one that is finite alone is computed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.autograd.graph import Node

from edpsgd import tensors
from edpsgd.per_example.owners import Owners

_SPREAD = (
    "NaN or infinities of some examples may have reached others in this model: one example could take all others out "
    "of the step. Remove what makes them, or use one backward and accumulate() for each example"
)
Places = Mapping[Node, Sequence[Owners | None]]  # units of the elements of each result that a node receives
Gradients = Mapping[int, torch.Tensor]  # of layers, by number


class AloneGradients:
    """Gradients by autograd, of one unit at a time, in a graph in which others are not finite.

    Args:
        by_autograd: makes the gradients of the sum over all units, each times its factor.
        count: how many units there are.

    Attributes:
        found: the units that are finite alone, with the norms of their layers.
    """

    def __init__(self, by_autograd: Callable[[torch.Tensor], Gradients], count: int) -> None:
        self._by_autograd, self._count = by_autograd, count
        self.found: dict[int, dict[int, torch.Tensor]] = {}

    def look_at(self, unit: int) -> bool:
        """Whether a unit is finite alone."""
        norms = {n: tensors.layer_norms([one], one.device)[0] for n, one in self._of_unit(unit).items()}
        if all(bool(torch.isfinite(norm)) for norm in norms.values()):
            self.found[unit] = norms
        return unit in self.found

    def _of_unit(self, unit: int) -> Gradients:
        only = torch.zeros(self._count)
        only[unit] = 1.0
        return self._by_autograd(only)

    def add_weighted_(self, sums: Sequence[torch.Tensor], factors: torch.Tensor) -> None:
        """Adds the gradients that were found, each times its factor: one for all layers, or units x layers."""
        for unit in self.found:
            of_layers = factors[unit].expand(len(sums))
            for number, gradient in self._of_unit(unit).items():
                sums[number].add_(gradient.to(sums[number].dtype) * of_layers[number].to(sums[number]))


def find_alone(alone: AloneGradients, suspects: Sequence[int], is_certain: Callable[[], bool]) -> None:
    """Looks at each unit alone that others may have broken: ``alone.found`` has those that are finite.

    Args:
        alone: gradients of single units.
        suspects: units with gradients that are not finite, though their losses are.
        is_certain: whether a unit that is not finite alone has broken itself.
    """
    are_finite = [alone.look_at(unit) for unit in suspects]
    if not all(are_finite) and not is_certain():
        raise RuntimeError(_SPREAD)


@contextmanager
def only(kept: torch.Tensor, places: Places) -> Iterator[None]:
    """Within, no gradients of other units pass the nodes of which it is known where the units are.

    Their losses have a factor of zero, but zero times infinity is NaN.

    Args:
        kept: whether each unit is one of those whose gradients are wanted; on the CPU.
        places: the units of what nodes receive.
    """
    with ExitStack() as stack:
        for node, units in places.items():
            masks = [None if one is None else kept[one.clamp(min=0)] & (one >= 0) for one in units]
            stack.callback(node.register_prehook(_Masks(masks)).remove)
        yield


class _Masks:
    """Makes the elements of some units zero, whatever they hold."""

    def __init__(self, masks: Sequence[torch.Tensor | None]) -> None:
        self._masks = masks

    def __call__(self, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        return tuple(
            one if one is None or mask is None else torch.where(mask.to(one.device), one, 0.0)
            for one, mask in zip(gradients, self._masks, strict=True)
        )
