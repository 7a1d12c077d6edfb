"""Words as numbers: a public list of words, and how a text is cut into words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edpsgd import files
from edpsgd._arguments import check_count
from tasks.common.text_files import NOT_UTF8, ReadError, is_utf8, numbered_lines

UNK, BOS, EOS = 0, 1, 2
SPECIALS = ("<unk>", "<bos>", "<eos>")  # tokenize never gives these

_TOKEN = re.compile(r"\w+(?:'\w+)*|[^\w\s]")


def tokenize(text: str) -> list[str]:
    """The words of a text in lower case, with the apostrophes inside them, and every punctuation mark by itself.

    Example:
        >>> tokenize("We'll see, Anna: 'tis late!")
        ["we'll", 'see', ',', 'anna', ':', "'", 'tis', 'late', '!']
    """
    return _TOKEN.findall(text.lower().replace("’", "'"))


class Dictionary:
    """The words that a model knows, after UNK (any other word), BOS and EOS (begin and end of a sentence).

    What is in it is public: it must not come from private text.

    Args:
        words: without the three; the most frequent first.

    Example:
        >>> dictionary = Dictionary(["the", "cat"])
        >>> dictionary.encode(["the", "dog"]).tolist(), dictionary.decode([4, 2]), len(dictionary)
        ([3, 0], ['cat', '<eos>'], 5)
    """

    def __init__(self, words: Sequence[str]) -> None:
        if isinstance(words, str) or len(words) == 0:
            raise ValueError("words must be a list of at least one word")
        self._numbers: dict[str, int] = {}
        for place, word in enumerate(words):
            fault = _fault(word, self._numbers)
            if fault:
                raise ValueError(f"words[{place}] {fault}")
            self._numbers[word] = place + len(SPECIALS)
        self._names = [*SPECIALS, *words]

    @property
    def words(self) -> list[str]:
        """Without UNK, BOS and EOS, the most frequent first."""
        return self._names[len(SPECIALS) :]

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, word: object) -> bool:
        return word in self._numbers

    def encode(self, words: Sequence[str]) -> npt.NDArray[np.int32]:
        """The numbers of words, (words,); UNK for those that are not in it."""
        numbers = (self._numbers.get(word, UNK) for word in words)
        return np.fromiter(numbers, dtype=np.int32, count=len(words))

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The words of numbers."""
        numbers = [int(number) for number in ids]
        if numbers and not 0 <= min(numbers) <= max(numbers) < len(self):
            raise ValueError(f"ids must be from 0 to {len(self) - 1}, got {min(numbers)} to {max(numbers)}")
        return [self._names[number] for number in numbers]

    def save(self, path: str | Path) -> None:
        """Writes the words, one in each line."""
        files.write_text(path, "".join(f"{word}\n" for word in self.words))

    @staticmethod
    def load(path: str | Path) -> Dictionary:
        """What save wrote, or any list of words in UTF-8, one in each line."""
        seen: dict[str, int] = {}
        for number, word in numbered_lines(Path(path)):
            fault = _fault(word, seen) if is_utf8(word) else NOT_UTF8
            if fault:
                raise ReadError(path, number, fault)
            seen[word] = number
        return Dictionary(list(seen))

    @classmethod
    def from_texts(cls, texts: Iterable[str], size: int = 10_000) -> Dictionary:
        """The most frequent words of public texts; of equally frequent ones the first in the alphabet.

        Args:
            texts: public ones.
            size: how many words at most, without UNK, BOS and EOS.
        """
        check_count("size", size)
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(tokenize(text))
        if not counts:
            raise ValueError("texts must hold at least one word")
        by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(by_frequency[:size])


def _fault(word: object, seen: dict[str, int]) -> str | None:
    """What is wrong with a word of the list, if anything; never the word itself."""
    if not isinstance(word, str) or word.split() != [word]:
        return "is no word: it must be a text without blanks"
    if word in SPECIALS:
        return f"is one of {', '.join(SPECIALS)}, which every dictionary has"
    return "is there twice" if word in seen else None
