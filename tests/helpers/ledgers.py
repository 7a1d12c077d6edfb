"""Ledgers by hand: events, steps, and files with the right checksums."""

from __future__ import annotations

import json
from pathlib import Path

from edpsgd import Ledger
from edpsgd.ledger.file import _chain
from tests.helpers.common import Bag, private


def forged(path: Path, *records: dict) -> Path:
    """Lines with the right checksums."""
    digest = ""
    with open(path, "w") as file:
        for record in records:
            digest = _chain(digest, record)
            file.write(json.dumps({**record, "digest": digest}) + "\n")
    return path


def event(**values: object) -> dict:
    full = {"kind": "gradients", "epoch": 0, "noise_multiplier": 1.0, "steps": 3, "batching": "shuffled"}
    return {"index": 0, "event": {**full, "sampling_rate": None, **values}}


def stepped(path: Path, steps: int):
    optimizer = private(Bag((5,)), ledger=path)
    optimizer.set_epoch(0)
    for _ in range(steps):
        optimizer.step()
    return optimizer


def charge(ledger: Ledger, epoch: int | None, steps: int, z: float = 1.0) -> None:
    ledger.open_epoch(epoch)
    for _ in range(steps):
        ledger.charge(z)
