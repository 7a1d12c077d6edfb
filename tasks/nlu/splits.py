"""Train, validation and test sets, and how far the test set repeats what was trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tasks.nlu.corpus import OUTSIDE, Corpus, Rows

Hashes = npt.NDArray[np.uint64]

SHARES = (0.45, 0.05, 0.50)
KINDS = ("hash", "random")


@dataclass(frozen=True)
class Split:
    """Which rows of a corpus are in which set; ascending, and each row in one of them."""

    train: Rows
    validation: Rows
    test: Rows


@dataclass(frozen=True)
class Overlap:
    """How many test utterances also occur in the training set, and their share of the test set (from 0 to 1).

    Attributes:
        near_duplicates: those whose masked form occurs: lower case, every digit a 0, every slot's value its type.
        exact_duplicates: those whose words occur, in lower case.
    """

    near_duplicates: int
    near_duplicate_share: float
    exact_duplicates: int
    exact_duplicate_share: float


def split(corpus: Corpus, kind: str = "hash", seed: int = 0, shares: Sequence[float] = SHARES) -> Split:
    """Splits a corpus.

    Args:
        corpus: the utterances, pooled.
        kind: "hash": the words of an utterance, in lower case, decide by themselves where it belongs. It never moves
            when other utterances come or go, and equal ones are always together; the sizes are about the shares.
            "random": a permutation, with exact sizes; equal utterances may be on both sides.
        seed: another seed gives another split, of either kind.
        shares: of train, validation and test; they sum to 1.

    Example:
        >>> from tasks.nlu.corpus import Utterance
        >>> corpus = Corpus(Utterance((f"channel{i}",), ("O",), "tune") for i in range(20))
        >>> [len(rows) for rows in vars(split(corpus, "random")).values()]
        [9, 1, 10]
    """
    bounds = _bounds(shares)
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if kind == "hash":
        place = text_hashes(corpus, seed) / 2.0**64  # from 0 to 1
        part = np.searchsorted(bounds, place, side="right")
    else:
        order = np.random.default_rng(seed).permutation(len(corpus))
        part = np.searchsorted(np.rint(bounds * len(corpus)), order, side="right")
    train, validation, test = (np.flatnonzero(part == number) for number in range(3))
    return Split(train.astype(np.int64), validation.astype(np.int64), test.astype(np.int64))


def _bounds(shares: Sequence[float]) -> npt.NDArray[np.float64]:
    """Where validation and test begin, two numbers from 0 to 1."""
    are_shares = len(shares) == 3 and all(share >= 0 for share in shares)
    if not (are_shares and math.isclose(sum(shares), 1, abs_tol=1e-9)):
        raise ValueError(f"shares must be three numbers >= 0 that sum to 1, got {shares!r}")
    return np.array([shares[0], shares[0] + shares[1]])


def text_hashes(corpus: Corpus, seed: int) -> Hashes:
    """A number for the words of each utterance, (utterances,).

    It is the same in every corpus and on every machine, and depends on nothing but the words in
    lower case and the seed.
    """
    words = [word.lower().encode() for word in corpus.words]
    key = str(seed).encode()
    digests = bytearray()
    for start, end in pairwise(corpus.starts.tolist()):
        word_ids = corpus.word_ids[start:end].tolist()
        text = b" ".join([words[number] for number in word_ids])
        digests += blake2b(text, digest_size=8, key=key).digest()
    return np.frombuffer(digests, "<u8").astype(np.uint64)


# ---------------------------------------------------------------- duplicates


def near_duplicates(corpus: Corpus, split: Split) -> Overlap:
    """How many test utterances repeat one of the training set, exactly or but for slot values and digits.

    Example:
        >>> from tasks.nlu.corpus import Utterance
        >>> calls = Corpus(Utterance(("call", name), ("O", "B-name"), "call") for name in ("anna", "ben", "ben"))
        >>> rows = Split(np.array([0]), np.array([], np.int64), np.array([1, 2]))
        >>> near_duplicates(calls, rows)
        Overlap(near_duplicates=2, near_duplicate_share=1.0, exact_duplicates=0, exact_duplicate_share=0.0)
    """
    lower_case = _numbered([word.lower() for word in corpus.words])
    near = _common(forms(corpus), split)
    exact = _common(_code_hashes(lower_case[corpus.word_ids], corpus.starts), split)
    size = max(1, len(split.test))
    return Overlap(near, near / size, exact, exact / size)


def forms(corpus: Corpus) -> Hashes:
    """A number for each utterance, (utterances,); near duplicates have the same."""
    return _code_hashes(*_masked(corpus))


def _common(hashes: Hashes, split: Split) -> int:
    """How many test utterances have a hash that a training utterance has."""
    return int(np.isin(hashes[split.test], hashes[split.train]).sum())


def _numbered(names: Sequence[str]) -> npt.NDArray[np.int32]:
    """A number for each name, (names,), the same for equal ones."""
    _, numbers = np.unique(np.array(names, dtype=object), return_inverse=True)
    return numbers.astype(np.int32)


def _masked(corpus: Corpus) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Numbers for the masked words and the slot types of all utterances, and where each utterance begins in them."""
    zeros = str.maketrans("0123456789", "0000000000")
    word = _numbered([word.lower().translate(zeros) for word in corpus.words])[corpus.word_ids]
    kind = _numbered([tag[2:] for tag in corpus.tags])[corpus.tag_ids]
    is_slot = np.array([tag != OUTSIDE for tag in corpus.tags], bool)[corpus.tag_ids]
    is_continued = np.array([tag[0] == "I" for tag in corpus.tags], bool)[corpus.tag_ids]
    is_continued[1:] &= kind[1:] == kind[:-1]
    is_continued[corpus.starts[:-1]] = False  # an utterance continues no slot of the one before
    is_kept = ~is_continued  # a slot is one code, however many words it has
    codes = np.where(is_slot, -1 - kind, word)[is_kept]  # below zero, so that no word has the same
    starts = np.concatenate([[0], np.cumsum(is_kept)])[corpus.starts]
    return codes, starts


def _code_hashes(codes: npt.NDArray[np.int32], starts: npt.NDArray[np.int64]) -> Hashes:
    """A number of eight bytes for the codes of each utterance, (utterances,)."""
    digests = bytearray()
    for start, end in pairwise(starts.tolist()):
        digests += blake2b(codes[start:end].tobytes(), digest_size=8).digest()
    return np.frombuffer(digests, "<u8").astype(np.uint64)
