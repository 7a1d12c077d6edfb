"""Utterances, and a corpus of them as flat arrays, which hold a million in little memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

OUTSIDE = "O"
Rows = npt.NDArray[np.int64]  # numbers of utterances


@dataclass(frozen=True)
class Utterance:
    """One utterance: its words, their BIO tags and its intent.

    Example:
        >>> Utterance(("call", "anna"), ("O", "B-name"), "call").slots()
        [('name', 1, 2)]
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    intent: str

    def slots(self) -> list[Slot]:
        """The type, the first word and the word after the last of each slot, in order."""
        return spans(self.tags)


Slot = tuple[str, int, int]


def spans(tags: Sequence[str]) -> list[Slot]:
    """The slots of BIO tags; an I- that continues nothing begins a slot, as if it were B-.

    Example:
        >>> spans(["B-date", "I-date", "O", "I-name"])
        [('date', 0, 2), ('name', 3, 4)]
    """
    slots: list[Slot] = []
    for position, tag in enumerate(tags):
        if tag == OUTSIDE:
            continue
        kind = tag[2:]
        last = slots[-1] if slots else None
        if tag[0] == "I" and last is not None and (last[0], last[2]) == (kind, position):
            slots[-1] = (kind, last[1], position + 1)
        else:
            slots.append((kind, position, position + 1))
    return slots


class _Names:
    """Gives each distinct string a number, in the order of their first appearance."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


class Corpus:
    """Utterances in flat arrays. Every distinct word, tag and intent is kept once.

    Args:
        utterances: any iterable; it is read once, and nothing of it is kept but numbers and distinct strings.

    Attributes:
        words, tags, intents: the distinct strings; the arrays hold their indices.
        word_ids, tag_ids: those of all utterances, one after the other.
        starts: where each utterance begins in them, and where the last one ends.
        intent_ids: one for each utterance.
        repaired: how many I- tags without their B- were read as B-.
        skipped: how many bad lines were left out.
        left_out: how many rows were left out because the publishers marked them as unusable, or as too long.

    Example:
        >>> corpus = Corpus([Utterance(("call", "anna"), ("O", "B-name"), "call")])
        >>> len(corpus), corpus[0].intent, corpus.words
        (1, 'call', ['call', 'anna'])
    """

    def __init__(self, utterances: Iterable[Utterance]) -> None:
        words, tags, intents = _Names(), _Names(), _Names()
        word_ids, tag_ids, intent_ids = array("i"), array("i"), array("i")
        starts = array("q", [0])
        for utterance in utterances:
            word_ids.extend(words[word] for word in utterance.words)
            tag_ids.extend(tags[tag] for tag in utterance.tags)
            intent_ids.append(intents[utterance.intent])
            starts.append(len(word_ids))
        self.words, self.tags = list(words.numbers), list(tags.numbers)
        self.intents = list(intents.numbers)
        # Views of the arrays that were filled: nothing is copied.
        self.word_ids = np.frombuffer(word_ids, np.int32)
        self.tag_ids = np.frombuffer(tag_ids, np.int32)
        self.intent_ids = np.frombuffer(intent_ids, np.int32)
        self.starts = np.frombuffer(starts, np.int64)
        self.repaired, self.skipped, self.left_out = 0, 0, 0

    def __len__(self) -> int:
        return len(self.intent_ids)

    def __getitem__(self, row: int) -> Utterance:
        row = range(len(self))[row]  # as a list: negative ones count from the end, others raise
        part = slice(self.starts[row], self.starts[row + 1])
        return Utterance(
            tuple(self.words[number] for number in self.word_ids[part]),
            tuple(self.tags[number] for number in self.tag_ids[part]),
            self.intents[self.intent_ids[row]],
        )

    def shorter(self, longest: int) -> Corpus:
        """A corpus without the utterances that have more words; they count as left out."""
        found = Corpus(utterance for utterance in self if len(utterance.words) <= longest)
        found.repaired, found.skipped = self.repaired, self.skipped
        found.left_out = self.left_out + len(self) - len(found)
        return found

    def __iter__(self) -> Iterator[Utterance]:
        return (self[row] for row in range(len(self)))


def word_places(corpus: Corpus, rows: Rows) -> Rows:
    """Where the words of some utterances stand in the corpus's arrays, one utterance after the other.

    Args:
        corpus: the utterances.
        rows: numbers of utterances, in any order.

    Returns:
        Indices into ``word_ids`` and ``tag_ids``, (words of all these utterances,).

    Example:
        >>> from tasks.nlu.corpus import Utterance
        >>> said = [Utterance(("call", "anna"), ("O", "B-name"), "call"), Utterance(("stop",), ("O",), "stop")]
        >>> word_places(Corpus(said), np.array([1, 0])).tolist()
        [2, 0, 1]
    """
    starts = corpus.starts[rows]
    lengths = corpus.starts[rows + 1] - starts
    ends = np.cumsum(lengths)
    total = ends[-1] if len(ends) else 0
    shift = starts - (ends - lengths)  # from a place in the answer to one in the corpus
    return np.arange(total) + np.repeat(shift, lengths)
