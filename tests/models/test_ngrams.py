"""Hashed n-grams: which there are, and a hash that is the same everywhere."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from models.ngrams import entry, hashed_ngrams, ngrams, shape

WORDS = ["call", "Zürich", "10:30", "日本", "a", "", "\u0301", "\udcff", "call"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("Ab", ["<a", "ab", "b>", "<ab", "ab>", "<ab>", " Xx"]),
        ("é", ["<e", "e>", "<e>", " x"]),
        ("", ["<>", " "]),
    ],
)
def test_ngrams_of_a_word(word, expected) -> None:
    assert list(ngrams(word)) == expected


@pytest.mark.parametrize(
    ("word", "expected"),
    [("hello", "x"), ("McDonald", "XxXx"), ("2015", "0000"), ("7pm", "0x"), ("9:30", "0:00"), ("日本", "x")],
)
def test_shapes(word, expected) -> None:
    assert shape(word) == expected


def test_the_hash_never_changes() -> None:
    """Runs that were saved hang on it."""
    assert [entry(text, 512) for text in ("<ca", "日本", " x0")] == [(120, -1), (488, -1), (36, 1)]


def test_vectors_are_signed_counts_of_length_one() -> None:
    """Against a loop; words do not change each other's."""
    table = hashed_ngrams(WORDS, 32)
    for row, word in enumerate(WORDS):
        counts = np.zeros(32)
        for text in ngrams(word):
            digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            column, sign = int.from_bytes(digest, "little") % 32, 1 if digest[7] >= 128 else -1
            counts[column] += sign
        np.testing.assert_allclose(table[row], counts / np.sqrt((counts**2).sum()), rtol=1e-6)
        np.testing.assert_array_equal(hashed_ngrams([word], 32)[0], table[row])
    assert table.dtype == np.float32
    assert hashed_ngrams([], 32).shape == (0, 32)


def test_ngrams_that_cancel_out_are_zero() -> None:
    """In one dimension, with as many signs of one kind as of the other."""
    words = [word for word in "abc" if sum(entry(t, 1)[1] for t in ngrams(word)) == 0]
    assert words == ["a"]
    assert not hashed_ngrams(words, 1).any()
