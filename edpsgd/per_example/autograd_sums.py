"""Weighted sums of the units' gradients by plain autograd, to compare the engine's own with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.graph import Node

from edpsgd.per_example.attribution import Attribution
from edpsgd.per_example.graph import LEAF
from edpsgd.per_example.layout import Units
from edpsgd.per_example.owners import Owners

_GAINS = (11.3, 1 / 43.7)
_FAR_GAIN = 2.0**30  # by which hooks show themselves; float16 has no room for it
Gradients = Mapping[int, torch.Tensor]  # of parameters, by their number


@dataclass(eq=False)
class AutogradSums:
    """Weighted sums of the units' gradients, each by one backward pass of autograd.

    Attributes:
        parameters: by name; their order is that of their numbers.
        losses: one for each example.
        weights: of the losses, so that each unit has the mean of its examples.
        units: of the batch.
        attribution: of the batch's graph.
        has_room: whether losses may be scaled far without leaving the range of what is in the
            graph.
        has_broken: whether some units are not finite: they are then kept from mixing with others.
    """

    parameters: Mapping[str, torch.Tensor]
    losses: torch.Tensor
    weights: torch.Tensor
    units: Units
    attribution: Attribution
    has_room: bool
    has_broken: bool = False

    def weighted(self, factors: torch.Tensor) -> Gradients:
        """The sum of all units' gradients, each times its factor, where a parameter has any."""
        of_units = factors.to(self.weights)
        weights = self.weights * of_units[self.units.of_examples.to(self.weights.device)]
        if not self.has_broken:
            return self._backward(weights)
        with _only_units((factors != 0).cpu(), self._units_of_results()):
            return self._backward(weights)

    def weighted_far_off(self, factors: torch.Tensor) -> Gradients:
        """The same for losses that are far larger, divided by as much afterwards.

        A hook that clamps or normalises gradients then makes others. The gain is a power of two, so
        that nothing else is rounded in another way; where it leaves the range, nothing is scaled.
        """
        gain = _FAR_GAIN if self.has_room else 1.0
        found = self.weighted(factors * gain)
        if not _are_finite(found):
            return self.weighted(factors)
        return {number: gradient / gain for number, gradient in found.items()}

    def rounding_noise(self, factors: torch.Tensor) -> dict[int, float]:
        """By how much the sums are off in half precision, for each parameter.

        That is how far they change if the losses are scaled.
        Exact ones would not change. The gains are no powers of two, so that everything is rounded
        otherwise, and one of them is small, so that what float16 loses below its range is at least
        what was lost of the units' gradients.
        """
        plain = self.weighted(factors)
        noise = dict.fromkeys(plain, 0.0)
        for gain in _GAINS:
            for number, scaled in self.weighted(factors * gain).items():
                difference = scaled.double() / gain - plain[number].double()
                noise[number] = max(noise[number], float(difference.norm()))
        return noise

    def keep_zeros(self) -> bool:
        """Whether units with a factor of zero add nothing, and no NaN either."""
        return _are_finite(self.weighted(torch.zeros(self.units.count)))

    def _backward(self, weights: torch.Tensor) -> Gradients:
        numbered = enumerate(self.parameters.values())
        trained = {number: parameter for number, parameter in numbered if parameter.requires_grad}
        found = torch.autograd.grad(
            [self.losses],
            list(trained.values()),
            [weights],
            retain_graph=True,
            allow_unused=True,
        )
        pairs = zip(trained, found, strict=True)
        return {number: gradient for number, gradient in pairs if gradient is not None}

    def _units_of_results(self) -> dict[Node, list[Owners | None]]:
        """The units of each node's results, where that is one unit for each element."""
        found: dict[Node, list[Owners | None]] = {}
        for node in self.attribution.graph.nodes:
            if node.name() != LEAF and self.attribution.is_separable(node):
                found[node] = [self._units_of(owners) for owners in self.attribution.results(node)]
        return found

    def _units_of(self, owners: Owners | None) -> torch.Tensor | None:
        if owners is None:
            return None
        units = self.units.of_examples[owners.clamp(min=0)]
        return torch.where(owners >= 0, units, owners)


def _are_finite(gradients: Gradients) -> bool:
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values())


@contextmanager
def _only_units(
    kept: torch.Tensor,
    units_of: Mapping[Node, Sequence[Owners | None]],
) -> Iterator[None]:
    """Within, no output gradients of other units pass the nodes whose units are known.

    Their losses have a factor of zero, but zero times infinity is NaN.

    Args:
        kept: whether each unit is one of those whose gradients are wanted; on the CPU.
        units_of: the units of the elements of each node's results.
    """
    with ExitStack() as stack:
        for node, results in units_of.items():
            masks: list[torch.Tensor | None] = []
            for units in results:
                belongs = None if units is None else kept[units.clamp(min=0)] & (units >= 0)
                masks.append(belongs)
            stack.callback(node.register_prehook(_Masks(masks)).remove)
        yield


@dataclass(frozen=True, eq=False)
class _Masks:
    """A hook that makes the output gradients of some units zero, whatever they hold."""

    masks: Sequence[torch.Tensor | None]

    def __call__(
        self,
        output_gradients: Sequence[torch.Tensor | None],
    ) -> tuple[torch.Tensor | None, ...]:
        masked: list[torch.Tensor | None] = []
        for gradient, mask in zip(output_gradients, self.masks, strict=True):
            if gradient is None or mask is None:
                masked.append(gradient)
            else:
                masked.append(torch.where(mask.to(gradient.device), gradient, 0.0))
        return tuple(masked)
