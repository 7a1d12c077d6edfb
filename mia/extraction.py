"""What a language model says about a phrase: log-perplexity, its rank among random phrases, and beam search.

Log-perplexity is in bits, as Carlini et al. (2019) define it: the sum of -log2 of the words' probabilities, each after
BOS and the words before it. All words count in the probabilities, UNK, BOS and EOS too; candidates are made of the
dictionary's words only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mia.phrases import FIRST
from models.language_model import LanguageModel, State
from tasks.language.dictionary import BOS

CHUNK = 512  # phrases at a time: bounds the memory, 4 bytes for each phrase and word of the dictionary
PREFIX = 2  # words of a canary that are given, in random sampling
Phrases = npt.NDArray[np.int32]


@torch.inference_mode()
def log_perplexity(model: LanguageModel, sequences: npt.ArrayLike, start: int = 0) -> npt.NDArray[np.float64]:
    """Bits that each phrase costs after BOS.

    Args:
        model: of the words.
        sequences: phrases of one length, (n, L).
        start: how many words at the beginning are given and cost nothing.

    Example:
        >>> model = LanguageModel(words=8, dimension=2, hidden=2)
        >>> _ = torch.nn.init.zeros_(model.output.weight)  # every word is as likely as any
        >>> log_perplexity(model, [[3, 4, 5], [7, 7, 7]], start=1).round(4).tolist()
        [6.0, 6.0]
    """
    ids = _tensor(model, sequences)
    if ids.ndim != 2 or not 0 <= start <= ids.shape[1]:
        raise ValueError(f"sequences must be (n, L) and start from 0 to L, got {tuple(ids.shape)} and {start}")
    table, found = model.table(), []
    for rows in ids.split(CHUNK):
        outputs, _ = model.encode(torch.nn.functional.pad(rows[:, :-1], (1, 0), value=BOS))
        each = torch.arange(len(rows), device=rows.device)
        costs = [_bits(outputs[:, k], table, each, rows[:, k]) for k in range(start, rows.shape[1])]
        found.append(sum(costs, torch.zeros(len(rows), dtype=torch.float64, device=rows.device)))
    return torch.cat(found).cpu().numpy()


def _bits(outputs: Tensor, table: Tensor, node: Tensor, words: Tensor) -> Tensor:
    """What words cost after the contexts with these output embeddings; node says which context each word follows."""
    logits = outputs @ table.T
    return (logits.logsumexp(dim=1)[node] - logits[node, words]).double() / math.log(2)


def _tensor(model: LanguageModel, words: npt.ArrayLike) -> Tensor:
    """Numbers of words, where the model is."""
    weight = model.embedding.weight
    ids = np.asarray(words, np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < len(weight):
        raise ValueError(f"words must be from 0 to {len(weight) - 1}, got {ids.min()} to {ids.max()}")
    return torch.from_numpy(ids).to(weight.device)


def _advance(model: LanguageModel, words: Tensor, state: State, parents: Tensor) -> tuple[Tensor, State]:
    """One word more, each after the context that is its parent: output embeddings and states."""
    outputs, state = model.encode(words[:, None], (state[0][:, parents], state[1][:, parents]))
    return outputs[:, 0], state


# -------------------------------------------------------------------- random sampling


def random_suffixes(words: int, number: int, length: int = 3, *, seed: int) -> Phrases:
    """Independent draws, every word as likely; sorted, so that neighbours share their beginnings.

    Args:
        words: size of the dictionary, with UNK, BOS and EOS, which are never drawn.
        number: how many suffixes.
        length: words in each.
        seed: of the draw.

    Example:
        >>> random_suffixes(words=10_003, number=1000, seed=1).shape
        (1000, 3)
    """
    if number < 1 or length < 1 or words <= FIRST:
        raise ValueError(f"there must be a suffix, with a word, of a dictionary; got {number}, {length}, {words}")
    drawn = np.random.default_rng(seed).integers(FIRST, words, size=(number, length), dtype=np.int32)
    return drawn[np.lexsort(drawn.T[::-1])]


def all_suffixes(words: int, length: int = 3) -> Phrases:
    """All that there are, for small dictionaries.

    Example:
        >>> all_suffixes(words=5, length=2).tolist()
        [[3, 3], [3, 4], [4, 3], [4, 4]]
    """
    return np.indices((words - FIRST,) * length, np.int32).reshape(length, -1).T + np.int32(FIRST)


@dataclass
class Tally:
    """A rank in the making.

    Attributes:
        done: suffixes that were looked at.
        same: those that are the canary's own, which is no rival of itself.
        ahead: the others that are at most as perplexing.
    """

    done: int = 0
    same: int = 0
    ahead: int = 0

    @property
    def rank(self) -> int:
        """1 if no other is at most as perplexing: a tie counts as no memory, so a model that knows nothing has none."""
        return self.ahead + 1

    @property
    def candidates(self) -> int:
        """The canary and its rivals. Of a canary that was never seen, every rank up to it is as likely."""
        return self.done - self.same + 1


def exposure(rank: int, candidates: int) -> float:
    """Bits by which the model narrows the guess (Carlini et al. 2019); at most log2 of the candidates.

    Example:
        >>> exposure(rank=1, candidates=1024), exposure(rank=512, candidates=1024)
        (10.0, 1.0)
    """
    if not 1 <= rank <= candidates:
        raise ValueError(f"rank must be from 1 to the number of candidates, got {rank} of {candidates}")
    return math.log2(candidates) - math.log2(rank)


class Sampling:
    """Compares suffixes with that of a phrase, after the same prefix.

    Contexts that suffixes share are computed once for each chunk. A suffix whose first words alone cost more than the
    phrase's is given up there: words never cost less than nothing, so this changes no rank. Logits are in single
    precision: which of two suffixes costs less can be wrong if they differ by some 1e-5 bits.

    Args:
        model: of the words.
        words: the phrase.
        prefix: how many of its words are given.

    Attributes:
        cost: log-perplexity of the phrase's own suffix.
    """

    @torch.inference_mode()
    def __init__(self, model: LanguageModel, words: Sequence[int], prefix: int = PREFIX) -> None:
        if not 0 <= prefix < len(words):
            raise ValueError(f"prefix must be from 0 to {len(words) - 1}, one less than the words, got {prefix}")
        self._model, self._table = model, model.table()
        outputs, self._state = model.encode(_tensor(model, [[BOS, *words[:prefix]]]))
        self._outputs = outputs[:, -1]
        self._suffix = np.array(words[prefix:], np.int32)
        self.cost = float(self._costs(_tensor(model, self._suffix[None]), math.inf)[0])

    @torch.inference_mode()
    def go_on(self, tally: Tally, suffixes: Phrases) -> None:
        """Looks at the next chunk of suffixes."""
        rows = suffixes[tally.done : tally.done + CHUNK]
        others = rows[(rows != self._suffix).any(axis=1)]
        tally.ahead += len(self._costs(_tensor(self._model, others), self.cost))
        tally.same += len(rows) - len(others)
        tally.done += len(rows)

    def _costs(self, rows: Tensor, limit: float) -> Tensor:
        """Log-perplexities of the suffixes that are not above the limit."""
        outputs, state = self._outputs, self._state
        node = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)  # the context of each suffix
        costs = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        for column in range(rows.shape[1]):
            if column:
                # sorted suffixes with the same beginning are neighbours: one context for all of them
                beginnings, node = torch.unique_consecutive(
                    node * len(self._table) + rows[:, column - 1], return_inverse=True
                )
                parents, words = beginnings // len(self._table), beginnings % len(self._table)
                outputs, state = _advance(self._model, words, state, parents)
            costs = costs + _bits(outputs, self._table, node, rows[:, column])
            near = costs <= limit
            rows, node, costs = rows[near], node[near], costs[near]
            if not len(rows):
                break
        return costs


def rank(
    model: LanguageModel,
    words: Sequence[int],
    suffixes: Phrases,
    prefix: int = PREFIX,
    *,
    tally: Tally | None = None,
    after_chunk: Callable[[], object] = lambda: None,
) -> Tally:
    """The rank of a phrase's suffix among others after the same prefix, exact.

    Args:
        model: of the words.
        words: the phrase.
        suffixes: of random_suffixes or all_suffixes, as long as the phrase's own.
        prefix: how many words of the phrase are given.
        tally: of an earlier call with the same arguments that was interrupted; it goes on from there.
        after_chunk: called after every CHUNK suffixes.

    Example:
        >>> found = rank(LanguageModel(8, dimension=2, hidden=2), (3, 4, 5, 6, 7), all_suffixes(words=8))
        >>> found.candidates, 1 <= found.rank <= 125
        (125, True)
    """
    if suffixes.shape[1] != len(words) - prefix:
        raise ValueError(
            f"suffixes must have {len(words) - prefix} words, as the phrase's own, got {suffixes.shape[1]}"
        )
    sampling, tally = Sampling(model, words, prefix), tally or Tally()
    while tally.done < len(suffixes):
        sampling.go_on(tally, suffixes)
        after_chunk()
    return tally


# -------------------------------------------------------------------- beam search


@torch.inference_mode()
def beam_search(
    model: LanguageModel, prefix: Sequence[int], length: int = 5, beams: int = 5
) -> list[tuple[tuple[int, ...], float]]:
    """Phrases that go on from a prefix, and what the words after it cost in bits, the cheapest first.

    After each word only the cheapest beginnings are kept. Nothing but words of the dictionary: no EOS ends a phrase.

    Args:
        model: of the words.
        prefix: the given words.
        length: words of a phrase, with the prefix.
        beams: how many are kept, and returned.

    Example:
        >>> found = beam_search(LanguageModel(8, dimension=2, hidden=2), prefix=[3], length=4)
        >>> [len(phrase) for phrase, _ in found]
        [4, 4, 4, 4, 4]
    """
    if not 0 <= len(prefix) <= length or beams < 1:
        raise ValueError(f"length must be at least the prefix's {len(prefix)}, beams at least 1; got {length}, {beams}")
    table = model.table()
    given = _tensor(model, [[BOS, *prefix]])
    outputs, state = model.encode(given)
    outputs, phrases = outputs[:, -1], given[:, 1:]
    costs = torch.zeros(1, dtype=torch.float64, device=given.device)
    for _ in range(length - len(prefix)):
        each = -(outputs @ table.T).log_softmax(dim=1)[:, FIRST:].double() / math.log(2)
        together = (costs[:, None] + each).flatten()
        costs, places = together.topk(min(beams, len(together)), largest=False)
        parents, words = places // each.shape[1], places % each.shape[1] + FIRST
        phrases = torch.cat([phrases[parents], words[:, None]], dim=1)
        outputs, state = _advance(model, words, state, parents)
    return list(zip(map(tuple, phrases.tolist()), costs.tolist(), strict=True))
