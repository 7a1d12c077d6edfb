"""A corpus in flat arrays."""

from __future__ import annotations

import numpy as np

from tasks.nlu.corpus import spans, word_places


def test_places(corpus) -> None:
    expected = [place for row in (5, 2, 5) for place in range(corpus.starts[row], corpus.starts[row + 1])]
    assert word_places(corpus, np.array([5, 2, 5])).tolist() == expected
    assert word_places(corpus, np.array([], dtype=np.int64)).tolist() == []


def test_a_tag_that_continues_nothing_begins_a_slot() -> None:
    """Neither another type, nor a slot that has ended, is continued."""
    assert spans(["I-a", "I-a", "I-b", "O", "I-b", "B-b"]) == [("a", 0, 2), ("b", 2, 3), ("b", 4, 5), ("b", 5, 6)]
    assert spans([]) == []
