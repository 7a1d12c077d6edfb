"""The audit of the noise finds what is wrong with it."""

from __future__ import annotations

import math

import numpy as np

from edpsgd.distributed.collectives import Local
from edpsgd.mechanism import buffers
from edpsgd.mechanism.noise import GaussianStream
from mia.audited_step import Setup
from mia.noise_audit import audit_noise
from tests.mia.test_mechanism import HalfNoise, SameNoise


def failed(setup: Setup, **more) -> list[str]:
    return [check.name for check in audit_noise(setup, Local(), steps=5, **more).failed]


def test_broken_noise() -> None:
    assert {f"std of layer {k}" for k in range(3)} <= set(failed(Setup(seed=3), make=HalfNoise))
    assert failed(Setup(seed=3), make=SameNoise) == [
        "correlation of noise between steps",
        "correlation of sizes of noise between steps",
    ]


def test_a_bare_shard(monkeypatch) -> None:
    """One third of the coordinates gets no noise, as if a worker had forgotten its shard."""
    whole = buffers.GradientSum.add_noise_

    def two_of_three(self, stream, stds, shard, shards) -> None:
        whole(self, stream, stds, 0, 3)
        whole(self, stream, stds, 1, 3)

    monkeypatch.setattr(buffers.GradientSum, "add_noise_", two_of_three)
    finding = audit_noise(Setup(seed=4), Local(), steps=5)
    assert ("shards cover every coordinate once", "7000 bare, 0 noised twice, of 21000") in {
        (check.name, check.found) for check in finding.failed
    }


def test_one_layer_with_too_little_noise(monkeypatch) -> None:
    whole = buffers.GradientSum.add_noise_

    def less(self, stream, stds, shard, shards) -> None:
        whole(self, stream, [stds[0], 0.9 * stds[1], stds[2]], shard, shards)

    monkeypatch.setattr(buffers.GradientSum, "add_noise_", less)
    assert "std of layer 1" in failed(Setup(seed=5))
    assert not {"std of layer 0", "std of layer 2"} & set(failed(Setup(seed=5)))


def test_noise_of_another_shape(monkeypatch) -> None:
    """Uniform noise of the right std."""
    random = np.random.default_rng(6)

    def uniform(self, target, std) -> None:
        noise = random.uniform(-math.sqrt(3), math.sqrt(3), size=target.numel())
        target += target.new_tensor(std * noise)

    monkeypatch.setattr(GaussianStream, "add_to", uniform)
    assert "Gaussian shape" in failed(Setup(seed=6))
