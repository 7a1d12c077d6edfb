"""What both models share: an intent head, a slot head with a CRF, one loss per utterance, and decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torchcrf import CRF

from models import bio_chain
from models.bio_chain import FORBIDDEN
from models.marginals import likelihood_and_marginals

Batch = Mapping[str, torch.Tensor]
TRANSITIONS = ("trained", "bio")


@dataclass(frozen=True)
class HeadSettings:
    """How the two heads begin, what of them is trained, and which answers they may give; ready for JSON.

    Attributes:
        transitions: of the CRF: "trained", or "bio", fixed to what BIO allows. Fixed ones take no noise.
        zero_start: whether the linear layers begin at zero instead of at random.
        intent_weight: of the intent's loss, beside that of the tags.
        allowed: for every intent the numbers of the tags that may go with it; None if all may.

    Tags are numbered as ``tasks.nlu.labels`` does it: O, then B and I of each slot.
    """

    transitions: str = "trained"
    zero_start: bool = False
    intent_weight: float = 1.0
    allowed: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        if self.transitions not in TRANSITIONS:
            raise ValueError(f"transitions must be one of {', '.join(TRANSITIONS)}, got {self.transitions!r}")
        if not self.intent_weight > 0:
            raise ValueError(f"intent_weight must be above 0, got {self.intent_weight!r}")


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
        width: of the features of a word.
        intents: how many there are.
        tags: how many there are.
        dropout: on the features, before the heads.
        heads: how they begin and answer; as a mapping, what ``head_settings`` says.
        utterance_width: of the features of an utterance, if it is another.
    """

    forbidden: torch.Tensor | None

    def __init__(
        self,
        width: int,
        intents: int,
        tags: int,
        dropout: float,
        heads: HeadSettings | Mapping[str, Any] | None = None,
        utterance_width: int | None = None,
    ) -> None:
        super().__init__()
        self.heads = HeadSettings(**heads) if isinstance(heads, Mapping) else heads or HeadSettings()
        self.dropout = nn.Dropout(dropout)
        self.intent = nn.Linear(width if utterance_width is None else utterance_width, intents)
        self.slots = nn.Linear(width, tags)
        self.crf = CRF(tags, batch_first=True)
        if self.heads.transitions == "bio":
            bio_chain.fix_transitions(self.crf)
        if self.heads.zero_start:
            for head in (self.intent, self.slots):
                nn.init.zeros_(head.weight)
                nn.init.zeros_(head.bias)
        forbidden = None if self.heads.allowed is None else _forbidden(self.heads.allowed, intents, tags)
        self.register_buffer("forbidden", forbidden, persistent=False)  # the settings hold it

    def features(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the words (utterances x words x width) and of the utterances (utterances x width)."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """What makes the same model anew, but for its weights, intents and tags; JSON-ready."""
        raise NotImplementedError

    def head_settings(self) -> dict[str, Any]:
        """The same of the heads."""
        return asdict(self.heads)

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
        emissions = self._of_intent(emissions, batch["intents"])
        return self._loss(intents, batch["intents"], self._likelihood(emissions, batch))

    def _likelihood(self, emissions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The log-likelihood of each utterance's tags."""
        if self.heads.transitions == "bio":
            return bio_chain.log_likelihood(self.crf, emissions, batch["tags"], batch["mask"])
        likelihood: torch.Tensor = self.crf(emissions, batch["tags"], mask=batch["mask"], reduction="none")
        return likelihood

    def _loss(self, intents: torch.Tensor, chosen: torch.Tensor, likelihood: torch.Tensor) -> torch.Tensor:
        surprise = nn.functional.cross_entropy(intents, chosen, reduction="none")
        return self.heads.intent_weight * surprise - likelihood

    def _of_intent(self, emissions: torch.Tensor, intents: torch.Tensor) -> torch.Tensor:
        """The scores of the tags where each utterance has its intent: tags that do not go with it are forbidden."""
        if self.forbidden is None:
            return emissions
        return emissions.masked_fill(self.forbidden[intents].unsqueeze(1), FORBIDDEN)

    @torch.no_grad()
    def outputs(self, batch: Batch) -> Outputs:
        """Losses and probabilities of a batch that holds tags and intents too."""
        intents, emissions = self.scores(batch)
        true, said = (self._of_intent(emissions, chosen) for chosen in (batch["intents"], intents.argmax(dim=1)))
        likelihood, tags = likelihood_and_marginals(self.crf, true, batch["tags"], batch["mask"])
        if self.forbidden is not None:  # what it gives away goes with the intent that it names
            tags = likelihood_and_marginals(self.crf, said, batch["tags"], batch["mask"])[1]
        losses = self._loss(intents.double(), batch["intents"], likelihood)
        return Outputs(losses, torch.softmax(intents, dim=1), tags)

    @torch.no_grad()
    def predict(self, batch: Batch, with_scores: bool = False) -> list[Prediction]:
        """The likeliest intent and tags of every utterance; the probabilities of the tags cost a little more."""
        intents, emissions = self.scores(batch)
        best = torch.softmax(intents, dim=1).max(dim=1)
        emissions = self._of_intent(emissions, best.indices)
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


def _forbidden(allowed: Sequence[Sequence[int]], intents: int, tags: int) -> torch.Tensor:
    """Intents x tags, true where a tag does not go with an intent."""
    if len(allowed) != intents or any(not 0 <= tag < tags for own in allowed for tag in own):
        raise ValueError(f"allowed must have a list of tags from 0 to {tags - 1} for each of {intents} intents")
    forbidden = torch.ones(intents, tags, dtype=torch.bool)
    for intent, own in enumerate(allowed):
        forbidden[intent, list(own)] = False
    forbidden[:, 0] = False  # a word may be outside of all slots everywhere
    return forbidden


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
