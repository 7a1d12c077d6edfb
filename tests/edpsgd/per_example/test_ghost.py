"""Norms where rounding is large: never far below the gradient that is added; no false alarm where they are above."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from edpsgd.mechanism.clipping import flat_factor, per_layer_factors
from edpsgd.mechanism.layer_scales import norm_contribution
from edpsgd.per_example import UnitGradients
from edpsgd.per_example.ghost import LayerGradients, Products
from edpsgd.per_example.layout import Rows
from edpsgd.tensors import layer_norms
from tests.helpers.common import Bag, private

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


@pytest.mark.parametrize(("inputs", "outputs"), [(1e-25, 1e25), (1e25, 1e-25), (1e-3, 1e-17), (1e9, 1e9)])
def test_products_of_rows_that_single_precision_has_no_room_for(inputs: float, outputs: float) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(WORDS, WIDTH))
    rows, scale = torch.randn(4, 2, WIDTH), torch.randn(4, 2, WORDS)
    losses = (nn.functional.linear(inputs * rows, weight) * (outputs * scale)).sum((1, 2))
    [norms] = UnitGradients({"weight": weight}).backward(losses).T
    expected = torch.einsum("btl,btr->blr", scale.double(), rows.double()).flatten(1).norm(dim=1) * inputs * outputs
    torch.testing.assert_close(norms.double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1e-23, 1e-19, 1e-10, 1.0, 1e19, 1e25, 1e34])
def test_norms_of_gradients_of_any_size(size: float, dtype: torch.dtype) -> None:
    gradient = (size * torch.randn(70_000)).to(dtype)
    norms = layer_norms([gradient, None, gradient[:5]], torch.device("cpu")).double()
    expected = [gradient.double().norm(), torch.zeros(()), gradient[:5].double().norm()]
    torch.testing.assert_close(norms, torch.stack([one.double() for one in expected]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [1e-36, 1e-23, 1e-19, 1.0, 1e19, 1e30])
def test_the_norms_of_a_micro_batch_count_with_length_one(size: float) -> None:
    contribution = norm_contribution(torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]]) * size, private=True)
    torch.testing.assert_close(contribution, torch.tensor([[0.6, 0.8], [0.0, 1.0], [0.0, 0.0]]))


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_clipped_gradients_do_not_exceed_the_clip_norm(clipping: str) -> None:
    """Not even in the last digit: what goes into the sum is added up in double precision here."""
    torch.manual_seed(0)
    shapes = (3, 100, 7000)
    model, bound = Bag(shapes), 0.7
    optimizer = private(model, clip_norm=bound, clipping=clipping, noise_multiplier=0.0)
    largest = 0.0
    for number in range(300):
        optimizer.zero_grad()
        size = 1.0 + 1e-7 * (number % 5) if number % 2 else 10.0 ** float(torch.empty(()).uniform_(-1, 5))
        gradients = [torch.randn(shape) for shape in shapes]
        whole = math.sqrt(sum(float(one.double().square().sum()) for one in gradients))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = (gradient.double() * (bound * size / whole)).float()
        optimizer.accumulate()
        parts = optimizer._layers.sum.views
        largest = max(largest, math.sqrt(sum(float(part.double().square().sum()) for part in parts)))
        optimizer.abandon()
    assert 0.9 * bound < largest <= bound


def test_a_gradient_below_the_clip_norm_is_left_alone() -> None:
    norms = torch.tensor([[0.3, 0.4], [2.9, 0.0], [0.0, 0.0]])
    assert flat_factor(norms, 3.0, None).tolist() == [1.0, 1.0, 1.0]
    assert per_layer_factors(norms, 4.2, None).tolist() == [[1.0, 1.0]] * 3
    assert flat_factor(torch.tensor([3e30, 4e30]), 5.0, None).item() == pytest.approx(1e-30, rel=1e-5)
