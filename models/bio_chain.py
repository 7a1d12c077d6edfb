"""The CRF whose transitions are fixed to the rules of BIO: I- begins no utterance, and only follows its own slot.

Then a step of the forward recursion is one sum over all tags, for O and every B-, and a sum over two tags for each I-:
K operations for K tags, and not K². The tags are O, then B- and I- of each slot.
"""

from __future__ import annotations

import torch
from torchcrf import CRF

FORBIDDEN = -1e4  # a score that no others make up for; finite, since infinities of both signs would meet as NaN


@torch.no_grad()
def fix_transitions(crf: CRF) -> None:
    """Fixes a CRF to these rules.

    Example:
        >>> crf = CRF(3)
        >>> fix_transitions(crf)
        >>> crf.start_transitions.tolist(), crf.transitions[:, 2].tolist()
        ([0.0, 0.0, -10000.0], [-10000.0, 0.0, 0.0])
    """
    tags = torch.arange(crf.num_tags)
    is_inside = (tags > 0) & (tags % 2 == 0)
    slot = (tags + 1) // 2
    continues = slot[:, None] == slot[None, :]
    crf.start_transitions.copy_(torch.where(is_inside, FORBIDDEN, 0.0))
    crf.end_transitions.zero_()
    crf.transitions.copy_(torch.where(is_inside & ~continues, FORBIDDEN, 0.0))
    crf.requires_grad_(False)


def log_likelihood(crf: CRF, emissions: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Of each utterance's tags, as ``crf`` computes it where its transitions are fixed.

    Args:
        crf: the chain.
        emissions: utterances x words x tags.
        tags: utterances x words.
        mask: utterances x words, true up to the length of each, which is one at least.

    Example:
        >>> crf = CRF(3, batch_first=True)
        >>> fix_transitions(crf)
        >>> scores, tags = torch.tensor([[[0.5, 1.0, 2.0], [0.1, 0.2, 0.3]]]), torch.tensor([[1, 2]])
        >>> ones = torch.ones(1, 2, dtype=torch.bool)
        >>> bool(torch.isclose(log_likelihood(crf, scores, tags, ones), crf(scores, tags, mask=ones)))
        True
    """
    chosen = emissions.gather(2, tags.unsqueeze(2)).squeeze(2)
    scores = (chosen * mask).sum(1)
    before, after = tags[:, :-1], tags[:, 1:]
    fixed = (crf.transitions[before, after] * mask[:, 1:]).sum(1) + crf.start_transitions[tags[:, 0]]
    return scores + fixed - _log_partition(emissions, mask)


def _log_partition(emissions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The logarithm of the weight of all sequences that the rules allow, for each utterance."""
    words, tags = emissions.shape[1:]
    slots = (tags - 1) // 2
    is_inside = torch.arange(tags, device=emissions.device) % 2 == 0
    is_inside[0] = False
    weights = emissions[:, 0].masked_fill(is_inside, FORBIDDEN)  # of all ways to each tag of the word
    for word in range(1, words):
        from_any = torch.logsumexp(weights, dim=1, keepdim=True)  # to O and to every B-
        own = torch.logsumexp(weights[:, 1:].unflatten(1, (slots, 2)), dim=2)  # to I-, from B- or I- of the slot
        into_slots = torch.stack([from_any.expand(-1, slots), own], dim=2).flatten(1)
        following = torch.cat([from_any, into_slots], dim=1) + emissions[:, word]
        weights = torch.where(mask[:, word, None], following, weights)
    return torch.logsumexp(weights, dim=1)
