"""Character n-grams of words as vectors of one size, by feature hashing (Weinberger et al. 2009).

Every n-gram adds 1 or -1 to one entry, and which one is a function of its text alone: nothing is learned, nothing hangs
on other words, and words that share n-grams are similar. The hash is the same on every machine.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

DIMENSION = 512
SHORTEST, LONGEST = 2, 4  # characters of an n-gram
_BEGIN, _END, _SHAPE = "<", ">", " "


def without_accents(word: str) -> str:
    """The word in plain characters: an accent is a character of its own in the decomposed form, and is left out.

    Example:
        >>> without_accents("Zürich")
        'Zurich'
    """
    decomposed = unicodedata.normalize("NFKD", word)
    return "".join(one for one in decomposed if not unicodedata.combining(one))


def hashed_ngrams(words: Sequence[str], dimension: int = DIMENSION) -> npt.NDArray[np.float32]:
    """Directions of the words' n-grams, (words, dimension), each of length 1.

    Example:
        >>> table = hashed_ngrams(["playing", "plays", "weather"])
        >>> similarity = table @ table.T
        >>> bool(similarity[0, 1] > similarity[0, 2])
        True
    """
    table = np.zeros((len(words), dimension), dtype=np.float32)
    known: dict[str, tuple[int, int]] = {}
    for row, word in enumerate(words):
        for text in ngrams(word):
            if text not in known:
                known[text] = entry(text, dimension)
            column, sign = known[text]
            table[row, column] += sign
    lengths = np.linalg.norm(table, axis=1, keepdims=True)
    return table / np.maximum(lengths, 1.0)  # the entries are whole numbers, and may cancel out to zero


def ngrams(word: str) -> Iterator[str]:
    """Of the word between two marks, in lower case and without accents; and what its characters look like.

    Example:
        >>> list(ngrams("7Up"))
        ['<7', '7u', 'up', 'p>', '<7u', '7up', 'up>', '<7up', '7up>', ' 0Xx']
    """
    plain = without_accents(word)
    marked = _BEGIN + plain.lower() + _END
    for size in range(SHORTEST, LONGEST + 1):
        for begin in range(len(marked) - size + 1):
            yield marked[begin : begin + size]
    yield _SHAPE + shape(plain)


def shape(word: str) -> str:
    """Which kinds of characters follow each other, digits one by one.

    Example:
        >>> shape("McDonald's"), shape("10:30")
        ("XxXx'x", '00:00')
    """
    kinds = "".join(_kind(one) for one in word)
    return re.sub(r"([Xx])\1+", r"\1", kinds)


def _kind(character: str) -> str:
    if character.isdigit():
        return "0"
    if character.isalpha():
        return "X" if character.isupper() else "x"
    return character


def entry(text: str, dimension: int) -> tuple[int, int]:
    """The entry to which an n-gram adds, and the sign of what it adds."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    sign = 1 if number >> 63 else -1
    return number % dimension, sign
