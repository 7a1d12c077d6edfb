"""Synthetic users: their words, their language, phrases of their own."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tasks.language.dictionary import Dictionary, tokenize
from tasks.language.user_generator import generate, generate_words
from tasks.language.user_texts import UserData


def test_words_of_the_generator() -> None:
    words = generate_words(10_000)
    assert len(set(words)) == 10_000
    assert words[:500] == generate_words(500)
    assert all(tokenize(word) == [word] for word in words)


def test_generated_users_repeat_and_grow() -> None:
    users = generate(300, seed=3, sentences=5, words=200)
    assert generate(40, seed=3, sentences=5, words=200).texts == users.texts[:40]
    assert generate(40, seed=4, sentences=5, words=200).texts != users.texts[:40]
    counts = [len(texts) for texts in users.texts]
    assert (min(counts), max(counts)) == (3, 7)
    assert np.mean(counts) == pytest.approx(5, abs=0.4)
    assert len(set(users.names)) == 300


def test_generated_language() -> None:
    """Frequent words first, as in Zipf's law; the word before tells much about the next; users differ in topics."""
    data = generate(256, seed=1, words=500).numbered(Dictionary(generate_words(500)))
    counts = np.bincount(data.tokens, minlength=503)
    assert counts[:3].sum() == 0  # no word is missing in the list
    tens, hundreds, rest = counts[3:13].sum(), counts[13:103].sum(), counts[103:].sum()
    assert 0.2 < tens / len(data.tokens) < 0.5  # 0.35 of the weights 1 / (rank + 1)
    assert hundreds > rest
    assert _guessed(data.tokens[:-1], data.tokens[1:]) > 1.5 * counts.max() / len(data.tokens)
    assert _distance(data) > 1.2 * _distance(data.iid(seed=0))


def _guessed(before: np.ndarray, after: np.ndarray) -> float:
    """How often the word that most often follows is right."""
    pairs = Counter(zip(before.tolist(), after.tolist(), strict=True))
    best: dict[int, int] = {}
    for (word, _), count in pairs.items():
        best[word] = max(best.get(word, 0), count)
    return sum(best.values()) / len(before)


def _distance(data: UserData) -> float:
    """Of a user's shares of the 100 most frequent words from everybody's, squared, on average."""
    shares = [np.bincount(np.concatenate(data.of_user(k)), minlength=503)[3:103] for k in range(len(data))]
    users = np.array([share / share.sum() for share in shares])
    return float(((users - users.mean(axis=0)) ** 2).sum(axis=1).mean())


def test_personal_phrases() -> None:
    """Beginnings of three rare words that one user says again and again, and nobody else."""
    users = generate(200, seed=2, sentences=60, words=2000)
    said = [Counter(" ".join(text.split()[:3]) for text in texts) for texts in users.texts]
    everybody = Counter(phrase for own in said for phrase in own)
    repeated = [[p for p, n in own.items() if n >= 2 and everybody[p] == 1] for own in said]
    assert np.mean([len(phrases) for phrases in repeated]) == pytest.approx(
        1.7, abs=0.5
    )  # of three, each said Poisson(1 to 3) times
