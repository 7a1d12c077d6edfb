"""What the events of a ledger amount to: ε with the conditions under which it holds (privacy.md section 7)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_UP, Decimal

from edpsgd import accounting
from edpsgd.accounting.pld import Composition, Steps
from edpsgd.ledger.conditions import (
    conditions_of,
    has_single_examples,
    is_raw_scales,
)
from edpsgd.ledger.events import Event, LedgerError, family
from edpsgd.ledger.records import BatchesRecord, RunRecord


@dataclass(frozen=True)
class Bound:
    """A privacy statement; as a number, its ε.

    Attributes:
        epsilon: the bound on the privacy loss, at ``delta``.
        delta: the probability with which it may not hold.
        method: how it was computed.
        neighbours: what may differ between two data sets that cannot be told apart.
        conditions: what it depends on that nobody has checked. Printing shows them.

    Example:
        >>> print(Bound(2.0, 1e-5, "exact Gaussian", "replace or blank one example"))
        ε = 2.000 at δ = 1e-05 (exact Gaussian; replace or blank one example)
    """

    epsilon: float
    delta: float
    method: str
    neighbours: str
    conditions: tuple[str, ...] = ()

    def __float__(self) -> float:
        return self.epsilon

    def __str__(self) -> str:
        statement = f"ε = {format_epsilon(self.epsilon)} at δ = {self.delta:g} ({self.method}; {self.neighbours})"
        return "\n".join([statement, *(f"  on condition: {condition}" for condition in self.conditions)])


@dataclass(frozen=True)
class Report:
    """All bounds side by side, the one to publish first."""

    bounds: tuple[Bound, ...]

    def __str__(self) -> str:
        rows = [(format_epsilon(b.epsilon), b.method, b.neighbours) for b in self.bounds]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"ε at δ = {self.bounds[0].delta:g}"]
        lines += [f"  {e:>{widths[0]}}  {method:<{widths[1]}}  {neighbours}" for e, method, neighbours in rows]
        return "\n".join([*lines, *(f"on condition: {condition}" for condition in self.bounds[0].conditions)])


def format_epsilon(epsilon: float) -> str:
    """Four digits, rounded up: a printed ε is not below the computed one."""
    if not 0 < epsilon < math.inf:
        return f"{epsilon:g}"
    exact = Decimal(epsilon)
    rounded = exact.quantize(Decimal((0, (1,), exact.adjusted() - 3)), rounding=ROUND_UP)
    return f"{rounded:f}" if 1e-3 <= epsilon < 1e6 else f"{rounded:.4g}"


def bound(
    events: Sequence[Event],
    delta: float,
    runs: Sequence[RunRecord] = (),
    composition: Composition | None = None,
) -> Bound:
    """The tightest sound statement about the events.

    Args:
        events: of a ledger.
        delta: the δ to find ε for.
        runs: the records of the runs that wrote the events.
        composition: what an earlier call with the first of these events has computed, to be faster.
    """
    charged, unit = _charged(events), unit_of(runs)
    batching, conditions = _batching(charged), conditions_of(events, runs)
    if batching == "poisson":
        epsilon = accounting.compose(_steps(charged), delta, composition)
        return Bound(epsilon, delta, "PLD, Poisson sampling", _sampled_neighbours(runs), conditions)
    if batching == "fixed_size":
        epsilon = accounting.fixed_size_epsilon(_steps(charged), delta)
        return Bound(epsilon, delta, "RDP, rounds of a fixed size", f"replace one {unit}", conditions)
    epsilon = accounting.gaussian_epsilon(_passes(charged), delta)
    return Bound(epsilon, delta, "exact Gaussian", _neighbours(runs), conditions)


def report(
    events: Sequence[Event],
    delta: float,
    runs: Sequence[RunRecord] = (),
    composition: Composition | None = None,
) -> Report:
    """All methods side by side, and what it would be if every example were in every step."""
    charged, first = _charged(events), bound(events, delta, runs, composition)
    worst = accounting.gaussian_epsilon(_every_step(charged), delta)
    others = conditions_of([replace(event, epoch=None) for event in events], runs)
    last = Bound(worst, delta, f"exact Gaussian, every {unit_of(runs)} in every step", first.neighbours, others)
    batching = _batching(charged)
    if batching == "shuffled":
        return Report((first, *_of_passes(charged, delta, first, runs), last))
    if batching == "fixed_size":
        return Report((first, last))
    bounds = [replace(first, epsilon=accounting.rdp_epsilon(_steps(charged), delta), method="RDP, Poisson sampling")]
    if unit_of(runs) == "user":
        moments = accounting.moments_of(_steps(charged), delta)
        bounds.append(replace(first, epsilon=moments, method="moments accountant, as in McMahan et al. 2018"))
    return Report((first, *bounds, last))


def _of_passes(charged: Sequence[Event], delta: float, first: Bound, runs: Sequence[RunRecord]) -> Iterator[Bound]:
    """What else is to be said of passes in which every example is in one step."""
    passes = _passes(charged)
    zcdp = accounting.zcdp_epsilon(accounting.zcdp_rho(passes), delta)
    yield Bound(zcdp, delta, "zCDP, as in the paper", first.neighbours, first.conditions)
    if has_single_examples(runs):
        replaced = accounting.gaussian_epsilon([z / 2 for z in passes], delta)
        yield Bound(replaced, delta, "exact Gaussian", "replace one example", first.conditions)


def _charged(events: Sequence[Event]) -> list[Event]:
    """What costs something; raw scales are a condition instead. Steps whose noise nobody wrote down had none."""
    return [e for e in events if e.steps and not is_raw_scales(e)]


def unit_of(runs: Sequence[RunRecord]) -> str:
    """Whom the statement is about: a user with all their examples, or an example."""
    users = {run.unit == "user" for run in runs}
    if len(users) > 1:
        raise LedgerError("steps on users and steps on examples in one ledger cannot be accounted together")
    return "user" if True in users else "example"


def _batching(charged: Sequence[Event]) -> str:
    families = {family(e.batching) for e in charged if e.kind == "gradients"} or {"shuffled"}
    unknown = families - {"shuffled", "poisson", "fixed_size"}
    if unknown:
        raise LedgerError(f"the ledger holds batching that cannot be accounted for: {', '.join(sorted(unknown))}")
    if len(families) > 1:
        raise LedgerError(
            "Poisson and other batches in one ledger speak of different neighbours and cannot be accounted together"
        )
    return families.pop()


def _passes(charged: Sequence[Event]) -> list[float]:
    """One multiplier for each pass; if set_epoch was never called, each step is a pass."""
    passes = [1 if e.kind == "layer_norms" or e.epoch is not None else e.steps for e in charged]
    return [_noise(e) / math.sqrt(n) for e, n in zip(charged, passes, strict=True)]


def _every_step(charged: Sequence[Event]) -> list[float]:
    return [_noise(e) / math.sqrt(e.steps) for e in charged]


def _steps(charged: Sequence[Event]) -> list[Steps]:
    """Sampled steps; measured scales are charged without amplification."""
    return [
        Steps(_noise(e), e.sampling_rate if e.kind == "gradients" and e.sampling_rate else 1.0, e.steps)
        for e in charged
    ]


def _noise(event: Event) -> float:
    return event.noise_multiplier or 0.0


def _neighbours(runs: Sequence[RunRecord]) -> str:
    return "blank one example" if has_single_examples(runs) else "replace or blank one example"


def _sampled_neighbours(runs: Sequence[RunRecord]) -> str:
    """Where the micro-batch of an example followed from its index, removing one moved all later ones to others."""
    unit = unit_of(runs)
    for run in runs:
        batches = run.batches or BatchesRecord()
        is_split = run.has_several_workers or (batches.micro_batches or 1) > 1
        if run.unit == "micro_batch" and is_split and batches.slots != "drawn":
            return f"blank one {unit}, its index stays"
    return f"add or remove one {unit}"
