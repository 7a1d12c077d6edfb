"""What a training that has not happened yet would cost: for the ``edpsgd`` command, and for more users."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edpsgd import accounting
from edpsgd.accounting import pld
from edpsgd.accounting.pld import Composition, Steps
from edpsgd.ledger.events import Event, LedgerError
from edpsgd.ledger.guarantee import Report, report
from edpsgd.ledger.ledger import Ledger
from edpsgd.ledger.records import RunRecord
from edpsgd.mechanism import sensitivity
from edpsgd.schedules import Decay

_CURVE_POINTS = 20


@dataclass(frozen=True)
class Training:
    """What a planned training looks like from outside.

    Attributes:
        delta: δ of the ε to plan for.
        examples: size of the data set.
        batch: examples in a step, over all workers; with Poisson sampling, the expected number.
        epochs: passes over the data.
        workers: N.
        micro_batches: K, per worker and step.
        sampling: "shuffled" or "poisson".
        unit: what is clipped, "micro_batch" or "example".
    """

    delta: float
    examples: int
    batch: int
    epochs: int
    workers: int
    micro_batches: int
    sampling: str
    unit: str

    @property
    def steps(self) -> int:
        """Steps of an epoch; the last one may be smaller."""
        return math.ceil(self.examples / self.batch)

    @property
    def rate(self) -> float:
        """The share of the examples that a step uses; with Poisson sampling, the probability of each."""
        return self.batch / self.examples

    def noise_std(self, z: float) -> float:
        """Std of the noise on each coordinate of the mean gradient, at clip norm 1.

        It is sensitivity times z over the divisor (privacy.md sections 2 and 3).
        """
        given = self.batch if self.unit == "example" else None
        divisor = sensitivity.public_divisor(given, self.workers, self.micro_batches)
        return sensitivity.noise_on_mean(sensitivity.sum_sensitivity(self.unit, 1.0), z, divisor)

    def schedule(self, name: str, z0: float, decay: Decay | None) -> Schedule:
        """Noise that begins with z0, and its ε by every method."""
        z = [z0 * factor for factor in accounting.decay_factors(self.epochs, decay)]
        rate = self.rate if self.sampling == "poisson" else None
        events = [Event("gradients", t, value, self.steps, self.sampling, rate) for t, value in enumerate(z)]
        return Schedule(name, z, report(events, self.delta, [RunRecord(unit=self.unit)]))

    def cumulative(self, z: Sequence[float]) -> tuple[list[int], list[float]]:
        """ε after some of the epochs, for a curve: with Poisson sampling not to the last digit.

        Args:
            z: noise multipliers by epoch.

        Returns:
            Numbers of epochs, at most twenty, and ε after so many.
        """
        ends = sorted({math.ceil(self.epochs * i / _CURVE_POINTS) for i in range(1, _CURVE_POINTS + 1)})
        if self.sampling == "shuffled":
            return ends, [accounting.gaussian_epsilon(z[:end], self.delta) for end in ends]
        rough = Composition(100 * pld.TOLERANCE)
        steps = [Steps(value, self.rate, self.steps) for value in z]
        return ends, [accounting.compose(steps[:end], self.delta, rough) for end in ends]

    def data(self) -> dict[str, Any]:
        """The training as JSON-ready data."""
        return {**vars(self), "steps_per_epoch": self.steps, "sampling_rate": self.rate}

    def lines(self) -> list[str]:
        """The training in a few lines, to print."""
        word = "sampling rate" if self.sampling == "poisson" else "share of the examples in a step"
        size = f"{self.examples} examples, {self.batch} in a step, {self.workers} workers, {self.micro_batches} "
        return [
            f"  training        {size}micro-batches per worker, unit {self.unit}",
            f"  sampling        {self.sampling}, {word} {self.rate:.6g}",
            f"  steps           {self.steps} per epoch, {self.epochs} epochs",
        ]


@dataclass(frozen=True)
class Schedule:
    """Noise multipliers by epoch, and what they amount to.

    Attributes:
        name: of the decay.
        z: noise multipliers by epoch.
        report: ε of the whole training by every method.
    """

    name: str
    z: list[float]
    report: Report

    @property
    def mean(self) -> float:
        """The mean of the multipliers over the epochs."""
        return math.fsum(self.z) / len(self.z)

    def data(self, training: Training) -> dict[str, Any]:
        """The schedule as JSON-ready data, with its noise in this training."""
        bounds = []
        for bound in self.report.bounds:
            bounds.append({"epsilon": bound.epsilon, "method": bound.method, "neighbours": bound.neighbours})
        return {
            **({"decay": self.name} if self.name else {}),
            "z0": self.z[0],
            "last": self.z[-1],
            "mean": self.mean,
            "noise_std_first": training.noise_std(self.z[0]),
            "noise_std_last": training.noise_std(self.z[-1]),
            "noise_multipliers": self.z,
            "bounds": bounds,
        }


def as_if(ledger: Ledger, delta: float, users: int, cohort: float) -> float:
    """The ε that the same rounds would have with more users and larger rounds, and the same noise on the mean update.

    McMahan et al. 2018, section 3: a model that is trained with a small cohort tells the utility of the large run,
    since the noise on the mean is the same; there the multiplier is larger by the ratio of the cohorts. It is for
    planning, and no statement about the run at hand.

    Args:
        ledger: of a run with PoissonUsers.
        delta: of the larger run.
        users: how many there would be.
        cohort: expected users in its rounds.

    Example:
        >>> ledger = Ledger()
        >>> ledger.begin_run({"unit": "user", "batches": {"examples": 1000, "kind": "poisson"}})
        >>> ledger.open_epoch(0, "poisson", sampling_rate=0.01)
        >>> ledger.charge(0.1)
        >>> as_if(ledger, 1e-6, users=100_000, cohort=100) < 5 < float(ledger.epsilon(1e-6))
        True
    """
    if not 0 < cohort <= users:
        raise ValueError(f"cohort must be > 0 and at most the number of users, {users}, got {cohort!r}")
    rounds = [_larger_round(event, ledger, users, cohort) for event in _rounds_of(ledger)]
    return accounting.compose(rounds, delta)


def _rounds_of(ledger: Ledger) -> list[Event]:
    """The events of a ledger, if all of them are rounds with the same number of users, drawn by Poisson sampling."""
    events = [event for event in ledger.events if event.steps]
    if not ledger.runs or any(event.batching != "poisson" for event in events):
        raise LedgerError("as_if is for runs with PoissonUsers")
    if any(run.selection is not None for run in ledger.runs):
        raise LedgerError("as_if is for trainings that were not chosen among others")
    if len({_users_of(run) for run in ledger.runs}) > 1:
        raise LedgerError("as_if is for ledgers whose runs have the same number of users")
    return events


def _larger_round(event: Event, ledger: Ledger, users: int, cohort: float) -> Steps:
    """The rounds of an event, with more users and noise that is larger by the ratio of the cohorts."""
    cohort_before = (event.sampling_rate or 0.0) * _users_of(ledger.runs[-1])
    noise_multiplier = (event.noise_multiplier or 0.0) * cohort / cohort_before
    return Steps(noise_multiplier, cohort / users, event.steps)


def _users_of(run: RunRecord) -> int:
    if run.batches is None or run.batches.examples is None:
        raise LedgerError("as_if is for runs with PoissonUsers")
    return run.batches.examples
