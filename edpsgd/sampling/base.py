"""What all samplers have in common: shards of workers, the position in an epoch, and what the ledger is told of them.

Where worker and micro-batch of an example follow from its index (the index modulo the number of workers), replacing or
blanking one never moves another; where examples are clipped one by one, they do not matter at all. Wherever removing
an example could move others to another micro-batch, both are drawn (privacy.md section 7). The number of steps is
public and the same on all workers; a batch may be empty.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from edpsgd._arguments import check_count, check_seed
from edpsgd.distributed import consensus
from edpsgd.distributed.collectives import Collective
from edpsgd.distributed.launchers import resolve
from edpsgd.sampling.data_order import order_digest


class Batches(Sampler[list[int]]):
    """What all samplers share: shards, position, checkpoints. Use ShuffledBatches or PoissonBatches.

    Attributes:
        kind: "shuffled", "poisson" or "fixed_size".
        examples: size of the whole data set, over all workers; public.
        micro_batches: how many batches a worker draws for a step, None if each example of the draw is one.
        steps_per_epoch: public, and the same on all workers.
        sampling_rate: of Poisson sampling and of rounds of a fixed size, else None.
        together: whether all batches of a step come as one, for optimizer.backward().
        is_order_compared: whether several workers were seen to have the same examples in the same order.
        reach: how many clip norms one example or user can move a step's sum.
        position: how many steps of this epoch the optimizer has taken.
        passes: how often set_epoch was called, also before a checkpoint.
        moves: how often set_epoch or load_state_dict was called on this object.
    """

    kind: str
    sampling_rate: float | None = None
    together: bool = False
    _names = ("examples", "steps_per_epoch")  # of the arguments, in errors
    reach: float = 1.0
    micro_batches: int | None
    steps_per_epoch: int
    is_order_compared: bool = False
    _iteration: object = None  # the one that hands out batches

    def __init__(self, examples: int | Sized, read_ahead: int, collective: str | Collective, seed: int | None) -> None:
        workers = resolve(collective)
        self._rank, self._workers = workers.rank, workers.size
        self.examples = _count(examples)
        self.seed, self.read_ahead = seed, read_ahead
        self.epoch, self.position, self.passes, self.moves = 0, 0, 0, 0
        self._begin, self._drawn = 0, 0  # position at the last set_epoch or load; batches handed out in this epoch
        self._secret = secrets.token_bytes(32) if seed is None else hashlib.sha256(f"batches {seed}".encode()).digest()
        self._sizes: dict[int, list[int]] = {}  # of the batches that were handed out, by step
        answers = consensus.together(workers, lambda: (*self._prepare(), self._order_digest(examples)))
        consensus.check_alike([answer[0] for answer in answers])
        self._compare_order([answer[2] for answer in answers])
        self._secret = answers[0][1] or self._secret
        self._key = self._epoch_key()

    def _order_digest(self, examples: object) -> bytes | None:
        """Of what all workers must have in the same order; None if that cannot be told, or there is only one."""
        return order_digest(examples) if self._workers > 1 else None

    def _compare_order(self, digests: Sequence[bytes | None]) -> None:
        if any(digest is None for digest in digests):
            return
        if len(set(digests)) > 1:
            raise ValueError(
                f"the workers have other {self._names[0]}, or the same in another order: shards would overlap, and an "
                "example could be in two micro-batches of a step. Give every worker the whole data set in one order, "
                "for example sorted; sets and folder listings have no order of their own"
            )
        self.is_order_compared = True

    def _prepare(self) -> tuple[dict[str, Any], bytes | None]:
        """Checks the arguments; what the workers must agree on, and what worker 0 tells the others."""
        check_count(self._names[0], self.examples)
        check_count("read_ahead", self.read_ahead, least=0)
        check_seed(self.seed)
        return self.describe(), None

    # ---------------------------------------------------------------- for the training loop

    def __len__(self) -> int:
        """How many batches the epoch has, or the rest of it after a resume."""
        return max(0, self.steps_per_epoch - self._begin) * (1 if self.together else self.micro_batches or 1)

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of the steps that the optimizer has not taken yet, as lists of indices."""
        if self.position >= self.steps_per_epoch:
            raise RuntimeError(self._is_over())
        self._drawn = self.position * (self.micro_batches or 1)
        self._iteration = mine = object()
        for step in range(self.position, self.steps_per_epoch):
            drawn = self._draw(step)
            self._sizes[step] = [len(batch) for batch in drawn]
            for batch in [list(chain.from_iterable(drawn))] if self.together else drawn:
                if self._iteration is not mine:
                    raise RuntimeError(
                        "another iteration or epoch has begun since: take the batches from a new iterator, and "
                        "evaluate with a DataLoader without this sampler"
                    )
                self._drawn += len(drawn) if self.together else 1
                yield batch

    def set_epoch(self, epoch: int) -> None:
        """Begins a new pass. With ``PrivateOptimizer(batches=...)``, optimizer.set_epoch() does it."""
        check_count("epoch", epoch, least=0)
        self._move(epoch, 0, self.passes + 1)

    def _move(self, epoch: int, position: int, passes: int) -> None:
        self.epoch, self.position, self.passes, self.moves = epoch, position, passes, self.moves + 1
        self._begin, self._drawn, self._sizes, self._key = position, 0, {}, self._epoch_key()
        self._iteration = None  # an iterator of before has ended

    @property
    def expected_batch(self) -> float:
        """Examples in a step, over all workers: a public number."""
        raise NotImplementedError

    # ---------------------------------------------------------------- for the optimizer

    def fits(self, unit: str) -> bool:
        """Whether its batches can be an optimizer's micro-batches, of one example each or of several."""
        raise NotImplementedError

    def belongs_to(self, collective: Collective) -> bool:
        """Whether it was made for this worker, and for as many."""
        return (self._rank, self._workers) == (collective.rank, collective.size)

    def refusal(self, closed: int) -> str | None:
        """Why a step of so many micro-batches on this worker is not one that the sampler produced, if it is not."""
        if self.position >= self.steps_per_epoch:
            return self._is_over()
        ahead = self._drawn - (self.position + 1) * (self.micro_batches or 1)
        if self.together:
            ahead //= self.micro_batches or 1
        if ahead < 0:
            return f"the sampler has not produced the batches of step {self.position}: take them from it"
        expected = self.micro_batches or max(1, sum(self._sizes[self.position]))
        if closed != expected:
            return f"the step has {closed} micro-batches, and the sampler made {expected} for it{self._advice(closed)}"
        if ahead > self.read_ahead:
            return (
                f"the sampler is {ahead} batches ahead. Every batch is a micro-batch of its own, an empty one too: "
                "none may be skipped or added to another, and step() is called also where backward was left out. If a "
                "DataLoader with num_workers reads ahead, say so to the sampler: read_ahead=num_workers * "
                "prefetch_factor"
            )
        return None

    def _advice(self, closed: int) -> str:
        if self.micro_batches is None:
            return ": call optimizer.backward(losses) with one loss for each example" if closed == 1 else ""
        return f": give it micro_batches={closed}, if so many are meant" if closed > self.micro_batches else ""

    def is_whole(self, examples: int) -> bool:
        """Whether so many examples are all of a step whose batches came together."""
        return self.together and sum(self._sizes.get(self.position, [])) == examples

    def sizes(self, examples: int) -> list[int]:
        """Of the micro-batches that so many examples are; those of the whole step if its batches came together."""
        sizes = self._sizes.get(self.position, []) if self.together else [examples]
        if sum(sizes) != examples:
            raise ValueError(f"losses must be one for each of the {sum(sizes)} examples of the step, got {examples}")
        return sizes

    def _is_over(self) -> str:
        return (
            f"all {self.steps_per_epoch} steps of this epoch were taken: call optimizer.set_epoch() for the next, and "
            "evaluate with a DataLoader without this sampler"
        )

    def take(self) -> None:
        """Notes that the optimizer has taken a step."""
        self._sizes.pop(self.position, None)
        self.position += 1

    @property
    def common_draws(self) -> str | None:
        """A digest of what the draws follow from, if all workers must draw the same."""
        return None

    def describe(self) -> dict[str, Any]:
        """What the ledger and the card say about it."""
        return {
            "kind": self.kind,
            "examples": self.examples,
            "micro_batches": self.micro_batches,
            "steps_per_epoch": self.steps_per_epoch,
            "together": self.together,
            "seeded": self.seed is not None,
            "order_compared": self.is_order_compared,
        }

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands; the seed is included only if one was given."""
        state = {"kind": self.kind, "epoch": self.epoch, "position": self.position, "passes": self.passes}
        return state if self.seed is None else {**state, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another sampler of the same kind stood, in the middle of an epoch too."""
        self.check_state(state)
        self._move(state["epoch"], state["position"], state["passes"])

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuses the state of a sampler that this one cannot go on for."""
        if state.get("kind") != self.kind:
            raise ValueError(f"the checkpoint's batches are {state.get('kind')!r}, this sampler's are {self.kind!r}")
        if state.get("seed") != self.seed:
            raise ValueError(
                "the checkpoint's sampler has another seed: give this one the same, or none if it had none"
            )

    def _epoch_key(self) -> bytes:
        raise NotImplementedError

    def _draw(self, step: int) -> list[list[int]]:
        raise NotImplementedError

    def _shard(self) -> int:
        """How many examples this worker has: those with index rank, rank + N, rank + 2N and so on."""
        return len(range(self._rank, self.examples, self._workers))

    def _generator(self, purpose: str) -> np.random.Generator:
        """Random numbers of this worker alone."""
        return self._common_generator(f"{purpose}/{self._rank}")

    def _common_generator(self, purpose: str) -> np.random.Generator:
        """Random numbers that are the same on all workers with the same key."""
        digest = hashlib.blake2b(purpose.encode(), key=self._key, digest_size=32).digest()
        return np.random.default_rng(int.from_bytes(digest, "little"))


def _count(examples: int | Sized) -> int:
    """The size of a data set. What has another length than its examples stays, and is refused as no number."""
    has_columns = isinstance(examples, Mapping) and any(isinstance(name, str) for name in examples)
    has_columns |= isinstance(examples, tuple) and any(isinstance(part, torch.Tensor) for part in examples)
    if isinstance(examples, Sized) and not has_columns and not isinstance(examples, DataLoader):
        return len(examples)
    return cast("int", examples)
