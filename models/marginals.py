"""Probabilities of a linear chain CRF: of a sequence of tags, and of each tag by itself.

Forward and backward messages are those of Lafferty, McCallum and Pereira 2001, in logarithms.
"""

from __future__ import annotations

import torch
from torchcrf import CRF

_LEAST = 1e-300  # of a transition; smaller ones would be zero, and their logarithm infinite


def likelihood_and_marginals(
    crf: CRF, emissions: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-likelihood of tags, and the probability of every tag of a word given the utterance.

    Both are in double precision and have no gradient.

    Forward and backward messages are logarithms, and a step is a matrix product of their exponentials, each row
    divided by its largest: as exact as sums of logarithms unless transitions differ by more than about 690.

    Args:
        crf: the chain.
        emissions: utterances x words x tags.
        tags: utterances x words, those whose likelihood is asked for.
        mask: utterances x words, true up to the length of each, which is one at least.

    Returns:
        The log-likelihoods, (utterances,), and the probabilities, utterances x words x tags; those
        of words that the mask leaves out mean nothing.

    Example:
        >>> crf = CRF(2, batch_first=True)
        >>> ones = torch.ones(1, 3, dtype=torch.bool)
        >>> found = likelihood_and_marginals(crf, torch.zeros(1, 3, 2), torch.zeros(1, 3, dtype=torch.long), ones)
        >>> found[1].sum(2).round(decimals=6).tolist()
        [[1.0, 1.0, 1.0]]
    """
    with torch.no_grad():
        scores, start = emissions.double(), crf.start_transitions.double()
        end, transitions = crf.end_transitions.double(), crf.transitions.double()
        forward = _forward(scores, start, transitions, mask)
        backward = _backward(scores, end, transitions, mask)
        last = mask.sum(1) - 1
        rows = torch.arange(len(last), device=last.device)
        # The logarithm of the summed weights of all sequences of tags.
        log_partition = torch.logsumexp(forward[rows, last] + end, dim=1)
        # The score of the given sequence: of its tags, of the steps between them, of both ends.
        of_tags = scores.gather(2, tags.unsqueeze(2)).squeeze(2)
        of_tags[:, 1:] += transitions[tags[:, :-1], tags[:, 1:]]
        score = (of_tags * mask).sum(1) + start[tags[:, 0]] + end[tags[rows, last]]
        return score - log_partition, torch.softmax(forward + backward, dim=2)


def _forward(scores: torch.Tensor, start: torch.Tensor, transitions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logarithms of the weight of all ways to each tag of each word; after the end, the last ones again."""
    found = [start + scores[:, 0]]
    largest = transitions.max()
    steps = (transitions - largest).exp().clamp_min(_LEAST)
    for word in range(1, scores.shape[1]):
        following = _log_product(found[-1], steps) + largest + scores[:, word]
        found.append(torch.where(mask[:, word, None], following, found[-1]))
    return torch.stack(found, dim=1)


def _backward(scores: torch.Tensor, end: torch.Tensor, transitions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logarithms of the weight of all ways from each tag of each word to the end."""
    last = end.expand(len(scores), -1)
    found, largest = [last], transitions.max()
    steps = (transitions.T - largest).exp().clamp_min(_LEAST)
    for word in range(scores.shape[1] - 1, 0, -1):
        before = _log_product(found[-1] + scores[:, word], steps) + largest
        found.append(torch.where(mask[:, word, None], before, last))
    return torch.stack(found[::-1], dim=1)


def _log_product(logarithms: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """log(exp(logarithms) @ matrix)."""
    largest = logarithms.amax(1, keepdim=True)
    return ((logarithms - largest).exp() @ matrix).log() + largest
