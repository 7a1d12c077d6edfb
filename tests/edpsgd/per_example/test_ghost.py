"""Norms that are never far below the gradient that is added; no false alarm where they are above."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edpsgd.mechanism.clipping import flat_factor
from edpsgd.per_example import UnitGradients
from edpsgd.per_example.ghost import LayerGradients
from edpsgd.per_example.layout import Rows
from edpsgd.per_example.row_products import Products

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


LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


def scaled_rows(count: int, width: int) -> torch.Tensor:
    """Rows of lengths between 1e-30 and 1e+30; half of the batches have rows of one length in each of eight units."""
    exponents = torch.empty(count, 1, dtype=torch.float64).uniform_(-30, 30)
    if bool(torch.rand(()) < 0.5):
        exponents = exponents[: count // 8].repeat_interleave(8, 0)[:count]
    return (torch.randn(count, width, dtype=torch.float64) * 10.0**exponents).float()


def layer_of_rows(kind: str, units: int, length: int) -> tuple[LayerGradients, list[torch.Tensor]]:
    """A layer with random rows, and each unit's gradient by a loop in double precision."""
    height, width = (4, 3) if kind == "own" else (40, 30) if kind == "chunks" else (300, 200)
    layer = LayerGradients(torch.zeros(height, width), units, Products())
    whose = torch.arange(units).repeat(length)[torch.randperm(units * length)]
    rows = Rows(whose, units, torch.device("cpu"))
    expected = [torch.zeros(height, width, dtype=torch.float64) for _ in range(units)]
    left, right = scaled_rows(len(whose), height), scaled_rows(len(whose), width)
    words, others = torch.randint(0, height, (len(whose),)), scaled_rows(len(whose), width)
    if kind != "chosen":
        layer.add_products(left, right, rows)
        for unit, one, other in zip(whose.tolist(), left.double(), right.double(), strict=True):
            expected[unit] += torch.outer(one, other)
    if kind in ("chosen", "both"):
        layer.add_chosen(words, others, rows)
        for unit, word, other in zip(whose.tolist(), words.tolist(), others.double(), strict=True):
            expected[unit][word] += other
    return layer, expected


def norms_of(layer: LayerGradients) -> torch.Tensor:
    """As a batch makes them."""
    norms, has_left = layer.norms()
    if bool(has_left.any()):
        norms[has_left] = layer.precise_norms(has_left).float()
    return norms


@pytest.mark.parametrize("kind", ["own", "chunks", "products", "chosen", "both"])
def test_rows_of_any_size(kind: str) -> None:
    """Norms are those of a loop in double precision, and clipped gradients have at most the clip norm."""
    torch.manual_seed(0)
    for length in (1, 3, 8, 16):
        for _ in range(10):
            layer, expected = layer_of_rows(kind, 16, length)
            norms = norms_of(layer).double()
            right = torch.stack([one.norm() for one in expected])
            has_room = right < LARGEST / 100
            assert bool((~torch.isfinite(norms[right > 2 * LARGEST])).all())
            torch.testing.assert_close(norms[has_room], right[has_room], rtol=1e-5, atol=10 * SMALLEST)
            for unit in has_room.nonzero().flatten().tolist():
                factors = torch.zeros(16)
                factors[unit] = flat_factor(norms[unit : unit + 1].float(), 0.01, None)
                total = torch.zeros_like(expected[0], dtype=torch.float32)
                layer.drop(~torch.isfinite(norms))
                layer.add_weighted_(total, factors)
                assert float(total.double().norm()) <= 0.01 * (1 + 1e-6)
                least = min(0.01, float(right[unit])) * (1 - 1e-4) - 100 * SMALLEST
                assert least <= float(total.double().norm())
