"""A small network, a few steps of it, and settings of a mechanism: what several tests of the optimizer begin with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from edpsgd.mechanism.settings import Settings

USUAL: dict[str, Any] = {
    "clip_norm": 1.0,
    "noise_multiplier": 1.0,
    "noise_decay": None,
    "clipping": "flat",
    "unit": "micro_batch",
    "layer_scaling": None,
    "noise": "calibrated",
    "noise_placement": "sharded",
    "seed": None,
    "divisor": None,
    "compression": None,
    "verify": "spot",
    "sensitivity_factor": 1.0,
}


def settings(**changes: Any) -> Settings:
    """Those of a mechanism, with some changes."""
    return Settings(**{**USUAL, **changes})


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, after_step: Callable[[], object] | None = None
) -> None:
    """Steps on data of their own, the same in every call."""
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        if after_step:
            after_step()
