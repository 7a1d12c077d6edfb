"""check_model: models that keep or mix what they see are refused before training (privacy.md section 11)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from edpsgd._arguments import UNITS, check_choice
from edpsgd.validation.module_state import Snapshot


def check_model(model: nn.Module, forward: Callable[[], object] | None = None, *, unit: str = "example") -> None:
    """Refuses a model that keeps or mixes what it sees: private data that no noise covers, or no clipping bounds.

    Modules of torch that keep running statistics, rescale embeddings or, where single examples are clipped, compute
    statistics of the batch are known. Pass ``forward``, a function that runs the model on any batch, and everything
    else is watched too, and put back as it was: parameters, buffers, and tensors in plain attributes, also in lists,
    tuples, dicts and the like. ``edpsgd.check_losses`` finds other ways in which examples depend on each other.

    Args:
        model: what is to be trained.
        forward: runs it.
        unit: as for PrivateOptimizer. Statistics of the batch are within the unit for "micro_batch", unless several
            micro-batches are computed in one pass, and for "user".

    Raises:
        ValueError: naming the modules or tensors, and what to use instead.

    Example:
        >>> check_model(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))
    """
    check_choice("unit", unit, UNITS)
    _check_modules(model, unit)
    if forward is None:
        return
    moved, has_statistics = _watch(model, forward)
    if has_statistics and unit == "example":
        raise ValueError(f"the model normalises by statistics of the batch in training mode. {_NO_STATISTICS}")
    if moved:
        raise ValueError(
            f"these change in forward and would carry private data unprotected: {', '.join(moved)}. Compute them from "
            "public data and keep them fixed, or make them parameters that only the optimizer changes; a mask or "
            "table that does not read the data can be made in __init__"
        )


_NO_STATISTICS = (
    "Then the loss of an example depends on the others of its batch, and one example moves the clipped gradients of "
    "all of them: use LayerNorm or GroupNorm"
)


def _check_modules(model: nn.Module, unit: str) -> None:
    """What is known of single modules."""
    named = {name or "the model": module for name, module in model.named_modules()}
    renormed = [name for name, module in named.items() if getattr(module, "max_norm", None) is not None]
    if renormed:
        raise ValueError(
            f"embeddings with max_norm rescale the rows that private text uses, unprotected: {', '.join(renormed)}. "
            "Use max_norm=None"
        )
    counted = [name for name, module in named.items() if getattr(module, "scale_grad_by_freq", False)]
    if counted and unit == "example":
        raise ValueError(
            "embeddings with scale_grad_by_freq divide the gradient of an example by how often the others of its batch "
            f"use the same rows: {', '.join(counted)}. Use scale_grad_by_freq=False"
        )
    synced = [name for name, module in named.items() if _is_synced(module)]
    if synced:
        raise ValueError(
            "SyncBatchNorm sends statistics of private data to all workers, so that one example moves the gradients of "
            f"all of them: {', '.join(synced)}. Use LayerNorm or GroupNorm"
        )
    keeping = [f"{name} ({type(module).__name__})" for name, module in named.items() if _keeps_statistics(module)]
    if keeping:
        raise ValueError(
            f"running statistics of private data would end up in the model unprotected: {', '.join(keeping)}. Use "
            "LayerNorm or GroupNorm; freeze pretrained statistics by replacing the module with a fixed scale and shift"
        )
    mixing = [f"{name} ({type(module).__name__})" for name, module in named.items() if isinstance(module, _BatchNorm)]
    if mixing and unit == "example":
        raise ValueError(f"batch normalisation: {', '.join(mixing)}. {_NO_STATISTICS}")


def _is_synced(module: nn.Module) -> bool:
    """Torch's and Horovod's; whatever they keep."""
    return any(kind.__name__ == "SyncBatchNorm" for kind in type(module).__mro__)


def _keeps_statistics(module: nn.Module) -> bool:
    is_observer = type(module).__module__.startswith("torch.ao.quantization")
    return is_observer or bool(getattr(module, "track_running_stats", False))


class _BatchStatistics(TorchFunctionMode):
    """Sees batch normalisation in training mode, however it is called; instance norms are another function."""

    _TRAINING = 5  # the place of ``training`` among the arguments, of torch's function and of torch.nn.functional's

    def __init__(self) -> None:
        super().__init__()
        self.were_seen = False

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Called by torch instead of every function."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("batch_norm", "native_batch_norm", "cudnn_batch_norm"):
            given = args[self._TRAINING] if len(args) > self._TRAINING else kwargs.get("training", False)
            self.were_seen = self.were_seen or bool(given)
        return func(*args, **kwargs)


@torch.no_grad()
def _watch(model: nn.Module, forward: Callable[[], object]) -> tuple[list[str], bool]:
    """What a forward pass in training mode changes, and whether it used statistics of the batch."""
    before = Snapshot([model])
    try:
        model.train()
        with _BatchStatistics() as statistics:
            forward()
        return before.changes(), statistics.were_seen
    finally:
        before.restore()
