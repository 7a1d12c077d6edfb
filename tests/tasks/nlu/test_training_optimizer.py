"""The optimizer of a training: what it trains, and its learning rates in every step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import edpsgd
from edpsgd.distributed.collectives import Local
from tasks.nlu import new_model
from tasks.nlu.labels import Labels
from tasks.nlu.noise_plan import make_plan
from tasks.nlu.samplers import make_batches
from tasks.nlu.training_loop import Training
from tasks.nlu.training_optimizer import initial_rates, make_optimizer, rate_factor
from tests.helpers.common import quiet
from tests.helpers.examples import small_model
from tests.helpers.jobs import here, run, tiny

LABELS = Labels.of_slots(["call", "stop"], ["name"])


def optimizer_of(config, folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of which the word vectors are frozen, and its optimizer."""
    model = small_model("clc", LABELS)
    model.words.weight.requires_grad_(False)
    batches = make_batches(config, 100, Local())
    plan = None if config.private == "off" else make_plan(config, batches, 1)
    folder.mkdir()
    return model, make_optimizer(config, here("local", Local()), model, batches, plan, folder)


@pytest.mark.parametrize("private", ["off", "edp", "example"])
def test_trained_parameters_are_in_two_groups(tmp_path, private) -> None:
    """Of the encoder and of the heads, each parameter once; frozen ones in none."""
    model, optimizer = optimizer_of(tiny(tmp_path, private=private), tmp_path / "run")
    assert isinstance(optimizer, edpsgd.PrivateOptimizer) == (private != "off")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of_encoder, of_heads = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert {name.split(".")[0] for name in of_heads} == {"intent", "slots", "crf"}
    assert sorted(of_encoder + of_heads) == sorted(set(names.values()) - {"words.weight"})


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"model": "clc"}, [1e-3, 1e-3]),
        ({"model": "bert"}, [5e-5, 1e-3]),
        ({"model": "bert", "learning_rate": 0.01}, [0.01, 0.01]),
        ({"model": "bert", "head_learning_rate": 0.02}, [5e-5, 0.02]),
    ],
)
def test_rates_that_nobody_gave(tmp_path, settings, rates) -> None:
    assert initial_rates(tiny(tmp_path, **settings)) == rates


def test_the_factor_of_the_rates_is_never_zero_or_above_one(tmp_path) -> None:
    for warmup in (0.0, 0.05, 0.99):
        config = tiny(tmp_path, warmup=warmup)
        factors = [rate_factor(config, taken, total_steps=40) for taken in range(40)]
        assert min(factors) > 0
        assert max(factors) <= 1


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        ({"warmup": 0.2}, [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        ({"warmup": 0.0}, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ({"warmup": 0.4, "schedule": "constant"}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_the_learning_rates(tmp_path, monkeypatch, settings, factors) -> None:
    """Of the encoder and of the heads, in each of the ten steps."""
    take, seen = Training._step, []

    def step(self, *arguments) -> None:
        take(self, *arguments)
        seen.append([group["lr"] for group in self.optimizer.param_groups])

    monkeypatch.setattr(Training, "_step", step)
    run(tiny(tmp_path / "run", private="off", learning_rate=0.01, head_learning_rate=0.03, **settings))
    assert seen == [pytest.approx([0.01 * factor, 0.03 * factor]) for factor in factors]


def test_a_model_that_keeps_statistics_is_refused(tmp_path, monkeypatch) -> None:
    build = new_model.build

    def with_statistics(*arguments):
        parts = build(*arguments)
        parts.model.norm = torch.nn.BatchNorm1d(3)
        return parts

    monkeypatch.setattr(new_model, "build", with_statistics)
    with quiet(), pytest.raises(ValueError, match="running statistics"):
        run(tiny(tmp_path / "run"))
