"""How well an attack tells members from others: ROC, AUC, balanced accuracy, and true positives at few false ones.

Intervals are percentiles of a bootstrap that resamples members and non-members separately, for given attack scores:
they do not cover what another target model or other shadow models would change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from sklearn.metrics import auc, roc_curve

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

CELLS = 1_000_000  # of a block of resamples: some 50 MB
FEW, FEWER = 0.01, 0.001  # the false positive rates at which true positives are reported


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
        balanced_accuracy: mean of true positive and true negative rate at the best threshold. The threshold is chosen
            on the same scores, so the value is too high by a little; the interval is that of this threshold.
        tpr_at_1_percent: the largest true positive rate with a false positive rate of at most 1 %, not interpolated.
        tpr_at_1_permille: the same for 0.1 %.
        members: how many candidates were members.
        non_members: how many were not.
        confidence: of the intervals.
        resamples: of the bootstrap.
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
    resamples: int
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
            "resamples": self.resamples,
        }
        plain |= {name: getattr(self, name)._asdict() for name in _FIGURES}
        return {**plain, "fpr": self.fpr.tolist(), "tpr": self.tpr.tolist()} if curve else plain


_FIGURES = {
    "auc": "AUC",
    "balanced_accuracy": "balanced accuracy",
    "tpr_at_1_percent": "TPR at 1 % FPR",
    "tpr_at_1_permille": "TPR at 0.1 % FPR",
}


def evaluate(
    scores: npt.ArrayLike, members: npt.ArrayLike, resamples: int = 1000, confidence: float = 0.95, seed: int = 0
) -> Report:
    """Figures of an attack, with bootstrap intervals.

    An interval has no width where all resamples agree, such as that of an AUC of exactly 1: that is no certainty.

    Args:
        scores: (n,) higher = more likely a member.
        members: (n,) bool.
        resamples: of the bootstrap, at least 1.
        confidence: of the intervals, between 0 and 1.
        seed: of the bootstrap.

    Returns:
        The figures, the same for the same arguments.

    Raises:
        ValueError: on bad shapes, NaN or infinite scores, or if there are no members or no non-members.

    Example:
        >>> report = evaluate([0.9, 0.8, 0.4, 0.3], [True, False, True, False])
        >>> report.auc.value, report.balanced_accuracy.value, report.tpr_at_1_percent.value, report.resolution
        (0.75, 0.75, 0.5, 0.5)
    """
    values, truth = _check(scores, members)
    if resamples < 1 or not 0 < confidence < 1:
        raise ValueError(f"resamples must be >= 1 and confidence in (0, 1), got {resamples} and {confidence}")
    fpr, tpr, thresholds = roc_curve(truth, values, drop_intermediate=False)
    best = int(np.argmax(tpr - fpr))
    found = (auc(fpr, tpr), (1 + tpr[best] - fpr[best]) / 2, tpr[fpr <= FEW].max(), tpr[fpr <= FEWER].max())
    drawn = np.concatenate(list(_bootstrap(values, truth, best, resamples, seed)), axis=1)
    ends = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2], axis=1)
    area, balanced, few, fewer = (Estimate(*map(float, figure)) for figure in zip(found, *ends, strict=True))
    sizes = int(truth.sum()), int((~truth).sum())
    return Report(area, balanced, few, fewer, *sizes, confidence, resamples, fpr, tpr, thresholds)


def table(reports: Mapping[str, Report]) -> str:
    """Attacks side by side, as lines to print.

    Args:
        reports: by the name of the attack.

    Example:
        >>> print(table({"loss": evaluate([3, 2, 1, 0], [True, True, False, False])}).splitlines()[1][:46])
        loss    1.0000 (1.0000, 1.0000)  1.0000 (1.000
    """
    rows = [["attack", *_FIGURES.values(), "members", "others"]]
    rows += [[name, *_cells(report), str(report.members), str(report.non_members)] for name, report in reports.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    levels = sorted({f"{100 * report.confidence:g} %" for report in reports.values()})
    lines.append(f"In brackets: bootstrap intervals, {' or '.join(levels)}." if levels else "No attacks.")
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


def _bootstrap(values: Array, truth: npt.NDArray[np.bool_], best: int, resamples: int, seed: int) -> Iterator[Array]:
    """Blocks of (4, rows) figures. A resample is how often it has each distinct score, from the highest down."""
    place = np.unique(-values, return_inverse=True)[1] + 1  # place 0 is the curve's origin
    width, generators = int(place.max()) + 1, np.random.default_rng(seed).spawn(2)
    block = max(1, CELLS // values.size)
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        yield _figures(
            _draw(place[truth], rows, width, generators[0]), _draw(place[~truth], rows, width, generators[1]), best
        )


def _draw(places: Counts, rows: int, width: int, generator: np.random.Generator) -> Counts:
    """(rows, width) counts of as many draws from the places, with replacement."""
    drawn = places[generator.integers(places.size, size=(rows, places.size))] + width * np.arange(rows)[:, None]
    return np.bincount(drawn.ravel(), minlength=rows * width).reshape(rows, width)


def _figures(positives: Counts, negatives: Counts, best: int) -> Array:
    """(4, rows) figures of resamples, of their members and non-members at each place."""
    tp, fp = positives.cumsum(axis=1), negatives.cumsum(axis=1)
    total, others = int(tp[0, -1]), int(fp[0, -1])
    area = (negatives * (2 * tp - positives)).sum(axis=1) / (2 * total * others)
    balanced = (1 + tp[:, best] / total - fp[:, best] / others) / 2
    fpr, row = fp / others, np.arange(len(tp))
    few, fewer = (tp[row, (fpr <= limit).sum(axis=1) - 1] / total for limit in (FEW, FEWER))
    return np.stack([area, balanced, few, fewer])


def _check(scores: npt.ArrayLike, members: npt.ArrayLike) -> tuple[Array, npt.NDArray[np.bool_]]:
    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(members)
    if values.ndim != 1 or values.shape != truth.shape:
        raise ValueError(f"scores and members must be (n,), of one length, got {values.shape} and {truth.shape}")
    if truth.dtype != np.bool_:
        raise ValueError(f"members must be bool, got {truth.dtype}")
    wrong = ~np.isfinite(values)
    if wrong.any():
        raise ValueError(f"scores must be finite, {wrong.sum()} of {values.size} are NaN or infinite")
    if truth.all() or not truth.any():
        raise ValueError(f"members must have both kinds, got {truth.sum()} members among {truth.size} candidates")
    return values, truth
