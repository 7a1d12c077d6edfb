"""Checkpoints of optimizers with a sampler."""

from __future__ import annotations

import copy

from tests.helpers.common import Bag, private


def checkpoint(batches, steps=1) -> dict:
    model = Bag((5,))
    optimizer = private(model, batches=batches)
    optimizer.set_epoch(2)
    for _ in zip(range(steps), batches, strict=False):
        optimizer.step()
    return copy.deepcopy(optimizer.state_dict())
