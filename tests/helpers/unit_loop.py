"""Units one at a time by plain autograd, and the engine held against it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from edpsgd.per_example import UnitGradients
from edpsgd.per_example.batch import compute_batch
from edpsgd.per_example.graph import read_graph
from edpsgd.per_example.layout import make_units

torch.set_num_threads(1)


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradients_of(
    losses: torch.Tensor, parameters: Sequence[torch.Tensor], units: torch.Tensor, count: int
) -> list[list[torch.Tensor]]:
    """Of each unit's mean loss, for each layer."""
    found = []
    for unit in range(count):
        loss = losses[units == unit].mean() if bool((units == unit).any()) else losses.sum() * 0.0
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        found.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)])
    return found


def check(
    engine: UnitGradients,
    model: nn.Module,
    losses: torch.Tensor,
    units: torch.Tensor | None = None,
    count: int | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Norms, and flat and per-layer sums, are those of the loop; no ``.grad`` is made."""
    parameters = list(trained(model).values())
    numbers = torch.arange(len(losses)) if units is None else units
    expected = gradients_of(losses, parameters, numbers, count or len(losses))
    norms = engine.backward(losses, units, count)
    expected_norms = torch.tensor([[float(g.float().norm()) for g in unit] for unit in expected])
    whole = float(expected_norms.norm())
    assert norms.shape == expected_norms.shape
    assert whole > 0
    torch.testing.assert_close(norms.float(), expected_norms, rtol=tolerance, atol=tolerance * whole / 10)
    generator = torch.Generator().manual_seed(3)
    for shape in ((len(norms),), (len(norms), len(parameters))):
        factors = torch.rand(shape, generator=generator)
        sums = [torch.ones_like(p, requires_grad=False) for p in parameters]
        engine.add_weighted_(sums, factors)
        for layer, total in enumerate(sums):
            column = factors if factors.dim() == 1 else factors[:, layer]
            right = 1.0 + sum(float(f) * unit[layer] for f, unit in zip(column, expected, strict=True))
            error, size = float((total - right).norm()), float((right - 1.0).norm())
            assert error <= tolerance * (size + whole / 10), (list(trained(model))[layer], error, size)
    assert all(p.grad is None for p in parameters)


def check_uncompared(parameters: dict[str, torch.Tensor], losses: torch.Tensor) -> None:
    """The same for a batch that nobody compares with autograd, so that no comparison hides what is wrong."""
    numbers = torch.arange(len(losses))
    expected = gradients_of(losses, list(parameters.values()), numbers, len(losses))
    kinds = {node.name() for node in read_graph(losses).nodes}
    units = make_units(losses, None, None)
    batch = compute_batch(parameters, losses, torch.ones(len(losses)), units, set(), kinds, False)
    assert not batch.is_compared
    expected_norms = torch.tensor([[float(g.norm()) for g in unit] for unit in expected])
    scale = float(expected_norms.norm())
    torch.testing.assert_close(batch.norms().float(), expected_norms, rtol=1e-4, atol=1e-6 * scale)
    factors = torch.arange(1.0, len(losses) + 1)
    sums = [torch.zeros_like(p, requires_grad=False) for p in parameters.values()]
    batch.add_weighted_(sums, factors)
    for layer, total in enumerate(sums):
        right = sum(float(factor) * unit[layer] for factor, unit in zip(factors, expected, strict=True))
        torch.testing.assert_close(total, right, rtol=1e-4, atol=1e-5 * scale)


class Fast(warnings.catch_warnings):
    """Within, a parameter that no rule serves is an error."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("error", RuntimeWarning)
