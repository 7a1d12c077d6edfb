"""The workers behind one small protocol: one process, or torch.distributed.

Horovod has a module of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist


@runtime_checkable
class Collective(Protocol):
    """What optimizers and samplers need of the workers.

    All workers call ``sum_`` and ``gather`` in the same order, each with what the others have the like of: tensors of
    the same shapes, or a value.
    """

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""

    @property
    def size(self) -> int:
        """The number of workers."""

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces each tensor, in place, by its sum over the workers."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all workers, by rank, on every worker; they are small and can be pickled."""


class Local:
    """One process, which is its own only worker."""

    rank = 0
    size = 1

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leaves the tensors as they are: they are the sum over one worker."""

    def gather(self, value: Any) -> list[Any]:
        """A list of the one value."""
        return [value]


class Torch:
    """The workers of torch.distributed: those of the given group, or all of them.

    The process group must be initialised before.
    """

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
        """Replaces each tensor, in place, by its sum over the workers."""
        # All of them are under way before the first is waited for.
        works = [dist.all_reduce(tensor, group=self._group, async_op=True) for tensor in tensors]
        for work in works:
            if work is not None:  # it is where this process is not in the group
                work.wait()

    def gather(self, value: Any) -> list[Any]:
        """The values of all workers, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def __deepcopy__(self, memo: object) -> Torch:
        """The object itself: it is only a name for the workers, and their group cannot be copied."""
        return self
