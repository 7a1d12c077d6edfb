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
from edpsgd.ledger.selection import Selection, epsilon_of_best, in_words


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
        epsilon_width = max(len(epsilon) for epsilon, _, _ in rows)
        method_width = max(len(method) for _, method, _ in rows)
        lines = [f"ε at δ = {self.bounds[0].delta:g}"]
        for epsilon, method, neighbours in rows:
            lines.append(f"  {epsilon:>{epsilon_width}}  {method:<{method_width}}  {neighbours}")
        for condition in self.bounds[0].conditions:
            lines.append(f"on condition: {condition}")
        return "\n".join(lines)


def format_epsilon(epsilon: float) -> str:
    """ε as text with four digits, rounded up: a printed ε is not below the computed one."""
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
    charged = _charged(events)
    unit = unit_of(runs)
    batching = _batching(charged)
    conditions = conditions_of(events, runs)
    selection = selection_of(runs)
    if selection is not None:
        return _bound_of_best(selection, charged, delta, runs, conditions)
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
    """The bounds by all methods, and what ε would be if every example were in every step; arguments as in ``bound``."""
    charged = _charged(events)
    first = bound(events, delta, runs, composition)
    batching = _batching(charged)
    others: list[Bound] = []
    selection = selection_of(runs)
    if selection is not None:
        others.extend(_further_bounds_of_best(selection, charged, delta, first, runs))
    elif batching == "shuffled":
        others.extend(_further_bounds_of_passes(charged, delta, first, runs))
    elif batching == "poisson":
        others.extend(_further_bounds_of_samples(charged, delta, first, runs))
    return Report((first, *others, _worst_case(events, delta, runs, first.neighbours)))


def _worst_case(events: Sequence[Event], delta: float, runs: Sequence[RunRecord], neighbours: str) -> Bound:
    """What holds if every example was in every step, whatever the batches were."""
    conditions = conditions_of([replace(event, epoch=None) for event in events], runs)
    multipliers, selection = _every_step(_charged(events)), selection_of(runs)
    method = f"every {unit_of(runs)} in every step"
    if selection is not None:
        epsilon = epsilon_of_best(selection, _unsampled(multipliers), delta, every_step=True)
        return Bound(epsilon, delta, f"RDP, {in_words(selection)}, {method}", neighbours, conditions)
    epsilon = accounting.gaussian_epsilon(multipliers, delta)
    return Bound(epsilon, delta, f"exact Gaussian, {method}", neighbours, conditions)


def _bound_of_best(
    selection: Selection, charged: Sequence[Event], delta: float, runs: Sequence[RunRecord], conditions: tuple[str, ...]
) -> Bound:
    """The statement about the best of a random number of trainings, of which these are the events of one."""
    batching = _batching(charged)
    if batching == "shuffled":
        releases, drawn, neighbours = _unsampled(_passes(charged)), "", _neighbours(runs)
    elif batching == "poisson":
        releases, drawn, neighbours = _steps(charged), "Poisson sampling, ", _sampled_neighbours(runs)
    else:
        releases, drawn, neighbours = _steps(charged), "rounds of a fixed size, ", f"replace one {unit_of(runs)}"
    epsilon = epsilon_of_best(selection, releases, delta, fixed_size=batching == "fixed_size")
    return Bound(epsilon, delta, f"RDP, {drawn}{in_words(selection)}", neighbours, conditions)


def _further_bounds_of_best(
    selection: Selection, charged: Sequence[Event], delta: float, first: Bound, runs: Sequence[RunRecord]
) -> Iterator[Bound]:
    """What else is to be said of the best of a random number of trainings."""
    if _batching(charged) == "shuffled" and has_single_examples(runs):
        epsilon = epsilon_of_best(selection, _unsampled(_passes(charged)), delta, distance=2.0)
        yield replace(first, epsilon=epsilon, neighbours="replace one example")


def selection_of(runs: Sequence[RunRecord]) -> Selection | None:
    """How the training was chosen among others; None if it was not.

    Raises:
        LedgerError: if some runs say otherwise than others: two tunings have two ledgers.
    """
    found = [run.selection for run in runs if run.selection is not None]
    if any(selection != found[0] for selection in found):
        raise LedgerError("trainings of two tunings in one ledger cannot be accounted together")
    return found[0] if found else None


def _unsampled(noise_multipliers: Sequence[float]) -> list[Steps]:
    """Releases of every example, one with each multiplier."""
    return [Steps(z, 1.0, 1) for z in noise_multipliers]


def _further_bounds_of_samples(
    charged: Sequence[Event], delta: float, first: Bound, runs: Sequence[RunRecord]
) -> Iterator[Bound]:
    """The other accountants of Poisson-sampled steps, beside the PLD."""
    steps = _steps(charged)
    yield replace(first, epsilon=accounting.rdp_epsilon(steps, delta), method="RDP, Poisson sampling")
    if unit_of(runs) == "user":
        moments = accounting.moments_of(steps, delta)
        yield replace(first, epsilon=moments, method="moments accountant, as in McMahan et al. 2018")


def _further_bounds_of_passes(
    charged: Sequence[Event], delta: float, first: Bound, runs: Sequence[RunRecord]
) -> Iterator[Bound]:
    """What else is to be said of passes in which every example is in one step."""
    passes = _passes(charged)
    zcdp = accounting.zcdp_epsilon(accounting.zcdp_rho(passes), delta)
    yield Bound(zcdp, delta, "zCDP, as in the paper", first.neighbours, first.conditions)
    if has_single_examples(runs):
        replaced = accounting.gaussian_epsilon([z / 2 for z in passes], delta)
        yield Bound(replaced, delta, "exact Gaussian", "replace one example", first.conditions)


def _charged(events: Sequence[Event]) -> list[Event]:
    """The events that cost something; raw scales are a condition instead."""
    return [event for event in events if event.steps and not is_raw_scales(event)]


def unit_of(runs: Sequence[RunRecord]) -> str:
    """Whom the statement is about: "user", with all their examples, or "example".

    Raises:
        LedgerError: if some runs had users and others examples.
    """
    users = {run.unit == "user" for run in runs}
    if len(users) > 1:
        raise LedgerError("steps on users and steps on examples in one ledger cannot be accounted together")
    return "user" if True in users else "example"


def _batching(charged: Sequence[Event]) -> str:
    """The one kind of batching that all steps have: "shuffled", "poisson" or "fixed_size"."""
    families = {family(event.batching) for event in charged if event.kind == "gradients"}
    if not families:
        return "shuffled"
    unknown = families - {"shuffled", "poisson", "fixed_size"}
    if unknown:
        raise LedgerError(f"the ledger holds batching that cannot be accounted for: {', '.join(sorted(unknown))}")
    if len(families) > 1:
        raise LedgerError(
            "Poisson and other batches in one ledger speak of different neighbours and cannot be accounted together"
        )
    return families.pop()


def _passes(charged: Sequence[Event]) -> list[float]:
    """The noise multiplier of each event as one release: n passes with z are one with z/√n (privacy.md section 7).

    If set_epoch was never called, each step is a pass.
    """
    multipliers = []
    for event in charged:
        is_one_pass = event.kind == "layer_norms" or event.epoch is not None
        passes = 1 if is_one_pass else event.steps
        multipliers.append(_noise(event) / math.sqrt(passes))
    return multipliers


def _every_step(charged: Sequence[Event]) -> list[float]:
    """The noise multiplier of each event as one release, if each of its steps is a pass of its own."""
    return [_noise(event) / math.sqrt(event.steps) for event in charged]


def _steps(charged: Sequence[Event]) -> list[Steps]:
    """The sampled steps of each event; measured scales are charged without amplification (privacy.md section 5)."""
    steps = []
    for event in charged:
        rate = 1.0
        if event.kind == "gradients" and event.sampling_rate:
            rate = event.sampling_rate
        steps.append(Steps(_noise(event), rate, event.steps))
    return steps


def _noise(event: Event) -> float:
    """The event's noise multiplier; steps whose noise nobody wrote down had none."""
    return event.noise_multiplier or 0.0


def _neighbours(runs: Sequence[RunRecord]) -> str:
    return "blank one example" if has_single_examples(runs) else "replace or blank one example"


def _sampled_neighbours(runs: Sequence[RunRecord]) -> str:
    """The neighbours of Poisson-sampled steps.

    Where the micro-batch of an example followed from its index, removing one put all later ones into others.
    """
    unit = unit_of(runs)
    for run in runs:
        batches = run.batches or BatchesRecord()
        is_split = run.has_several_workers or (batches.micro_batches or 1) > 1
        if run.unit == "micro_batch" and is_split and batches.slots != "drawn":
            return f"blank one {unit}, its index stays"
    return f"add or remove one {unit}"
