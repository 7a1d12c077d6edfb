"""A corpus as batches of tensors: everything is a number before training begins, and a batch is a look-up."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from models.heads import pad
from tasks.nlu.corpus import Corpus, Rows, word_places
from tasks.nlu.labels import Labels


class WordTable(Protocol):
    """The distinct words of a corpus, as a model reads them (``ClcTable``, ``BertTable``)."""

    def check(self, word_ids: npt.NDArray[np.integer], starts: Rows) -> None:
        """Refuses utterances that the model cannot read."""

    def batch(self, word_ids: npt.NDArray[np.integer], lengths: Rows) -> dict[str, torch.Tensor]:
        """What the model reads of utterances whose words stand one after the other."""


class States(Protocol):
    """What an encoder that stays as it is has made of a corpus (``EncoderStates``)."""

    def batch(self, corpus: Corpus, rows: Rows) -> dict[str, torch.Tensor]:
        """What the model reads of these utterances."""


class Examples:
    """Some rows of a corpus, ready for a model.

    Args:
        corpus: where they are.
        rows: which.
        table: the corpus's distinct words as the model reads them.
        labels: the numbers of intents and tags. Others, which the model cannot answer, count as number 0 here: only
            evaluation meets them, and it compares strings.
        bucket_size: utterances of similar length that are computed at once.

    Attributes:
        states: read instead of the words, once somebody has computed them.
    """

    def __init__(self, corpus: Corpus, rows: Rows, table: WordTable, labels: Labels, bucket_size: int = 32) -> None:
        self.corpus, self.rows, self.bucket_size = corpus, rows, bucket_size
        self.states: States | None = None
        self._table = table
        self._intents = _numbers(corpus.intents, labels.intents)
        self._tags = _numbers(corpus.tags, labels.tags)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, chosen: Sequence[int] | Rows) -> dict[str, torch.Tensor]:
        """The chosen examples as tensors."""
        rows = self.rows[np.asarray(chosen, dtype=np.int64)]
        lengths, words = self._lengths(rows), word_places(self.corpus, rows)
        if self.states is None:
            batch = self._table.batch(self.corpus.word_ids[words], lengths)
        else:
            batch = self.states.batch(self.corpus, rows)
        batch["tags"] = torch.from_numpy(pad(self._tags[self.corpus.tag_ids[words]], lengths))
        batch["intents"] = torch.from_numpy(self._intents[self.corpus.intent_ids[rows]])
        return batch

    def buckets(self, chosen: Sequence[int] | Rows) -> Iterator[dict[str, torch.Tensor]]:
        """The chosen examples in batches of similar length; the sampler's choice stays what it is."""
        for part in self.sorted_parts(chosen):
            yield self.batch(part)

    def sorted_parts(self, chosen: Sequence[int] | Rows) -> list[Rows]:
        """The same as numbers of examples."""
        numbers = np.asarray(chosen, dtype=np.int64)
        order = numbers[np.argsort(-self._lengths(self.rows[numbers]), kind="stable")]
        return [order[begin : begin + self.bucket_size] for begin in range(0, len(order), self.bucket_size)]

    def of_different_lengths(self, number: int, left_out: Container[int] = ()) -> list[int]:
        """Numbers of so many examples, or all if there are fewer, from the shortest to the longest."""
        by_length = np.argsort(self._lengths(self.rows), kind="stable").tolist()
        usable = [example for example in by_length if example not in left_out]
        places = np.linspace(0, len(usable) - 1, min(number, len(usable))).round().astype(int)
        return [usable[place] for place in places]

    def _lengths(self, rows: Rows) -> Rows:
        return self.corpus.starts[rows + 1] - self.corpus.starts[rows]


def to_device(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The batch where the model is; lengths stay, since packing reads them on the CPU."""
    if device.type == "cpu":
        return batch
    moved = dict(batch)
    for name, tensor in batch.items():
        if name != "lengths":
            moved[name] = tensor.pin_memory().to(device, non_blocking=True)
    return moved


def _numbers(names: Sequence[str], labels: Sequence[str]) -> Rows:
    known = {label: number for number, label in enumerate(labels)}
    return np.array([known.get(name, 0) for name in names], dtype=np.int64)
