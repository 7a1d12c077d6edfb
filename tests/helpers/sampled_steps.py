"""Steps on the draws of a sampler, on every worker."""

from __future__ import annotations

import itertools

from tests.helpers.common import set_gradients


def train(model, optimizer, batches, steps=None) -> int:
    """Steps with a gradient where a batch has examples; how many there were."""
    taken, loader = 0, iter(batches)
    while steps is None or taken < steps:
        micro_batches = list(itertools.islice(loader, batches.micro_batches or 1))
        if not micro_batches:
            break
        units = [[i] for i in micro_batches[0]] if batches.micro_batches is None else micro_batches
        for unit in units:
            if unit:
                set_gradients(model, 1.0)
            optimizer.accumulate()
        optimizer.step()
        taken += 1
    return taken


def everywhere(workers, batches) -> list[list[list[int]]]:
    """The batches of an epoch on every worker."""
    return workers.gather(list(batches))
