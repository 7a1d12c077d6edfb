"""Batch samplers that vouch for the accounting: the ledger notes what they did, not what somebody says.

Every worker has a fixed shard, the examples whose index is its rank modulo the number of workers, and samples it by
itself. So adding, removing or replacing an example never moves another one to a different worker or micro-batch
(privacy.md section 7). The number of steps is public and the same on all workers; a batch may be empty.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sized
from itertools import chain
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Sampler

from edpsgd import agreement
from edpsgd.collectives import Collective, resolve


class Batches(Sampler[list[int]]):
    """What both samplers share: shards, position, checkpoints. Use ShuffledBatches or PoissonBatches.

    Attributes:
        kind: "shuffled" or "poisson".
        examples: size of the whole data set, over all workers; public.
        micro_batches: how many batches a worker draws for a step, None if each example of the draw is one.
        steps_per_epoch: public, and the same on all workers.
        sampling_rate: of Poisson sampling and of rounds of a fixed size, else None.
        together: whether all batches of a step come as one, for optimizer.backward().
        reach: how many clip norms one example or user can move a step's sum.
        neighbours: the pairs of data sets for which it is that far.
        position: how many steps of this epoch the optimizer has taken.
        passes: how often set_epoch was called, also before a checkpoint.
        moves: how often set_epoch or load_state_dict was called on this object.
    """

    kind: str
    sampling_rate: float | None = None
    together: bool = False
    _names = ("examples", "steps_per_epoch")  # of the arguments, in errors
    reach: float = 1.0
    neighbours: str = "add/remove or zero-out"
    micro_batches: int | None
    steps_per_epoch: int
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
        answers = agreement.together(workers, self._prepare)
        agreement.check_alike([description for description, _ in answers])
        self._secret = answers[0][1] or self._secret
        self._key = self._epoch_key()

    def _prepare(self) -> tuple[dict[str, Any], bytes | None]:
        """Checks the arguments; what the workers must agree on, and what worker 0 tells the others."""
        check_count(self._names[0], self.examples)
        check_count("read_ahead", self.read_ahead, least=0)
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ValueError(f"seed must be None or an int, got {self.seed!r}")
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
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch must be an int >= 0, got {epoch!r}")
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
        }

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands; the seed is included only if one was given."""
        state = {"kind": self.kind, "epoch": self.epoch, "position": self.position, "passes": self.passes}
        return state if self.seed is None else {**state, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another sampler of the same kind stood, in the middle of an epoch too."""
        self._check_kind(state)
        self._move(state["epoch"], state["position"], state["passes"])

    def _check_kind(self, state: Mapping[str, Any]) -> None:
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
        digest = hashlib.blake2b(f"{purpose}/{self._rank}".encode(), key=self._key, digest_size=32).digest()
        return np.random.default_rng(int.from_bytes(digest, "little"))


class ShuffledBatches(Batches):
    """Every example in one batch of every epoch, in a new order each time: a batch sampler for torch's DataLoader.

    Sound for replacing or blanking one example. The last batches of an epoch may be smaller, or empty, on some
    workers.

    Args:
        examples: the data set or its size, over all workers.
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
        self.steps_per_epoch = math.ceil(largest_shard / (self.batch_size * (self.micro_batches or 1)))
        return super()._prepare()[0], self._secret  # worker 0's, so that its checkpoint fits all workers

    @property
    def expected_batch(self) -> float:
        """Examples in a full step, over all workers."""
        return float(self._workers * self.batch_size * (self.micro_batches or 1))

    def fits(self, unit: str) -> bool:
        """Single examples need batches of one."""
        return unit == "micro_batch" or (unit == "example" and self.batch_size == 1)

    def describe(self) -> dict[str, Any]:
        """What the ledger and the card say about it."""
        return {**super().describe(), "batch_size": self.batch_size}

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands and the order of this epoch, which is no secret; nothing about other epochs."""
        return {**super().state_dict(), "key": self._key.hex(), "layout": self._layout()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another sampler stood; in the middle of an epoch only with the same shards and batches."""
        self._check_kind(state)
        layout, position = state["layout"], state["position"]
        is_same = layout == self._layout()
        if not is_same and 0 < position < layout["steps"]:
            raise ValueError(
                "the checkpoint was written in the middle of an epoch with other examples, workers or batch sizes "
                f"({layout}; here {self._layout()}): some examples would be used twice. Go on with the same, or from a "
                "checkpoint at the end of an epoch"
            )
        is_complete = position > 0 and not is_same
        self._move(state["epoch"], self.steps_per_epoch if is_complete else position, state["passes"])
        self._key = bytes.fromhex(state["key"])

    def _layout(self) -> dict[str, int]:
        return {
            "examples": self.examples,
            "workers": self._workers,
            "batch_size": self.batch_size,
            "micro_batches": self.micro_batches or 1,
            "steps": self.steps_per_epoch,
        }

    def _epoch_key(self) -> bytes:
        return hashlib.blake2b(f"epoch {self.epoch}".encode(), key=self._secret, digest_size=32).digest()

    def _draw(self, step: int) -> list[list[int]]:
        if self._order is None or self._order[0] != self._key:
            self._order = (self._key, self._generator("order").permutation(self._shard()))
        size, number = self.batch_size, self.micro_batches or 1
        starts = [(step * number + k) * size for k in range(number)]
        chosen = [self._order[1][start : start + size] for start in starts]
        return [[int(i) * self._workers + self._rank for i in batch] for batch in chosen]

    def __getstate__(self) -> dict[str, Any]:
        follow_up = hashlib.blake2b(b"copy", key=self._key, digest_size=32).digest()  # alike on all workers
        return {**self.__dict__, "_secret": follow_up if self.seed is None else self._secret}


class PoissonBatches(Batches):
    """Every example joins every step with probability q, independently: a batch sampler for torch's DataLoader.

    Sound for adding or removing one example, and the accounting profits from the sampling. Batches differ in size and
    may be empty.

    Args:
        examples: the data set or its size, over all workers.
        sampling_rate: q.
        steps_per_epoch: the length of what set_epoch counts; 1/q, rounded up, if None.
        unit: "micro_batch", or "example" for PrivateOptimizer(unit="example"): a worker's draw is then one batch, of
            which every example is to be a micro-batch of its own.
        micro_batches: K, how many batches a worker's draw is split into; an example is always in the same one.
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
        self.sampling_rate, self.unit, self._slots, self._steps = sampling_rate, unit, micro_batches, steps_per_epoch
        self.together = together
        super().__init__(examples, read_ahead, collective, seed)

    def _prepare(self) -> tuple[dict[str, Any], bytes | None]:
        q = self.sampling_rate
        if isinstance(q, bool) or not isinstance(q, int | float) or not 0 < q <= 1:
            raise ValueError(f"sampling_rate must be > 0 and <= 1, got {shown(q)}")
        if self.unit not in self._units:
            raise ValueError(f"unit must be 'micro_batch' or 'example', got {self.unit!r}")
        check_count("micro_batches", self._slots)
        if self.unit != "micro_batch" and self._slots != 1:
            raise ValueError("micro_batches is for unit='micro_batch'; with unit='example' it follows the draw")
        self.sampling_rate = float(q)
        self.steps_per_epoch = math.ceil(1 / q - 1e-9) if self._steps is None else self._steps
        check_count(self._names[1], self.steps_per_epoch)
        self.micro_batches = self._slots if self.unit == "micro_batch" else None
        self._process = os.getpid()
        return super()._prepare()  # each worker keeps its secret to itself

    @property
    def expected_batch(self) -> float:
        """Expected examples in a step, over all workers."""
        return self.examples * (self.sampling_rate or 0.0)

    def fits(self, unit: str) -> bool:
        """The draw is split for one unit or the other."""
        return unit == self.unit

    def describe(self) -> dict[str, Any]:
        """What the ledger and the card say about it."""
        return {**super().describe(), "sampling_rate": self.sampling_rate}

    def _epoch_key(self) -> bytes:
        # A pass over an epoch that was seen before draws anew: the accounting wants independent steps.
        return hashlib.blake2b(f"pass {self.passes}".encode(), key=self._secret, digest_size=32).digest()

    def _draw(self, step: int) -> list[list[int]]:
        if self._process != os.getpid():  # a forked process must not draw the same
            self._renew_secret()
            self._process, self._key = os.getpid(), self._epoch_key()
        chosen = np.flatnonzero(self._generator(f"step {step}").random(self._shard()) < (self.sampling_rate or 0.0))
        number = self.micro_batches or 1
        slots = [chosen[chosen % number == slot] for slot in range(number)]  # fixed by the example's own index
        return [[int(i) * self._workers + self._rank for i in slot] for slot in slots]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another sampler stood; without a seed, with draws of its own."""
        self._renew_secret()
        super().load_state_dict(state)

    def _renew_secret(self) -> None:
        if self.seed is None:
            self._process, self._secret = os.getpid(), secrets.token_bytes(32)

    def __getstate__(self) -> dict[str, Any]:
        secret = ("_secret", "_key") if self.seed is None else ()
        return {name: value for name, value in self.__dict__.items() if name not in secret}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._renew_secret()
        self._key = self._epoch_key()


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuses what is not an int, or less than it may be."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an int >= {least}, got {shown(value)}")


def shown(value: object) -> str:
    """For an error: a number as it is, of anything else only the kind, as it may hold private text.

    Example:
        >>> shown(-1), shown(["call anna"])
        ('-1', 'a list')
    """
    return repr(value) if isinstance(value, int | float | None) else f"a {type(value).__name__}"


def _count(examples: int | Sized) -> int:
    """The size of a data set. What has another length than its examples stays, and is refused as no number."""
    has_columns = isinstance(examples, Mapping) and any(isinstance(name, str) for name in examples)
    has_columns |= isinstance(examples, tuple) and any(isinstance(part, torch.Tensor) for part in examples)
    if isinstance(examples, Sized) and not has_columns and not isinstance(examples, DataLoader):
        return len(examples)
    return cast("int", examples)
