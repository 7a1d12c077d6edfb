"""Probabilities of a CRF, against all sequences of tags one by one."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from torchcrf import CRF

from models.marginals import likelihood_and_marginals

TAGS, LENGTHS = 3, (4, 1, 2)


def chain(seed: int) -> tuple[CRF, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A CRF, emissions, tags and the mask of three utterances of these lengths."""
    torch.manual_seed(seed)
    crf = CRF(TAGS, batch_first=True)
    for parameter in crf.parameters():
        torch.nn.init.normal_(parameter)
    longest = max(LENGTHS)
    emissions = 2 * torch.randn(len(LENGTHS), longest, TAGS)
    tags = torch.randint(TAGS, (len(LENGTHS), longest))
    mask = torch.arange(longest) < torch.tensor(LENGTHS)[:, None]
    return crf, emissions, tags, mask


@torch.no_grad()
def score(crf: CRF, emissions: torch.Tensor, tags: tuple[int, ...]) -> float:
    """Of one sequence: both ends, its tags, and the steps between them."""
    total = crf.start_transitions[tags[0]] + crf.end_transitions[tags[-1]]
    total = total + sum(emissions[word, tag] for word, tag in enumerate(tags))
    total = total + sum(crf.transitions[first, second] for first, second in pairwise(tags))
    return float(total)


@pytest.mark.parametrize("seed", range(3))
def test_probabilities_are_those_of_enumeration(seed) -> None:
    crf, emissions, tags, mask = chain(seed)
    likelihoods, marginals = likelihood_and_marginals(crf, emissions, tags, mask)
    assert (likelihoods.shape, marginals.shape) == ((3,), (3, 4, TAGS))
    for row, length in enumerate(LENGTHS):
        sequences = list(product(range(TAGS), repeat=length))
        scores = torch.tensor([score(crf, emissions[row], one) for one in sequences], dtype=torch.float64)
        probabilities = torch.softmax(scores, dim=0)
        given = sequences.index(tuple(tags[row, :length].tolist()))
        assert float(likelihoods[row]) == pytest.approx(float(probabilities[given].log()), abs=1e-5)
        expected = torch.zeros(length, TAGS, dtype=torch.float64)
        for one, probability in zip(sequences, probabilities, strict=True):
            for word, tag in enumerate(one):
                expected[word, tag] += probability
        torch.testing.assert_close(marginals[row, :length], expected, atol=1e-5, rtol=0)


def test_the_likelihood_is_that_of_the_crf() -> None:
    crf, emissions, tags, mask = chain(7)
    likelihoods, _ = likelihood_and_marginals(crf, emissions, tags, mask)
    expected = crf(emissions, tags, mask=mask, reduction="none")
    torch.testing.assert_close(likelihoods.float(), expected, atol=1e-5, rtol=1e-5)


def test_double_precision_and_no_gradient() -> None:
    for found in likelihood_and_marginals(*chain(1)):
        assert found.dtype == torch.float64
        assert not found.requires_grad


def test_forbidden_steps_leave_finite_numbers() -> None:
    """A step that is all but forbidden gives probabilities near zero, and no infinity."""
    crf, emissions, tags, mask = chain(2)
    with torch.no_grad():
        crf.transitions[0, 1] = -1000.0
    likelihoods, marginals = likelihood_and_marginals(crf, emissions, tags, mask)
    assert bool(torch.isfinite(likelihoods).all())
    torch.testing.assert_close(marginals[mask].sum(1), torch.ones(sum(LENGTHS), dtype=torch.float64))
