"""What both models share: an intent head, a slot head with a CRF, one loss per utterance, and decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torchcrf import CRF

from models.marginals import likelihood_and_marginals

Batch = Mapping[str, torch.Tensor]


class Prediction(NamedTuple):
    """What a model says about one utterance.

    Attributes:
        intent: the number of the likeliest intent.
        intent_score: its probability.
        tags: the numbers of the likeliest sequence of tags.
        tag_scores: the probability of each of these tags given the whole utterance; empty if not asked for.
    """

    intent: int
    intent_score: float
    tags: list[int]
    tag_scores: list[float]


class Outputs(NamedTuple):
    """All that a model gives away about some utterances.

    Attributes:
        losses: one for each utterance.
        intents: probabilities, utterances x intents.
        tags: the probability of each tag of a word given the whole utterance, utterances x words x tags; whatever
            stands at the places that the mask leaves out means nothing.
    """

    losses: torch.Tensor
    intents: torch.Tensor
    tags: torch.Tensor


class IntentSlotModel(nn.Module):
    """An encoder of utterances with two heads: a linear layer for the intent, a linear layer and a CRF for the slots.

    Sub-classes say what the features are. A batch holds ``mask`` (utterances x words), whatever the encoder reads and,
    for training, ``tags`` (utterances x words) and ``intents``.

    Args:
        width: of the features.
        intents: how many there are.
        tags: how many there are.
        dropout: on the features, before the heads.
    """

    def __init__(self, width: int, intents: int, tags: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.intent = nn.Linear(width, intents)
        self.slots = nn.Linear(width, tags)
        self.crf = CRF(tags, batch_first=True)

    def features(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the words (utterances x words x width) and of the utterances (utterances x width)."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """What makes the same model anew, but for its weights, intents and tags; JSON-ready."""
        raise NotImplementedError

    def head_parameters(self) -> list[nn.Parameter]:
        """Those that no pretrained encoder has."""
        return [p for part in (self.intent, self.slots, self.crf) for p in part.parameters()]

    def scores(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the intents, and of the tags of each word before the CRF; in full precision, also under autocast."""
        words, utterances = self.features(batch)
        found = self.intent(self.dropout(utterances)), self.slots(self.dropout(words))
        intents, tags = (scores.to(self.crf.transitions.dtype) for scores in found)
        return intents, tags

    def forward(self, batch: Batch) -> torch.Tensor:
        """One loss per utterance: cross entropy of the intent, and negative log-likelihood of the tags by the CRF.

        The loss of an utterance does not depend on the others in the batch.
        """
        intents, emissions = self.scores(batch)
        likelihood = self.crf(emissions, batch["tags"], mask=batch["mask"], reduction="none")
        return nn.functional.cross_entropy(intents, batch["intents"], reduction="none") - likelihood

    @torch.no_grad()
    def outputs(self, batch: Batch) -> Outputs:
        """Losses and probabilities of a batch that holds tags and intents too."""
        intents, emissions = self.scores(batch)
        likelihood, tags = likelihood_and_marginals(self.crf, emissions, batch["tags"], batch["mask"])
        losses = nn.functional.cross_entropy(intents.double(), batch["intents"], reduction="none") - likelihood
        return Outputs(losses, torch.softmax(intents, dim=1), tags)

    @torch.no_grad()
    def predict(self, batch: Batch, with_scores: bool = False) -> list[Prediction]:
        """The likeliest intent and tags of every utterance; the probabilities of the tags cost a little more."""
        intents, emissions = self.scores(batch)
        best = torch.softmax(intents, dim=1).max(dim=1)
        tags = self.crf.decode(emissions, mask=batch["mask"])
        scores = self._tag_scores(emissions, tags, batch["mask"]) if with_scores else [[] for _ in tags]
        rows = zip(best.indices.tolist(), best.values.tolist(), tags, scores, strict=True)
        return [Prediction(*row) for row in rows]

    def _tag_scores(self, emissions: torch.Tensor, tags: list[list[int]], mask: torch.Tensor) -> list[list[float]]:
        padded = torch.zeros(mask.shape, dtype=torch.long)
        for row, sequence in enumerate(tags):
            padded[row, : len(sequence)] = torch.tensor(sequence)
        padded = padded.to(mask.device)
        marginals = likelihood_and_marginals(self.crf, emissions, padded, mask)[1]
        lists = marginals.gather(2, padded.unsqueeze(2)).squeeze(2).tolist()
        return [row[: len(sequence)] for row, sequence in zip(lists, tags, strict=True)]


def pad(values: npt.NDArray[np.integer], lengths: npt.NDArray[np.int64], fill: int = 0) -> npt.NDArray[np.int64]:
    """Sequences that stand one after the other, as rows filled up on the right.

    Example:
        >>> pad(np.array([1, 2, 3]), np.array([2, 1])).tolist()
        [[1, 2], [3, 0]]
    """
    padded = np.full((len(lengths), int(lengths.max(initial=1))), fill, dtype=np.int64)
    padded[length_mask(lengths)] = values
    return padded


def length_mask(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which places of padded rows hold something."""
    return np.arange(int(lengths.max(initial=1))) < lengths[:, None]
