"""Norms where rounding is large, and numbers that single precision has no room for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from edpsgd.mechanism.clipping import flat_factor, per_layer_factors
from edpsgd.mechanism.layer_scales import norm_contribution
from edpsgd.per_example import UnitGradients
from edpsgd.per_example.precision import UNDERFLOW, exact, is_out_of_range, rounding
from edpsgd.tensors import layer_norms
from tests.helpers.common import Bag, private
from tests.helpers.unit_loop import trained


def test_norms_allow_for_more_where_factors_of_products_may_be_rounded(monkeypatch) -> None:
    assert rounding(torch.device("cpu")) == rounding(torch.device("cuda")) == 1e-5
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")
    assert rounding(torch.device("cpu")) == rounding(torch.device("cuda")) == 1e-2


WORDS, WIDTH, LENGTH = 500, 128, 16


@pytest.mark.parametrize(("inputs", "outputs"), [(1e-25, 1e25), (1e25, 1e-25), (1e-3, 1e-17), (1e9, 1e9)])
def test_products_of_rows_that_single_precision_has_no_room_for(inputs: float, outputs: float) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(WORDS, WIDTH))
    rows, scale = torch.randn(4, 2, WIDTH), torch.randn(4, 2, WORDS)
    losses = (nn.functional.linear(inputs * rows, weight) * (outputs * scale)).sum((1, 2))
    [norms] = UnitGradients({"weight": weight}).backward(losses).T
    expected = torch.einsum("btl,btr->blr", scale.double(), rows.double()).flatten(1).norm(dim=1) * inputs * outputs
    torch.testing.assert_close(norms.double(), expected, rtol=1e-4, atol=0)


def test_a_gradient_near_the_end_of_single_precision() -> None:
    model = nn.Linear(4, 1)
    inputs = torch.randn(3, 4)
    inputs[1] *= 1e12
    norms = UnitGradients(trained(model)).backward((model(inputs).squeeze(1) - 1).square())
    assert torch.isfinite(norms).all()


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


def test_what_leaves_the_range_of_single_precision() -> None:
    squares = torch.tensor([0.0, UNDERFLOW / 2, UNDERFLOW * 2, 1.0, torch.inf, torch.nan])
    out = [True, True, False, False, True, True]
    assert is_out_of_range(squares, UNDERFLOW).tolist() == out
    assert not is_out_of_range(squares.double(), UNDERFLOW).any()


def test_half_precision_is_made_single_and_nothing_else_is_copied() -> None:
    for dtype in (torch.float32, torch.float64):
        values = torch.ones(2, dtype=dtype)
        assert exact(values) is values
    assert exact(torch.ones(2).bfloat16()).dtype is torch.float32
