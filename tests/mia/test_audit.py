"""The audit of the real optimizer: what is sound stands, the paper's noise and broken mechanisms are found out."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from edpsgd import ExponentialDecay, FirstStepNorms, LinearDecay, PrivateOptimizer
from edpsgd.distributed.collectives import Local
from edpsgd.mechanism import buffers
from edpsgd.mechanism.noise import GaussianStream
from mia.audit import main
from mia.mechanism import Setup, audit_mechanism, audit_noise

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier must be a finite number > 0, got 0.0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"micro_batches": 0}, "micro_batches must be an int >= 1, got 0"),
        ({"epoch": -1}, "epoch must be an int >= 0"),
        ({"scaling": "private:1,2"}, "scaling must be none, public:A,B,C or private:Z"),
        ({"scaling": "public:1,-2,4"}, "numbers > 0"),
        ({"scaling": "public:1,2,x"}, "scaling"),
        ({"scaling": "public"}, "scaling"),
    ],
)
def test_bad_settings(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        Setup(**arguments)


def test_a_claim_that_the_trials_cannot_refute() -> None:
    with pytest.raises(ValueError, match="trials=500 cannot refute a noise multiplier as small as 0.1, give more"):
        audit_mechanism(Setup(noise_multiplier=0.1), Local(), trials=500)


# -------------------------------------------------------------------- the command


def test_the_command_stands(capsys, tmp_path) -> None:
    file = tmp_path / "audit.json"
    assert main(["mechanism", "--trials", "100", "--seed", "1", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "claim: noise multiplier 1, so mu 1 and epsilon 4.37718 at delta 1e-05"
    assert lines[-1] == "verdict: the claim stands"
    data = json.loads(file.read_text(encoding="utf-8"))
    assert data["is_refuted"] is False
    assert (data["mu"], data["settings"]["workers"], data["bounds"]["trials"]) == (1.0, 1, 100)
    assert f"found: mu >= {data['bounds']['mu']:.4f}, epsilon >= {data['bounds']['epsilon']:.4f}, each" in lines[2]


def test_the_command_refutes(capsys, tmp_path) -> None:
    file = tmp_path / "audit.json"
    settings = ["--noise", "paper", "--micro-batches", "8", "--seed", "1", "--json", str(file)]
    assert main(["mechanism", "--trials", "100", *settings]) == 1
    assert "verdict: REFUTED, the mechanism leaks more than it claims" in capsys.readouterr().out
    assert json.loads(file.read_text(encoding="utf-8"))["is_refuted"] is True
    assert main(["noise", "--steps", "3", *settings]) == 1
    assert "BAD  std of layer 0: 0.17" in capsys.readouterr().out  # 1/(2·√8)
    assert json.loads(file.read_text(encoding="utf-8"))["checks"][0]["p_value"] < 1e-9


def test_the_command_on_sound_noise(capsys) -> None:
    options = ["--decay", "linear:0.5", "--epoch", "2", "--layer-scaling", "public:1,2,4", "--seed", "2"]
    assert main(["noise", "--steps", "3", *options]) == 0
    out = capsys.readouterr().out
    assert "claim: noise multiplier 0.5\n" in out
    assert " ok  shards cover every coordinate once: 0 bare, 0 noised twice, of 12600" in out
    assert "BAD" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["mechanism", "--noise-multiplier", "-1"], "noise_multiplier must be a finite number > 0, got -1.0"),
        (["mechanism", "--decay", "cubic:1"], "decay must be none, linear:TAU or exponential:TAU, got 'cubic:1'"),
        (["mechanism", "--trials", "5"], "trials must be an int >= 10, got 5"),
        (["mechanism", "--release", "scales"], "needs scaling private:Z, got 'none'"),
        (["mechanism", "--delta", "0", "--trials", "20"], "delta"),
        (["mechanism", "--unit", "example", "--noise", "paper"], "noise='paper' is defined for unit='micro_batch'"),
        (["noise", "--compression", "fp16"], "compression needs noise_placement='per_worker'"),
        (["noise", "--steps", "1"], "steps must be an int >= 2"),
        (["noise", "--steps", "2", "--json", "/no/such/folder/audit.json"], "/no/such/folder"),
    ],
)
def test_bad_input_of_the_command(options, message, capsys) -> None:
    assert main(options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["nonsense"], ["mechanism", "--noise", "none"]])
def test_bad_words_of_the_command(options, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(options)
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err
