"""The layers: which parameters are trained, how they are scaled, and where their sum is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from edpsgd.mechanism import layer_scales
from edpsgd.mechanism.buffers import GradientSum
from edpsgd.mechanism.layer_scales import FirstStepNorms
from edpsgd.validation import optimizers

Groups = Sequence[dict[str, Any]]


class Layers:
    """A snapshot of the parameters that an optimizer holds and trains; laid out anew when they change.

    Args:
        groups: of the wrapped optimizer.
        named: all parameters of the model, by name.
        scaling: how layers are scaled.
        measured: scales that were measured, by name; None while they are not.
        tail: how many free elements the step's sum keeps for what rides along in its message.

    Attributes:
        parameters: the trained parameters by name, in the order of the model.
        scales: one for each layer at root mean square 1, None while they are to be measured.
        scale_tensor: the same on the device, None where all are 1.
        sum: the step's sum of clipped gradients.
        description: the same text on workers that train the same layers with the same scales.
    """

    def __init__(
        self,
        groups: Groups,
        named: Mapping[str, torch.Tensor],
        scaling: Mapping[str, float] | FirstStepNorms | None,
        measured: Mapping[str, float] | None,
        tail: int,
    ) -> None:
        held = [p for group in groups for p in group["params"]]
        optimizers.check_all_named(held, named)
        ids = {id(p) for p in held}
        self.parameters = {name: p for name, p in named.items() if id(p) in ids and p.requires_grad}
        if not self.parameters:
            raise ValueError("the optimizer holds no parameter that requires a gradient")
        self.scales = find_scales(list(self.parameters), named, scaling, measured)
        self.description = self._describe()
        self.sum = GradientSum(list(self.parameters.values()), tail)
        uneven = self.scales is not None and any(scale != 1.0 for scale in self.scales)
        self.scale_tensor = torch.tensor(self.scales, dtype=torch.float32, device=self.sum.home) if uneven else None
        self._seen = _look(groups)

    def __len__(self) -> int:
        return len(self.parameters)

    def fit(self, groups: Groups) -> bool:
        """Whether no parameter was added, frozen, unfrozen or moved since."""
        return _look(groups) == self._seen

    def have_gradients(self) -> bool:
        """Whether backward has left anything."""
        return any(p.grad is not None for p in self.parameters.values())

    def take_gradients(self) -> list[torch.Tensor | None]:
        """What backward left; .grad is None afterwards."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ValueError(
                    f"{name} has a sparse gradient, which would show which rows were used: use sparse=False"
                )
        gradients = [parameter.grad for parameter in self.parameters.values()]
        for parameter in self.parameters.values():
            parameter.grad = None
        return gradients

    def hand_over_sum(self) -> None:
        """Lets .grad show the sum; in half precision, a rounded copy of it."""
        for parameter, view in zip(self.parameters.values(), self.sum.views, strict=True):
            if view.dtype is not parameter.dtype:
                largest = torch.finfo(parameter.dtype).max
                parameter.grad = view.clamp(-largest, largest).to(parameter.dtype)
            else:
                parameter.grad = view

    def _describe(self) -> str:
        shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in self.parameters.items()]
        digest = hashlib.sha256(repr((shapes, self.scales)).encode()).hexdigest()[:16]
        elements = sum(p.numel() for p in self.parameters.values())
        return f"{len(self.parameters)} tensors, {elements} elements, digest {digest}"


def describe_parameters(named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Names, shapes and whether they are trained: what must be the same on all workers."""
    return {
        f"parameter {index}": (name, tuple(p.shape), str(p.dtype), "trained" if p.requires_grad else "frozen")
        for index, (name, p) in enumerate(named.items())
    }


def find_scales(
    layers: list[str],
    named: Mapping[str, torch.Tensor],
    scaling: Mapping[str, float] | FirstStepNorms | None,
    measured: Mapping[str, float] | None,
) -> list[float] | None:
    """The scales of layers, or None while they are still to be measured."""
    if scaling is None:
        return [1.0] * len(layers)
    if isinstance(scaling, FirstStepNorms):
        return None if measured is None else layer_scales.given_scales(measured, layers)
    optimizers.check_known(scaling, named)
    return layer_scales.given_scales(scaling, layers)


def _look(groups: Groups) -> list[tuple[int, bool, torch.device, torch.dtype]]:
    return [(id(p), p.requires_grad, p.device, p.dtype) for group in groups for p in group["params"]]
