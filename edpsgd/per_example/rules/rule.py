"""What a rule is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from edpsgd.per_example.ghost import LayerGradients
from edpsgd.per_example.uses import Received, Use


def _examples_come_first(use: Use, dim: int) -> bool:
    return dim == 0


@dataclass(frozen=True)
class Rule:
    """What an operation adds to the units' gradients of a parameter that goes into it.

    Attributes:
        add: adds it to the gradients of a layer.
        fits: whether the rule is right for this form of the operation, and for the argument that
            the parameter is.
        allows: whether examples may lie along this dimension of the output gradient.
        saved: names of the tensors that ``add`` reads of what autograd saved, by the argument that
            the parameter is.
        takes_any_shape: whether the parameter may have been given another shape before.
    """

    add: Callable[[Use, Received, LayerGradients], None]
    fits: Callable[[Use], bool]
    allows: Callable[[Use, int], bool] = _examples_come_first
    saved: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    takes_any_shape: bool = False

    def hold_saved(self, use: Use) -> None:
        """Keeps what ``add`` will read, before the backward pass lets go of it."""
        use.hold(self.saved.get(use.slot, ()))
