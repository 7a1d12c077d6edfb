"""The file accounting.json: speed and tightness of ε."""

from __future__ import annotations

from typing import TypedDict

from benchmarks.harness.rows.common import Made


class AccountedEpsilon(TypedDict):
    """ε of a training, and how far it is above a finer grid."""

    noise: float
    rate: float
    epsilon: float
    seconds: float
    above: float


class Calibrated(TypedDict):
    """The noise for an ε."""

    rate: float
    noise: float
    seconds: float
    epsilon: float


class WithoutSampling(TypedDict):
    """Milliseconds of the accountant where every step has all examples of an epoch."""

    epsilon_ms: float
    epsilon_slowest_ms: float
    calibrate_ms: float


class GrowingEpsilon(TypedDict):
    """ε after each epoch: with what was composed before, and from scratch."""

    rate: float
    seconds: float
    slowest: float
    seconds_anew: float
    slowest_anew: float
    difference: float


class DpAccounting(TypedDict):
    """The same ε by dp-accounting and by edpsgd."""

    rate: float
    levels: int
    dp_accounting_epsilon: float
    dp_accounting_seconds_per_level: float
    epsilon: float
    seconds_per_level: float


class Accounting(Made):
    """The file accounting.json."""

    epsilon: list[AccountedEpsilon]
    calibration: list[Calibrated]
    without_sampling: WithoutSampling
    growth: list[GrowingEpsilon]
    dp_accounting: DpAccounting
