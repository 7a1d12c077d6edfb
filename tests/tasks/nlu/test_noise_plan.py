"""The noise of a job: the ledger says in the end what the plan said, and never more than was asked for."""

from __future__ import annotations

import math

import dp_accounting
import pytest
from dp_accounting import pld
from scipy.special import log_ndtr

import edpsgd
from edpsgd.distributed.collectives import Local
from tasks.nlu.noise_plan import layer_scaling, make_plan
from tasks.nlu.samplers import make_batches
from tests.helpers.jobs import run, tiny

DELTA = 5e-4


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
