"""A corpus in flat arrays."""

from __future__ import annotations

import numpy as np

from tasks.nlu.corpus import word_places


def test_places(corpus) -> None:
    expected = [place for row in (5, 2, 5) for place in range(corpus.starts[row], corpus.starts[row + 1])]
    assert word_places(corpus, np.array([5, 2, 5])).tolist() == expected
    assert word_places(corpus, np.array([], dtype=np.int64)).tolist() == []
