"""The flat buffers of a step: their law in half precision, and their parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
