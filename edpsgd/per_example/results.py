"""The gradients of one batch's units, for all parameters: their norms, and their weighted sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from edpsgd.per_example.autograd_sums import AutogradSums
from edpsgd.per_example.fallback import FallbackGradients
from edpsgd.per_example.ghost import LayerGradients
from edpsgd.per_example.layout import Units
from edpsgd.per_example.precision import exact
from edpsgd.per_example.probing import keep_zeros


@dataclass(eq=False)
class BatchGradients:
    """The gradients of a batch's units, for all parameters.

    Attributes:
        parameters: by name; their order is that of their numbers.
        units: of the batch.
        layers: the parameters that rules serve, by number.
        fallbacks: the others, which autograd computes unit by unit.
        autograd: the same sums by autograd alone.
        kinds: the names of the batch's operations.
        is_new: whether one of them was never compared.
        is_compared: whether autograd must be asked too.
        may_spread: whether NaN of one unit may reach others: not where each operation is known to
            keep them apart.
        without_rule: names of parameters that are left to autograd, for an operation that has no
            rule.
        shared: names of those with rows that belong to several examples.
        tolerance: relative, of the precision in which the output gradients came.
        has_halves: whether anything in the graph is in half precision, so that sums are rounded.
    """

    parameters: Mapping[str, torch.Tensor]
    units: Units
    layers: dict[int, LayerGradients]
    fallbacks: Sequence[FallbackGradients]
    autograd: AutogradSums
    kinds: Set[str]
    is_new: bool
    is_compared: bool
    may_spread: bool
    without_rule: Sequence[str]
    shared: Sequence[str]
    tolerance: float
    has_halves: bool

    @property
    def numbers(self) -> list[int]:
        """Of the parameters that have gradients."""
        of_fallbacks = [number for fallback in self.fallbacks for number in fallback.parameters]
        return [*self.layers, *of_fallbacks]

    def norms(self) -> torch.Tensor:
        """Units x parameters, in their order; 0 where a unit has no gradient."""
        device = self.autograd.losses.device
        found = self._norms_by_rules()
        for fallback in self.fallbacks:
            found.update(fallback.norms())
        none = torch.zeros(self.units.count, device=device)
        numbers = range(len(self.parameters))
        columns = [found.get(number, none).to(device) for number in numbers]
        dtype = torch.float32
        for column in columns:
            dtype = torch.promote_types(dtype, column.dtype)
        return torch.stack([column.to(dtype) for column in columns], dim=1)

    def _norms_by_rules(self) -> dict[int, torch.Tensor]:
        """Of the layers that rules serve; what single precision has no room for is made again."""
        found, imprecise = {}, {}
        for number, layer in self.layers.items():
            found[number], imprecise[number] = layer.norms()
        if not found:
            return found
        device = self.autograd.losses.device
        # Waits once.
        on_cpu = torch.stack([is_imprecise.to(device) for is_imprecise in imprecise.values()]).cpu()
        for number, units in zip(imprecise, on_cpu, strict=True):
            if bool(units.any()):
                norms = self.layers[number].precise_norms(units)
                found[number][units.to(norms.device)] = norms.to(found[number].dtype)
        return found

    def norms_of(self, unit: int) -> Iterator[tuple[int, float]]:
        """The norm of one unit's instantiated gradient, for the number of each layer with rules."""
        for number, layer in self.layers.items():
            yield number, layer.norm_of(unit)

    def add_weighted_(self, sums: Sequence[torch.Tensor], factors: torch.Tensor) -> None:
        """Adds each unit's gradient times its factor.

        Args:
            sums: a tensor for each parameter.
            factors: one for each unit, or units x parameters.
        """
        for number in self.layers:
            self._add_layer_(number, sums[number], factors)
        for fallback in self.fallbacks:
            fallback.add_weighted_(sums, factors)

    def sums(self, factors: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The number of each parameter and its weighted sum of the units' gradients."""
        by_fallbacks: dict[int, torch.Tensor] = {}
        for fallback in self.fallbacks:
            for number, parameter in fallback.parameters.items():
                by_fallbacks[number] = _zeros_like(parameter)
        for fallback in self.fallbacks:
            fallback.add_weighted_(by_fallbacks, factors)
        for number, parameter in enumerate(self.parameters.values()):
            if not parameter.requires_grad:
                continue
            total = by_fallbacks.get(number, _zeros_like(parameter))
            if number in self.layers:
                self._add_layer_(number, total, factors)
            yield number, total

    def _add_layer_(self, number: int, total: torch.Tensor, factors: torch.Tensor) -> None:
        of_layer = factors if factors.dim() == 1 else factors[:, number]
        precise = exact(total).contiguous()  # as a rule the same tensor
        self.layers[number].add_weighted_(precise, of_layer.to(precise))
        if precise is not total:
            total.copy_(precise)

    def drop(self, units: torch.Tensor) -> None:
        """Makes the gradients of some units zero. Autograd is kept from mixing them with others.

        Args:
            units: whether each is dropped; on the losses' device.
        """
        self.autograd.has_broken = True
        for layer in self.layers.values():
            layer.drop(units)
        for fallback in self.fallbacks:
            fallback.drop(units)

    def keeps_zeros(self) -> bool:
        """Whether NaN of one unit cannot spread: no infinity that was saved makes NaN of zeros."""
        if self.shared or not keep_zeros(self.autograd.attribution.probed):
            return False
        return self.autograd.keep_zeros()


def _zeros_like(parameter: torch.Tensor) -> torch.Tensor:
    """In the usual order of the memory, also if the parameter has another: channels_last."""
    return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
