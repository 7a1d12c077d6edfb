"""Splits that do not move, and duplicates against a computation with plain strings."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.nlu.corpus import Corpus, Utterance
from tasks.nlu.generator import utterances
from tasks.nlu.readers import read
from tasks.nlu.splits import Split, near_duplicates, split
from tests.helpers.corpora import data_folder


def texts(corpus: Corpus, rows: np.ndarray) -> list[str]:
    return [" ".join(corpus[row].words) for row in rows]


def sides(corpus: Corpus, **settings: object) -> dict[str, str]:
    """In which set each text is."""
    parts = vars(split(corpus, **settings))
    return {text: name for name, rows in parts.items() for text in texts(corpus, rows)}


WORD = st.sampled_from(["call", "Call", "anna", "ANNA", "7", "at", "été"])
UTTERANCE = st.lists(WORD, min_size=1, max_size=5).map(lambda words: Utterance(tuple(words), ("O",) * len(words), "a"))
UTTERANCES = st.lists(UTTERANCE, min_size=1, max_size=30)


@settings(max_examples=100, deadline=None)
@given(some=UTTERANCES, others=UTTERANCES, seed=st.integers(-5, 5))
def test_hash_split_does_not_move_when_utterances_are_added(some, others, seed):
    before = sides(Corpus(some), seed=seed)
    after = sides(Corpus([*others, *some, *others]), seed=seed)
    assert before.items() <= after.items()


@settings(max_examples=100, deadline=None)
@given(some=UTTERANCES)
def test_equal_utterances_are_on_one_side_whatever_their_case_and_labels(some):
    shouted = [Utterance(tuple(w.upper() for w in u.words), ("B-x",) * len(u.words), "b") for u in some]
    side = sides(Corpus([*some, *shouted]))
    for text, name in side.items():
        assert side[text.upper()] == name


@pytest.mark.parametrize("kind", ["hash", "random"])
@given(some=UTTERANCES)
@settings(max_examples=30, deadline=None)
def test_every_row_is_in_one_set(kind, some):
    parts = vars(split(Corpus(some), kind)).values()
    assert sorted(np.concatenate(list(parts)).tolist()) == list(range(len(some)))
    assert all(rows.dtype == np.int64 and (np.diff(rows) > 0).all() for rows in parts)


def test_hash_split_is_that_of_blake2b():
    corpus = Corpus(utterances(300, seed=4))
    parts = vars(split(corpus, seed=7, shares=(0.2, 0.3, 0.5)))
    for name, low, high in (("train", 0, 0.2), ("validation", 0.2, 0.5), ("test", 0.5, 1)):
        for text in texts(corpus, parts[name]):
            digest = hashlib.blake2b(text.lower().encode(), digest_size=8, key=b"7").digest()
            assert low <= int.from_bytes(digest, "little") / 2**64 <= high


def test_random_split_has_exact_sizes_and_follows_its_seed():
    corpus = Corpus(utterances(1_001, seed=4))
    first, again, other = split(corpus, "random", 1), split(corpus, "random", 1), split(corpus, "random", 2)
    assert [len(rows) for rows in vars(first).values()] == [450, 50, 501]
    assert all(np.array_equal(a, b) for a, b in zip(vars(first).values(), vars(again).values(), strict=True))
    assert not np.array_equal(first.train, other.train)
    assert 150 < len(np.intersect1d(first.train, other.train)) < 255  # 202.5 by chance, six deviations


def test_another_seed_is_another_hash_split():
    corpus = Corpus(utterances(1_000, seed=4))
    assert not np.array_equal(split(corpus, seed=0).train, split(corpus, seed=1).train)


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.5, 0.2, 0.2), (1.2, -0.2, 0), (float("nan"), 0.5, 0.5)])
def test_bad_shares_are_named(shares):
    with pytest.raises(ValueError, match="shares must be three numbers >= 0 that sum to 1, got"):
        split(Corpus(utterances(3)), shares=shares)


def test_a_share_may_be_nothing_and_an_unknown_kind_is_named():
    corpus = Corpus(utterances(50))
    for kind in ("hash", "random"):
        assert [len(rows) for rows in vars(split(corpus, kind, shares=(1, 0, 0))).values()] == [50, 0, 0]
        assert [len(rows) for rows in vars(split(corpus, kind, shares=(0, 0, 1))).values()] == [0, 0, 50]
    with pytest.raises(ValueError, match="kind must be one of hash, random, got 'even'"):
        split(corpus, "even")


# ---------------------------------------------------------------- duplicates


def masked(one: Utterance) -> str:
    words = [re.sub("[0-9]", "0", word.lower()) for word in one.words]
    for kind, start, end in reversed(one.slots()):
        words[start:end] = [f"<{kind}>"]
    return " ".join(words)


def naive(corpus: Corpus, parts: Split) -> tuple[int, int]:
    near = {masked(corpus[row]) for row in parts.train}
    exact = {text.lower() for text in texts(corpus, parts.train)}
    return (
        sum(masked(corpus[row]) in near for row in parts.test),
        sum(text.lower() in exact for text in texts(corpus, parts.test)),
    )


TAG = st.sampled_from(["O", "O", "B-a", "I-a", "B-b", "I-b"])  # I- without B- too
TAGGED = st.lists(st.tuples(st.sampled_from(["call", "Call", "12", "34", "a"]), TAG), min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.lists(TAGGED, min_size=1, max_size=40))
def test_duplicates_as_a_naive_computation_finds(pairs):
    corpus = Corpus(Utterance(*zip(*one, strict=True), "a") for one in pairs)  # type: ignore[arg-type]
    parts = split(corpus, "random")
    found = near_duplicates(corpus, parts)
    near, exact = naive(corpus, parts)
    assert (found.near_duplicates, found.exact_duplicates) == (near, exact)
    assert found.near_duplicate_share == near / max(1, len(parts.test))
    assert found.exact_duplicate_share == exact / max(1, len(parts.test))


@pytest.mark.parametrize("kind", ["hash", "random"])
def test_duplicates_of_generated_utterances(kind):
    corpus = Corpus(utterances(3_000, seed=1))
    parts = split(corpus, kind)
    found = near_duplicates(corpus, parts)
    assert (found.near_duplicates, found.exact_duplicates) == naive(corpus, parts)
    assert found.near_duplicates > 100  # so that there is something to find
    assert kind == "random" or found.exact_duplicates == 0


# ---------------------------------------------------------------- the real corpora


@pytest.mark.parametrize("task", ["atis", "snips", "nlu-eval"])
def test_real_corpora(task):
    corpus = read(task, data_folder())
    parts = split(corpus)
    for rows, share in zip(vars(parts).values(), (0.45, 0.05, 0.50), strict=True):
        assert len(rows) / len(corpus) == pytest.approx(share, abs=0.015)
    found = near_duplicates(corpus, parts)
    assert (found.near_duplicates, found.exact_duplicates) == naive(corpus, parts)
    assert found.exact_duplicates == 0
    trained, tested = set(texts(corpus, parts.train)), set(texts(corpus, parts.test))
    assert not trained & tested
