"""Other weights than the given ones: moved at random as training moves them, or only rounded otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


@torch.no_grad()
def move_parameters(modules: Sequence[nn.Module], seed: int, distance: float) -> None:
    """Adds noise to what will be trained; zeros hide what they are multiplied with, as in new adapters and gates.

    Args:
        modules: whose parameters are changed.
        seed: of the noise.
        distance: its std over the root mean square of each parameter tensor.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in _trained_parameters(modules):
        size = float(parameter.float().square().mean().sqrt()) or 1.0
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(distance * size * noise.to(parameter))


@contextmanager
def rounded_otherwise(modules: Sequence[nn.Module], precision: torch.dtype, seed: int) -> Iterator[None]:
    """Within, each weight differs by about as much as it was rounded in this precision."""
    generator = torch.Generator().manual_seed(seed)
    parameters = _trained_parameters(modules)
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            share = torch.finfo(precision).eps * torch.randn(parameter.shape, generator=generator)
            parameter.mul_(1.0 + share.to(parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, kept in zip(parameters, before, strict=True):
                parameter.copy_(kept)


def _trained_parameters(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """All parameters that require a gradient, each once."""
    parameters: dict[nn.Parameter, None] = {}
    for module in modules:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameters[parameter] = None
    return list(parameters)
