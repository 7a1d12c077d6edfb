"""What the events of a ledger amount to: ε with the conditions under which it holds (privacy.md section 7)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_UP, Decimal
from typing import Any

from edpsgd import accounting
from edpsgd.events import Event, LedgerError, family
from edpsgd.pld import Composition, Steps

_NOTHING = "no step is recorded: it says nothing of a training that took its steps elsewhere"
_RAW_SCALES = "the layer scales are raw first-step norms: a release of private data that no noise covers, and not in ε"
_SEEDED = (
    "the noise comes from a given seed: it holds only while the seed is secret, and is used for no other run and for "
    "no step that was run again"
)
_ONE_PASS = (
    "examples were clipped in one backward pass, which is compared with autograd on some batches only: it holds if the "
    "others were right too, and no loss depends on other examples"
)
_VERIFIED = (
    "examples were clipped in one backward pass, and every batch was compared with autograd: it holds if no error is "
    "hidden by the rounding of both, and no loss depends on other examples"
)
_SHARED_ROWS = (
    "gradients of several examples reach the same rows of some layers, and check_losses was not run: it holds if those "
    "rows do not depend on the data"
)
_WRONG = "gradients of single examples were found to be wrong: it does not hold for the steps before"
_ORDER = "micro-batches came together: it holds if the losses are in the order in which the sampler drew their examples"
_SCALED = (
    "a GradScaler follows the micro-batches that were discarded, which no noise covers: it holds if none was "
    "discarded, or if the scale does not change"
)
_ROUNDED = (
    "messages are rounded on the wire before they are summed: it holds as far as the noise of a single worker is much "
    "larger than that"
)
_SEEDED_SAMPLING = (
    "the batches come from a given seed: it holds only while the seed is secret, and is used for no other run and for "
    "no step that was run again"
)
_ORDER_OF_WORKERS = (
    "the sampler could not compare the data of the workers: it holds if all of them have the same ones in the same "
    "order. Give it the data set instead of a number"
)
_FOLLOWED = (
    "clip_norm was changed after clip_fraction was read, which no noise covers: it holds if the change does not follow "
    "from what was read"
)


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
    runs: Sequence[Mapping[str, Any]] = (),
    composition: Composition | None = None,
) -> Bound:
    """The tightest sound statement about the events.

    Args:
        events: of a ledger.
        delta: the δ to find ε for.
        runs: the settings of the runs that wrote the events.
        composition: what an earlier call with the first of these events has computed, to be faster.
    """
    charged, unit = _charged(events), unit_of(runs)
    batching, conditions = _batching(charged), _conditions(events, runs)
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
    runs: Sequence[Mapping[str, Any]] = (),
    composition: Composition | None = None,
) -> Report:
    """All methods side by side, and what it would be if every example were in every step."""
    charged, first = _charged(events), bound(events, delta, runs, composition)
    worst = accounting.gaussian_epsilon(_every_step(charged), delta)
    others = _conditions([replace(event, epoch=None) for event in events], runs)
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


def _of_passes(
    charged: Sequence[Event], delta: float, first: Bound, runs: Sequence[Mapping[str, Any]]
) -> Iterator[Bound]:
    """What else is to be said of passes in which every example is in one step."""
    passes = _passes(charged)
    zcdp = accounting.zcdp_epsilon(accounting.zcdp_rho(passes), delta)
    yield Bound(zcdp, delta, "zCDP, as in the paper", first.neighbours, first.conditions)
    if _has_single_examples(runs):
        replaced = accounting.gaussian_epsilon([z / 2 for z in passes], delta)
        yield Bound(replaced, delta, "exact Gaussian", "replace one example", first.conditions)


def _charged(events: Sequence[Event]) -> list[Event]:
    """What costs something; raw scales are a condition instead. Steps whose noise nobody wrote down had none."""
    return [e for e in events if e.steps and not _is_raw(e)]


def _is_raw(event: Event) -> bool:
    return event.kind == "layer_norms" and event.noise_multiplier == 0


def unit_of(runs: Sequence[Mapping[str, Any]]) -> str:
    """Whom the statement is about: a user with all their examples, or an example."""
    users = {run.get("unit") == "user" for run in runs}
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


def _has_single_examples(runs: Sequence[Mapping[str, Any]]) -> bool:
    return any(run.get("unit") == "example" for run in runs)


def _neighbours(runs: Sequence[Mapping[str, Any]]) -> str:
    return "blank one example" if _has_single_examples(runs) else "replace or blank one example"


def _sampled_neighbours(runs: Sequence[Mapping[str, Any]]) -> str:
    """Where the micro-batch of an example followed from its index, removing one moved all later ones to others."""
    unit = unit_of(runs)
    for run in runs:
        batches = run.get("batches") or {}
        is_split = run.get("workers", 1) * (batches.get("micro_batches") or 1) > 1
        if run.get("unit") == "micro_batch" and is_split and batches.get("slots") != "drawn":
            return f"blank one {unit}, its index stays"
    return f"add or remove one {unit}"


def _is_clip_norm_followed(runs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the clip norm changed after the share of clipped units was read."""
    was_read, before = False, None
    for number, run in enumerate(runs):
        following = runs[number + 1] if number + 1 < len(runs) else {}
        is_unused = following.get("clip_norm_restored") and not run.get("clip_norm_restored")
        if is_unused:  # a checkpoint with another clip norm was loaded before the first step
            continue
        clip_norm = run.get("clip_norm")
        if was_read and clip_norm != before:
            return True
        was_read, before = was_read or bool(run.get("clip_fraction_read")), clip_norm
    return False


def _is_order_unknown(run: Mapping[str, Any]) -> bool:
    """Whether a sampler shared examples out to several workers that may have them in different orders."""
    batches = run.get("batches")
    return batches is not None and run.get("workers", 1) > 1 and not batches.get("order_compared")


def _conditions(events: Sequence[Event], runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    unvouched = [e for e in events if e.batching == "unvouched" and e.kind == "gradients" and e.steps]
    conditions = {
        _NOTHING: not any(e.steps for e in events),
        _RAW_SCALES: any(_is_raw(e) for e in events),
        _word(any(e.epoch is not None for e in unvouched), runs): bool(unvouched),
        _WRONG: any(run.get("wrong_gradients") for run in runs),
        _ONE_PASS: any(run.get("one_pass") and run.get("verify") != "always" for run in runs),
        _VERIFIED: any(run.get("one_pass") and run.get("verify") == "always" for run in runs),
        _SHARED_ROWS: any(run.get("shared_rows") for run in runs),
        _ORDER: any(run.get("one_pass") and (run.get("batches") or {}).get("together") for run in runs),
        _ORDER_OF_WORKERS: any(_is_order_unknown(run) for run in runs),
        _FOLLOWED: _is_clip_norm_followed(runs),
        _SCALED: any(run.get("loss_scaling") for run in runs),
        _ROUNDED: any(run.get("compression") for run in runs),
        _SEEDED: any(run.get("seeded") for run in runs),
        _SEEDED_SAMPLING: any(
            (run.get("batches") or {}).get("seeded") and run["batches"]["kind"] != "shuffled" for run in runs
        ),
    }
    return tuple(text for text, applies in conditions.items() if applies)


def _word(has_epochs: bool, runs: Sequence[Mapping[str, Any]]) -> str:
    """What nobody but the user knows of batches that no sampler made; without epochs every step is a pass."""
    alone = "every micro-batch held one example, " if _has_single_examples(runs) else ""
    where = "an epoch, of one step or of several," if has_epochs else "a step"
    numbers = "the number of steps does not"
    if any(run.get("unit") == "micro_batch" for run in runs):  # then it is the divisor too, and sets the noise
        numbers = (
            "neither the number of steps nor that of micro-batches in a step (which backward() takes from `units`, "
            "if not from `count`) does"
        )
    return (
        f"no sampler vouches for the batches: it holds if {alone}no example was in two micro-batches of {where} and "
        f"{numbers} depend on the data"
    )
