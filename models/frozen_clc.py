"""CLC without an encoder that is trained: fixed features of words and characters, and the two heads.

What a private training pays for is what it trains. Here these are two linear layers, which begin where somebody says
(``HeadSettings``), on features that are a function of their utterance and of public vectors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from edpsgd import files
from models.clc import ClcInputs, ClcTable, look_up
from models.features import of_utterances, of_words, word_width
from models.heads import Batch, HeadSettings, IntentSlotModel
from models.ngrams import DIMENSION, hashed_ngrams
from models.vectors import WordVectors, restore

_ABOUT = "ngrams.json"
WINDOW = 2
LENGTH = 12.0  # of a part of the features: all are then as long as a frozen MiniLM's, and the same rates suit both


def weights_around(window: int) -> list[float]:
    """How much a word and its neighbours count, in the order of ``features.of_words``: the nearer, the more.

    Example:
        >>> weights_around(2)
        [1.0, 0.75, 0.75, 0.5, 0.5]
    """
    weights = [1.0]
    for distance in range(1, window + 1):
        weights += [1 - distance / (window + 2)] * 2
    return weights


class FrozenCLC(IntentSlotModel):
    """Linear heads on fixed features.

    Those of a word are the directions of its vector, of its neighbours' vectors, of its n-grams and of the sum of all
    vectors of the utterance, by which words are understood as its intent has it. Those of an utterance are the
    direction of the sum of its words' features, and as long as these.

    Args:
        words: rows of the word table, row 0 for unknown words included.
        dimension: of the word vectors.
        intents: how many there are.
        tags: how many there are.
        ngrams: dimension of the hashed n-grams.
        window: how many neighbours of a word its slot head sees on each side.
        dropout: on the features, before the heads.
        heads: how they begin and answer.
    """

    def __init__(
        self,
        words: int,
        dimension: int,
        intents: int,
        tags: int,
        ngrams: int = DIMENSION,
        window: int = WINDOW,
        dropout: float = 0.0,
        heads: HeadSettings | Mapping[str, Any] | None = None,
    ) -> None:
        width = word_width(1, dimension, window) + ngrams + dimension
        super().__init__(width, intents, tags, dropout, heads, utterance_width=width)
        self._settings = {
            "words": words,
            "dimension": dimension,
            "ngrams": ngrams,
            "window": window,
            "dropout": dropout,
        }
        self.window = window
        self.words = nn.Embedding(words, dimension)
        self.words.weight.requires_grad_(False)
        nn.init.zeros_(self.words.weight)

    def settings(self) -> dict[str, Any]:
        """The arguments, but for intents and tags."""
        return {**self._settings, "heads": self.head_settings()}

    def set_words(self, table: npt.NDArray[np.float32]) -> None:
        """Puts pretrained vectors into the word table, after the row for unknown words."""
        with torch.no_grad():
            self.words.weight[1:] = torch.from_numpy(table)

    def features(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the words, zero where there is none, and of the utterances.

        Returns:
            (utterances, words, width) and (utterances, width).
        """
        mask, place = batch["mask"], batch["place"]
        vectors = self._directions(batch)[place] * mask.unsqueeze(2)
        around = of_words(vectors.unsqueeze(2), mask, [1], self.window).unflatten(2, (-1, vectors.shape[2]))
        weights = around.new_tensor(weights_around(self.window)).unsqueeze(1)
        neighbours = (around * weights).flatten(2)
        ngrams = batch["ngrams"][place]
        topic = nn.functional.normalize(vectors.sum(1), dim=1).unsqueeze(1).expand_as(vectors)
        words = LENGTH * torch.cat([neighbours, ngrams, topic], dim=2) * mask.unsqueeze(2)
        return words, of_utterances(words.sum(1), words, mask)

    def _directions(self, batch: Batch) -> torch.Tensor:
        """Those of the vectors of a batch's distinct words, (words, dimension); zero for unknown words."""
        vectors = self.words(batch["rows"])
        if "made" in batch:  # vectors of words out of the table, made of their subwords
            vectors = torch.cat([vectors, batch["made"]])
        return nn.functional.normalize(vectors, dim=1)


class FrozenClcInputs(ClcInputs):
    """Turns words into what FrozenCLC reads: rows of the word table, n-grams, and vectors of words out of the table.

    Args:
        vectors: the words of a public source of vectors.
        dimension: of the hashed n-grams.
    """

    def __init__(self, vectors: WordVectors, dimension: int = DIMENSION) -> None:
        super().__init__(vectors)
        self.dimension = dimension

    def save(self, folder: Path) -> None:
        """Writes the word list, what makes vectors of other words, and the dimension; never words of the data."""
        super().save(folder)
        files.write_text(folder / _ABOUT, json.dumps({"dimension": self.dimension}))

    @staticmethod
    def load(folder: Path) -> FrozenClcInputs:
        """What save wrote."""
        return FrozenClcInputs(restore(folder), files.read_json(folder / _ABOUT)["dimension"])

    def table(self, words: Sequence[str]) -> FrozenClcTable:
        """Looks every distinct word of some data up, once."""
        return FrozenClcTable(*look_up(words, self.vectors), hashed_ngrams(words, self.dimension))


class FrozenClcTable(ClcTable):
    """The distinct words of some data as numbers, and their n-grams as vectors."""

    def _spelling(self, spelled: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        return {"ngrams": spelled}
