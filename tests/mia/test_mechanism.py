"""The audit of the real optimizer: what is sound stands, the paper's noise and broken mechanisms are found out."""

from __future__ import annotations

import math

import pytest

from edpsgd import ExponentialDecay, FirstStepNorms, LinearDecay, PrivateOptimizer
from edpsgd.distributed.collectives import Local
from mia.audited_step import Setup
from mia.mechanism import audit_mechanism
from mia.noise_audit import audit_noise

SOUND = {
    "plain": {},
    "per worker": {"noise_placement": "per_worker", "micro_batches": 8, "compression": "fp16"},
    "per layer": {"clipping": "per_layer", "scaling": "public:1,2,4", "noise_decay": LinearDecay(0.5), "epoch": 2},
    "public scales": {"scaling": "public:1,2,4", "noise_decay": ExponentialDecay(0.3), "epoch": 3},
    "private scales": {"scaling": "private:0.5", "micro_batches": 2},
    "examples": {"unit": "example", "micro_batches": 2},
}
PAPER = {
    "eight micro-batches": {"micro_batches": 8},
    "uneven scales": {"scaling": "public:1,2,4"},
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_mechanisms_stand(name) -> None:
    """And the canary is as strong as it can be: with less than half of the noise multiplier the claim would fall."""
    setup = Setup(seed=len(name), **SOUND[name])
    finding = audit_mechanism(setup, Local(), trials=500)
    assert not finding.is_refuted, finding
    assert finding.bounds.mu > 0.5 / setup.claimed_multiplier
    assert not audit_noise(setup, Local(), steps=5).is_refuted


@pytest.mark.parametrize("name", PAPER)
def test_the_noise_of_the_paper_is_refuted(name) -> None:
    setup = Setup(noise="paper", seed=1, **PAPER[name])
    finding = audit_mechanism(setup, Local(), trials=300)
    assert finding.is_refuted, finding
    largest = 4 / math.sqrt(7) if setup.scaling != "none" else 1.0
    real = 2 * math.sqrt(setup.micro_batches) * largest  # of section 3, for z = 1
    assert min(real, 4.3) - 1.2 < finding.bounds.mu < real
    assert audit_noise(setup, Local(), steps=5).is_refuted


def test_the_claim_is_that_of_the_epoch() -> None:
    finding = audit_mechanism(Setup(noise_decay=LinearDecay(1.0), epoch=1, seed=1), Local(), trials=60)
    assert (finding.multiplier, finding.mu) == (0.5, 2.0)
    assert finding.epsilon == pytest.approx(9.9973, abs=1e-3)  # of z = 1/2 at 1e-5


class HalfNoise(PrivateOptimizer):
    def _add_noise(self, number: int) -> None:
        self._noise_multiplier /= 2
        super()._add_noise(number)
        self._noise_multiplier *= 2


class TwiceTheNorm(PrivateOptimizer):
    def _add_noise(self, number: int) -> None:
        self._layers.sum.scale_(2.0)
        super()._add_noise(number)


class SameNoise(PrivateOptimizer):
    def _add_noise(self, number: int) -> None:
        super()._add_noise(0)


@pytest.mark.parametrize("make", [HalfNoise, TwiceTheNorm, SameNoise])
def test_a_broken_step_leaks(make) -> None:
    assert audit_mechanism(Setup(seed=2), Local(), trials=200, make=make).is_refuted


def test_what_private_scales_release(monkeypatch) -> None:
    setup = Setup(scaling="private:0.8", seed=7)
    finding = audit_mechanism(setup, Local(), trials=150, confidence=0.95, release="scales")
    assert finding.mu == pytest.approx(1 / 0.8)
    assert not finding.is_refuted
    assert finding.bounds.mu > 0.5 * finding.mu
    monkeypatch.setattr(FirstStepNorms, "noise_std", 0.5 * math.sqrt(2) * 0.8)
    assert audit_mechanism(setup, Local(), trials=150, release="scales").is_refuted


def test_private_scales_of_single_examples() -> None:
    """Adding an example moves the layer norms by 1 at most, not by √2: less leaks than is charged."""
    setup = Setup(scaling="private:0.8", unit="example", seed=8)
    finding = audit_mechanism(setup, Local(), trials=60, release="scales")
    assert not finding.is_refuted


def test_a_claim_that_the_trials_cannot_refute() -> None:
    with pytest.raises(ValueError, match="trials=500 cannot refute a noise multiplier as small as 0.1, give more"):
        audit_mechanism(Setup(noise_multiplier=0.1), Local(), trials=500)
