"""How well a language model predicts the next word: accuracy, perplexity, and how often it keeps to head words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from edpsgd._arguments import check_count
from models.language_model import NO_TARGET, LanguageModel
from tasks.language.dictionary import SPECIALS, UNK
from tasks.language.user_texts import Numbers, UserData, windows

HEADS = (10, 50, 100)  # numbers of most frequent words
PREDICTIONS = 10  # of which head words are counted

_STEPS = 128  # of a sentence at a time
_POSITIONS = 1 << 15  # of a batch, padding included, unless one sentence alone has more
_ROWS = 512  # logits at a time: 20 MB with 10,000 words


@dataclass(frozen=True)
class NextWord:
    """Predictions against what was said, the end of each sentence included.

    Attributes:
        accuracy: AccuracyTop1, how often the most likely word was right. A word out of the dictionary never is.
        top3: how often it was among the three most likely ones.
        top5: among the five most likely ones.
        perplexity: e to the mean negative log-likelihood, words out of the dictionary counted as UNK.
        words: how many were predicted.
        head: for 10, 50 and 100: at how many places 0, 1, ..., 10 of the ten most likely words are among that many
            most frequent words of the dictionary.
    """

    accuracy: float
    top3: float
    top5: float
    perplexity: float
    words: int
    head: dict[int, list[int]]


@torch.no_grad()
def evaluate(model: LanguageModel, data: UserData, device: torch.device | None = None, batch: int = 64) -> NextWord:
    """Predicts every word of every sentence, and its end, from all words before it in the sentence.

    Args:
        model: what predicts.
        data: sentences as numbers of the model's dictionary; those without words are left out.
        device: where the model is, if not None.
        batch: sentences at a time, at most.

    Example:
        >>> result = evaluate(LanguageModel(20, 4, 8), UserData.from_lists([[[5, 6], [7]]]))
        >>> result.words, sum(result.head[10])
        (5, 5)
    """
    _check(model, data, batch)
    sums = _Sums()
    for inputs, targets in _batches(data, batch):
        device = device or model.embedding.weight.device
        _predict(model, torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device), sums)
    return sums.result()


def _check(model: LanguageModel, data: UserData, batch: int) -> None:
    check_count("batch", batch)
    if len(data.tokens) == 0:
        raise ValueError("data must hold at least one word")
    least, greatest = int(data.tokens.min()), int(data.tokens.max())
    words = model.settings()["words"]
    if least < 0 or greatest >= words:
        raise ValueError(f"data must hold the model's words, from 0 to {words - 1}, got {least} to {greatest}")


def _batches(data: UserData, batch: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Inputs and targets of sentences of similar length, the longest first; each sentence is one window."""
    lengths = np.diff(data.sentences)
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]  # without empty ones
    place = 0
    while place < len(order):
        longest = int(lengths[order[place]]) + 1
        fitting = max(1, _POSITIONS // longest)
        chosen = order[place : place + min(batch, fitting)]
        starts, ends = data.sentences[chosen], data.sentences[chosen + 1]
        sentences = [data.tokens[start:end] for start, end in zip(starts, ends, strict=True)]
        yield windows(sentences, longest)
        place += len(chosen)


def _predict(model: LanguageModel, inputs: Tensor, targets: Tensor, sums: _Sums) -> None:
    """Adds the predictions of a batch to the sums.

    Long sentences are read in parts, and the state goes on from one to the next. Logits, which are
    the greater part of the memory, are made only where there is a target, and some at a time.
    """
    state, table = None, model.table()
    for tokens, wanted in zip(inputs.split(_STEPS, dim=1), targets.split(_STEPS, dim=1), strict=True):
        outputs, state = model.encode(tokens, state)
        is_real = wanted != NO_TARGET
        for rows, words in zip(outputs[is_real].split(_ROWS), wanted[is_real].split(_ROWS), strict=True):
            sums.add(rows @ table.T, words)


class _Sums:
    """What was counted so far."""

    def __init__(self) -> None:
        self.words, self.loss = 0, 0.0
        self.right = dict.fromkeys((1, 3, 5), 0)
        self.head = {size: np.zeros(PREDICTIONS + 1, np.int64) for size in HEADS}

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Counts predictions, (places, words), against the words that were said."""
        self.words += len(targets)
        losses = functional.cross_entropy(logits.float(), targets, reduction="none")
        self.loss += float(losses.double().sum())
        best = logits.topk(min(PREDICTIONS, logits.shape[1]), dim=1).indices.cpu()
        wanted = targets.cpu().unsqueeze(1)
        is_right = (best == wanted) & (wanted != UNK)
        for size in self.right:
            self.right[size] += int(is_right[:, :size].sum())
        for size in HEADS:
            # The dictionary holds the most frequent words first, after its special ones.
            is_frequent = (best >= len(SPECIALS)) & (best < len(SPECIALS) + size)
            found = is_frequent.sum(dim=1)
            self.head[size] += np.bincount(found.numpy(), minlength=PREDICTIONS + 1)

    def result(self) -> NextWord:
        loss = self.loss / self.words
        shares = [count / self.words for count in self.right.values()]
        perplexity = math.inf if loss > 700 else math.exp(loss)  # a float ends at e**709
        head = {size: counts.tolist() for size, counts in self.head.items()}
        return NextWord(shares[0], shares[1], shares[2], perplexity, self.words, head)
