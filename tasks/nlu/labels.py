"""The intents and tags that a model can answer: those of public lists, or of a training set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tasks.nlu.corpus import OUTSIDE, Corpus, Rows, word_places


@dataclass(frozen=True)
class Labels:
    """The intents and tags that a model can answer.

    Example:
        >>> Labels.of_slots(["call"], ["name"]).tags
        ['O', 'B-name', 'I-name']
    """

    intents: list[str]
    tags: list[str]

    @staticmethod
    def of_slots(intents: Sequence[str], slots: Sequence[str]) -> Labels:
        """With the two tags of each slot."""
        tags = (f"{prefix}-{slot}" for slot in sorted(set(slots)) for prefix in "BI")
        return Labels(sorted(set(intents)), [OUTSIDE, *tags])

    @staticmethod
    def of_rows(corpus: Corpus, rows: Rows) -> Labels:
        """Those of some utterances; if they are private, so is this list."""
        intents = [corpus.intents[i] for i in np.unique(corpus.intent_ids[rows])]
        tags = [corpus.tags[i] for i in np.unique(corpus.tag_ids[word_places(corpus, rows)])]
        return Labels.of_slots(intents, [tag[2:] for tag in tags if tag != OUTSIDE])
