"""CLC: a character CNN joined with word vectors, BiLSTM layers, and the two heads (Ma & Hovy 2016)."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from models.heads import Batch, HeadSettings, IntentSlotModel, length_mask, pad
from models.ngrams import without_accents
from models.vectors import WordVectors, restore

ALPHABET = string.ascii_letters + string.digits + string.punctuation  # public: no character is learned from the data
PADDING, OTHER = 0, 1
LONGEST_WORD = 24  # characters that the CNN sees


class CLC(IntentSlotModel):
    """Character CNN + word vectors -> BiLSTM layers -> intent (fully connected) and slots (CRF).

    Args:
        words: rows of the word table, row 0 for unknown words included.
        dimension: of the word vectors.
        intents: how many there are.
        tags: how many there are.
        train_words: whether the word table is trained.
        hidden: width of an LSTM in one direction.
        layers: of BiLSTM.
        characters: dimension of a character.
        filters: of the character CNN.
        dropout: on the input, between the layers and before the heads.
        word_dropout: how often a word's vector is hidden in training, so that its characters must do.
        heads: how they begin and answer.

    Attributes:
        keeps_apart: whether no two utterances of a batch share any computation, which optimizer.backward() wants; else
            words that occur twice are looked at once, which is faster.
    """

    def __init__(
        self,
        words: int,
        dimension: int,
        intents: int,
        tags: int,
        train_words: bool = False,
        hidden: int = 384,
        layers: int = 2,
        characters: int = 32,
        filters: int = 64,
        dropout: float = 0.4,
        word_dropout: float = 0.0,
        heads: HeadSettings | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(2 * hidden, intents, tags, dropout, heads)
        self._settings = {
            "words": words,
            "dimension": dimension,
            "train_words": train_words,
            "hidden": hidden,
            "layers": layers,
            "characters": characters,
            "filters": filters,
            "dropout": dropout,
            "word_dropout": word_dropout,
        }
        self.words = nn.Embedding(words, dimension)
        self.words.weight.requires_grad_(train_words)
        self.characters = nn.Embedding(len(ALPHABET) + 2, characters, padding_idx=PADDING)
        self.convolution = nn.Conv1d(characters, filters, kernel_size=3, padding=1)
        between = dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(dimension + filters, hidden, layers, batch_first=True, bidirectional=True, dropout=between)
        self.word_dropout = word_dropout
        self.keeps_apart = False
        nn.init.normal_(self.words.weight, std=0.1)
        with torch.no_grad():
            self.words.weight[0] = 0.0

    def settings(self) -> dict[str, Any]:
        """The arguments, but for intents and tags."""
        return {**self._settings, "heads": self.head_settings()}

    def set_words(self, table: npt.NDArray[np.float32]) -> None:
        """Puts pretrained vectors into the word table, after the row for unknown words."""
        with torch.no_grad():
            self.words.weight[1:] = torch.from_numpy(table)

    def features(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """BiLSTM outputs of the words, and their largest values over the utterance.

        Returns:
            (utterances, words, width) and (utterances, width), with width twice the LSTM's.
        """
        inputs = self.dropout(self._inputs(batch))
        lengths = batch["lengths"]  # on the CPU
        is_sorted = bool((lengths[1:] <= lengths[:-1]).all())
        # If they are sorted already, nothing is sent to the device to sort there.
        packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=is_sorted)
        # cuDNN hides the steps of the LSTM, from which gradients of single utterances are made.
        without_cudnn = torch.backends.cudnn.flags(enabled=False)
        with without_cudnn if self.keeps_apart else nullcontext():
            states = self.lstm(packed)[0]
        outputs, _ = pad_packed_sequence(states, batch_first=True, total_length=inputs.shape[1])
        hidden = outputs.masked_fill(~batch["mask"].unsqueeze(2), -torch.inf)
        return outputs, hidden.max(dim=1).values

    def _inputs(self, batch: Batch) -> torch.Tensor:
        """The vector of each word, and what the CNN makes of its characters, side by side.

        Returns:
            (utterances, words, dimension + filters).
        """
        place = batch["place"]
        if self.keeps_apart:
            placed, spelled = self._each_word(batch)
        else:
            placed, spelled = self._distinct_words(batch)
        if self.training and self.word_dropout > 0:
            # torch's dropout of ones, since edpsgd.check_losses can switch that off.
            every = torch.ones(place.shape, device=place.device)
            kept = nn.functional.dropout(every, self.word_dropout) > 0
            placed = placed * kept.unsqueeze(2)
        return torch.cat([placed, spelled], dim=2)

    def _distinct_words(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Every distinct word of the batch is looked at once, and its features put wherever it stands."""
        place, vectors = batch["place"], self.words(batch["rows"])
        if "made" in batch:  # vectors of words out of the table, made of their subwords
            vectors = torch.cat([vectors, batch["made"]])
        return vectors[place], self._spelling(batch["characters"])[place]

    def _each_word(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, one word at a time: then every row belongs to one utterance, and its gradient too."""
        place, rows = batch["place"], batch["rows"]
        if "made" in batch:
            # Places up to `known` are rows of the table, those behind are vectors made of subwords.
            # Both are looked up for every word, and the one that does not apply is left out.
            known, made = len(rows), batch["made"]
            all_rows = torch.cat([rows, rows.new_zeros(len(made))])
            of_table = self.words(all_rows[place])
            of_subwords = made[(place - known).clamp(min=0)]
            vectors = torch.where((place >= known).unsqueeze(2), of_subwords, of_table)
        else:
            vectors = self.words(rows[place])
        spelled = self._spelling(batch["characters"][place].flatten(0, 1))
        return vectors, spelled.view(*place.shape, -1)

    def _spelling(self, characters: torch.Tensor) -> torch.Tensor:
        """The largest values of the CNN over the characters of each word; longer words beside it change nothing.

        Padding is nothing, whatever noise has made of its row.
        """
        padding = (characters == PADDING).unsqueeze(1)
        letters = self.characters(characters).transpose(1, 2).masked_fill(padding, 0.0)
        found = self.convolution(letters).masked_fill(padding, -torch.inf)
        return torch.relu(found.max(dim=2).values)


class ClcInputs:
    """Turns words into what CLC reads: rows of the word table, characters, and vectors of words out of the table.

    Args:
        vectors: the word list, with or without vectors; nothing but public words belongs here.

    Example:
        >>> inputs = ClcInputs(WordVectors(["call", "anna"], None, "list", 8))
        >>> batch = inputs.table(["call", "bob", "anna"]).batch(np.array([0, 2, 1]), np.array([2, 1]))
        >>> batch["rows"][batch["place"]].tolist(), batch["mask"].tolist()
        ([[1, 2], [0, 1]], [[True, True], [True, False]])
    """

    def __init__(self, vectors: WordVectors) -> None:
        self.vectors = vectors

    def save(self, folder: Path) -> None:
        """Writes the word list and what makes vectors of other words; never words of the data."""
        self.vectors.save(folder)

    @staticmethod
    def load(folder: Path) -> ClcInputs:
        """What save wrote."""
        return ClcInputs(restore(folder))

    def table(self, words: Sequence[str]) -> ClcTable:
        """Looks every distinct word of some data up, once."""
        return ClcTable(*look_up(words, self.vectors), _spell(words))


def look_up(words: Sequence[str], vectors: WordVectors) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The row of each word in the model's table, and the vectors that were made of subwords.

    Row 0 is for unknown words. A row below zero stands for a vector that was made: -1 for the first of them.
    """
    rows = vectors.lookup(words) + 1
    made: list[npt.NDArray[np.float32]] = []
    for number in np.flatnonzero(rows == 0).tolist():
        vector = vectors.out_of_vocabulary(words[number])
        if vector is not None:
            made.append(vector)
            rows[number] = -len(made)
    return rows, np.array(made, dtype=np.float32)


class ClcTable:
    """The distinct words of some data as numbers.

    Args:
        rows: of the words, see ``look_up``.
        made: see there.
        spelled: what else is known of each word, a row each: here its characters.
    """

    def __init__(self, rows: npt.NDArray[np.int64], made: npt.NDArray[np.float32], spelled: npt.NDArray[Any]) -> None:
        self._rows, self._made, self._spelled = rows, made, spelled

    def check(self, word_ids: npt.NDArray[np.integer], starts: npt.NDArray[np.int64]) -> None:
        """Utterances may have any length."""

    def batch(self, word_ids: npt.NDArray[np.integer], lengths: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """What CLC reads of utterances whose words stand one after the other."""
        distinct, place = np.unique(word_ids, return_inverse=True)
        order = np.argsort(self._rows[distinct] < 0, kind="stable")  # words of the table first
        new_place = np.argsort(order)  # the inverse of the order
        distinct, place = distinct[order], new_place[place]
        rows = self._rows[distinct]
        batch: dict[str, Any] = {
            **self._spelling(self._spelled[distinct]),
            "rows": rows[rows >= 0],
            "place": pad(place, lengths),
            "mask": length_mask(lengths),
            "lengths": lengths,
        }
        if (rows < 0).any():
            batch["made"] = self._made[-rows[rows < 0] - 1]
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in batch.items()}

    def _spelling(self, spelled: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """What the model reads of the distinct words of a batch, beside their vectors."""
        word_lengths = (spelled != PADDING).sum(axis=1)
        longest = max(1, int(word_lengths.max(initial=1)))
        return {"characters": spelled[:, :longest].astype(np.int64)}


def _spell(words: Sequence[str]) -> npt.NDArray[np.uint8]:
    """Characters as numbers, (words, LONGEST_WORD), without accents.

    Of longer words, the first and the last characters are taken.
    """
    codes = {character: number for number, character in enumerate(ALPHABET, 2)}
    spelled = np.full((len(words), LONGEST_WORD), PADDING, dtype=np.uint8)
    for number, word in enumerate(words):
        plain = without_accents(word)
        if len(plain) > LONGEST_WORD:
            plain = plain[: LONGEST_WORD // 2] + plain[-LONGEST_WORD // 2 :]
        spelled[number, : len(plain)] = [codes.get(one, OTHER) for one in plain]
    return spelled
