"""The code for devices that are not CPUs, run on this CPU by saying that it is none."""

from __future__ import annotations

import pytest
import torch

from edpsgd import tensors
from edpsgd.mechanism import noise
from tests.helpers.common import Bag, assert_same, assert_std, layers_of, private, quiet


@pytest.fixture
def elsewhere(monkeypatch) -> None:
    monkeypatch.setattr(tensors, "on_cpu", lambda tensor: False)


def train(clipping: str, bad: int | None = None) -> Bag:
    model = Bag()
    scales = {"p0": 1.0, "p1": 2.0, "p2": 3.0}
    optimizer = private(model, clip_norm=0.5, noise_multiplier=0.0, clipping=clipping, layer_scaling=scales)
    for step in range(3):
        for k in range(3):
            for index, parameter in enumerate(model.parameters()):
                if (step, k, index) != (1, 0, 2):  # one layer without a gradient
                    parameter.grad = torch.linspace(0.0, 1.0 + step + k + index, parameter.numel())
            if k == bad:
                model.p0.grad[5] = torch.nan
            optimizer.accumulate()
        with quiet():
            optimizer.step()
    return model


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("bad", [None, 0, 2])
def test_clipped_sums_are_the_same(request, clipping, bad) -> None:
    expected = layers_of(train(clipping, bad))
    request.getfixturevalue("elsewhere")
    assert_same(train(clipping, bad), expected)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_noise_from_torchs_generator(dtype) -> None:
    def draw(seed: int | None, rank: int, step: int) -> torch.Tensor:
        target = torch.zeros(200_000, dtype=dtype)
        noise.GaussianSource(seed, rank).stream(step).add_to(target, 0.5)
        return target

    first = draw(1, 0, 0)
    assert_std(first, 0.5)
    assert torch.equal(first, draw(1, 0, 0))
    for other in (draw(2, 0, 0), draw(1, 1, 0), draw(1, 0, 1), draw(None, 0, 0)):
        assert not torch.equal(first, other)


def test_streams_of_two_devices_differ() -> None:
    stream = noise.GaussianSource(1, 0).stream(0)
    assert (
        stream._generator(torch.device("cpu")).initial_seed() != stream._generator(torch.device("cpu:0")).initial_seed()
    )


@pytest.mark.usefixtures("elsewhere")
def test_mixed_dtypes_with_a_buffer_that_gets_no_gradient() -> None:
    model = Bag()
    model.p2.data = model.p2.data.double()
    optimizer = private(model, clip_norm=1e9, noise_multiplier=0.0)
    model.p0.grad = torch.ones_like(model.p0)
    optimizer.step()
    assert [p[0].item() for p in model.parameters()] == [-1.0, 0.0, 0.0]
