"""A corpus as batches of tensors: everything is a number before training begins, and a batch is a look-up."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from models.heads import pad
from tasks.nlu.corpus import OUTSIDE, Corpus

Rows = npt.NDArray[np.int64]


class WordTable(Protocol):
    """The distinct words of a corpus, as a model reads them (``ClcTable``, ``BertTable``)."""

    def check(self, word_ids: npt.NDArray[np.integer], starts: Rows) -> None:
        """Refuses utterances that the model cannot read."""

    def batch(self, word_ids: npt.NDArray[np.integer], lengths: Rows) -> dict[str, torch.Tensor]:
        """What the model reads of utterances whose words stand one after the other."""


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
        tags = [corpus.tags[i] for i in np.unique(corpus.tag_ids[places(corpus, rows)])]
        return Labels.of_slots(intents, [tag[2:] for tag in tags if tag != OUTSIDE])


class Examples:
    """Some rows of a corpus, ready for a model.

    Args:
        corpus: where they are.
        rows: which.
        table: the corpus's distinct words as the model reads them.
        labels: the numbers of intents and tags. Others, which the model cannot answer, count as number 0 here: only
            evaluation meets them, and it compares strings.
        bucket_size: utterances of similar length that are computed at once.
    """

    def __init__(self, corpus: Corpus, rows: Rows, table: WordTable, labels: Labels, bucket_size: int = 32) -> None:
        self.corpus, self.rows, self.bucket_size = corpus, rows, bucket_size
        self._table = table
        self._intents = _numbers(corpus.intents, labels.intents)
        self._tags = _numbers(corpus.tags, labels.tags)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, chosen: Sequence[int] | Rows) -> dict[str, torch.Tensor]:
        """The chosen examples as tensors."""
        rows = self.rows[np.asarray(chosen, dtype=np.int64)]
        lengths, words = self._lengths(rows), places(self.corpus, rows)
        batch = self._table.batch(self.corpus.word_ids[words], lengths)
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
    stay = {"lengths"}
    return {n: t if n in stay else t.pin_memory().to(device, non_blocking=True) for n, t in batch.items()}


def places(corpus: Corpus, rows: Rows) -> Rows:
    """Where the words of some utterances stand in the corpus's arrays, one utterance after the other.

    Example:
        >>> from tasks.nlu.corpus import Utterance
        >>> said = [Utterance(("call", "anna"), ("O", "B-name"), "call"), Utterance(("stop",), ("O",), "stop")]
        >>> places(Corpus(said), np.array([1, 0])).tolist()
        [2, 0, 1]
    """
    starts, lengths = corpus.starts[rows], corpus.starts[rows + 1] - corpus.starts[rows]
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)


def _numbers(names: Sequence[str], labels: Sequence[str]) -> Rows:
    known = {label: number for number, label in enumerate(labels)}
    return np.array([known.get(name, 0) for name in names], dtype=np.int64)
