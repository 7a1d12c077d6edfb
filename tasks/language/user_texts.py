"""Texts grouped by user: words as numbers in three arrays, held-out users, windows that a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from edpsgd._arguments import check_count
from models.language_model import NO_TARGET
from tasks.language.dictionary import BOS, EOS, Dictionary, tokenize

Words = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class UserData:
    """The sentences of all users as numbers of words, without BOS and EOS.

    A user may have no sentences, and a sentence no words.

    Attributes:
        tokens: all words of all sentences in a row.
        sentences: where each sentence begins in tokens, and the end.
        users: where each user begins in sentences, and the end.

    Example:
        >>> data = UserData.from_lists([[[5, 6], [7]], [], [[8]]])
        >>> len(data), data.sizes().tolist(), [words.tolist() for words in data.of_user(0)]
        (3, [3, 0, 1], [[5, 6], [7]])
    """

    tokens: Words
    sentences: Numbers
    users: Numbers

    def __post_init__(self) -> None:
        _check_bounds("sentences", self.sentences, "tokens", len(self.tokens))
        _check_bounds("users", self.users, "sentences", len(self.sentences) - 1)

    @classmethod
    def from_lists(cls, users: Sequence[Sequence[Sequence[int]]]) -> UserData:
        """From the sentences of each user."""
        sentences = list(chain.from_iterable(users))
        tokens = np.fromiter(chain.from_iterable(sentences), dtype=np.int32)
        sentence_bounds = bounds_of([len(words) for words in sentences])
        user_bounds = bounds_of([len(texts) for texts in users])
        return cls(tokens, sentence_bounds, user_bounds)

    def __len__(self) -> int:
        return len(self.users) - 1

    def sizes(self) -> Numbers:
        """How many words each user has, (users,)."""
        return np.diff(self.sentences[self.users])

    def of_user(self, k: int) -> list[Words]:
        """The sentences of user k."""
        if not 0 <= k < len(self):
            raise IndexError(f"k must be from 0 to {len(self) - 1}, got {k}")
        bounds = self.sentences[self.users[k] : self.users[k + 1] + 1].tolist()
        return [self.tokens[start:end] for start, end in pairwise(bounds)]

    def cut(self, budget: int) -> UserData:
        """The first words of each user, at most so many; a sentence that is cut through is shortened."""
        check_count("budget", budget)
        owner = np.repeat(np.arange(len(self)), np.diff(self.users))  # of each sentence
        first_word = self.sentences[self.users[:-1]]  # of each user
        before = self.sentences[:-1] - first_word[owner]  # words of the user before the sentence
        kept = before < budget
        lengths = np.minimum(np.diff(self.sentences), budget - before)[kept]
        users = np.concatenate([[0], np.cumsum(kept)])[self.users]
        return self._with(self.sentences[:-1][kept], lengths, users)

    def select(self, users: npt.ArrayLike) -> UserData:
        """Some users, by their numbers, in the order given."""
        # numpy makes an empty list one of floats, which the next check would refuse.
        chosen = np.asarray(users if np.size(users) else np.empty(0, np.int64))
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
            raise ValueError(f"users must be a list of whole numbers, got {chosen.ndim} dimensions of {chosen.dtype}")
        if np.any((chosen < 0) | (chosen >= len(self))):
            raise ValueError(f"users must be from 0 to {len(self) - 1}, got {chosen.min()} to {chosen.max()}")
        counts = np.diff(self.users)[chosen]
        return self._reordered(_ranges(self.users[chosen], counts), bounds_of(counts))

    def iid(self, seed: int) -> UserData:
        """All sentences shuffled and dealt anew, to users with the same numbers of sentences as before."""
        order = np.random.default_rng(seed).permutation(len(self.sentences) - 1)
        return self._reordered(order, self.users)

    def _reordered(self, order: Numbers, users: Numbers) -> UserData:
        """The sentences with these numbers, given to users with these bounds."""
        return self._with(self.sentences[order], np.diff(self.sentences)[order], users)

    def _with(self, starts: Numbers, lengths: Numbers, users: Numbers) -> UserData:
        """The sentences that begin at these tokens and are so long, of users with these bounds."""
        return UserData(self.tokens[_ranges(starts, lengths)], bounds_of(lengths), users)


def _check_bounds(name: str, bounds: Numbers, inner: str, end: int) -> None:
    """Bounds go up from 0 to the end of what they divide."""
    if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != end or np.any(np.diff(bounds) < 0):
        raise ValueError(f"{name} must go up from 0 to {end}, the number of {inner}")


def bounds_of(lengths: npt.ArrayLike) -> Numbers:
    """Where pieces of these lengths begin, and the end of the last, (pieces + 1,)."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _ranges(starts: Numbers, lengths: Numbers) -> Numbers:
    """The numbers start, start + 1, ... of each piece, one piece after the other."""
    ends = np.cumsum(lengths)
    total = ends[-1] if len(ends) else 0
    shift = starts - (ends - lengths)  # from a place in the answer to the number there
    return np.arange(total) + np.repeat(shift, lengths)


def split_users(data: UserData, names: Sequence[str], seed: int, share: float = 0.1) -> tuple[UserData, UserData]:
    """Training users and held-out users. A user's name decides, so that nobody moves when others come or go.

    Args:
        data: all users.
        names: theirs.
        seed: another seed gives another split.
        share: of held-out users, about; each user's name and the seed decide by a hash.

    Example:
        >>> train, test = split_users(UserData.from_lists([[[3]]] * 1000), [f"user {k}" for k in range(1000)], seed=1)
        >>> len(train) + len(test), 70 < len(test) < 130
        (1000, True)
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise ValueError(f"share must be >= 0 and < 1, got {share!r}")
    if len(names) != len(data):
        raise ValueError(f"names must be as many as there are users, {len(data)}, got {len(names)}")
    key = str(seed).encode()
    digests = [blake2b(name.encode(), digest_size=8, key=key).digest() for name in names]
    place = np.frombuffer(b"".join(digests), "<u8") / 2.0**64  # of each user, from 0 to 1
    is_held_out = place < share
    return data.select(np.flatnonzero(~is_held_out)), data.select(np.flatnonzero(is_held_out))


def windows(sentences: Sequence[npt.NDArray[np.integer]], unroll: int = 10) -> tuple[Numbers, Numbers]:
    """What a model reads and what it has to predict, in windows of `unroll` steps.

    A sentence is BOS w1 ... wn, and its targets are w1 ... wn EOS. Inputs are padded with EOS, targets with -100. A
    sentence without words gives nothing.

    Args:
        sentences: numbers of words.
        unroll: steps of a window; a longer sentence goes on in the next one.

    Returns:
        Inputs and targets, each (number of windows, unroll).

    Example:
        >>> inputs, targets = windows([np.array([7, 8, 9])], unroll=3)
        >>> inputs.tolist(), targets.tolist()
        ([[1, 7, 8], [9, 2, 2]], [[7, 8, 9], [2, -100, -100]])
    """
    check_count("unroll", unroll)
    spoken = [words for words in sentences if len(words)]
    tokens = np.concatenate([np.empty(0, np.int64), *spoken])
    lengths = np.array([len(words) for words in spoken], np.int64)
    bounds = bounds_of(lengths // unroll + 1)  # in windows: n + 1 steps of n words, rounded up
    starts = bounds[:-1] * unroll
    places = _ranges(starts, lengths)
    inputs = np.full(bounds[-1] * unroll, EOS, np.int64)
    inputs[starts] = BOS
    inputs[places + 1] = tokens
    targets = np.full(bounds[-1] * unroll, NO_TARGET, np.int64)
    targets[places] = tokens
    targets[starts + lengths] = EOS
    return inputs.reshape(-1, unroll), targets.reshape(-1, unroll)


# ---------------------------------------------------------------- texts


@dataclass(frozen=True)
class RawUsers:
    """Users with their texts, each text a sentence.

    Example:
        >>> users = RawUsers(["anna"], [["Call me!", "Now."]])
        >>> users.numbered(Dictionary(["call", "me", "."])).tokens.tolist()
        [3, 4, 0, 0, 5]
    """

    names: list[str]
    texts: list[list[str]]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.texts):
            raise ValueError(f"texts must be of as many users as names, got {len(self.texts)} for {len(self.names)}")

    def numbered(self, dictionary: Dictionary) -> UserData:
        """The words of the texts as numbers of a dictionary."""
        tokens_of_users, lengths = [np.empty(0, np.int32)], []
        for texts in self.texts:
            sentences = [tokenize(text) for text in texts]
            lengths += [len(words) for words in sentences]
            words = list(chain.from_iterable(sentences))
            tokens_of_users.append(dictionary.encode(words))
        user_bounds = bounds_of([len(texts) for texts in self.texts])
        return UserData(np.concatenate(tokens_of_users), bounds_of(lengths), user_bounds)
