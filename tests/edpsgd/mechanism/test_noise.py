"""The Gaussian source: its law, and that it depends on secret, rank, step and purpose."""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch
from scipy.stats import kstest, norm

from edpsgd.mechanism.noise import GaussianSource, GaussianStream
from tests.helpers.common import FRESH, assert_std, assert_uncorrelated


def draw(source: GaussianSource, step: int = 0, purpose: str = "gradient", count: int = 200_001, dtype=torch.float32):
    target = torch.zeros(count, dtype=dtype)
    source.stream(step, purpose).add_to(target, 1.0)
    return target


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_law(dtype) -> None:
    noise = draw(GaussianSource(1, 0), dtype=dtype)
    assert noise.dtype == dtype
    assert_std(noise, 1.0)
    if dtype in (torch.float32, torch.float64):
        assert kstest(noise.numpy(), "norm").pvalue > 0.001
        far = (noise.abs() > 4).sum().item()
        expected = len(noise) * 2 * norm.sf(4)
        assert expected / 3 < far < expected * 3


def test_neighbouring_numbers_are_independent() -> None:
    noise = draw(GaussianSource(2, 0))
    for lag in (1, 2, 65536, 65537, 131072):
        assert_uncorrelated(noise[:-lag], noise[lag:])
    pieces = noise[:131072].view(2, -1)  # the two halves of a chunk share radius and angle
    assert_uncorrelated(pieces[0].square(), pieces[1].square())


def test_streams_are_independent() -> None:
    streams = [
        draw(GaussianSource(1, 0), 0),
        draw(GaussianSource(1, 1), 0),
        draw(GaussianSource(1, 0), 1),
        draw(GaussianSource(1, 1), 1),
        draw(GaussianSource(1, 0), 0, "layer norms"),
        draw(GaussianSource(2, 0), 0),
    ]
    for a, b in itertools.combinations(streams, 2):
        assert_uncorrelated(a, b)
    assert torch.equal(streams[0], draw(GaussianSource(1, 0), 0))


def test_without_a_seed_sources_differ() -> None:
    assert_uncorrelated(draw(GaussianSource(None, 0)), draw(GaussianSource(None, 0)), FRESH)


def test_std_scales_and_small_ones_do_not_vanish() -> None:
    for std in (1e-25, 1e-9, 3.0, 1e9):
        target = torch.zeros(10_000)
        GaussianSource(4, 0).stream(0).add_to(target, std)
        assert_std(target.double(), std)


def test_noise_is_added_in_the_precision_of_the_target() -> None:
    """float32 noise on float64 numbers would leave their low bits as they are."""
    noise = draw(GaussianSource(5, 0), dtype=torch.float64)
    assert not torch.equal(noise, noise.float().double())


def test_short_and_odd_targets() -> None:
    for count in (1, 2, 3, 131_073):
        target = torch.zeros(count)
        GaussianSource(None, 0).stream(0).add_to(target, 1.0)
        assert (target != 0).all()


def test_a_forked_process_draws_noise_of_its_own() -> None:
    source = GaussianSource(None, 0)
    draw(source)
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, source.stream(1)._key)
        os._exit(0)
    os.wait()
    assert os.read(reader, 100) != source.stream(1)._key


def test_the_tails_reach_beyond_what_31_bits_can() -> None:
    """With the first 31 bits of the radius at zero, the other 31 decide."""

    class Zeros(GaussianStream):
        def _random_bits(self, count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32)

    target = torch.zeros(2)
    Zeros(bytes(16), bytearray(64)).add_to(target, 1.0)
    assert target[0].item() == pytest.approx(math.sqrt(2 * 63 * math.log(2)), rel=1e-5)


def test_no_coordinate_is_left_bare(monkeypatch) -> None:
    """The largest 31 bits round to 2³¹, whose logarithm would be 0."""
    bits = torch.tensor([2**31 - 1, 2**31 - 64, 2**31 - 65, 0, 0, 0, 1, 2, 3], dtype=torch.int64).to(torch.int32)
    monkeypatch.setattr(GaussianStream, "_random_bits", lambda self, count: bits[:count].clone())
    noise = torch.zeros(6)
    GaussianSource(1, 0).stream(0).add_to(noise, 1.0)
    assert bool((noise.abs() > 0).all())
