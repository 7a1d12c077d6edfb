"""What the heads of a CLC without a trained encoder read: against a loop over utterances and words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.frozen_clc import LENGTH, FrozenCLC, FrozenClcInputs
from models.ngrams import hashed_ngrams
from models.vectors import WordVectors

WORDS = ["call", "Anna", "zz", "omar", "\u200b", "at"]
SAID = [["call", "Anna", "at", "zz", "call"], ["\u200b"], ["omar", "zz"]]
DIMENSION, NGRAMS = 5, 16


def vectors() -> WordVectors:
    """Of some words in a table; others are made of their subwords, and one has none."""
    rng = np.random.default_rng(0)
    found = WordVectors(["call", "anna", "at"], rng.normal(size=(3, DIMENSION)).astype(np.float32), "list", DIMENSION)
    made = {word: rng.normal(size=DIMENSION).astype(np.float32) for word in ("zz", "omar")}
    found.out_of_vocabulary = made.get
    return found


def model_of(source: WordVectors, window: int = 2) -> FrozenCLC:
    model = FrozenCLC(4, DIMENSION, 3, 5, ngrams=NGRAMS, window=window)
    model.set_words(source.table)
    return model.eval()


def batch_of(said: list[list[str]], source: WordVectors) -> dict[str, torch.Tensor]:
    numbers = np.array([WORDS.index(word) for one in said for word in one])
    return FrozenClcInputs(source, NGRAMS).table(WORDS).batch(numbers, np.array([len(one) for one in said]))


def unit(vector: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(vector)
    return vector / length if length else vector


def direction(word: str, source: WordVectors) -> np.ndarray:
    [row] = source.lookup([word])
    vector = source.table[row] if row >= 0 else source.out_of_vocabulary(word)
    return np.zeros(DIMENSION) if vector is None else unit(vector)


def word_features(said: list[str], source: WordVectors, window: int) -> np.ndarray:
    """Words x width, one word at a time."""
    own = [direction(word, source) for word in said]
    places = [0] + [sign * distance for distance in range(1, window + 1) for sign in (-1, 1)]
    rows = []
    for number, word in enumerate(said):
        parts = []
        for d in places:
            is_inside = 0 <= number + d < len(said)
            parts.append(own[number + d] * (1 - abs(d) / (window + 2)) if is_inside else np.zeros(DIMENSION))
        rows.append(np.concatenate([*parts, hashed_ngrams([word], NGRAMS)[0], unit(sum(own))]))
    return LENGTH * np.array(rows)


@pytest.mark.parametrize("window", [0, 1, 2, 6])
def test_features_word_by_word(window) -> None:
    source = vectors()
    model = model_of(source, window)
    words, utterances = model.features(batch_of(SAID, source))
    assert words.shape[2] == model.slots.in_features == (2 * window + 2) * DIMENSION + NGRAMS
    for row, said in enumerate(SAID):
        expected = word_features(said, source, window)
        np.testing.assert_allclose(words[row, : len(said)], expected, rtol=1e-5, atol=1e-5)
        assert not words[row, len(said) :].any()
        length = np.sqrt((expected**2).sum() / len(said))
        np.testing.assert_allclose(utterances[row], length * unit(expected.sum(0)), rtol=1e-5, atol=1e-5)


def test_features_do_not_depend_on_other_utterances() -> None:
    """But for the rounding of sums, which the padding of a batch may put into another order."""
    source = vectors()
    model = model_of(source)
    together = model.features(batch_of(SAID, source))
    for row, said in enumerate(SAID):
        words, utterances = model.features(batch_of([said], source))
        torch.testing.assert_close(together[0][row, : len(said)], words[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(together[1][row], utterances[0], rtol=0, atol=1e-5)


def test_only_the_heads_are_trained() -> None:
    model = model_of(vectors())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.partition(".")[0] for name in trained} == {"intent", "slots", "crf"}
    other = FrozenCLC(**model.settings(), intents=3, tags=5)
    assert {name: p.shape for name, p in other.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


def test_inputs_are_read_as_they_were_saved(tmp_path) -> None:
    FrozenClcInputs(WordVectors(["call"], None, "fasttext-vec", 3), 24).save(tmp_path)
    found = FrozenClcInputs.load(tmp_path)
    batch = found.table(WORDS).batch(np.array([2, 0]), np.array([2]))
    assert batch["rows"][batch["place"]].tolist() == [[0, 1]]
    np.testing.assert_array_equal(batch["ngrams"][batch["place"]][0], hashed_ngrams(["zz", "call"], 24))
