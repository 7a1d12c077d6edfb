"""Labels are those of the rows that they were read from."""

from __future__ import annotations

import numpy as np

from tasks.nlu.corpus import Corpus, Utterance
from tasks.nlu.labels import Labels


def test_labels_are_those_of_the_rows() -> None:
    said = [
        Utterance(("call", "anna"), ("O", "B-name"), "phone"),
        Utterance(("at", "nine", "pm"), ("O", "B-time", "I-time"), "clock"),
        Utterance(("play", "it"), ("O", "O"), "music"),
        Utterance(("by", "abba"), ("O", "B-artist"), "music"),
    ]
    corpus = Corpus(said)
    assert Labels.of_rows(corpus, np.array([2, 0])) == Labels(["music", "phone"], ["O", "B-name", "I-name"], True)
    assert Labels.of_rows(corpus, np.array([2])) == Labels(["music"], ["O"], True)
    tags = ["O", "B-artist", "I-artist", "B-time", "I-time"]
    assert Labels.of_rows(corpus, np.array([3, 1])) == Labels(["clock", "music"], tags, True)
    assert Labels.of_slots(["b", "a", "b"], ["y", "x", "y"]) == Labels(["a", "b"], ["O", "B-x", "I-x", "B-y", "I-y"])
