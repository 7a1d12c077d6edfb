"""The data of a job: a corpus, its parts, and places for canaries."""

from __future__ import annotations

import numpy as np

from tasks.nlu.dataset import load
from tests.helpers.jobs import tiny


def test_coins_change_nothing_but_what_is_blank(tmp_path) -> None:
    """All canaries have a place in the training set, those that are out a blank one."""
    plain, data = (load(tiny(tmp_path, canaries=n), None, seed=3) for n in (0, 10))
    added = np.arange(len(plain.corpus), len(data.corpus))
    assert [data.corpus[row] for row in added] == [one.said for one in data.canaries]
    assert data.rows.train.tolist() == [*plain.rows.train, *added]
    assert data.rows.test.tolist() == plain.rows.test.tolist()
    assert data.without_canaries().train.tolist() == plain.rows.train.tolist()
    assert plain.without_canaries().train.tolist() == plain.rows.train.tolist()
    blank = {data.corpus[data.rows.train[number]] for number in data.blanks()}
    assert blank == {one.said for one in data.canaries if not one.inside}
    assert plain.blanks() == frozenset()
