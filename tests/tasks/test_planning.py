"""What a job will cost, before it begins: the ledger says the same in the end, and never more than was asked for."""

from __future__ import annotations

import math

import dp_accounting
import pytest
from dp_accounting import pld
from scipy.special import log_ndtr

import edpsgd
from edpsgd.distributed.collectives import Local
from edpsgd.ledger.guarantee import format_epsilon
from tasks.planning import layer_scaling, make_batches, make_plan
from tasks.train import train
from tests.helpers.jobs import here, run, tiny

DELTA = 5e-4


class Team:
    """One of several workers that all say the same."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def sum_(self, tensors) -> None:
        raise AssertionError("a sampler sends no tensors")

    def gather(self, value):
        return [value] * self.size


# -------------------------------------------------------------------- samplers


def test_shuffled_batches(tmp_path) -> None:
    batches = make_batches(tiny(tmp_path, batch_size=4, micro_batches=3), 100, Team(1, 2))
    assert (batches.kind, batches.micro_batches, batches.expected_batch) == ("shuffled", 3, 24.0)
    assert batches.steps_per_epoch == math.ceil(50 / 12)
    assert {row % 2 for batch in batches for row in batch} == {1}


def test_shuffled_single_examples(tmp_path) -> None:
    """As many of them in a step as a micro-batch would hold."""
    batches = make_batches(tiny(tmp_path, private="example", batch_size=4), 100, Team(0, 2))
    assert (batches.kind, batches.micro_batches, batches.expected_batch) == ("shuffled", 4, 8.0)
    assert batches.fits("example")
    assert {len(batch) for batch in batches} == {0, 1}  # the last step is not full


@pytest.mark.parametrize(("private", "micro_batches"), [("edp", 3), ("example", None)])
def test_poisson_batches(tmp_path, private, micro_batches) -> None:
    settings = {"sampling": "poisson", "private": private, "batch_size": 4, "micro_batches": micro_batches or 1}
    batches = make_batches(tiny(tmp_path, **settings), 96, Team(0, 2))
    rate = 2 * 4 * (micro_batches or 1) / 96
    assert (batches.kind, batches.sampling_rate, batches.micro_batches) == ("poisson", rate, micro_batches)
    assert batches.steps_per_epoch == round(1 / rate)


def test_plain_training_is_shuffled(tmp_path) -> None:
    assert make_batches(tiny(tmp_path, private="off", sampling="poisson"), 100, Local()).kind == "shuffled"


def test_a_batch_that_is_larger_than_the_data(tmp_path) -> None:
    """Shuffled, it is the whole training set; a probability cannot be above 1."""
    assert make_batches(tiny(tmp_path, batch_size=16), 10, Local()).steps_per_epoch == 1
    assert make_batches(tiny(tmp_path, batch_size=5, sampling="poisson"), 10, Team(0, 2)).sampling_rate == 1.0
    with pytest.raises(ValueError, match=r"12 utterances \(2 workers x .* batch_size 6\), and there are 10"):
        make_batches(tiny(tmp_path, batch_size=6, sampling="poisson"), 10, Team(0, 2))


def test_layer_scaling(tmp_path) -> None:
    assert layer_scaling(tiny(tmp_path)) is None
    assert layer_scaling(tiny(tmp_path, layer_scaling="raw")) == edpsgd.FirstStepNorms()
    assert layer_scaling(tiny(tmp_path, layer_scaling="private:2.5")) == edpsgd.FirstStepNorms(2.5)
    for text in ("private", "private:", "private:0", "private:-1", "private:x", "private:inf", "Raw", ""):
        with pytest.raises(ValueError, match="layer_scaling|FirstStepNorms"):
            layer_scaling(tiny(tmp_path, layer_scaling=text))


# -------------------------------------------------------------------- the plan and the ledger


def gaussian_delta(events, epsilon: float) -> float:
    """δ of a Gaussian mechanism in closed form (Balle & Wang 2018), with a term for every pass over the data."""
    mu = math.sqrt(sum(1 / event.noise_multiplier**2 for event in events if event.steps))
    return math.exp(log_ndtr(mu / 2 - epsilon / mu)) - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))


def poisson_delta(events, epsilon: float) -> float:
    """δ by dp-accounting, a little too high."""
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    for event in events:
        noise = dp_accounting.GaussianDpEvent(event.noise_multiplier)
        is_sampled = event.sampling_rate is not None
        accountant.compose(
            dp_accounting.PoissonSampledDpEvent(event.sampling_rate, noise) if is_sampled else noise, event.steps
        )
    return accountant.get_delta(epsilon)


def finished(config):
    """The plan of a job, and the ledger after it."""
    folder = run(config).folder
    ledger = edpsgd.Ledger.read(folder / "ledger.jsonl")
    batches = make_batches(config, ledger.runs[0].batches.examples, Local())
    return make_plan(config, batches, 1), ledger


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"decay": "linear:0.5"},
        {"layer_scaling": "private:2.0", "decay": "exponential:0.3"},
        {"private": "example", "batch_size": 6, "epochs": 1},
        {"sampling": "poisson", "decay": "linear:0.5"},
        {"sampling": "poisson", "layer_scaling": "private:4.0"},
        {"sampling": "poisson", "private": "example", "batch_size": 6, "epochs": 1},
    ],
)
def test_calibrated_noise_spends_what_was_asked_for_and_no_more(tmp_path, settings) -> None:
    config = tiny(tmp_path / "run", epsilon=3.0, delta=DELTA, **settings)
    plan, ledger = finished(config)
    measured = "layer_scaling" in settings
    gradients = [event for event in ledger.events if event.kind == "gradients"]
    assert [event.kind for event in ledger.events if event.kind != "gradients"] == ["layer_norms"] * measured
    assert sum(event.steps for event in gradients) == config.epochs * plan.steps - measured  # none was refused

    assert 2.8 < float(ledger.epsilon(DELTA)) <= 3.0
    delta = poisson_delta if config.sampling == "poisson" else gaussian_delta
    assert 0.5 * DELTA < delta(ledger.events, 3.0) <= DELTA * 1.01
    assert plan.report.bounds[0].epsilon <= 3.0


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon": 3.0, "decay": "linear:0.5"},
        {"noise": "paper", "micro_batches": 2, "decay": "exponential:0.2"},
        {"noise": "paper", "clipping": "per_layer", "layer_scaling": "private:3.0"},
        {"layer_scaling": "raw"},
        {"private": "example", "batch_size": 6, "epochs": 1, "seed": 4},
        {"sampling": "poisson", "seed": 4, "micro_batches": 2, "batch_size": 6},
    ],
)
def test_the_plan_is_what_the_ledger_says_in_the_end(tmp_path, settings) -> None:
    plan, ledger = finished(tiny(tmp_path / "run", delta=DELTA, **settings))
    expected, found = plan.report.bounds, ledger.report(DELTA).bounds
    assert [(b.method, b.neighbours, b.conditions) for b in expected] == [
        (b.method, b.neighbours, b.conditions) for b in found
    ]
    last = len(found) - ("layer_scaling" in settings)  # "every example in every step": a step that measures is none
    for before, after in zip(expected[:last], found[:last], strict=True):
        assert before.epsilon == pytest.approx(after.epsilon, rel=1e-3 if "sampling" in settings else 1e-12)


def test_noise_as_published_hangs_on_scales_that_are_not_known_yet(tmp_path) -> None:
    config = tiny(tmp_path, noise="paper", layer_scaling="private:3.0")
    plan = make_plan(config, make_batches(config, 100, Local()), 1)
    assert plan.report is None
    assert "known when the layer scales are measured" in "\n".join(plan.lines(DELTA))


# -------------------------------------------------------------------- the dry run


def dry_run(config, capsys) -> str:
    assert train(config, here("local", Local()), dry_run=True) is None
    return capsys.readouterr().out


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path, capsys) -> None:
    config = tiny(tmp_path / "run", epsilon=3.0, decay="linear:0.5", epochs=4, delta=DELTA)
    said = dry_run(config, capsys)
    plan = make_plan(config, make_batches(config, 52, Local()), 1)
    assert "52 train, 6 validation, 62 test" in said
    assert f"{plan.noise_multiplier:.6g} in the first epoch, {plan.noise_multiplier / 2.5:.6g} in the last" in said
    for bound in plan.report.bounds:
        assert f"{format_epsilon(bound.epsilon)} at δ = 0.0005 ({bound.method}" in said
    assert "condition" not in said
    assert "note: δ" not in said
    assert list(tmp_path.iterdir()) == []


def test_no_epsilon_is_printed_without_its_conditions(tmp_path, capsys) -> None:
    said = dry_run(tiny(tmp_path, layer_scaling="raw", seed=3, sampling="poisson"), capsys)
    assert "on condition: the layer scales are raw first-step norms" in said
    assert "on condition: the noise comes from a given seed" in said
    assert "on condition: the batches come from a given seed" in said


def test_a_delta_above_one_over_the_number_of_utterances(tmp_path, capsys) -> None:
    assert "note: δ is above 1/52" in dry_run(tiny(tmp_path, delta=0.02), capsys)
    assert "note: δ" not in dry_run(tiny(tmp_path, delta=0.019), capsys)
