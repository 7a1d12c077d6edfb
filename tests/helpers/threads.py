"""Several workers in one process: threads that meet in every sum and gather."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


class ThreadWorker:
    """One of several workers. ``rank`` and ``size`` may change, as in an elastic job."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: dict[int, Any]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._board = barrier, board

    def gather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait(timeout=30)
        found = [self._board[rank] for rank in range(self.size)]
        self._barrier.wait(timeout=30)
        return found

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        parts = self.gather([tensor.clone() for tensor in tensors])
        for index, tensor in enumerate(tensors):
            tensor.copy_(torch.stack([part[index] for part in parts]).sum(0))

    def __deepcopy__(self, memo: object) -> ThreadWorker:
        return self


def run_workers(size: int, work: Callable[[ThreadWorker], Any]) -> list[Any]:
    """What each worker returns, or the error that it raises."""
    barrier, board = threading.Barrier(size), dict[int, Any]()

    def one(rank: int) -> Any:
        try:
            return work(ThreadWorker(rank, size, barrier, board))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
