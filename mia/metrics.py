"""How well an attack tells members from others: ROC, AUC, balanced accuracy, and true positives at few false ones.

Intervals cover the figure in the population that members and non-members are drawn from, at least as often as they say
and for any law of the scores: all of them are made of Clopper and Pearson's exact interval of a proportion, and what
was chosen by looking at scores is paid for. They are for given attack scores: they do not cover what another target
model or other shadow models would change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import beta, binom
from sklearn.metrics import auc, roc_curve

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

FEW, FEWER = 0.01, 0.001  # the false positive rates at which true positives are reported
_FEW_SCORES = 10  # to judge a threshold by; from here on sums of squares cover 95 %, by all outcomes of two binomials


class Estimate(NamedTuple):
    """A figure and its interval.

    Attributes:
        value: on the data as given.
        low: lower end of the interval.
        high: upper end of the interval.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f}, {self.high:.4f})"


@dataclass(frozen=True)
class Report:
    """What `evaluate` found.

    Attributes:
        auc: area under the ROC curve; ties count half.
        balanced_accuracy: mean of true positive and true negative rate at a threshold that is the best one on half of
            the scores; value and interval are from the other half. The lower end holds for the best threshold too.
        tpr_at_1_percent: the largest true positive rate with a false positive rate of at most 1 %, not interpolated.
            The interval is that of the population's rate: its lower end is 0 where the non-members are too few to be
            sure of any threshold (below 437).
        tpr_at_1_permille: the same for 0.1 % (4380).
        members: how many candidates were members.
        non_members: how many were not.
        confidence: of the intervals.
        fpr: false positive rates of the ROC curve, from 0 to 1, a point for each distinct score.
        tpr: true positive rates.
        thresholds: candidates with at least this score are called members; the first is infinite.
    """

    auc: Estimate
    balanced_accuracy: Estimate
    tpr_at_1_percent: Estimate
    tpr_at_1_permille: Estimate
    members: int
    non_members: int
    confidence: float
    fpr: Array = field(repr=False, compare=False)
    tpr: Array = field(repr=False, compare=False)
    thresholds: Array = field(repr=False, compare=False)

    @property
    def resolution(self) -> float:
        """The smallest false positive rate above 0 that so many non-members can show.

        Where it is above 1 % or 0.1 %, the true positive rate there is that without any false positive.
        """
        return 1 / self.non_members

    def to_json(self, curve: bool = False) -> dict[str, Any]:
        """Plain data for JSON, with fpr and tpr if the curve is wanted."""
        plain: dict[str, Any] = {
            "members": self.members,
            "non_members": self.non_members,
            "fpr_resolution": self.resolution,
            "confidence": self.confidence,
        }
        plain |= {name: getattr(self, name)._asdict() for name in _FIGURES}
        return {**plain, "fpr": self.fpr.tolist(), "tpr": self.tpr.tolist()} if curve else plain


_FIGURES = {
    "auc": "AUC",
    "balanced_accuracy": "balanced accuracy",
    "tpr_at_1_percent": "TPR at 1 % FPR",
    "tpr_at_1_permille": "TPR at 0.1 % FPR",
}


def evaluate(scores: npt.ArrayLike, members: npt.ArrayLike, confidence: float = 0.95, seed: int = 0) -> Report:
    """Figures of an attack, with intervals.

    Args:
        scores: (n,) higher = more likely a member.
        members: (n,) bool, at least two of each kind.
        confidence: of each interval, between 0 and 1.
        seed: of the halves, one to choose a threshold and one to judge it.

    Returns:
        The figures, the same for the same arguments.

    Raises:
        ValueError: on bad shapes, NaN or infinite scores, or if there are too few members or non-members.

    Example:
        >>> report = evaluate([0.9, 0.8, 0.4, 0.3], [True, False, True, False])
        >>> report.auc.value, report.tpr_at_1_percent.value, report.resolution
        (0.75, 0.5, 0.5)
    """
    values, truth = _check(scores, members)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
    fpr, tpr, thresholds = roc_curve(truth, values, drop_intermediate=False)
    inside, outside = values[truth], values[~truth]
    return Report(
        auc=auc_estimate(float(auc(fpr, tpr)), len(inside), len(outside), confidence),
        balanced_accuracy=_balanced_accuracy(values, truth, confidence, seed),
        tpr_at_1_percent=_true_positives(inside, outside, float(tpr[fpr <= FEW].max()), FEW, confidence),
        tpr_at_1_permille=_true_positives(inside, outside, float(tpr[fpr <= FEWER].max()), FEWER, confidence),
        members=len(inside),
        non_members=len(outside),
        confidence=confidence,
        fpr=fpr,
        tpr=tpr,
        thresholds=thresholds,
    )


# -------------------------------------------------------------------- intervals


def proportion_interval(share: float, trials: int, error: float) -> tuple[float, float]:
    """Clopper and Pearson's ends; each of them fails with probability ``error`` at most.

    Example:
        >>> low, high = proportion_interval(0.0, 100, 0.05)
        >>> low, round(high, 6)  # 1 − 0.05^(1/100)
        (0.0, 0.029513)
    """
    successes = share * trials
    low = 0.0 if share <= 0 else float(beta.ppf(error, successes, trials - successes + 1))
    high = 1.0 if share >= 1 else float(beta.ppf(1 - error, successes + 1, trials - successes))
    return low, high


def auc_estimate(value: float, members: int, non_members: int, confidence: float = 0.95) -> Estimate:
    """The interval of an AUC, for any law of the scores.

    Over all laws, the variance of an AUC θ is at most θ(1 − θ)/min(members, non_members) (Birnbaum and Klose 1957):
    that of as many pairs of a member and a non-member, each of which is in the right order or not. So the interval is
    that of a proportion of so many. For scores without heavy ties and as many members as others it is a fifth or
    more wider than need be, and it is never without width.

    Args:
        value: the AUC that was found.
        members: how many there were.
        non_members: how many there were.
        confidence: of the interval.

    Example:
        >>> print(auc_estimate(0.75, 100, 100))
        0.7500 (0.6534, 0.8312)
    """
    return Estimate(value, *proportion_interval(value, min(members, non_members), (1 - confidence) / 2))


def _balanced_accuracy(values: Array, truth: Flags, confidence: float, seed: int) -> Estimate:
    """At the best threshold of one half of the scores, judged by the other half.

    The ends of the two rates are combined as Zou and Donner 2008 do: distances from the values add up by squares. That
    misses up to 9 % where there are a few scores only; there a union bound holds, and the distances just add up.
    """
    is_choosing = _half(truth, seed)
    fpr, tpr, thresholds = roc_curve(truth[is_choosing], values[is_choosing], drop_intermediate=False)
    best = int(np.argmax(tpr - fpr))
    threshold = thresholds[best]
    if 0 < best < len(thresholds) - 1:  # half way to the next score: the lowest one that was seen is too strict
        threshold = (thresholds[best] + thresholds[best + 1]) / 2
    is_called = values >= threshold
    positives, negatives = is_called[truth & ~is_choosing], ~is_called[~truth & ~is_choosing]
    rates = float(positives.mean()), float(negatives.mean())
    is_small = min(len(positives), len(negatives)) < _FEW_SCORES
    error = (1 - confidence) / (4 if is_small else 2)
    ends = [proportion_interval(rates[0], len(positives), error), proportion_interval(rates[1], len(negatives), error)]
    value = sum(rates) / 2
    below = [rate - low for rate, (low, _) in zip(rates, ends, strict=True)]
    above = [high - rate for rate, (_, high) in zip(rates, ends, strict=True)]
    if is_small:
        return Estimate(value, value - sum(below) / 2, value + sum(above) / 2)
    return Estimate(value, max(0.0, value - math.hypot(*below) / 2), min(1.0, value + math.hypot(*above) / 2))


def _half(truth: Flags, seed: int) -> Flags:
    """Random halves of members and of non-members; True for those that choose, the smaller halves."""
    generator, is_choosing = np.random.default_rng(seed), np.zeros(truth.shape, dtype=bool)
    for kind in (truth, ~truth):
        rows = generator.permutation(np.flatnonzero(kind))
        is_choosing[rows[: len(rows) // 2]] = True
    return is_choosing


def _true_positives(inside: Array, outside: Array, value: float, rate: float, confidence: float) -> Estimate:
    """The interval of the population's best true positive rate at a false positive rate of at most ``rate``.

    The j-th highest of n non-members lets a share of them through that has the law Beta(j, n − j + 1). So two of them
    are thresholds with a false positive rate below and above ``rate``; the members know nothing of this choice, and
    show the true positive rate of each. Four events fail with a quarter of 1 − confidence each.
    """
    error = (1 - confidence) / 4
    highest_first = np.sort(outside)[::-1]
    number, places = len(outside), np.arange(len(outside))
    strict = int((binom.cdf(places, number, rate) <= error).sum())  # the largest j that lets surely less through
    loose = 1 + int((binom.sf(places, number, rate) > error).sum())  # the smallest that lets surely more through
    low, high = 0.0, 1.0
    if strict >= 1:
        found = float((inside > highest_first[strict - 1]).mean())
        low = proportion_interval(found, len(inside), error)[0]
    if loose <= number:
        found = float((inside >= highest_first[loose - 1]).mean())
        high = proportion_interval(found, len(inside), error)[1]
    return Estimate(value, low, high)


# -------------------------------------------------------------------- output and bad input


def table(reports: Mapping[str, Report]) -> str:
    """Attacks side by side, as lines to print.

    Args:
        reports: by the name of the attack.

    Example:
        >>> print(table({"loss": evaluate([3, 2, 1, 0], [True, True, False, False])}).splitlines()[1][:31])
        loss    1.0000 (0.1581, 1.0000)
    """
    rows = [["attack", *_FIGURES.values(), "members", "others"]]
    rows += [[name, *_cells(report), str(report.members), str(report.non_members)] for name, report in reports.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    levels = sorted({f"{100 * report.confidence:g} %" for report in reports.values()})
    lines.append(f"In brackets: intervals, {' or '.join(levels)}." if levels else "No attacks.")
    if any("*" in line for line in lines):
        lines.append("* Without any false positive: there are too few others for this rate.")
    return "\n".join(lines)


def _cells(report: Report) -> list[str]:
    """The figures as text, with a star where the non-members are too few."""
    limits = (1.0, 1.0, FEW, FEWER)
    return [
        f"{getattr(report, name)}{' *' if report.resolution > limit else ''}"
        for name, limit in zip(_FIGURES, limits, strict=True)
    ]


def _check(scores: npt.ArrayLike, members: npt.ArrayLike) -> tuple[Array, Flags]:
    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(members)
    if values.ndim != 1 or values.shape != truth.shape:
        raise ValueError(f"scores and members must be (n,), of one length, got {values.shape} and {truth.shape}")
    if truth.dtype != np.bool_:
        raise ValueError(f"members must be bool, got {truth.dtype}")
    wrong = ~np.isfinite(values)
    if wrong.any():
        raise ValueError(f"scores must be finite, {wrong.sum()} of {values.size} are NaN or infinite")
    if min(truth.sum(), (~truth).sum()) < 2:  # one to choose a threshold, one to judge it
        raise ValueError(f"members must be two of each kind at least, got {truth.sum()} among {truth.size} candidates")
    return values, truth
