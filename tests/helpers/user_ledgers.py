"""Ledgers of user-level training, made by hand."""

from __future__ import annotations

import edpsgd


def user_ledger(batching: str, rate: float, z: float, rounds: int, users: int = 10**6) -> edpsgd.Ledger:
    """As a run of so many rounds leaves it."""
    ledger = edpsgd.Ledger()
    ledger.begin_run({"unit": "user", "batches": {"kind": batching, "examples": users}})
    ledger.open_epoch(0, batching, rate)
    ledger.charge(z)
    ledger.events[0].steps = rounds
    return ledger
