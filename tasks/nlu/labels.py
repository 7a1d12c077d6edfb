"""The intents and tags that a model can answer: those of public lists, or of a training set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tasks.nlu.corpus import OUTSIDE, Corpus, Rows, word_places


@dataclass(frozen=True)
class Labels:
    """The intents and tags that a model can answer.

    Attributes:
        intents: sorted.
        tags: O, then B and I of each slot.
        read_from_data: whether they were read from utterances, and nobody has confirmed that they are public.

    Example:
        >>> Labels.of_slots(["call"], ["name"]).tags
        ['O', 'B-name', 'I-name']
    """

    intents: list[str]
    tags: list[str]
    read_from_data: bool = False

    @staticmethod
    def of_slots(intents: Sequence[str], slots: Sequence[str], read_from_data: bool = False) -> Labels:
        """With the two tags of each slot."""
        tags = (f"{prefix}-{slot}" for slot in sorted(set(slots)) for prefix in "BI")
        return Labels(sorted(set(intents)), [OUTSIDE, *tags], read_from_data)

    @staticmethod
    def of_rows(corpus: Corpus, rows: Rows) -> Labels:
        """Those of some utterances; if they are private, so is this list."""
        intents = [corpus.intents[i] for i in np.unique(corpus.intent_ids[rows])]
        tags = [corpus.tags[i] for i in np.unique(corpus.tag_ids[word_places(corpus, rows)])]
        return Labels.of_slots(intents, [tag[2:] for tag in tags if tag != OUTSIDE], read_from_data=True)

    def allowed_tags(self, slots: Mapping[str, Sequence[str]]) -> list[list[int]]:
        """For each intent the numbers of the tags that it may have.

        Args:
            slots: those that may go with each intent.

        Example:
            >>> Labels.of_slots(["call", "stop"], ["name"]).allowed_tags({"call": ["name"], "stop": []})
            [[0, 1, 2], [0]]
        """
        number = {tag: place for place, tag in enumerate(self.tags)}
        found = []
        for intent in self.intents:
            tags = [number[f"{prefix}-{slot}"] for slot in sorted(set(slots[intent])) for prefix in "BI"]
            found.append([number[OUTSIDE], *tags])
        return found
