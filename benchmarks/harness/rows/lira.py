"""The file lira.json: membership inference on trainings of recipes."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.rows.common import Made
from benchmarks.harness.rows.membership import AttackReport


class LiraPiece(AttackReport):
    """LiRA on a training, as a piece of the file too."""

    epsilon: float | None
    spent: float | None
    shadows: int
    members: int
    non_members: int
    near_duplicates: int
    test_ser: float
    minutes: float


class Lira(Made):
    """The file lira.json."""

    is_complete: bool
    delta: float
    title: str
    rows: Sequence[LiraPiece]
