"""The layers: which parameters are trained, how they are scaled, and where their sum is kept.

A layer is one parameter tensor.
"""

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
    """The parameters that an optimizer holds and trains, as they were when this was made.

    ``fit`` says whether they still are; if not, others must be made.

    Args:
        groups: of the wrapped optimizer.
        named: all parameters of the model, by name.
        scaling: how layers are scaled.
        measured: scales that were measured, by name; None while they are not.
        trailer_size: how many free elements the step's sum keeps for what is sent with it.

    Attributes:
        parameters: the trained parameters by name, in the order of the model.
        scales: one for each layer at root mean square 1, None while they are to be measured.
        scale_tensor: the same on the device, (layers,); None where all are 1, or to be measured.
        sum: the step's sum of clipped gradients.
        description: a text that is the same on workers that train the same layers with the same scales.
    """

    def __init__(
        self,
        groups: Groups,
        named: Mapping[str, torch.Tensor],
        scaling: Mapping[str, float] | FirstStepNorms | None,
        measured: Mapping[str, float] | None,
        trailer_size: int,
    ) -> None:
        held = [parameter for group in groups for parameter in group["params"]]
        optimizers.check_all_named(held, named)
        held_ids = {id(parameter) for parameter in held}
        self.parameters: dict[str, torch.Tensor] = {}
        for name, parameter in named.items():
            if id(parameter) in held_ids and parameter.requires_grad:
                self.parameters[name] = parameter
        if not self.parameters:
            raise ValueError("the optimizer holds no parameter that requires a gradient")
        self.scales = find_scales(list(self.parameters), named, scaling, measured)
        self.description = self._describe()
        self.sum = GradientSum(list(self.parameters.values()), trailer_size)
        self.scale_tensor: torch.Tensor | None = None
        if self.scales is not None and any(scale != 1.0 for scale in self.scales):
            device = self.sum.first_device
            self.scale_tensor = torch.tensor(self.scales, dtype=torch.float32, device=device)
        self._seen = _look(groups)

    def __len__(self) -> int:
        return len(self.parameters)

    def fit(self, groups: Groups) -> bool:
        """Whether no parameter was added, frozen, unfrozen or moved, or has another dtype, since this was made."""
        return _look(groups) == self._seen

    def have_gradients(self) -> bool:
        """Whether backward has left a gradient in any layer."""
        return any(p.grad is not None for p in self.parameters.values())

    def pop_gradients(self) -> list[torch.Tensor | None]:
        """What backward left in each layer, None where it left nothing; .grad is None afterwards."""
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
        """Lets .grad be a view of the sum; in half precision, a rounded copy of it, which is finite."""
        for parameter, view in zip(self.parameters.values(), self.sum.views, strict=True):
            if view.dtype is not parameter.dtype:
                largest = torch.finfo(parameter.dtype).max
                parameter.grad = view.clamp(-largest, largest).to(parameter.dtype)
            else:
                parameter.grad = view

    def _describe(self) -> str:
        kinds = [(name, tuple(p.shape), str(p.dtype)) for name, p in self.parameters.items()]
        digest = hashlib.sha256(repr((kinds, self.scales)).encode()).hexdigest()[:16]
        elements = sum(parameter.numel() for parameter in self.parameters.values())
        return f"{len(self.parameters)} tensors, {elements} elements, digest {digest}"


def describe_parameters(named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Name, shape, dtype and whether it is trained, of each parameter: what must be the same on all workers."""
    described = {}
    for index, (name, parameter) in enumerate(named.items()):
        use = "trained" if parameter.requires_grad else "frozen"
        described[f"parameter {index}"] = (name, tuple(parameter.shape), str(parameter.dtype), use)
    return described


def find_scales(
    layers: list[str],
    named: Mapping[str, torch.Tensor],
    scaling: Mapping[str, float] | FirstStepNorms | None,
    measured: Mapping[str, float] | None,
) -> list[float] | None:
    """The scales of the named layers, in their order, at root mean square 1; None while they are to be measured.

    Args:
        layers: their names.
        named: all parameters of the model, by name: a given scale must be of one of them.
        scaling: how layers are scaled.
        measured: scales that were measured, by name; None while they are not.
    """
    if scaling is None:
        return [1.0] * len(layers)
    if isinstance(scaling, FirstStepNorms):
        return None if measured is None else layer_scales.given_scales(measured, layers)
    optimizers.check_known(scaling, named)
    return layer_scales.given_scales(scaling, layers)


def _look(groups: Groups) -> list[tuple[int, bool, torch.device, torch.dtype]]:
    """What ``fit`` compares of each parameter that the optimizer holds."""
    held = [parameter for group in groups for parameter in group["params"]]
    return [(id(p), p.requires_grad, p.device, p.dtype) for p in held]
