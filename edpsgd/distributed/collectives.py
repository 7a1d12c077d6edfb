"""The workers behind one small protocol: one process, or torch.distributed. Horovod has a module of its own."""

from __future__ import annotations

from collections.abc import Sequence
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
