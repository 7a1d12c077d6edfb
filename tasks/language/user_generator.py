"""Synthetic users: a language that all of them share, topics that some prefer, and phrases of their own."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edpsgd._arguments import check_count
from tasks.language.user_texts import Numbers, RawUsers, Words, bounds_of

Shares = npt.NDArray[np.float64]

_CONSONANTS, _VOWELS = "bdfghklmnprstvz", "aeiou"
_SYLLABLES = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
_STRIDE = 7919  # a prime that does not divide 75**k: it walks through all words of k syllables in a mixed order
_BLOCK = 256  # users who are drawn together; more users are more blocks
_TOPICS, _FAVOURITES = 10, 2
_PHRASES, _PHRASE = 3, (3, 5)  # of a user; shortest and longest
_SENTENCE = (3, 15)  # shortest and longest


class _Language(NamedTuple):
    """How words follow each other.

    Attributes:
        cumulative: the topics' shares of words, summed, topic after topic; topic t goes from t to t + 1.
        successors: of a word in a topic, the likely one and another, (topics, words, 2).
    """

    cumulative: Shares
    successors: Words

    def follow(self, rng: np.random.Generator, topic: Numbers, word: Numbers) -> Numbers:
        """The next word: the likely one (0.4), the other (0.2), or any of the topic."""
        chance = rng.random(len(word))
        known = self.successors[topic, word, (chance < 0.2).astype(np.int64)]
        return np.where(chance < 0.6, known, _draw(self.cumulative, rng, topic))


def generate_words(words: int) -> list[str]:
    """The generator's words, the most frequent first; a shorter list is the beginning of a longer one.

    Example:
        >>> generate_words(78)[-4:]
        ['le', 'baba', 'nula', 'fote']
    """
    check_count("words", words)
    found: list[str] = []
    syllables = 0
    while len(found) < words:
        syllables += 1
        count = len(_SYLLABLES) ** syllables  # all words of that length
        missing = min(count, words - len(found))
        found += [_spelled(number * _STRIDE % count, syllables) for number in range(missing)]
    return found


def _spelled(number: int, syllables: int) -> str:
    """The word of a number: its digits to the base of all syllables, the last one first."""
    word = ""
    for _ in range(syllables):
        number, digit = divmod(number, len(_SYLLABLES))
        word += _SYLLABLES[digit]
    return word


def generate(users: int, seed: int, sentences: int = 40, words: int = 2000) -> RawUsers:
    """Synthetic users: words as frequent as Zipf says, in topics that all users share, and phrases of their own.

    A user has two favourite topics and three phrases of 3 to 5 words that nobody else has but by chance, one of which
    begins every tenth sentence. The language depends on `words` alone, so that users of any seed speak the same. The
    first thousand users of a million are those of a thousand.

    Args:
        users: how many.
        seed: the same seed gives the same users.
        sentences: of a user on average; from half to one and a half times as many.
        words: size of the vocabulary, which is generate_words(words).

    Example:
        >>> raw = generate(3, seed=1, sentences=2)
        >>> raw.names, set(" ".join(raw.texts[0]).split()) <= set(generate_words(2000))
        (['user0', 'user1', 'user2'], True)
    """
    check_count("users", users)
    check_count("seed", seed, least=0)
    check_count("sentences", sentences)
    names, language = np.array(generate_words(words), dtype=object), _language(words)
    blocks = math.ceil(users / _BLOCK)
    texts: list[list[str]] = []
    for block in range(blocks):
        # A generator for each block, so that more users change nothing in those before.
        rng = np.random.default_rng([seed, block])
        texts += _texts(names, language, rng, sentences)
    return RawUsers([f"user{number}" for number in range(users)], texts[:users])


@cache
def _language(words: int) -> _Language:
    """The language of so many words; the same for every seed of users."""
    rng = np.random.default_rng(0)
    preference = np.where(rng.random((_TOPICS, words)) < 0.1, 10.0, 1.0)
    weights = preference / np.arange(2, words + 2)  # Zipf's law
    shares: Shares = weights / weights.sum(axis=1, keepdims=True)
    cumulative = (np.cumsum(shares, axis=1) + np.arange(_TOPICS)[:, None]).ravel()
    topic = np.arange(_TOPICS).repeat(2 * words).reshape(_TOPICS, words, 2)
    return _Language(cumulative, _draw(cumulative, rng, topic).astype(np.int32))


def _draw(cumulative: Shares, rng: np.random.Generator, topic: Numbers) -> Numbers:
    """A word of each topic, in the shape of the topics."""
    words = len(cumulative) // _TOPICS
    found = np.searchsorted(cumulative, topic + rng.random(topic.shape), side="right")
    return np.clip(found - topic * words, 0, words - 1)  # sums may miss t + 1 by a rounding


def _texts(
    names: npt.NDArray[np.object_], language: _Language, rng: np.random.Generator, sentences: int
) -> list[list[str]]:
    """The sentences of each user of a block."""
    counts = rng.integers((sentences + 1) // 2, sentences + sentences // 2, _BLOCK, endpoint=True)
    owner = np.repeat(np.arange(_BLOCK), counts)
    given = _phrases(rng, owner, len(names))
    spoken = _spoken_words(language, rng, _topics(rng, owner), given)
    lengths = _SENTENCE[0] + rng.binomial(_SENTENCE[1] - _SENTENCE[0], 0.4, len(owner))
    lengths = np.maximum(lengths, (given >= 0).sum(axis=1))  # a phrase is never cut
    is_said = np.arange(_SENTENCE[1]) < lengths[:, None]
    said = names[spoken[is_said]].tolist()  # the words of all sentences in a row
    texts = [" ".join(said[start:end]) for start, end in pairwise(bounds_of(lengths).tolist())]
    return [texts[start:end] for start, end in pairwise(bounds_of(counts).tolist())]


def _topics(rng: np.random.Generator, owner: Numbers) -> Numbers:
    """The topic of each sentence, (sentences,): mostly one of the user's favourites."""
    favourites = rng.integers(_TOPICS, size=(_BLOCK, _FAVOURITES))
    own = favourites[owner, rng.integers(_FAVOURITES, size=len(owner))]
    return np.where(rng.random(len(owner)) < 0.8, own, rng.integers(_TOPICS, size=len(owner)))


def _phrases(rng: np.random.Generator, owner: Numbers, words: int) -> Numbers:
    """The words of the user's phrase that a sentence begins with, (sentences, longest phrase).

    They are -1 where a sentence has no phrase, or the phrase has ended.
    """
    shortest, longest = _PHRASE
    phrases = rng.integers(words, size=(_BLOCK, _PHRASES, longest))
    lengths = rng.integers(shortest, longest, size=(_BLOCK, _PHRASES, 1), endpoint=True)
    phrases[np.arange(longest) >= lengths] = -1
    said = phrases[owner, rng.integers(_PHRASES, size=len(owner))]
    said[rng.random(len(owner)) >= 0.1] = -1
    return said


def _spoken_words(language: _Language, rng: np.random.Generator, topic: Numbers, given: Numbers) -> Numbers:
    """Sentences of the greatest length, (sentences, words): the given words, then others.

    Each word follows the one before it.
    """
    word = _draw(language.cumulative, rng, topic)
    spoken = np.full((len(topic), _SENTENCE[1]), -1)
    spoken[:, : given.shape[1]] = given
    for place in range(_SENTENCE[1]):
        word = np.where(spoken[:, place] >= 0, spoken[:, place], word)
        spoken[:, place] = word
        word = language.follow(rng, topic, word)
    return spoken
