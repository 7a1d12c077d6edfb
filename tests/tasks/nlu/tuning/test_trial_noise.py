"""The noise of candidates: together they cost what was asked for, and each training releases what was planned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edpsgd import Ledger
from edpsgd.accounting import Steps, TrialLaw, selected_epsilon
from edpsgd.distributed.collectives import Local
from tasks.nlu.tuning import trial_noise
from tests.helpers.jobs import run, tiny

LAW = TrialLaw(5.0)


def test_the_candidates_together_cost_what_they_may(tmp_path) -> None:
    config = tiny(tmp_path, private="example", sampling="poisson", epsilon=8.0)
    configs = [replace(config, batch_size=size, epochs=epochs) for size, epochs in [(4, 1), (40, 4)]]
    configs.append(replace(config, decay="linear:0.2", layer_scaling="private:4"))
    shapes = [trial_noise.shape_of(one, 100, Local()) for one in configs]
    found = trial_noise.calibrated(shapes, 8.0, 1e-5, LAW)
    releases = []
    for one, shape in zip(configs, shapes, strict=True):
        z, steps = found[shape], -(-100 // one.batch_size)
        training = [Steps(z, one.batch_size / 100, steps * one.epochs)]
        if one.decay != "none":
            decayed = [Steps(z / (1 + 0.2 * epoch), 0.12, steps) for epoch in range(one.epochs)]
            training = [Steps(4.0, 1.0, 1), *decayed]
        releases.append(training)
        alone = selected_epsilon([training], 1e-5, LAW)
        assert 6.0 < alone < 8.0
    assert 7.9 < selected_epsilon(releases, 1e-5, LAW) <= 8.0


@pytest.mark.parametrize(("sampling", "scaling"), [("shuffled", "none"), ("poisson", "private:4")])
def test_a_training_releases_what_was_planned(tmp_path, sampling, scaling) -> None:
    settings = {"private": "example", "sampling": sampling, "layer_scaling": scaling, "batch_size": 20}
    config = tiny(tmp_path / "run", decay="linear:0.5", **settings)
    run(config)
    ledger = Ledger.read(tmp_path / "run" / "ledger.jsonl")
    planned = trial_noise.shape_of(config, ledger.runs[-1].batches.examples, Local()).planned(1.0)
    found = [(e.noise_multiplier, e.sampling_rate, e.steps, 1) for e in ledger.events]
    if scaling == "none":
        assert found == [tuple(steps) for steps in planned]
        return
    # The first step measures, and is no step of training: one fewer than planned.
    first, measured, last = found
    assert [measured, (*first[:2], first[2] + 1, 1), last] == [tuple(steps) for steps in planned]


def test_what_no_noise_can_reach_is_refused(tmp_path) -> None:
    config = tiny(tmp_path, layer_scaling="private:0.5")
    with pytest.raises(ValueError, match="cannot be reached"):
        trial_noise.calibrated([trial_noise.shape_of(config, 60, Local())], 1.0, 1e-5, LAW)
