"""The search through the paper's grid, with error rates that are known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from benchmarks.harness.grid_search import (
    DECAYS,
    MICRO_BATCHES,
    SETTINGS,
    TAUS,
    Setting,
    epsilons,
    explore,
    without_search,
)
from benchmarks.harness.noise_search import GRID
from benchmarks.harness.published import CHANGES
from edpsgd.schedules import parse_decay


class Trainings:
    """A model that bears a mean noise over the epochs; with another clip norm perhaps more, and perhaps only then."""

    def __init__(self, bearable: float, others: dict[float, float] | None = None) -> None:
        self.bearable, self.tried = {1.0: bearable, **(others or {})}, []

    def __call__(self, setting: Setting) -> dict:
        if not setting.noise_multiplier:
            return {"validation_ser": 10.0}
        cost = epsilons(setting, 0.1)
        self.tried.append(setting)
        decay = parse_decay(setting.decay)
        noise = setting.noise_multiplier * (1.0 if decay is None else sum(decay(t) for t in range(8)) / 8)
        is_borne = noise <= self.bearable.get(setting.clip_norm, 0.0)
        validation = 10.5 if is_borne else 10.6 + noise + abs(math.log(setting.clip_norm))
        return {"validation_ser": validation, "epsilon": cost}


@pytest.mark.parametrize("bearable", [1e-6, 1e-4, 1e-3, 1e-2, 1.0])
def test_the_largest_noise_is_found(bearable) -> None:
    train = Trainings(bearable)
    found = explore("clc", "atis", train)
    assert found["plain"] == Setting("clc", "atis")
    assert found["none"].noise_multiplier == pytest.approx(bearable)
    assert len(train.tried) <= 15


def test_another_clip_norm_may_bear_more() -> None:
    found = explore("clc", "atis", Trainings(1e-3, {5.0: 1e-2}))
    assert (found["none"].noise_multiplier, found["none"].clip_norm) == (1e-2, 5.0)


def test_decays_have_the_clip_norm_that_was_found() -> None:
    found = explore("clc", "atis", Trainings(0.0, {5.0: 1e-4}))
    assert (found["none"].noise_multiplier, found["none"].clip_norm) == (1e-4, 5.0)
    assert {found[kind].clip_norm for kind in ("linear", "exponential")} == {5.0}


def test_decays_start_with_more_noise_and_the_least_decay_that_makes_up_for_it() -> None:
    train = Trainings(4e-3)  # 0.01 with linear:0.7 has a mean of 3.9e-3 over 8 epochs, with linear:0.5 4.7e-3
    found = explore("clc", "atis", train)
    assert found["none"].noise_multiplier == 1e-3
    assert (found["linear"].decay, found["linear"].noise_multiplier) == ("linear:0.7", 1e-2)
    assert found["exponential"].decay == "exponential:0.35"


def test_a_decay_that_never_makes_up_for_it_has_the_same_noise() -> None:
    found = explore("clc", "atis", Trainings(1.0001e-3))
    assert (found["linear"].noise_multiplier, found["linear"].decay) == (1e-3, f"linear:{TAUS['linear'][0]:g}")


def test_the_noise_stays_in_the_grid() -> None:
    train = Trainings(1e9)
    found = explore("clc", "atis", train)
    assert {setting.noise_multiplier for setting in train.tried} <= set(GRID)
    assert {found[kind].noise_multiplier for kind in DECAYS} == {1.0}


def exact(mu: float, delta: float) -> float:
    """ε of a Gaussian mechanism, from its definition."""
    return brentq(lambda e: norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu) - delta, 0, 400)


def test_what_is_claimed_and_what_is_real() -> None:
    setting = Setting("clc", "snips", 0, "none", 1.0)  # four epochs
    share = 1 / (2 * math.sqrt(8) * 1.5)  # privacy.md, section 3, with a largest scale of 1.5
    found = epsilons(setting, share)
    epochs = SETTINGS["clc", "snips"]["epochs"]
    assert found["claimed_exact"] == pytest.approx(exact(math.sqrt(epochs), 5e-4), rel=1e-6)
    rho = epochs / 2 / share**2
    assert found["zcdp"] == pytest.approx(rho + 2 * math.sqrt(rho * math.log(1 / 5e-4)))
    assert found["claimed_exact"] < found["claimed_zcdp"] < found["exact"] < found["zcdp"]


def test_the_published_algorithm_is_trained() -> None:
    flags = Setting("bert", "atis", 1, "linear:0.5", 1e-3).flags()
    assert flags["micro_batches"] * flags["batch_size"] == 2 * SETTINGS["bert", "atis"]["batch_size"]
    assert (flags["micro_batches"], flags["noise"], flags["layer_scaling"]) == (MICRO_BATCHES, "paper", "raw")
    plain = Setting("bert", "atis", 1).flags()
    assert plain["batch_size"] == flags["micro_batches"] * flags["batch_size"]
    assert {plain["seed"], plain["split_seed"], flags["seed"], flags["split_seed"]} == {1}


def test_every_setting_has_a_name_of_its_own() -> None:
    settings = [s for model, task in CHANGES for s in without_search(model, task).values()]
    settings += [replace(s, seed=1) for s in settings] + [
        replace(s, clip_norm=0.1) for s in settings if s.kind != "plain"
    ]
    assert len({s.name for s in settings}) == len(settings)
    assert {s.kind for s in settings} == {"plain", *DECAYS}
