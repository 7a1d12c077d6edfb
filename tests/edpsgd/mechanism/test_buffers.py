"""The flat buffers of a step: their law in half precision, and their parts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from edpsgd.mechanism.buffers import GradientSum, float16_factor
from edpsgd.mechanism.noise import GaussianSource
from tests.helpers.common import Bag, Spy, assert_std, private
from tests.helpers.threads import run_workers


@pytest.mark.parametrize("clip_norm", [3e4, 1.0, 1e-7])
@pytest.mark.parametrize("workers", [1, 4])
def test_noise_keeps_its_law_in_float16(clip_norm, workers) -> None:
    """However large or small C/divisor is: neither bounded by the largest number of float16, nor rounded away."""

    def work(worker) -> torch.Tensor:
        model = Bag((20000,))
        optimizer = private(
            model,
            unit="example",
            divisor=1.0,
            clip_norm=clip_norm,
            compression="fp16",
            noise_placement="per_worker",
            collective=worker,
            seed=3,
        )
        optimizer.step()
        return model.p0.detach()

    moved = run_workers(workers, work)
    assert all(torch.equal(moved[0], other) for other in moved)
    assert_std(moved[0] / clip_norm, 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_one_pass", [False, True])
def test_one_example_moves_the_sum_by_its_clip_norm_in_half_precision_too(dtype, in_one_pass) -> None:
    """257 and 2049 are no numbers of bfloat16 and float16: sums of ones that are rounded stop before them."""

    def released(examples: int) -> torch.Tensor:
        model, spy = nn.Linear(1, 1, bias=False).to(dtype), Spy()
        settings = {"unit": "example", "divisor": 2048.0, "clip_norm": 1.0, "noise_multiplier": 0.0}
        optimizer = private(model, collective=spy, **settings)
        x = torch.full((examples, 1), 5.0, dtype=dtype)
        if in_one_pass:
            optimizer.backward(model(x).squeeze(1))
        for row in () if in_one_pass else x:
            model(row).sum().backward()
            optimizer.accumulate()
        optimizer.step()
        return spy.sent[0][0].double() * 2048

    few = 256 if dtype is torch.bfloat16 else 2048
    assert float(released(few + 1) - released(few)) == pytest.approx(1.0, abs=1e-3)


def parameters() -> list[torch.Tensor]:
    """Two kinds, in turns; half precision is summed in single, as the first."""
    sizes, dtypes = [(2, 3), (4,), (5,)], [torch.float32, torch.float64, torch.bfloat16]
    return [torch.zeros(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]


def test_layers_of_one_kind_are_end_to_end_and_the_first_buffer_has_a_trailer() -> None:
    total = GradientSum(parameters(), trailer_size=7)
    assert [(len(flat), flat.dtype) for flat in total.buffers] == [(6 + 5 + 7, torch.float32), (4, torch.float64)]
    assert [view.shape for view in total.views] == [(2, 3), (4,), (5,)]
    assert len(total.trailer) == 7
    total.views[2].fill_(1.0)
    assert total.buffers[0].tolist() == [0.0] * 6 + [1.0] * 5 + [0.0] * 7
    total.trailer.fill_(2.0)
    assert total.buffers[0][-7:].tolist() == [2.0] * 7


def gradients(value: float) -> list[torch.Tensor | None]:
    return [torch.full_like(parameter, value) for parameter in parameters()]


def sums(total: GradientSum) -> list[float]:
    for view in total.views:
        assert (view == view.flatten()[0]).all()
    return [float(view.flatten()[0]) for view in total.views]


def test_gradients_are_added_with_their_factors() -> None:
    total = GradientSum(parameters(), trailer_size=3)
    total.trailer.fill_(9.0)
    total.add_(gradients(1.0), torch.tensor(0.5))
    total.add_([None, gradients(2.0)[1], None], torch.tensor([9.0, 0.25, 9.0]))
    assert sums(total) == [0.5, 1.0, 0.5]
    total.scale_(2.0)
    assert sums(total) == [1.0, 2.0, 1.0]
    assert total.trailer.tolist() == [9.0] * 3
    total.clear()
    total.add_([gradients(3.0)[0], None, None], torch.tensor(1.0))  # the rest is not of the step before
    assert sums(total) == [3.0, 0.0, 0.0]


@pytest.mark.parametrize("first", [True, False])
def test_a_factor_of_zero_discards_what_is_not_finite(first) -> None:
    total = GradientSum(parameters(), trailer_size=0)
    if not first:
        total.add_(gradients(1.0), torch.tensor(1.0))
    for bad in (math.nan, math.inf):
        total.add_(gradients(bad), torch.tensor(0.0))
    assert sums(total) == [0.0 if first else 1.0] * 3


def test_an_empty_sum_is_opened_as_zeros() -> None:
    total = GradientSum(parameters(), trailer_size=0)
    total.add_(gradients(1.0), torch.tensor(1.0))
    total.clear()
    total.open()[0].add_(1.0)
    assert sums(total) == [1.0, 0.0, 0.0]


def test_shards_noise_every_coordinate_once() -> None:
    noised = []
    for shard in range(3):
        total = GradientSum(parameters(), trailer_size=4)
        total.add_noise_(GaussianSource(1, shard).stream(0), [1.0, 2.0, 3.0], shard, 3)
        assert not total.trailer.any()
        noised.append(torch.cat([view.flatten().double() for view in total.views]) != 0)
    assert torch.stack(noised).sum(dim=0).tolist() == [1] * (6 + 4 + 5)


def test_noise_has_the_std_of_its_layer() -> None:
    total = GradientSum([torch.zeros(20_000), torch.zeros(20_000), torch.zeros(20_000)], trailer_size=0)
    total.add_noise_(GaussianSource(2, 0).stream(0), [1.0, 1.0, 4.0], 0, 1)
    for view, std in zip(total.views, (1.0, 1.0, 4.0), strict=True):
        assert_std(view, std)


@pytest.mark.parametrize(
    ("stds", "largest", "is_kept"),
    [([1.0], 1.0, True), ([0.0, 1.0], 1e9, True), ([1e-6], 1e-6, False), ([1e4], 1.0, False), ([1.0], 1e5, False)],
)
def test_the_factor_for_float16(stds, largest, is_kept) -> None:
    """A power of two, with which sums of four workers are in the range."""
    factor = float16_factor(stds, largest, 4)
    assert (factor == 1.0) is is_kept
    assert math.log2(factor).is_integer()
    if not is_kept:
        assert 0.4 < 4 * factor * (largest + 12 * max(stds)) / torch.finfo(torch.float16).max <= 1.0


def test_sums_in_float16_are_finite() -> None:
    total = GradientSum([torch.zeros(3)], trailer_size=1)
    total.open()[0].copy_(torch.tensor([1e9, -1e9, 1.0]))
    total.keep_finite_(workers=4)
    assert (4 * total.views[0].half()).isfinite().all()
    assert total.views[0][2] == 1.0
