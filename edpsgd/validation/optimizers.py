"""What cannot be wrapped: inner optimizers, wrappers and parameters around which gradients would leak."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


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
    """Refuses an optimizer whose state holds .grad itself, in whose place the next step's sum without noise will be.

    Args:
        optimizer: that was wrapped, after a step.
        buffers: the memory of all .grad.
    """
    places = {buffer.untyped_storage().data_ptr() for buffer in buffers}
    for state in optimizer.state.values():
        if not isinstance(state, dict):
            continue
        for name, value in state.items():
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
    own_ids = {id(parameter) for parameter in parameters}
    objects = gc.get_objects()
    # There are few types and many objects: only where a type is a wrapper are the objects gone through.
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, wrappers)}
    if not kinds:
        return
    for module in objects:
        if type(module) in kinds and not own_ids.isdisjoint(map(id, module.parameters())):
            raise ValueError(f"a {type(module).__name__} module holds these parameters. {_NO_DDP}")


def named_layers(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The parameters by name; refuses what named_parameters() of a plain model would not give.

    Raises:
        ValueError: for what holds no (name, parameter) pairs, one of them twice, or sharded or complex parameters.
    """
    if not isinstance(named_parameters, Iterable):
        raise ValueError(f"named_parameters must be model.named_parameters(), got a {type(named_parameters).__name__}")
    named = list(named_parameters)
    if not all(map(_is_named_parameter, named)):
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
        is_sharded = hasattr(parameter, "device_mesh") or "_fsdp_wrapped_module" in name or "_flat_param" in name
        if parameter.is_complex() or is_sharded:
            raise ValueError(f"complex and sharded (FSDP, DTensor) parameters are not supported: {name}")
    return layers


def _is_named_parameter(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor)


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
