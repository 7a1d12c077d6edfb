"""Poisson sampling: every example joins every step independently (privacy.md section 7)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from typing import Any

import numpy as np

from edpsgd._arguments import check_choice, check_count, shown
from edpsgd.distributed.collectives import Collective
from edpsgd.sampling.secret_draws import RandomDraws

_DRAWS = 2  # how micro-batches of Poisson draws follow from a seed; counts up when that changes
_FINE = 1e-6  # a rate above this hardly notices the grid of random numbers
_CHUNK = 1 << 20  # indices whose random numbers are held at once


class PoissonBatches(RandomDraws):
    """Every example joins every step with probability q, independently: a batch sampler for torch's DataLoader.

    Sound for adding or removing one example, and the accounting profits from the sampling. Batches differ in size and
    may be empty.

    Args:
        examples: the data set or its size, over all workers. Several workers read a few items of a data set, to see
            that all have them in the same order; with a size only, that is a condition of ε.
        sampling_rate: q.
        steps_per_epoch: the length of what set_epoch counts; 1/q, rounded up, if None.
        unit: "micro_batch", or "example" for PrivateOptimizer(unit="example"): a worker's draw is then one batch, of
            which every example is to be a micro-batch of its own.
        micro_batches: K, how many batches a worker has in a step. Each example of a step is in one of the N·K batches
            of all workers, drawn independently of the others, so that removing one moves no other.
        together: whether the K batches of a step come as one, for ``optimizer.backward(losses)``.
        read_ahead: how many batches a DataLoader may draw before they are used, num_workers * prefetch_factor.
        collective: as for PrivateOptimizer.
        seed: None for secret draws. An int repeats them, for tests: ε holds only while it is secret.

    Example:
        >>> batches = PoissonBatches(1000, sampling_rate=0.05, collective="local", seed=1)
        >>> len(batches), len(next(iter(batches))) > 20
        (20, True)
    """

    kind = "poisson"
    _units: tuple[str, ...] = ("micro_batch", "example")
    _process: int

    def __init__(
        self,
        examples: int | Sized,
        sampling_rate: float,
        *,
        steps_per_epoch: int | None = None,
        unit: str = "micro_batch",
        micro_batches: int = 1,
        together: bool = False,
        read_ahead: int = 0,
        collective: str | Collective = "auto",
        seed: int | None = None,
    ) -> None:
        self.sampling_rate, self.unit, self.together = sampling_rate, unit, together
        self._given_micro_batches, self._given_steps = micro_batches, steps_per_epoch
        super().__init__(examples, read_ahead, collective, seed)

    def _prepare(self) -> tuple[dict[str, Any], bytes | None]:
        q = self.sampling_rate
        if isinstance(q, bool) or not isinstance(q, int | float) or not 0 < q <= 1:
            raise ValueError(f"sampling_rate must be > 0 and <= 1, got {shown(q)}")
        check_choice("unit", self.unit, self._units)
        check_count("micro_batches", self._given_micro_batches)
        if self.unit != "micro_batch" and self._given_micro_batches != 1:
            raise ValueError("micro_batches is for unit='micro_batch'; with unit='example' it follows the draw")
        self.sampling_rate = _drawn_rate(float(q))
        self.steps_per_epoch = math.ceil(1 / q - 1e-9) if self._given_steps is None else self._given_steps
        check_count(self._names[1], self.steps_per_epoch)
        self.micro_batches = self._given_micro_batches if self.unit == "micro_batch" else None
        return super()._prepare()

    @property
    def _is_common(self) -> bool:
        # Units that are clipped one by one count alike on any worker: each draws from its shard, with its own secret.
        return self.unit == "micro_batch"

    @property
    def expected_batch(self) -> float:
        """Expected examples in a step, over all workers."""
        return self.examples * (self.sampling_rate or 0.0)

    def fits(self, unit: str) -> bool:
        """Whether the optimizer's unit is the one that the draw is split for."""
        return unit == self.unit

    def describe(self) -> dict[str, Any]:
        """What the ledger and the card say about it."""
        drawn = {"slots": "drawn"} if self._is_common else {}
        return {**super().describe(), "sampling_rate": self.sampling_rate, **drawn}

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands; with a seed, also how micro-batches follow from it."""
        state = super().state_dict()
        return {**state, "draws": _DRAWS} if self._has_seeded_slots else state

    @property
    def _has_seeded_slots(self) -> bool:
        return self.seed is not None and self._is_common

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuses the state of another kind of sampler, and one whose seed gave other draws."""
        super().check_state(state)
        if self._has_seeded_slots and state.get("draws") != _DRAWS:
            raise ValueError(
                "the checkpoint is of another version, in which the same seed gave other batches: its run cannot be "
                "repeated here. Go on with that version, or without a seed from the model alone"
            )

    def _draw(self, step: int) -> list[list[int]]:
        self._check_process()
        q = self.sampling_rate or 0.0
        if not self._is_common:
            chosen = np.flatnonzero(self._generator(f"step {step}").random(self._shard()) < q)
            return [(chosen * self._workers + self._rank).tolist()]
        return self._draw_micro_batches(self._common_generator(f"step {step}"), q)

    def _draw_micro_batches(self, generator: np.random.Generator, q: float) -> list[list[int]]:
        """One random number for each index says whether it is drawn and, if it is, for which of the N·K micro-batches.

        The number of an index does not depend on how many others there are.
        """
        own = self._batches_per_step
        slots = self._workers * own
        batches: list[list[int]] = [[] for _ in range(own)]
        for start in range(0, self.examples, _CHUNK):
            numbers = generator.random(min(_CHUNK, self.examples - start))
            chosen = np.flatnonzero(numbers < q)
            # A number below q is uniform up to q: its share of q says which slot it falls into.
            slot_of_chosen = (numbers[chosen] * (slots / q)).astype(np.int64)
            slot_of_chosen = np.minimum(slot_of_chosen, slots - 1)  # never beyond, by rounding
            for k, batch in enumerate(batches):
                is_in_batch = slot_of_chosen == self._rank * own + k
                batch += (chosen[is_in_batch] + start).tolist()
        return batches


def _drawn_rate(q: float) -> float:
    """The probability that a uniform random number, a multiple of 2^-53, is below q: what the accountant must know.

    Example:
        >>> _drawn_rate(0.05), _drawn_rate(1e-30) == 2.0**-53
        (0.05, True)
    """
    return q if q >= _FINE else math.ceil(q * 2.0**53) * 2.0**-53
