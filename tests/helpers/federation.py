"""Users whose updates are known beforehand, and DP-FedAvg written a second time from the paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import edpsgd


class Point(nn.Module):
    """Two parameter tensors and nothing else."""

    def __init__(self, first: int = 3, second: int = 2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.a = nn.Parameter(torch.randn(first, generator=generator))
        self.b = nn.Parameter(torch.randn(second, generator=generator))

    def flat(self) -> torch.Tensor:
        return torch.cat([self.a, self.b])


def training(model: nn.Module, users: Any, local: Any, server: torch.optim.Optimizer | None = None, **settings: Any):
    """Federated with plain averaging, without noise and with a clip norm that nobody reaches."""
    settings = {"clip_norm": 1e6, "noise_multiplier": 0.0, **settings}
    server = server or torch.optim.SGD(model.parameters(), lr=1.0)
    return edpsgd.Federated(model, server, users, local, **settings)


def towards(model: Point) -> Callable[[torch.Tensor], torch.Tensor]:
    """A loss whose gradient depends on where the model is: half the mean squared distance to the batch's points."""
    return lambda points: (model.flat() - points).square().sum(dim=1).mean() / 2


def pushed(model: Point) -> Callable[[torch.Tensor], torch.Tensor]:
    """A loss whose negative gradient is the batch itself."""
    return lambda update: -(model.flat() * update).sum()


def reference_round(
    theta: Sequence[torch.Tensor],
    drawn: Mapping[int, float],
    data: Callable[[int], Sequence[torch.Tensor]],
    rate: float,
    epochs: int,
    clip_norm: float,
    per_layer: bool,
    denominator: float,
) -> list[torch.Tensor]:
    """Algorithm 1 of McMahan et al. 2018 without noise, for the loss of ``towards``; ``drawn`` has the weights."""
    total = [torch.zeros_like(part) for part in theta]
    for user, weight in drawn.items():
        local = [part.clone() for part in theta]
        for points in list(data(user)) * epochs:
            centre = points.mean(dim=0).split([len(part) for part in theta])
            local = [part - rate * (part - middle) for part, middle in zip(local, centre, strict=True)]
            update = [part - start for part, start in zip(local, theta, strict=True)]
            norms = [float(part.norm()) for part in update]
            limit, whole = clip_norm / math.sqrt(len(update)), math.hypot(*norms)
            factors = [min(1.0, limit / max(n, 1e-30)) if per_layer else min(1.0, clip_norm / whole) for n in norms]
            local = [start + f * part for start, f, part in zip(theta, factors, update, strict=True)]
        total = [t + weight * (part - start) for t, part, start in zip(total, local, theta, strict=True)]
    return [start + part / denominator for start, part in zip(theta, total, strict=True)]


def points_of(user: int) -> list[torch.Tensor]:
    """Some batches of points, other ones for every user; user 4 has none."""
    generator = torch.Generator().manual_seed(100 + user)
    return [torch.randn(3, 5, generator=generator) * (1 + user) for _ in range(user % 3 + 1)] if user != 4 else []
