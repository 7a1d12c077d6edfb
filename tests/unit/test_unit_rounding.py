"""Norms where rounding is large: never far below the gradient that is added; no false alarm where they are above."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edpsgd.units import UnitGradients

WORDS, WIDTH, LENGTH = 500, 128, 16


def losses_of(kind: str, weight: nn.Parameter, size: float) -> torch.Tensor:
    """Of four examples: the parts of the first one's gradient are ``size`` times as large as what is left of them."""
    words, left, right = torch.randint(0, WORDS, (4, LENGTH)), torch.randn(4, LENGTH, WORDS), torch.randn(WIDTH)
    rights = torch.randn(4, LENGTH, WIDTH)
    signs = torch.tensor([1.0, -1.0] * (LENGTH // 2)).unsqueeze(1)
    words[0] = 7
    if kind == "chosen":
        rights[0] += size * signs * right
        return (nn.functional.embedding(words, weight) * rights).sum((1, 2))
    if kind == "products":
        left[0] = signs * left[0, 0] + left[0] / size
        rights[0] = size * right + rights[0]
        return (nn.functional.linear(rights, weight) * left).sum((1, 2))
    left[0] = nn.functional.one_hot(words[0], WORDS)
    others = rights.clone()
    others[0] = -(rights[0] + torch.randn(LENGTH, WIDTH) / size)
    chosen = (nn.functional.embedding(words, weight) * rights).sum((1, 2))
    return size * (chosen + (nn.functional.linear(others, weight) * left).sum((1, 2)))


@pytest.mark.filterwarnings("error")  # that rules do not agree with autograd
@pytest.mark.parametrize("kind", ["chosen", "products", "both"])
@pytest.mark.parametrize("size", [10.0, 1e3, 1e5])
def test_what_cancels_is_not_hidden(kind: str, size: float) -> None:
    """In embeddings, linear layers, and a weight that is tied to both."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(WORDS, WIDTH))
    engine = UnitGradients({"weight": weight})
    for _ in range(20):  # of which some are compared with autograd
        [said], *_ = engine.backward(losses_of(kind, weight, size))
        total = torch.zeros(WORDS, WIDTH)
        engine.add_weighted_([total], torch.tensor([1.0, 0.0, 0.0, 0.0]))
        assert float(total.norm()) <= 1.01 * float(said)


def test_backward_inside_of_autocast() -> None:
    """Tensors of single precision stay what they are."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(WORDS, WIDTH))
    losses, found = losses_of("products", weight, 10.0), []
    for is_on in (False, True):
        engine, total = UnitGradients({"weight": weight}), torch.zeros(WORDS, WIDTH)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            norms = engine.backward(losses)
            engine.add_weighted_([total], torch.ones(4))
        found.append((norms, total))
    torch.testing.assert_close(*found, rtol=0, atol=0)
