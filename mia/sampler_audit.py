"""The audit of samplers: do the draws follow the law that the accounting takes for granted (privacy.md section 7)?

The real samplers draw for some epochs, on all workers. Their draws are compared with the law of the settings, not with
what the sampler says of itself: the rate of all examples and of each, steps and epochs and neighbours that must know
nothing of each other, and one slot for every example that is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import binom, binomtest, hypergeom, norm

from edpsgd import FixedSizeUsers, PoissonBatches, PoissonUsers, ShuffledBatches
from edpsgd.distributed.collectives import Collective
from edpsgd.sampling.base import Batches
from mia.bounds import Floats
from mia.noise_checks import Check, NoiseFinding, check_std

KINDS = ("poisson", "shuffled", "poisson_users", "fixed_size_users")

Counts = NDArray[np.int64]
Draws = list[list[list[list[int]]]]  # by epoch, step and micro-batch: indices


@dataclass(frozen=True)
class SamplerSetup:
    """The settings of the sampler to audit.

    Attributes:
        kind: "poisson", "shuffled", "poisson_users" or "fixed_size_users".
        examples: size of the data set, or the number of users.
        sampling_rate: q; rounds of a fixed size have q times the number of users.
        batch_size: of shuffled batches.
        micro_batches: K, per worker and step; of examples, not of users.
        unit: "micro_batch" or "example", of Poisson sampling.
        seed: None for the operating system's entropy.

    Example:
        >>> SamplerSetup(kind="fixed_size_users", examples=50, sampling_rate=0.2).cohort
        10
    """

    kind: str = "poisson"
    examples: int = 400
    sampling_rate: float = 0.05
    batch_size: int = 8
    micro_batches: int = 1
    unit: str = "micro_batch"
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.examples < 2:
            raise ValueError(f"examples must be an int >= 2, got {self.examples!r}")

    @property
    def cohort(self) -> int:
        """Users in a round of a fixed size."""
        return max(1, round(self.examples * self.sampling_rate))

    @property
    def claim(self) -> str:
        """What the accounting counts on."""
        if self.kind == "shuffled":
            return "every example once in every epoch"
        if self.kind == "fixed_size_users":
            return f"{self.cohort} users in every round, all sets of so many alike probable"
        return f"each joins each step with probability {self.sampling_rate:g}, independently of all others"

    def make(self, collective: Collective) -> Batches:
        """The real sampler with these settings."""
        if self.kind == "poisson":
            return PoissonBatches(
                self.examples,
                self.sampling_rate,
                unit=self.unit,
                micro_batches=self.micro_batches,
                collective=collective,
                seed=self.seed,
            )
        if self.kind == "shuffled":
            return ShuffledBatches(
                self.examples,
                self.batch_size,
                micro_batches=self.micro_batches,
                collective=collective,
                seed=self.seed,
            )
        if self.kind == "poisson_users":
            return PoissonUsers(self.examples, self.sampling_rate, collective=collective, seed=self.seed)
        return FixedSizeUsers(self.examples, self.cohort, collective=collective, seed=self.seed)


def audit_sampler(
    setup: SamplerSetup,
    collective: Collective,
    *,
    epochs: int = 40,
    error_rate: float = 1e-3,
    make: Callable[[SamplerSetup, Collective], Batches] = SamplerSetup.make,
) -> NoiseFinding:
    """Draws many epochs and looks at them; all workers together, with the same finding on each.

    Args:
        setup: the settings to audit.
        collective: the workers.
        epochs: how many are drawn.
        error_rate: how often a sound sampler is refuted at most, all checks together.
        make: what makes the sampler.

    Example:
        >>> from edpsgd.distributed.collectives import Local
        >>> audit_sampler(SamplerSetup(examples=100, seed=1), Local(), epochs=4).is_refuted
        False
    """
    if epochs < 2 or not 0 < error_rate < 1:
        raise ValueError(f"epochs must be an int >= 2 and error_rate in (0, 1), got {epochs!r} and {error_rate!r}")
    own = _draw(make(setup, collective), epochs)
    draws = _joined(collective.gather(own))
    # The random numbers that smooth counts must be the same again with a seed, and have nothing to do with the draws.
    generator = np.random.default_rng(None if setup.seed is None else [setup.seed, 1])
    checks = _CHECKS[setup.kind](setup, draws, generator)
    finding: NoiseFinding = collective.gather(NoiseFinding(tuple(checks), error_rate))[0]
    return finding


def _draw(sampler: Batches, epochs: int) -> Draws:
    """What this worker draws; the batches of a step belong together."""
    found: Draws = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        each = sampler.micro_batches or 1
        found.append([batches[start : start + each] for start in range(0, len(batches), each)])
    return found


def _joined(workers: Sequence[Draws]) -> Draws:
    """The slots of all workers side by side, in each step."""
    if any([len(epoch) for epoch in own] != [len(epoch) for epoch in workers[0]] for own in workers):
        raise RuntimeError("the workers' samplers have epochs of different lengths")
    return [
        [[slot for own in workers for slot in own[epoch][step]] for step in range(len(steps))]
        for epoch, steps in enumerate(workers[0])
    ]


# -------------------------------------------------------------------- what every kind has


def _counts(setup: SamplerSetup, draws: Draws) -> Counts:
    """How often each example is in each step: (epochs, steps, examples)."""
    steps = max(len(epoch) for epoch in draws)
    found = np.zeros((len(draws), steps, setup.examples), dtype=np.int64)
    for number, epoch in enumerate(draws):
        for step, slots in enumerate(epoch):
            for slot in slots:
                inside = [index for index in slot if 0 <= index < setup.examples]
                np.add.at(found[number, step], inside, 1)
    return found


def _check_slots(setup: SamplerSetup, draws: Draws, counts: Counts) -> list[Check]:
    """One slot for each example of a step, and no example that does not exist. No chance: sound samplers never fail."""
    drawn = sum(len(slot) for epoch in draws for slots in epoch for slot in slots)
    foreign, twice = drawn - int(counts.sum()), int((counts > 1).sum())
    return [
        Check("every index is one of the data set's", f"{foreign} are not, of {drawn}", float(foreign == 0)),
        Check("one slot for each example of a step", f"{twice} examples in two, of {drawn}", float(twice == 0)),
    ]


def _normal(counts: Counts, law: object, generator: np.random.Generator) -> Floats:
    """Counts of this law as standard normal numbers: exactly, since the jumps of the law are filled at random."""
    below, until = law.cdf(counts - 1), law.cdf(counts)  # type: ignore[attr-defined]
    place = below + (until - below) * generator.random(counts.shape)
    return np.asarray(ndtri(np.clip(place, 1e-300, 1 - 1e-16)), dtype=np.float64)


def _check_mean(name: str, values: Floats, counts: Counts, expected: float) -> Check:
    """Two-sided test of the sum of values that should be standard normal."""
    score = abs(float(values.sum())) / math.sqrt(values.size)
    return Check(name, f"{counts.mean():.4f} on average, {expected:.4f} expected", 2.0 * float(norm.sf(score)))


def _check_rate(name: str, events: int, trials: int, rate: float) -> Check:
    p_value = float(binomtest(events, trials, rate).pvalue)
    return Check(name, f"{events / trials:.5f}, {rate:.5f} promised", p_value)


def _check_each(counts: Counts, steps: int, rate: float) -> Check:
    """The example that is drawn most surprisingly often or seldom, by a union bound over all."""
    tails = np.minimum(binom.cdf(counts, steps, rate), binom.sf(counts - 1, steps, rate))
    worst = int(np.argmin(tails))
    found = f"{counts[worst] / steps:.5f} is the farthest off"
    return Check("rate of every single one", found, min(1.0, 2.0 * float(tails[worst]) * len(counts)))


def _pairs(rows: Counts) -> Counts:
    """What disjoint pairs of neighbouring rows have in common."""
    last = len(rows) // 2 * 2
    return np.minimum(rows[0:last:2], rows[1:last:2])


# -------------------------------------------------------------------- the kinds


def _check_poisson(setup: SamplerSetup, draws: Draws, generator: np.random.Generator) -> list[Check]:
    """Every example joins every step with probability q, whatever else is drawn."""
    counts, q = _counts(setup, draws), setup.sampling_rate
    is_drawn = np.minimum(counts, 1).reshape(-1, setup.examples)
    steps = len(is_drawn)
    sizes = is_drawn.sum(axis=1)
    by_steps = _pairs(is_drawn).sum(axis=1)
    by_epochs = _pairs(np.minimum(counts, 1)).reshape(-1, setup.examples).sum(axis=1)
    by_neighbours = _pairs(is_drawn.T).sum(axis=0)
    both = binom(setup.examples, q**2)
    neighbours = binom(setup.examples // 2, q**2)
    checks = [
        *_check_slots(setup, draws, counts),
        _check_rate("rate", int(is_drawn.sum()), is_drawn.size, q),
        _check_each(is_drawn.sum(axis=0), steps, q),
        check_std("the sizes of steps", _normal(sizes, binom(setup.examples, q), generator)),
        check_std("how often each is drawn", _normal(is_drawn.sum(axis=0), binom(steps, q), generator)),
    ]
    for name, found, law in (
        ("in a step and the next", by_steps, both),
        ("in the same step of two epochs", by_epochs, both),
        ("an example and its neighbour in a step", by_neighbours, neighbours),
    ):
        if found.size:
            checks.append(_check_mean(name, _normal(found, law, generator), found, law.mean()))
    return checks


def _check_fixed_size(setup: SamplerSetup, draws: Draws, generator: np.random.Generator) -> list[Check]:
    """Every round has as many users, all sets of so many being alike probable, whatever other rounds have."""
    counts = _counts(setup, draws)
    is_drawn = np.minimum(counts, 1).reshape(-1, setup.examples)
    sizes, rate = is_drawn.sum(axis=1), setup.cohort / setup.examples
    wrong = int((sizes != setup.cohort).sum())
    common = hypergeom(setup.examples, setup.cohort, setup.cohort)
    by_steps = _pairs(is_drawn).sum(axis=1)
    by_epochs = _pairs(np.minimum(counts, 1)).reshape(-1, setup.examples).sum(axis=1)
    checks = [
        *_check_slots(setup, draws, counts),
        Check("size of rounds", f"{wrong} of {len(sizes)} do not have {setup.cohort} users", float(wrong == 0)),
        _check_each(is_drawn.sum(axis=0), len(is_drawn), rate),
    ]
    for name, found in (("in a round and the next", by_steps), ("in the same round of two epochs", by_epochs)):
        if found.size:
            checks.append(_check_mean(name, _normal(found, common, generator), found, common.mean()))
    return checks


def _check_shuffled(setup: SamplerSetup, draws: Draws, generator: np.random.Generator) -> list[Check]:
    """Every example once in every epoch, in an order that knows nothing of other epochs.

    One example of each epoch is looked at, another one each time: those of an epoch depend on each other.
    """
    counts = _counts(setup, draws)
    wrong = int((counts.sum(axis=1) != 1).sum())
    long = sum(len(slot) > setup.batch_size for epoch in draws for slots in epoch for slot in slots)
    epochs, steps = len(draws), counts.shape[1]
    place = counts.argmax(axis=1)  # the step of each example, by epoch
    chosen = np.arange(epochs) % setup.examples
    shares = np.bincount(place[0], minlength=steps) / setup.examples
    even = np.arange(0, epochs - 1, 2)
    together = int((place[even, chosen[even]] == place[even + 1, chosen[even]]).sum())
    early = int((place[np.arange(epochs), chosen] < steps // 2).sum())
    return [
        *_check_slots(setup, draws, counts),
        Check("every example once in every epoch", f"{wrong} are not, of {counts[:, 0].size}", float(wrong == 0)),
        Check("size of batches", f"{long} have more than {setup.batch_size}", float(long == 0)),
        _check_rate("in the first half of an epoch", early, epochs, float(shares[: steps // 2].sum())),
        _check_rate("in the same step of two epochs", together, len(even), float((shares**2).sum())),
    ]


_CHECKS = {
    "poisson": _check_poisson,
    "poisson_users": _check_poisson,
    "fixed_size_users": _check_fixed_size,
    "shuffled": _check_shuffled,
}
