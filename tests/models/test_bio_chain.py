"""The chain with fixed transitions, against pytorch-crf with the same ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchcrf import CRF

from models.bio_chain import FORBIDDEN, fix_transitions, log_likelihood
from models.heads import length_mask


@pytest.mark.parametrize("tags", [1, 3, 11])
@pytest.mark.parametrize("lengths", [[1], [5], [7, 1, 4, 7]])
def test_likelihoods_and_gradients_are_those_of_pytorch_crf(tags, lengths) -> None:
    torch.manual_seed(tags)
    crf = CRF(tags, batch_first=True).double()
    fix_transitions(crf)
    mask = torch.from_numpy(length_mask(np.array(lengths)))
    emissions = (3 * torch.randn(*mask.shape, tags, dtype=torch.float64)).requires_grad_()
    gold = torch.randint(tags, mask.shape) * mask  # also sequences that the rules forbid
    expected = crf(emissions, gold, mask=mask, reduction="none")
    found = log_likelihood(crf, emissions, gold, mask)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-9)
    weights = torch.randn(len(lengths), dtype=torch.float64)
    slopes = [torch.autograd.grad((one * weights).sum(), emissions)[0] for one in (found, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-12)


def test_masked_scores_stay_numbers_in_single_precision() -> None:
    crf = CRF(5, batch_first=True)
    fix_transitions(crf)
    emissions = torch.randn(2, 60, 5)
    emissions[:, :, 1:] = FORBIDDEN
    emissions.requires_grad_()
    mask, gold = torch.ones(2, 60, dtype=torch.bool), torch.zeros(2, 60, dtype=torch.long)
    found = log_likelihood(crf, emissions, gold, mask)
    found.sum().backward()
    torch.testing.assert_close(found, torch.zeros(2), rtol=0, atol=1e-3)
    assert torch.isfinite(emissions.grad).all()
