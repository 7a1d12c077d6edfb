"""Shuffled epochs: resumed in the middle, and with other batches."""

from __future__ import annotations

import pytest

import edpsgd
from tests.helpers.common import Bag, private
from tests.helpers.sampler_checkpoints import checkpoint


def test_the_middle_of_an_epoch_needs_the_same_batches() -> None:
    state = checkpoint(edpsgd.ShuffledBatches(20, 2))
    optimizer = private(Bag((5,)), batches=edpsgd.ShuffledBatches(20, 4))
    with pytest.raises(ValueError, match="some examples would be used twice"):
        optimizer.load_state_dict(state)
    optimizer = private(Bag((5,)), batches=edpsgd.PoissonBatches(20, 0.1))
    with pytest.raises(ValueError, match="the checkpoint's batches are 'shuffled', this sampler's are 'poisson'"):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="another seed"):
        private(Bag((5,)), batches=edpsgd.ShuffledBatches(20, 2, seed=1)).load_state_dict(state)


def test_after_a_complete_epoch_the_batches_may_change() -> None:
    state = checkpoint(edpsgd.ShuffledBatches(20, 2), steps=10)
    batches = edpsgd.ShuffledBatches(20, 1)
    optimizer = private(Bag((5,)), batches=batches)
    optimizer.load_state_dict(state)
    with pytest.raises(RuntimeError, match="all 20 steps of this epoch were taken"):
        optimizer.step()
    optimizer.set_epoch(3)
    for _ in batches:
        optimizer.step()
    assert [(e.epoch, e.steps) for e in optimizer.ledger.events] == [(2, 10), (3, 20)]


def test_a_checkpoint_that_does_not_fit_leaves_the_sampler_alone() -> None:
    state = checkpoint(edpsgd.ShuffledBatches(20, 2))["edpsgd"]["batches"]
    batches = edpsgd.ShuffledBatches(20, 4, seed=None)
    planned = list(batches)
    with pytest.raises(ValueError, match="some examples would be used twice"):
        batches.load_state_dict(state)
    assert (batches.position, batches.moves, list(batches)) == (0, 0, planned)
