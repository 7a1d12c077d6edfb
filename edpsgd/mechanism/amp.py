"""Mixed precision: what torch's GradScaler must know of gradients that it does not see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState

from edpsgd import tensors


def loss_scale(scaler: GradScaler, optimizer: torch.optim.Optimizer, device: torch.device) -> torch.Tensor:
    """What the scaler has multiplied the loss, and so the gradient, by: a scalar on the device."""
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED:
        raise RuntimeError("scaler.unscale_() before accumulate(scaler=...) would unscale twice: leave it out")
    scale = scaler._get_scale_async()
    return scaler.scale(torch.ones((), device=device)) if scale is None else tensors.moved(scale, device)


@contextmanager
def forgotten_on_failure(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Takes back what a GradScaler told an optimizer, if the step fails.

    The scaler does so by itself only after a step that succeeds, and the next step would use what is left.
    """
    try:
        yield
    except BaseException:
        for name in ("grad_scale", "found_inf"):
            optimizer.__dict__.pop(name, None)
        raise


class LossScaling:
    """What a GradScaler has to do with the micro-batches of one step."""

    def __init__(self) -> None:
        self._scaler: GradScaler | None = None
        self._has_unscaled = False  # whether a micro-batch came without a scaler

    def scale(
        self, scaler: GradScaler | None, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> torch.Tensor | None:
        """What the losses of a micro-batch were multiplied by, a scalar on the device; None if they were not."""
        if scaler is None or not scaler.is_enabled():
            self._has_unscaled = True
            return None
        self._scaler = scaler
        return loss_scale(scaler, optimizer, device)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses a step that a GradScaler calls, if a micro-batch before it came without the scaler.

        A GradScaler that calls step() has set ``grad_scale`` on the optimizer.
        """
        if self._has_unscaled and getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "scaler.step() after accumulate() or backward() without the scaler: their losses were scaled, but not "
                "their gradients back. Pass scaler=scaler to them"
            )

    def report(self, optimizer: torch.optim.Optimizer, discarded: torch.Tensor) -> None:
        """Tells the scaler, if there is one, to lower its scale if a gradient of this step was discarded."""
        if self._scaler is None:
            return
        found: dict[Any, Any] = self._scaler._found_inf_per_device(optimizer)
        overflow = (discarded > 0).float()
        found[overflow.device] = found.get(overflow.device, 0.0) + overflow
