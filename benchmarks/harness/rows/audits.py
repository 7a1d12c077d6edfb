"""The file audits.json: claims and their lower bounds."""

from __future__ import annotations

from typing import TypedDict

from benchmarks.harness.rows.common import Made


class AuditRow(TypedDict):
    """A claim, and the lower bounds that an audit found."""

    noise: str
    micro_batches: int
    clipping: str
    scaling: str | None
    claimed_mu: float
    mu: float
    claimed_epsilon: float
    epsilon: float
    is_refuted: bool


class Audits(Made):
    """The file audits.json."""

    trials: int
    delta: float
    confidence: float
    rows: list[AuditRow]
