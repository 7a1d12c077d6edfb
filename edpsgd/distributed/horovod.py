"""The workers of Horovod, and all else that calls it or knows how it works."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch


class Horovod:
    """The workers of Horovod, which must be initialised before."""

    def __init__(self) -> None:
        hvd = import_horovod()
        if not hvd.is_initialized():
            raise ValueError("Horovod is not initialised: call hvd.init() before making the PrivateOptimizer")

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return int(import_horovod().rank())

    @property
    def size(self) -> int:
        """The number of workers."""
        return int(import_horovod().size())

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces each tensor, in place, by its sum; bfloat16, which Horovod cannot add, is sent as float32."""
        hvd = import_horovod()
        sent = [tensor.float() if tensor.dtype == torch.bfloat16 else tensor for tensor in tensors]
        if len(sent) == 1:  # no copy into and out of Horovod's fusion buffer
            hvd.allreduce_(sent[0], op=hvd.Sum, name="edpsgd.sum")
        else:
            hvd.grouped_allreduce_(sent, op=hvd.Sum, name="edpsgd.sum")
        for tensor, total in zip(tensors, sent, strict=True):
            if total is not tensor:
                tensor.copy_(total)

    def gather(self, value: Any) -> list[Any]:
        """The values of all workers, by rank."""
        return list(import_horovod().allgather_object(value, name="edpsgd.gather"))


def import_horovod() -> Any:
    """The module horovod.torch; a ValueError says why it cannot be had."""
    try:
        return importlib.import_module("horovod.torch")
    except ImportError as error:
        raise ValueError(
            "collective 'horovod' needs Horovod with its torch extension in this Python environment, and importing "
            f"horovod.torch failed: {error}"
        ) from error


def horovod_broadcast_root() -> int | None:
    """The root rank if hvd.broadcast_optimizer_state() is what called the caller, else None.

    That function calls optimizer.step() with zero gradients, on those workers alone whose state is still empty, to
    make the state exist. It is no training step, and only the call stack tells the two apart.
    """
    functions = sys.modules.get("horovod.torch.functions")
    if functions is None:
        return None
    code = functions.broadcast_optimizer_state.__code__
    frame: FrameType | None = sys._getframe(1)
    for _ in range(10):  # the wrappers that torch's hooks and LR schedulers put around step()
        if frame is None:
            return None
        if frame.f_code is code:
            return int(frame.f_locals["root_rank"])
        frame = frame.f_back
    return None
