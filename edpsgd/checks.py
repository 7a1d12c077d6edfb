"""Refusals: what would leak around the optimizer is an error before training starts."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from edpsgd.arguments import check_choice
from edpsgd.batches import Batches
from edpsgd.budget import Budget
from edpsgd.collectives import Collective
from edpsgd.module_state import Snapshot
from edpsgd.settings import UNITS


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


def check_one_for_each(losses: object) -> None:
    """Refuses losses that are no vector."""
    if not isinstance(losses, torch.Tensor) or losses.dim() != 1:
        shape = getattr(losses, "shape", None)
        found = f"a {type(losses).__name__}" if shape is None else f"shape {tuple(shape)}"
        raise ValueError(f"losses must be one number for each example, a tensor of shape (B,), got {found}")


OPEN_EXAMPLE = (
    "step() found a gradient that was not closed as that of one example, and the mean over a batch is none: with "
    "unit='example' call optimizer.backward(losses) with one loss for each example, or optimizer.accumulate() after "
    "the backward of each"
)


def check_inner(optimizer: torch.optim.Optimizer) -> None:
    """Refuses optimizers that cannot be wrapped."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if type(optimizer).__module__.startswith("horovod."):
        raise ValueError(
            "hvd.DistributedOptimizer sends the raw gradient during backward, before any clipping or noise: wrap the "
            "plain torch optimizer instead, PrivateOptimizer sums over the workers by itself"
        )
    if type(optimizer).__module__.startswith("edpsgd."):
        raise ValueError("the optimizer is private already: wrap the plain torch optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the model several times in a step, which cannot be accounted for")


_NO_DDP = (
    "It sends the raw gradient during backward, before any clipping or noise: use the plain module, PrivateOptimizer "
    "sums over the workers by itself"
)


def check_keeps_no_gradient(optimizer: torch.optim.Optimizer, buffers: Sequence[torch.Tensor]) -> None:
    """Refuses an optimizer whose state holds .grad itself, in whose place the next step's bare sum will be."""
    places = {buffer.untyped_storage().data_ptr() for buffer in buffers}
    for state in optimizer.state.values():
        for name, value in state.items() if isinstance(state, dict) else ():
            is_plain = type(value) is torch.Tensor and value.layout is torch.strided
            if is_plain and value.untyped_storage().data_ptr() in places:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps .grad itself as {name!r} in its state, which would hold "
                    "gradients without noise in the next step: let it keep a copy"
                )


def check_no_ddp(parameters: Sequence[torch.Tensor]) -> None:
    """Refuses parameters that a living DistributedDataParallel or FullyShardedDataParallel module holds."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrappers = (DistributedDataParallel, FullyShardedDataParallel)
    objects, ours = gc.get_objects(), {id(p) for p in parameters}
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, wrappers)}  # few types, many objects
    for module in (candidate for candidate in objects if type(candidate) in kinds) if kinds else ():
        if not ours.isdisjoint(map(id, module.parameters())):
            raise ValueError(f"a {type(module).__name__} module holds these parameters. {_NO_DDP}")


def named_layers(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The parameters by name; refuses what named_parameters() of a plain model would not give."""
    if not isinstance(named_parameters, Iterable):
        raise ValueError(f"named_parameters must be model.named_parameters(), got a {type(named_parameters).__name__}")
    named = list(named_parameters)
    if not all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor) for item in named):
        raise ValueError("named_parameters must hold (name, parameter) pairs, as model.named_parameters() does")
    if not named:
        raise ValueError("named_parameters is empty: pass model.named_parameters()")
    layers = dict(named)
    if len(layers) < len(named) or len({id(p) for p in layers.values()}) < len(named):
        raise ValueError("named_parameters holds a name or a parameter twice: pass model.named_parameters() as it is")
    if all(name.startswith("module.") for name in layers):
        raise ValueError(
            f"all names begin with module. ({named[0][0]}), as in DistributedDataParallel. {_NO_DDP}. "
            "If it is no such module, call that child otherwise"
        )
    for name, parameter in named:
        sharded = hasattr(parameter, "device_mesh") or "_fsdp_wrapped_module" in name or "_flat_param" in name
        if parameter.is_complex() or sharded:
            raise ValueError(f"complex and sharded (FSDP, DTensor) parameters are not supported: {name}")
    return layers


def check_all_named(parameters: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor]) -> None:
    """Refuses parameters that the wrapper was not given: their raw gradient would slip through."""
    known = {id(p) for p in named.values()}
    unknown = [f"position {i}, shape {tuple(p.shape)}" for i, p in enumerate(parameters) if id(p) not in known]
    if unknown:
        raise ValueError(
            f"the optimizer holds parameters that are not among named_parameters ({'; '.join(unknown[:5])}), and their "
            "raw gradient would slip through: pass the named_parameters() of the whole model"
        )


def check_known(scaling: Mapping[str, float], named: Mapping[str, torch.Tensor]) -> None:
    """Refuses scales for parameters that do not exist."""
    unknown = [name for name in scaling if name not in named]
    if unknown:
        raise ValueError(f"layer_scaling names parameters that do not exist: {', '.join(unknown[:5])}")


def check_books(batches: object, budget: object, unit: str, ledger: object, collective: Collective) -> None:
    """Refuses a sampler, budget or ledger of the wrong kind, and a sampler that does not fit the unit or the worker."""
    if ledger is not None and not isinstance(ledger, str | os.PathLike):
        raise ValueError(f"ledger must be None or a path, got {ledger!r}")
    if budget is not None and not isinstance(budget, Budget):
        raise ValueError(f"budget must be None or edpsgd.Budget(epsilon, delta), got {budget!r}")
    if batches is None and unit == "user":
        raise ValueError("unit='user' needs batches: PoissonUsers or FixedSizeUsers")
    if batches is None:
        return
    if not isinstance(batches, Batches):
        raise ValueError(f"batches must be None, ShuffledBatches or PoissonBatches, got {type(batches).__name__}")
    check_place(batches, collective)
    if unit in UNITS and not batches.fits(unit):
        raise ValueError(
            f"unit={unit!r} does not fit the sampler: with unit='example' use PoissonBatches(unit='example') or "
            "ShuffledBatches(batch_size=1), with unit='micro_batch' PoissonBatches(unit='micro_batch'), with "
            "unit='user' PoissonUsers or FixedSizeUsers"
        )


def warn_of_discards(discarded: int, number: int) -> None:
    """Says once that micro-batches could not be used; the warning points at the caller's step()."""
    warnings.warn(
        f"{discarded} micro-batch(es) held NaN or infinities in step {number} and counted as zero; later ones are "
        "counted in optimizer.discarded without a warning",
        stacklevel=8,
    )


def check_place(batches: Batches | None, collective: Collective) -> None:
    """Refuses a sampler of another worker: two workers would use the same examples."""
    if batches is not None and not batches.belongs_to(collective):
        raise ValueError(
            f"the sampler was made for another worker than {collective.rank} of {collective.size}, this one: make it "
            "on each worker, after hvd.init() or init_process_group(), with the same collective as the optimizer"
        )
