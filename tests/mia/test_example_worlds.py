"""Audits of single examples and of samplers: sound ones stand, and each kind of planted bug is refuted."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from edpsgd import FirstStepNorms, FixedSizeUsers, PoissonBatches, PoissonUsers, PrivateOptimizer, ShuffledBatches
from edpsgd.distributed.collectives import Local
from mia import example_worlds
from mia.audit import main
from mia.audited_step import CLIP_NORM, Setup
from mia.mechanism import audit_mechanism
from mia.sampler_audit import KINDS, SamplerSetup, audit_sampler

EXAMPLES = {"unit": "example", "micro_batches": 4}


class ByLoop(PrivateOptimizer):
    """Sound by construction: one backward pass for each example, clipped by accumulate()."""

    def backward(self, losses, *arguments, **named) -> None:
        for loss in losses:
            loss.backward(retain_graph=True)
            self.accumulate()


class AfterAveraging(PrivateOptimizer):
    """Clips the average of the examples, and takes it for as many."""

    def backward(self, losses, *arguments, **named) -> None:
        losses.mean().backward()
        self.accumulate()


class Looser(ByLoop):
    """Clips by norms that a subclass says, which may be too small."""

    def norms(self, gradients: list[torch.Tensor]) -> list[float]:
        raise NotImplementedError

    def backward(self, losses, *arguments, **named) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for loss in losses:
            gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
            factor = min(1.0, CLIP_NORM / math.hypot(*self.norms(gradients)))
            self.contribute(parameters, [factor * gradient for gradient in gradients])

    def contribute(self, parameters, gradients) -> None:
        """As it is, however long: in pieces that are short enough not to be clipped again."""
        pieces = math.ceil(1.01 * math.hypot(*(float(g.norm()) for g in gradients)) / CLIP_NORM)
        for _ in range(max(1, pieces)):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient / pieces
            self.accumulate()


def under_counting(layer: int, share: float) -> type[Looser]:
    class UnderCounted(Looser):
        def norms(self, gradients):
            return [float(g.norm()) * (share if k == layer else 1.0) for k, g in enumerate(gradients)]

    return UnderCounted


class Watched(example_worlds.Model):
    """Keeps the rows of its linear layer, tokens x examples x features, on their way in and out."""

    rows: tuple[torch.Tensor, torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.hidden.register_forward_hook(self.keep)

    @staticmethod
    def keep(layer, inputs, output) -> None:
        Watched.rows = (inputs[0].detach(), output)


class SwappedLayout(Looser):
    """Takes the tokens of the linear layer for its examples where there are as many."""

    def backward(self, losses, *arguments, **named) -> None:
        inputs, outputs = Watched.rows
        if inputs.shape[0] != inputs.shape[1]:
            return ByLoop.backward(self, losses)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        at = example_worlds.layer_names().index("hidden.weight")
        [received] = torch.autograd.grad(losses.sum(), [outputs], retain_graph=True)
        by_token = torch.einsum("tbo,tbi->toi", received, inputs)
        for number, loss in enumerate(losses):
            gradients = list(torch.autograd.grad(loss, parameters, retain_graph=True))
            gradients[at] = by_token[number]
            norm = math.hypot(*(float(gradient.norm()) for gradient in gradients))
            self.contribute(parameters, [min(1.0, CLIP_NORM / norm) * gradient for gradient in gradients])


# -------------------------------------------------------------------- single examples


@pytest.mark.parametrize("make", [PrivateOptimizer, ByLoop])
@pytest.mark.parametrize(
    "settings", [{}, {"clipping": "per_layer"}, {"scaling": "public:1,2,4"}, {"scaling": "private:0.5"}]
)
def test_sound_clipping_of_examples_stands(make, settings) -> None:
    """And the canary moves the sum as far as it may."""
    for seed in range(3):
        finding = audit_mechanism(Setup(seed=seed, **EXAMPLES, **settings), Local(), trials=20, make=make)
        assert not finding.is_refuted, finding
        assert finding.move == pytest.approx(1.0, abs=1e-4)


def test_clipping_after_averaging_is_refuted() -> None:
    finding = audit_mechanism(Setup(seed=1, **EXAMPLES), Local(), make=AfterAveraging)
    assert finding.is_refuted
    assert finding.move is not None
    assert 1.5 < finding.move < 2.01  # from one side of the ball to the other


@pytest.mark.parametrize("layer", range(len(example_worlds.layer_names())))
def test_a_layer_that_is_counted_too_little_is_refuted(layer) -> None:
    """Any layer; half of its norm is enough."""
    sound = audit_mechanism(Setup(seed=2, **EXAMPLES), Local(), trials=20, make=under_counting(layer, 1.0))
    assert sound.move == pytest.approx(1.0, abs=1e-4)
    assert audit_mechanism(Setup(seed=2, **EXAMPLES), Local(), make=under_counting(layer, 0.5)).is_refuted


@pytest.mark.parametrize("seed", range(5))
def test_a_layout_that_is_swapped_is_refuted(monkeypatch, seed) -> None:
    monkeypatch.setattr(example_worlds, "Model", Watched)
    finding = audit_mechanism(Setup(seed=seed, **EXAMPLES), Local(), make=SwappedLayout)
    assert finding.is_refuted
    assert finding.shape is not None
    examples, tokens = finding.shape
    assert tokens in (examples, examples - 1)  # as many with the canary, or without it


class HalfNoise(ByLoop):
    def __init__(self, *arguments, noise_multiplier: float, **named) -> None:
        super().__init__(*arguments, noise_multiplier=noise_multiplier / 2, **named)


def test_too_little_noise_on_examples_is_refuted() -> None:
    """The sum moves by the clip norm and no more: the trials find it."""
    finding = audit_mechanism(Setup(seed=3, **EXAMPLES), Local(), trials=300, make=HalfNoise)
    assert finding.move == pytest.approx(1.0, abs=1e-4)
    assert finding.is_refuted
    assert finding.bounds is not None
    assert 1.0 < finding.bounds.mu < 2.0


def test_the_command_for_examples(capsys, tmp_path, monkeypatch) -> None:
    file = tmp_path / "audit.json"
    options = ["mechanism", "--unit", "example", "--trials", "50", "--seed", "1", "--json", str(file)]
    monkeypatch.setattr(PrivateOptimizer, "backward", ByLoop.backward)
    assert main(options) == 0
    shown = capsys.readouterr().out
    assert "found: an example moves the sum by 1.0000 clip norms, in a batch of " in shown
    assert "refute a claim that is just right in about 0.0001 of audits" in shown
    assert json.loads(file.read_text(encoding="utf-8"))["move"] == pytest.approx(1.0, abs=1e-4)
    monkeypatch.setattr(PrivateOptimizer, "backward", AfterAveraging.backward)
    assert main(options) == 1
    assert "verdict: REFUTED, the mechanism leaks more than it claims" in capsys.readouterr().out
    assert json.loads(file.read_text(encoding="utf-8"))["bounds"] is None


def test_a_missing_root_of_two_in_the_layer_norms_is_found_by_default(monkeypatch, capsys) -> None:
    monkeypatch.setattr(FirstStepNorms, "noise_std", property(lambda self: self.noise_multiplier))
    assert main(["mechanism", "--layer-scaling", "private:1", "--release", "scales", "--seed", "4"]) == 1
    assert "by 2000 trials in each world" in capsys.readouterr().out


# -------------------------------------------------------------------- samplers


def setup_of(kind: str, **more) -> SamplerSetup:
    slots = {} if "users" in kind else {"micro_batches": 4}
    return SamplerSetup(**{"kind": kind, "examples": 203, **slots, **more})


def failed(setup: SamplerSetup, epochs: int = 40, **more) -> set[str]:
    return {check.name for check in audit_sampler(setup, Local(), epochs=epochs, **more).failed}


@pytest.mark.parametrize("kind", KINDS)
def test_sound_samplers_stand(kind) -> None:
    """At an error rate that lets this test fail for sound draws of other seeds once in thousands of changes."""
    for seed in range(30):
        assert not failed(setup_of(kind, seed=seed), epochs=10, error_rate=1e-6)
    assert not failed(setup_of(kind, sampling_rate=0.5, batch_size=1, seed=1), epochs=5, error_rate=1e-6)


def test_p_values_of_a_sound_sampler_are_fair() -> None:
    """At most a tenth of the sound audits fail at an error rate of a tenth."""
    refuted = sum(
        audit_sampler(setup_of("poisson", seed=seed), Local(), epochs=4, error_rate=0.1).is_refuted
        for seed in range(200)
    )
    assert refuted <= 34  # 20 at most are expected; 1 in 1000 for a binomial of 200 and 0.1


def changed(monkeypatch, sampler, change) -> None:
    """Plants a bug in what a sampler hands out: change(batches of the step, sampler, step) -> batches."""
    whole = sampler._draw
    monkeypatch.setattr(sampler, "_draw", lambda self, step: change(whole(self, step), self, step))


@pytest.mark.parametrize(("sampler", "kind"), [(PoissonBatches, "poisson"), (PoissonUsers, "poisson_users")])
def test_a_doubled_rate_is_refuted(monkeypatch, sampler, kind) -> None:
    whole = sampler._draw

    def twice(self, step):
        again = [set(one) | set(two) for one, two in zip(whole(self, step), whole(self, step + 10**6), strict=True)]
        return [sorted(slot) for slot in again]

    monkeypatch.setattr(sampler, "_draw", twice)
    assert {"rate", "rate of every single one"} <= failed(setup_of(kind, seed=1))


def test_a_rate_that_is_a_tenth_too_large_is_refuted() -> None:
    def make(setup, collective):
        return PoissonBatches(setup.examples, 1.1 * setup.sampling_rate, collective=collective, seed=setup.seed)

    assert audit_sampler(SamplerSetup(seed=1), Local(), make=make).is_refuted


@pytest.mark.parametrize(("sampler", "kind"), [(PoissonBatches, "poisson"), (ShuffledBatches, "shuffled")])
def test_an_example_in_two_micro_batches_is_refuted(monkeypatch, sampler, kind) -> None:
    """One example, once in an epoch."""

    def doubled(batches, own, step):
        if step == 3 and batches[0]:
            batches[1] = [*batches[1], batches[0][0]]
        return batches

    changed(monkeypatch, sampler, doubled)
    assert "one slot for each example of a step" in failed(setup_of(kind, seed=2))


def test_draws_that_know_of_each_other_are_refuted(monkeypatch) -> None:
    whole = PoissonBatches._draw
    monkeypatch.setattr(PoissonBatches, "_draw", lambda self, step: whole(self, step // 2 * 2))
    assert "in a step and the next" in failed(setup_of("poisson", seed=3))
    monkeypatch.setattr(PoissonBatches, "_draw", whole)
    monkeypatch.setattr(PoissonBatches, "_epoch_key", lambda self: bytes(32))
    assert "in the same step of two epochs" in failed(setup_of("poisson", seed=3))


def test_batches_of_one_size_are_no_poisson_sampling(monkeypatch) -> None:
    def of_one_size(batches, own, step):
        chosen = np.random.default_rng([own.passes, step]).choice(own.examples, 10, replace=False)
        return [chosen.tolist(), [], [], []]

    changed(monkeypatch, PoissonBatches, of_one_size)
    assert "std of the sizes of steps" in failed(setup_of("poisson", examples=200, seed=4))


def test_neighbours_that_come_together_are_refuted(monkeypatch) -> None:
    """Pairs of examples are drawn instead of examples: rates and steps are as promised."""

    def pairs(batches, own, step):
        chosen = np.flatnonzero(np.random.default_rng([own.passes, step]).random(own.examples // 2) < 0.05)
        return [[int(one) for pair in chosen for one in (2 * pair, 2 * pair + 1)], [], [], []]

    changed(monkeypatch, PoissonBatches, pairs)
    assert "an example and its neighbour in a step" in failed(setup_of("poisson", examples=200, seed=5))


def test_an_example_that_is_drawn_too_often_is_refuted(monkeypatch) -> None:
    def favourite(batches, own, step):
        return [[index for index in batches[0] if index != 8] + [8] * (step % 4 == 0), *batches[1:]]

    changed(monkeypatch, PoissonBatches, favourite)
    found = failed(SamplerSetup(seed=6))
    assert "rate of every single one" in found
    assert "rate" not in found  # that of all of them together is as promised


def test_an_order_that_comes_again_is_refuted(monkeypatch) -> None:
    monkeypatch.setattr(ShuffledBatches, "_epoch_key", lambda self: bytes(32))
    assert failed(setup_of("shuffled", seed=7)) == {"in the same step of two epochs"}
    monkeypatch.setattr(FixedSizeUsers, "_epoch_key", lambda self: bytes(32))
    assert "in the same round of two epochs" in failed(setup_of("fixed_size_users", seed=7))


def test_padding_and_rounds_of_another_size_are_refuted(monkeypatch) -> None:
    changed(monkeypatch, ShuffledBatches, lambda batches, own, step: [batch or [0] for batch in batches])
    assert "every example once in every epoch" in failed(setup_of("shuffled", seed=8))
    changed(monkeypatch, FixedSizeUsers, lambda batches, own, step: [batches[0][: 9 + step % 2]])
    assert failed(setup_of("fixed_size_users", seed=8)) == {"size of rounds"}
    changed(monkeypatch, PoissonUsers, lambda batches, own, step: [[user + 1 for user in batches[0]]])
    assert "every index is one of the data set's" in failed(setup_of("poisson_users", seed=8))


def test_the_command_for_samplers(capsys, tmp_path, monkeypatch) -> None:
    file = tmp_path / "sampler.json"
    options = ["sampler", "--examples", "100", "--micro-batches", "2", "--seed", "1", "--json", str(file)]
    assert main(options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "claim: each joins each step with probability 0.05, independently of all others"
    assert lines[-2:] == [
        "A sound sampler is refuted with probability 0.001 at most, all checks together.",
        "verdict: the claim stands",
    ]
    changed(monkeypatch, PoissonBatches, lambda batches, own, step: [batches[0], batches[0]])
    assert main(options) == 1
    assert "BAD  one slot for each example of a step" in capsys.readouterr().out
    assert json.loads(file.read_text(encoding="utf-8"))["is_refuted"] is True
    assert main(["sampler", "--kind", "shuffled", "--seed", "1"]) == 0
    assert main(["sampler", "--kind", "fixed_size_users", "--seed", "1"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--examples", "1"], "examples must be an int >= 2, got 1"),
        (["--sampling-rate", "1.5"], "sampling_rate must be > 0 and <= 1, got 1.5"),
        (["--epochs", "1"], "epochs must be an int >= 2"),
        (["--error-rate", "0"], "error_rate in (0, 1)"),
        (["--kind", "shuffled", "--batch-size", "0"], "batch_size"),
        (["--unit", "example", "--micro-batches", "2"], "micro_batches is for unit='micro_batch'"),
    ],
)
def test_bad_input_of_the_sampler_command(options, message, capsys) -> None:
    assert main(["sampler", *options]) == 2
    assert message in capsys.readouterr().err
