"""A corpus in flat arrays."""

from __future__ import annotations

import numpy as np
import pytest

from tasks.nlu import generator
from tasks.nlu.corpus import Corpus, word_places


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(generator.utterances(60, seed=3))


def test_places(corpus) -> None:
    expected = [place for row in (5, 2, 5) for place in range(corpus.starts[row], corpus.starts[row + 1])]
    assert word_places(corpus, np.array([5, 2, 5])).tolist() == expected
    assert word_places(corpus, np.array([], dtype=np.int64)).tolist() == []
