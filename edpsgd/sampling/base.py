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
        reach: sensitivity of a step's sum in clip norms, where examples or users are clipped one by one. For
            micro-batches it is not used: their sensitivity is always two clip norms (privacy.md section 2).
        position: how many steps of this epoch the optimizer has taken.
        passes: how often set_epoch was called, also before a checkpoint.
        moves: how often the position was set, by set_epoch or load_state_dict, on this object; whoever remembers the
            number sees whether somebody else has set it since.
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
        self.examples = _number_of_examples(examples)
        self.seed, self.read_ahead = seed, read_ahead
        self.epoch, self.position, self.passes, self.moves = 0, 0, 0, 0
        self._begin = 0  # position at the last set_epoch or load_state_dict
        self._drawn = 0  # batches handed out in this epoch
        self._sizes: dict[int, list[int]] = {}  # of the batches that were handed out, by step
        self._secret = _first_secret(seed)
        self._agree(workers, examples)
        self._key = self._epoch_key()

    def _agree(self, workers: Collective, examples: object) -> None:
        """Checks the arguments and that all workers have the same, and takes over what worker 0 tells the others."""
        answers = consensus.together(workers, lambda: (*self._prepare(), self._order_digest(examples)))
        descriptions, secrets_told, digests = zip(*answers, strict=True)
        consensus.check_alike(list(descriptions))
        self._compare_order(digests)
        self._secret = secrets_told[0] or self._secret

    def _order_digest(self, examples: object) -> bytes | None:
        """A digest of what all workers must have in the same order; None if there is none, or only one worker."""
        return order_digest(examples) if self._workers > 1 else None

    def _compare_order(self, digests: Sequence[bytes | None]) -> None:
        """Refuses digests that differ, and notes that they were compared, if every worker has one."""
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
        """Checks the arguments.

        Returns:
            What the workers must have alike, and what worker 0 tells the others: the secret, None if each has its own.
        """
        check_count(self._names[0], self.examples)
        check_count("read_ahead", self.read_ahead, least=0)
        check_seed(self.seed)
        return self.describe(), None

    # ---------------------------------------------------------------- for the training loop

    def __len__(self) -> int:
        """How many batches the epoch has, or the rest of it after a resume."""
        steps = max(0, self.steps_per_epoch - self._begin)
        return steps if self.together else steps * self._batches_per_step

    @property
    def _batches_per_step(self) -> int:
        """How many batches of this worker a step has, also where they are handed out as one."""
        return self.micro_batches or 1

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of the steps that the optimizer has not taken yet, as lists of indices."""
        if self.position >= self.steps_per_epoch:
            raise RuntimeError(self._is_over())
        self._drawn = self.position * self._batches_per_step
        this_iteration = object()
        self._iteration = this_iteration
        for step in range(self.position, self.steps_per_epoch):
            drawn = self._draw(step)
            self._sizes[step] = [len(batch) for batch in drawn]
            handed_out = [list(chain.from_iterable(drawn))] if self.together else drawn
            for batch in handed_out:
                if self._iteration is not this_iteration:
                    raise RuntimeError(
                        "another iteration or epoch has begun since: take the batches from a new iterator, and "
                        "evaluate with a DataLoader without this sampler"
                    )
                self._drawn += len(drawn) if self.together else 1
                yield batch

    def set_epoch(self, epoch: int) -> None:
        """Begins a new pass. With ``PrivateOptimizer(batches=...)``, optimizer.set_epoch() does it."""
        check_count("epoch", epoch, least=0)
        self._set_position(epoch, 0, self.passes + 1)

    def _set_position(self, epoch: int, position: int, passes: int) -> None:
        """Goes on from here: draws follow from a new key, and iterators of before have ended."""
        self.epoch, self.position, self.passes = epoch, position, passes
        self.moves += 1
        self._begin, self._drawn = position, 0
        self._sizes = {}
        self._key = self._epoch_key()
        self._iteration = None

    @property
    def expected_batch(self) -> float:
        """Examples in a step, over all workers: a public number."""
        raise NotImplementedError

    # ---------------------------------------------------------------- for the optimizer

    def fits(self, unit: str) -> bool:
        """Whether its batches can be the units of an optimizer: "micro_batch", "example" or "user"."""
        raise NotImplementedError

    def belongs_to(self, collective: Collective) -> bool:
        """Whether it was made on this worker: the shard follows from the worker's rank and their number."""
        return (self._rank, self._workers) == (collective.rank, collective.size)

    def refusal(self, closed: int) -> str | None:
        """Why a step of ``closed`` micro-batches on this worker is not one that the sampler made; None if it is."""
        if self.position >= self.steps_per_epoch:
            return self._is_over()
        # How many batches were handed out beyond those of this step.
        ahead = self._drawn - (self.position + 1) * self._batches_per_step
        if self.together:
            ahead //= self._batches_per_step
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
        """What to do about a wrong number of micro-batches, where that is clear; the end of a sentence."""
        if self.micro_batches is None and closed == 1:
            return ": call optimizer.backward(losses) with one loss for each example"
        if self.micro_batches is not None and closed > self.micro_batches:
            return f": give it micro_batches={closed}, if so many are meant"
        return ""

    def is_whole(self, examples: int) -> bool:
        """Whether the batches of the next step came together, and are of so many examples in all."""
        return self.together and sum(self._sizes.get(self.position, [])) == examples

    def sizes(self, examples: int) -> list[int]:
        """The sizes of the micro-batches that so many examples belong to, in the order of the examples.

        There are several only if the batches of a step come together; then they must be those of the whole step.
        """
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
        """Goes on to the next step, after the optimizer has released the one before."""
        self._sizes.pop(self.position, None)
        self.position += 1

    @property
    def common_draws(self) -> str | None:
        """A digest of what the draws follow from, if all workers must draw the same; else None."""
        return None

    def describe(self) -> dict[str, Any]:
        """What the ledger and the card say about it, as JSON-ready data: fields of ``BatchesRecord``."""
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
        """Where the sampler stands, JSON-ready; the seed is included only if one was given."""
        state = {"kind": self.kind, "epoch": self.epoch, "position": self.position, "passes": self.passes}
        return state if self.seed is None else {**state, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another sampler of the same kind stood, in the middle of an epoch too."""
        self.check_state(state)
        self._set_position(state["epoch"], state["position"], state["passes"])

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuses the state of a sampler that this one cannot go on for."""
        if state.get("kind") != self.kind:
            raise ValueError(f"the checkpoint's batches are {state.get('kind')!r}, this sampler's are {self.kind!r}")
        if state.get("seed") != self.seed:
            raise ValueError(
                "the checkpoint's sampler has another seed: give this one the same, or none if it had none"
            )

    def _epoch_key(self) -> bytes:
        """The key, 32 bytes, that all random numbers of the pass at hand follow from."""
        raise NotImplementedError

    def _draw(self, step: int) -> list[list[int]]:
        """The indices of this worker's examples in a step, one list for each micro-batch."""
        raise NotImplementedError

    def _shard(self) -> int:
        """How many examples this worker has: those with index rank, rank + N, rank + 2N and so on."""
        return len(range(self._rank, self.examples, self._workers))

    def _generator(self, purpose: str) -> np.random.Generator:
        """Random numbers of this worker alone, which follow from the key and the purpose."""
        return self._common_generator(f"{purpose}/{self._rank}")

    def _common_generator(self, purpose: str) -> np.random.Generator:
        """Random numbers for a purpose that are the same on all workers with the same key."""
        digest = hashlib.blake2b(purpose.encode(), key=self._key, digest_size=32).digest()
        return np.random.default_rng(int.from_bytes(digest, "little"))


def _first_secret(seed: int | None) -> bytes:
    """What all draws of a sampler follow from: 32 bytes, of the operating system's entropy unless a seed is given."""
    if seed is None:
        return secrets.token_bytes(32)
    return hashlib.sha256(f"batches {seed}".encode()).digest()


def _number_of_examples(examples: int | Sized) -> int:
    """The size of a data set, or the number itself.

    What has another length than its examples is returned as it is, and refused later as no number: columns of
    examples, whose length is the number of columns, and loaders, whose length is that of their batches.
    """
    is_of_columns = isinstance(examples, Mapping) and any(isinstance(name, str) for name in examples)
    is_of_tensors = isinstance(examples, tuple) and any(isinstance(part, torch.Tensor) for part in examples)
    has_other_length = is_of_columns or is_of_tensors or isinstance(examples, DataLoader)
    if isinstance(examples, Sized) and not has_other_length:
        return len(examples)
    return cast("int", examples)
