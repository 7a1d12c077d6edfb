"""Draws at random that must not come again."""

from __future__ import annotations

import json
import os
import pickle

import edpsgd


def test_poisson_draws_are_not_repeated_by_a_rewind_or_a_pickle_and_not_by_a_fork() -> None:
    batches = edpsgd.PoissonBatches(200, 0.5, steps_per_epoch=3)
    planned, state = list(batches), batches.state_dict()
    pickled = pickle.dumps(batches)
    assert batches._key not in pickled
    assert batches._secret not in pickled
    assert list(pickle.loads(pickled)) != planned
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, json.dumps(list(batches)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert json.loads(answer.read()) != planned
    assert list(batches) == planned
    batches.load_state_dict(state)
    assert list(batches) != planned
