"""Shuffled epochs: every example in one batch of every epoch (privacy.md section 7)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sized
from typing import Any

import numpy as np
import numpy.typing as npt

from edpsgd._arguments import check_count
from edpsgd.distributed.collectives import Collective
from edpsgd.sampling.base import Batches


class ShuffledBatches(Batches):
    """Every example in one batch of every epoch, in a new order each time: a batch sampler for torch's DataLoader.

    Sound for replacing or blanking one example. The last batches of an epoch may be smaller, or empty, on some
    workers.

    Args:
        examples: the data set or its size, over all workers. Several workers read a few items of a data set, to see
            that all have them in the same order; with a size only, that is a condition of ε.
        batch_size: examples in a micro-batch of one worker.
        micro_batches: K, how many batches a worker draws for a step; ``optimizer.accumulate()`` between them.
        together: whether the K batches of a step come as one, for ``optimizer.backward(losses)``.
        read_ahead: how many batches a DataLoader may draw before they are used, num_workers * prefetch_factor.
        collective: as for PrivateOptimizer; every worker makes its sampler.
        seed: None for a new order in every run.

    Example:
        >>> batches = ShuffledBatches(10, batch_size=4, collective="local", seed=1)
        >>> [len(batch) for batch in batches]
        [4, 4, 2]
    """

    kind = "shuffled"
    _order: tuple[bytes, npt.NDArray[np.int64]] | None = None  # of the epoch with that key

    def __init__(
        self,
        examples: int | Sized,
        batch_size: int,
        *,
        micro_batches: int = 1,
        together: bool = False,
        read_ahead: int = 0,
        collective: str | Collective = "auto",
        seed: int | None = None,
    ) -> None:
        self.batch_size, self.micro_batches, self.together = batch_size, micro_batches, together
        super().__init__(examples, read_ahead, collective, seed)

    def _prepare(self) -> tuple[dict[str, Any], bytes | None]:
        check_count(self._names[0], self.examples)
        check_count("batch_size", self.batch_size)
        check_count("micro_batches", self.micro_batches)
        largest_shard = math.ceil(self.examples / self._workers)
        self.steps_per_epoch = math.ceil(largest_shard / (self.batch_size * self._batches_per_step))
        return super()._prepare()[0], self._secret  # worker 0's, so that its checkpoint fits all workers

    @property
    def expected_batch(self) -> float:
        """Examples in a full step, over all workers."""
        return float(self._workers * self.batch_size * self._batches_per_step)

    def fits(self, unit: str) -> bool:
        """Whether its batches are the optimizer's units: micro-batches always, single examples if they have one."""
        return unit == "micro_batch" or (unit == "example" and self.batch_size == 1)

    def describe(self) -> dict[str, Any]:
        """What the ledger and the card say about it."""
        return {**super().describe(), "batch_size": self.batch_size}

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands and the order of this epoch, which is no secret; nothing about other epochs."""
        return {**super().state_dict(), "key": self._key.hex(), "layout": self._layout()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another sampler stood; in the middle of an epoch only with the same shards and batches."""
        super().load_state_dict(state)
        if state["position"] > 0 and state["layout"] != self._layout():  # the epoch was complete
            self._set_position(state["epoch"], self.steps_per_epoch, state["passes"])
        self._key = bytes.fromhex(state["key"])

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuses the state of another kind of sampler, and one in the middle of an epoch of other batches."""
        super().check_state(state)
        layout = state["layout"]
        if layout != self._layout() and 0 < state["position"] < layout["steps"]:
            raise ValueError(
                "the checkpoint was written in the middle of an epoch with other examples, workers or batch sizes "
                f"({layout}; here {self._layout()}): some examples would be used twice. Go on with the same, or from a "
                "checkpoint at the end of an epoch"
            )

    def _layout(self) -> dict[str, int]:
        """What the batches of an epoch depend on, beside its key."""
        return {
            "examples": self.examples,
            "workers": self._workers,
            "batch_size": self.batch_size,
            "micro_batches": self._batches_per_step,
            "steps": self.steps_per_epoch,
        }

    def _epoch_key(self) -> bytes:
        return hashlib.blake2b(f"epoch {self.epoch}".encode(), key=self._secret, digest_size=32).digest()

    def _draw(self, step: int) -> list[list[int]]:
        if self._order is None or self._order[0] != self._key:
            self._order = (self._key, self._generator("order").permutation(self._shard()))
        _, order = self._order
        batches = []
        for k in range(self._batches_per_step):
            start = (step * self._batches_per_step + k) * self.batch_size
            in_shard = order[start : start + self.batch_size]
            batches.append([int(place) * self._workers + self._rank for place in in_shard])
        return batches

    def __getstate__(self) -> dict[str, Any]:
        follow_up = hashlib.blake2b(b"copy", key=self._key, digest_size=32).digest()  # alike on all workers
        return {**self.__dict__, "_secret": follow_up if self.seed is None else self._secret}
