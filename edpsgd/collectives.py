"""Workers: one process, Horovod or torch.distributed behind one small protocol.

This is the only module that knows of Horovod.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist


@runtime_checkable
class Collective(Protocol):
    """What the optimizer needs of the workers. Every method is called by all workers, in the same order."""

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""

    @property
    def size(self) -> int:
        """The number of workers."""

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces each tensor by its sum over the workers."""

    def gather(self, value: Any) -> list[Any]:
        """Every worker's (small, picklable) value, by rank, on every worker."""


class Local:
    """One process."""

    rank = 0
    size = 1

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """The sum over one worker."""

    def gather(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]


class Horovod:
    """The workers of horovodrun."""

    def __init__(self) -> None:
        hvd = _import_horovod()
        if not hvd.is_initialized():
            raise ValueError("Horovod is not initialised: call hvd.init() before making the PrivateOptimizer")

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return int(_import_horovod().rank())

    @property
    def size(self) -> int:
        """The number of workers."""
        return int(_import_horovod().size())

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces each tensor by its sum; bfloat16, which Horovod cannot add, travels as float32."""
        hvd = _import_horovod()
        wire = [t.float() if t.dtype == torch.bfloat16 else t for t in tensors]
        if len(wire) == 1:  # no copy into and out of Horovod's fusion buffer
            hvd.allreduce_(wire[0], op=hvd.Sum, name="edpsgd.sum")
        else:
            hvd.grouped_allreduce_(wire, op=hvd.Sum, name="edpsgd.sum")
        for tensor, sent in zip(tensors, wire, strict=True):
            if sent is not tensor:
                tensor.copy_(sent)

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, by rank."""
        return list(_import_horovod().allgather_object(value, name="edpsgd.gather"))


class Torch:
    """The workers of torchrun, or those of a given torch.distributed group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group() "
                "before making the PrivateOptimizer"
            )
        self._group = group

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        """The number of workers."""
        return dist.get_world_size(self._group)

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces each tensor by its sum."""
        for work in [dist.all_reduce(t, group=self._group, async_op=True) for t in tensors]:
            if work is not None:
                work.wait()

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def __deepcopy__(self, memo: object) -> Torch:
        """It is only a name for the workers, and their group cannot be copied."""
        return self


_BY_NAME: dict[str, Callable[[], Collective]] = {"local": Local, "horovod": Horovod, "torch": Torch}


def resolve(collective: str | Collective) -> Collective:
    """The collective of a name, or the given object if it has the protocol."""
    if isinstance(collective, str):
        name = _detect() if collective == "auto" else collective
        if name not in _BY_NAME:
            raise ValueError(f"collective must be 'auto', 'horovod', 'torch', 'local' or an object, got {name!r}")
        return _BY_NAME[name]()
    if not isinstance(collective, Collective):
        raise ValueError(
            f"collective must have rank, size, sum_ and gather (edpsgd.collectives.Collective), got {collective!r}"
        )
    return collective


_WIRE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def wire_dtype(compression: str | None) -> torch.dtype | None:
    """What gradients are rounded to on the wire, None to send them as they are."""
    return None if compression is None else _WIRE_DTYPES[compression]


def check_compression(collective: Collective, compression: str | None) -> None:
    """Refuses what the library cannot send."""
    if compression == "bf16" and isinstance(collective, Horovod):
        raise ValueError("compression='bf16' needs torch.distributed: Horovod cannot add bfloat16, use 'fp16'")


def _detect() -> str:
    """The launcher decides; without one, whichever library the script has initialised."""
    if "HOROVOD_RANK" in os.environ or "HOROVOD_HOSTNAME" in os.environ:
        return "horovod"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torch"
    hvd = sys.modules.get("horovod.torch")
    if hvd is not None and hvd.is_initialized():
        return "horovod"
    if dist.is_available() and dist.is_initialized():
        return "torch"
    for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"):
        if int(os.environ.get(variable) or 1) > 1:
            raise ValueError(
                f"{variable}={os.environ[variable]} says that there are several workers, but neither Horovod nor "
                "torch.distributed is initialised: call hvd.init() or torch.distributed.init_process_group(), "
                "or say collective='local' if each process trains a model of its own"
            )
    return "local"


def _import_horovod() -> Any:
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
