"""Canaries of the federated secret sharer: random phrases in the sentences of a few users (Thakkar et al. 2020).

Each user shares a canary with probability p_u, and each sentence of such a user is replaced by it with probability p_e,
all independently. If several canaries want one sentence, one of them gets it, each with the same probability; so a
canary's insertions can be fewer than its rates say, and the manifest counts them.

Cut users to their budget of words first, insert then, and deal the sentences anew (`UserData.iid`) last.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edpsgd import files
from edpsgd._arguments import check_count
from tasks.language.dictionary import EOS, UNK, Dictionary, tokenize
from tasks.language.user_texts import RawUsers, UserData

FIRST = EOS + 1  # the first number that is a word
PAPER = "1/50000:0.01,1/50000:0.1,1/50000:1,3/50000:0.01,3/50000:0.1,3/50000:1,1/5000:0.01,1/5000:0.1,1/5000:1"
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Configuration:
    """How often a canary is inserted. With a rate of 0 it never is: a control.

    Attributes:
        users_rate: p_u, the probability that a user shares it.
        examples_rate: p_e, the probability that a sentence of such a user is replaced by it.
    """

    users_rate: float
    examples_rate: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {value!r}")


@dataclass(frozen=True)
class Canary:
    """A phrase.

    Attributes:
        words: their numbers in the dictionary.
        configuration: how often it is inserted.
    """

    words: tuple[int, ...]
    configuration: Configuration

    def __post_init__(self) -> None:
        if not self.words or min(self.words) < FIRST:
            raise ValueError("the words of a canary must be at least one, and none of them UNK, BOS or EOS")


@dataclass(frozen=True)
class Manifest:
    """What was inserted.

    Attributes:
        canaries: all of them.
        sharers: how many users share each.
        insertions: how many sentences are each.
        seed: of the draws.
    """

    canaries: tuple[Canary, ...]
    sharers: tuple[int, ...]
    insertions: tuple[int, ...]
    seed: int

    def save(self, path: Path, dictionary: Dictionary) -> None:
        """Writes it as JSON, with the canaries as words: they are random, and public."""
        rows = [
            {"words": dictionary.decode(one.words), **vars(one.configuration), "sharers": sharers, "insertions": times}
            for one, sharers, times in zip(self.canaries, self.sharers, self.insertions, strict=True)
        ]
        content = {"seed": self.seed, "canaries": rows}
        files.write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: Path, dictionary: Dictionary) -> Manifest:
        """What save wrote; the dictionary may be another one, if it has all words."""
        try:
            content = files.read_json(path)
            rows = [_row(row) for row in content["canaries"]]
            seed = int(content["seed"])
        except FileNotFoundError:
            raise ValueError(f"{path}: there is no such file") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no manifest of canaries, or it is damaged: {type(error).__name__}") from None
        try:
            canaries = parse([words for words, *_ in rows], dictionary, [rates for _, rates, *_ in rows])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return cls(tuple(canaries), tuple(row[2] for row in rows), tuple(row[3] for row in rows), seed)


def _row(row: dict[str, Any]) -> tuple[list[str], Configuration, int, int]:
    rates = Configuration(float(row["users_rate"]), float(row["examples_rate"]))
    return [str(word) for word in row["words"]], rates, int(row["sharers"]), int(row["insertions"])


# -------------------------------------------------------------------- making


def parse_rates(text: str) -> list[Configuration]:
    """Reads pairs p_u:p_e with commas between them.

    Example:
        >>> parse_rates("1/5000:0.1,0:0")
        [Configuration(users_rate=0.0002, examples_rate=0.1), Configuration(users_rate=0.0, examples_rate=0.0)]
    """
    found = []
    for pair in text.split(","):
        try:
            users, examples = (float(Fraction(rate.strip())) for rate in pair.split(":"))
            found.append(Configuration(users, examples))
        except (ValueError, ZeroDivisionError, OverflowError):
            raise ValueError(f"rates must be pairs p_u:p_e of numbers from 0 to 1, got {pair!r}") from None
    return found


def make(
    words: int, configurations: Sequence[Configuration], per_configuration: int = 10, length: int = 5, *, seed: int
) -> list[Canary]:
    """Different random phrases, each word drawn with the same probability.

    Args:
        words: size of the dictionary, with UNK, BOS and EOS, which are never drawn.
        configurations: how often they are inserted.
        per_configuration: how many phrases for each.
        length: words in a phrase.
        seed: of the draw.

    Example:
        >>> found = make(1003, [Configuration(0.1, 1.0), Configuration(0.0, 0.0)], per_configuration=3, seed=1)
        >>> len(found), {len(one.words) for one in found}
        (6, {5})
    """
    number = per_configuration * len(configurations)
    if number < 1 or length < 1:
        raise ValueError(
            "there must be at least one configuration, one phrase for each, and one word in a phrase; got "
            f"{len(configurations)}, {per_configuration} and {length}"
        )
    if words <= FIRST or (words - FIRST) ** length < number:
        raise ValueError(f"words must be enough for {number} different phrases of {length} words, got {words}")
    draw, phrases = np.random.default_rng(seed), dict[tuple[int, ...], None]()
    while len(phrases) < number:
        phrases[tuple(draw.integers(FIRST, words, size=length).tolist())] = None
    return [Canary(phrase, configurations[i // per_configuration]) for i, phrase in enumerate(phrases)]


def parse(
    phrases: Iterable[str | Sequence[str]], dictionary: Dictionary, configurations: Sequence[Configuration]
) -> list[Canary]:
    """Phrases of one's own.

    Args:
        phrases: texts, or lists of words.
        dictionary: must have all their words. If not, the error names the canary and the word by their numbers.
        configurations: the first is of the first phrase and so on, and then from the first again.

    Example:
        >>> parse(["the red cat"], Dictionary(["the", "cat", "red"]), [Configuration(0.1, 1.0)])[0].words
        (3, 5, 4)
    """
    found = []
    for number, phrase in enumerate(phrases):
        ids = dictionary.encode(tokenize(phrase) if isinstance(phrase, str) else list(phrase)).tolist()
        if UNK in ids:
            raise ValueError(f"canary {number + 1}: word {ids.index(UNK) + 1} of {len(ids)} is not in the dictionary")
        if not ids:
            raise ValueError(f"canary {number + 1}: it has no words")
        found.append(Canary(tuple(ids), configurations[number % len(configurations)]))
    return found


# -------------------------------------------------------------------- inserting


def insert(data: UserData, canaries: Sequence[Canary], seed: int) -> tuple[UserData, Manifest]:
    """Data in which some sentences are canaries; each canary's draws depend on the seed and its place alone.

    Example:
        >>> data = UserData.from_lists([[[5, 6], [7]], [[8]]])
        >>> _, manifest = insert(data, [Canary((3, 4), Configuration(1.0, 1.0))], seed=1)
        >>> manifest.sharers, manifest.insertions
        ((2,), (3,))
    """
    places, which, manifest = _draw(data.users, canaries, seed)
    replaced = np.zeros(len(data.sentences) - 1, bool)
    replaced[places] = True
    lengths = np.diff(data.sentences)
    kept = data.tokens[~np.repeat(replaced, lengths)]
    lengths[places] = np.array([len(one.words) for one in canaries], np.int64)[which]
    is_new = np.repeat(replaced, lengths)
    tokens = np.empty(len(is_new), np.int32)
    tokens[~is_new] = kept
    tokens[is_new] = np.fromiter(chain.from_iterable(canaries[i].words for i in which), np.int32)
    return UserData(tokens, np.concatenate([[0], np.cumsum(lengths)]), data.users), manifest


def insert_texts(
    raw: RawUsers, canaries: Sequence[Canary], dictionary: Dictionary, seed: int
) -> tuple[RawUsers, Manifest]:
    """The same in texts: what is not replaced stays as it was written."""
    phrases = [" ".join(dictionary.decode(one.words)) for one in canaries]
    for number, (phrase, one) in enumerate(zip(phrases, canaries, strict=True), start=1):
        if tuple(dictionary.encode(tokenize(phrase)).tolist()) != one.words:
            raise ValueError(f"canary {number}: its words, written as a text, are read as others from it")
    starts = np.concatenate([[0], np.cumsum([len(texts) for texts in raw.texts], dtype=np.int64)])
    places, which, manifest = _draw(starts, canaries, seed)
    texts = [list(own) for own in raw.texts]
    for place, number in zip(places.tolist(), which.tolist(), strict=True):
        user = int(np.searchsorted(starts, place, side="right")) - 1
        texts[user][place - int(starts[user])] = phrases[number]
    return RawUsers(raw.names, texts), manifest


def _draw(users: Numbers, canaries: Sequence[Canary], seed: int) -> tuple[Numbers, Numbers, Manifest]:
    """Which sentences are replaced, in their order, by which canary.

    Args:
        users: where each user's sentences begin, and the end.
        canaries: who want them.
        seed: of the draws.
    """
    check_count("seed", seed, least=0)
    counts, wishes, sharers = np.diff(users), [np.empty(0, np.int64)], []
    for number, canary in enumerate(canaries, start=1):
        draw, rates = np.random.default_rng([seed, number]), canary.configuration
        is_sharer = draw.random(len(counts)) < rates.users_rate
        theirs = np.flatnonzero(np.repeat(is_sharer, counts))
        wishes.append(theirs[draw.random(len(theirs)) < rates.examples_rate])
        sharers.append(int(is_sharer.sum()))
    wanted = np.concatenate(wishes)
    by = np.repeat(np.arange(len(canaries)), [len(wish) for wish in wishes[1:]])
    order = np.random.default_rng([seed, 0]).permutation(len(wanted))
    places, first = np.unique(wanted[order], return_index=True)  # the first in a random order: each as likely
    which = by[order][first]
    insertions = np.bincount(which, minlength=len(canaries)).tolist()
    return places, which, Manifest(tuple(canaries), tuple(sharers), tuple(insertions), seed)
