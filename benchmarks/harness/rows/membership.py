"""The file membership.json: attacks on trainings."""

from __future__ import annotations

from typing import TypedDict

from typing_extensions import NotRequired

from benchmarks.harness.rows.common import Interval, Made


class AttackReport(TypedDict):
    """How well an attack tells members."""

    auc: Interval
    balanced_accuracy: Interval
    tpr_at_1_percent: Interval
    resamples: NotRequired[int]


class AttackedRun(AttackReport):
    """The paper's attack on a training of utility."""

    name: str
    model: str
    task: str
    private: str
    noise: str
    noise_multiplier: float
    decay: str
    near_duplicates: int


class Membership(Made):
    """The file membership.json."""

    by_heart: dict[str, dict[str, AttackReport]]
    corpora: list[AttackedRun]
