"""The search through the paper's grid and the rows of Table 1, with error rates that are known."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from benchmarks import recipes, tradeoff
from benchmarks.harness import results, trainings
from benchmarks.harness.published import CHANGES
from benchmarks.report.render import page
from benchmarks.tradeoff import (
    DECAYS,
    GRID,
    MICRO_BATCHES,
    REDUCED,
    SETTINGS,
    TAUS,
    UNITS,
    Extent,
    Setting,
    Trainer,
    epsilons,
    explore,
    one_unit,
    without_search,
    works,
)
from benchmarks.tradeoff import figures as figures_of
from edpsgd.schedules import parse_decay
from mia.metrics import Estimate
from tasks.nlu.configuration import Config, parse

figures = partial(figures_of, extent=Extent(), seeds=1)


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


def test_if_nothing_is_borne_the_lowest_error_rate_is_chosen_and_shown() -> None:
    train = Trainings(1e-9)
    found = explore("clc", "atis", train)
    assert (found["none"].noise_multiplier, found["none"].clip_norm) == (1e-6, 1.0)
    tried = {setting.name: piece(setting, train(setting)["validation_ser"], 9.0) for setting in set(train.tried)}
    rows = figures({"plain": piece(Setting("clc", "atis"), 10.0, 10.0), **tried})["table"]
    shown = {row["decay"]: (row["settings"]["decay"], row["settings"]["noise_multiplier"]) for row in rows[1:]}
    assert shown == {kind: (found[kind].decay, found[kind].noise_multiplier) for kind in DECAYS}
    assert not any(row["is_allowed"] for row in rows[1:])


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


def piece(setting: Setting, validation: float, test: float) -> dict:
    cost = epsilons(setting, 0.1) if setting.noise_multiplier else None
    scores = {"validation_ser": validation, "test_ser": test, "epochs": 8, "utterances": 2642, "clip_fraction": 0.5}
    about = {"machine": {"processor": "p"}, "epsilon": cost, "real_share": 0.1 if cost else None}
    return {"table": vars(setting), **scores, **about}


def test_the_rows_are_the_most_noise_that_is_allowed() -> None:
    plain = Setting("clc", "atis")
    little, fair, much = (replace(plain, noise_multiplier=z) for z in (1e-4, 1e-3, 1e-2))
    pieces = {
        setting.name: piece(setting, *sers)
        for setting, sers in {
            plain: (6.0, 6.1), replace(plain, seed=1): (5.0, 5.2),
            little: (6.0, 6.0), fair: (6.2, 6.4), much: (9.0, 9.1),
            replace(fair, seed=1): (9.9, 6.6), replace(much, decay="linear:0.5"): (7.0, 7.0),
        }.items()
    }  # fmt: skip
    attack = {"auc": {"value": 0.6, "low": 0.5, "high": 0.7}, "roc": [[0, 0], [1, 1]], "test_ser": 6.4}
    found = figures({**pieces, f"attack-{fair.name}": attack})
    first, none, linear = found["table"]
    assert [run["test_ser"] for run in first["runs"]] == [6.1, 5.2]
    assert (none["settings"]["noise_multiplier"], none["tried"], none["is_allowed"]) == (1e-3, 3, True)
    assert [(run["test_ser"], run["auc"]) for run in none["runs"]] == [(6.4, attack["auc"]), (6.6, None)]
    assert none["paper"] == {"ser": 5.5, "auc": 0.619, "log10_epsilon": 4.4}  # 6.3 less 12.9 %, 67.5 % less 8.26 %
    assert not linear["is_allowed"]
    text = page("tradeoff", {**found, "frontier": None})
    assert "| CLC, ATIS | none | 6.50 (6.40–6.60) | 5.5 | 0.600 (0.500–0.700) | 0.619 |" in text
    assert "| linear, τ = 0.5 † |" in text
    assert "Not complete: rows are missing" in text
    assert "δ is the paper's, and above one over the number of training utterances of atis (2642)." in text


def test_every_setting_has_a_name_of_its_own() -> None:
    settings = [s for model, task in CHANGES for s in without_search(model, task).values()]
    settings += [replace(s, seed=1) for s in settings] + [
        replace(s, clip_norm=0.1) for s in settings if s.kind != "plain"
    ]
    assert len({s.name for s in settings}) == len(settings)
    assert {s.kind for s in settings} == {"plain", *DECAYS}


def test_an_attack_on_another_model_is_not_shown() -> None:
    """A run that was gone was trained again on another machine, and came out otherwise."""
    plain = Setting("clc", "atis")
    attack = {"auc": {"value": 0.6, "low": 0.5, "high": 0.7}, "roc": [], "test_ser": 6.2}
    [row] = figures({plain.name: piece(plain, 6.0, 6.1), f"attack-{plain.name}": attack})["table"]
    assert row["runs"][0]["auc"] is None


def parsed(settings) -> Config:
    """What tasks.train makes of the flags."""
    needed = {} if settings["task"] == "generated" else {"data": "somewhere"}
    return parse(trainings.flags({**settings, **needed}))[0]


@pytest.mark.parametrize("pair", [*CHANGES, *REDUCED.pairs])
def test_trainings_are_accepted(pair) -> None:
    for setting in without_search(*pair).values():
        config = parsed(setting.flags())
        assert (config.private == "off") == (setting.kind == "plain")
    for epsilon in (*recipes.EPSILONS, 1e6) if pair in {**recipes.RECIPES, **recipes.REDUCED} else ():
        assert parsed(recipes.settings(*pair, epsilon)).epsilon == epsilon


def test_the_frontier_has_units_of_every_size(tmp_path, monkeypatch) -> None:
    asked: dict[str, Config] = {}
    monkeypatch.setattr(trainings, "train", lambda settings, folder: asked.update({folder.name: parsed(settings)}))
    monkeypatch.setattr(trainings, "scores", lambda folder: {"test_ser": 9.0, "epochs": 2})
    kept = results.Pieces(tmp_path, "tradeoff", lambda pieces: {}, lambda name, found: "", "tradeoff")
    for unit in UNITS:
        Trainer(kept.get, None, tmp_path).frontier("clc", "generated", unit, 10.0)
    Trainer(kept.get, None, tmp_path).frontier("clc", "generated", "example", None)
    sizes = [(config.private, config.micro_batches, config.batch_size) for config in asked.values()]
    assert sizes == [("edp", 2, 32), ("edp", 8, 8), ("edp", 32, 2), ("example", 1, 64), ("off", 1, 64)]
    assert {config.sampling for config in asked.values() if config.private != "off"} == {"poisson"}


def test_what_is_below_a_useless_point_of_the_frontier_is_not_run() -> None:
    asked: list[tuple[str, float]] = []

    def point(unit: str, epsilon: float) -> dict:
        asked.append((unit, epsilon))
        return {"test_ser": 40.0 if epsilon >= 100 else 96.0}

    one_unit("4", (1.0, 10.0, 100.0, 1000.0), point)
    assert asked == [("4", 1000.0), ("4", 100.0), ("4", 10.0)]


def whole(extent: Extent, seeds: int) -> dict[str, dict]:
    """The pieces of a run that was not interrupted."""
    pieces: dict[str, dict] = {}
    bears = Trainings(1e-3)

    def get(key: str, _: object, settings: dict) -> dict:
        if key in pieces:
            return pieces[key]
        found = {"test_ser": 9.0, "auc": {"value": 0.6, "low": 0.5, "high": 0.7}, "roc": []}
        if key.startswith("frontier"):
            _, task, model, unit, *target = key.split("-")
            about = {"model": model, "task": task, "batch": 64, "delta": 1e-4, "unit": unit if target else "example"}
            about["target"] = float(target[0]) if target else None
            scores = {"epochs": 2, "utterances": 99, "test_intent_accuracy": 9.0, "test_slot_f1": 9.0, "epsilon": 1.0}
            found = {"frontier": about, **scores, "test_ser": 96.0 if unit == "1" else 50.0}
        elif not key.startswith("attack"):
            named = {name: settings[name] for name in ("decay", "noise_multiplier", "clip_norm") if name in settings}
            setting = Setting(settings["model"], settings["task"], settings["seed"], **named)
            found = piece(setting, bears(setting)["validation_ser"], 9.0)
        pieces[key] = {**found, "settings": settings}
        return pieces[key]

    for work in works(Trainer(get, None, Path()), extent, seeds).values():
        work()
    return pieces


class Machine:
    """Trains and attacks by a formula, and is switched off before the training or attack of some number."""

    def __init__(self, breaks: int | None) -> None:
        self.breaks, self.done, self.trained = breaks, 0, dict[str, dict]()

    def work(self) -> None:
        if self.done == self.breaks:
            raise KeyboardInterrupt
        self.done += 1

    def train(self, settings: dict, folder: Path) -> None:
        if folder.name not in self.trained:
            self.work()
            self.trained[folder.name] = settings

    def scores(self, folder: Path) -> dict:
        settings = self.trained[folder.name]
        named = {name: settings[name] for name in ("decay", "noise_multiplier", "clip_norm") if name in settings}
        setting = Setting(settings["model"], settings["task"], settings["seed"], **named)
        is_point = folder.name.startswith("frontier")
        validation = 9.0 if is_point else Trainings(1e-3)(setting)["validation_ser"]
        ser = {"validation_ser": validation, "test_ser": 40.0 + len(folder.name), "clip_fraction": 0.5}
        sizes = {"epochs": 8, "utterances": 99, "test_intent_accuracy": 9.0, "test_slot_f1": 9.0}
        return {**ser, **sizes, **({"epsilon": settings.get("epsilon")} if is_point else {})}

    def attack(self, run: SimpleNamespace, shadow: Path) -> tuple[SimpleNamespace, int]:
        self.work()
        value = 0.5 + len(run.folder.name) / 1000
        return SimpleNamespace(auc=Estimate(value, value - 0.1, value + 0.1), fpr=[0, 1], tpr=[0, 1]), 0


@pytest.mark.parametrize("breaks", range(0, 22, 3))
def test_interrupting_and_going_on_gives_the_same_tables(tmp_path, monkeypatch, breaks) -> None:
    """In the search, in attacks or in the frontier; run folders survive, and are of use."""
    extent = Extent([("clc", "atis")], epsilons=(1.0, 10.0))
    found, numbers = {}, []
    for folder, moments in (("whole", [None]), ("parts", [breaks, None])):
        trained: dict[str, dict] = {}
        for moment in moments:
            machine = Machine(moment)
            machine.trained = trained
            monkeypatch.setattr(trainings, "train", machine.train)
            monkeypatch.setattr(trainings, "scores", machine.scores)
            monkeypatch.setattr(tradeoff, "shadow_attack", machine.attack)
            monkeypatch.setattr(tradeoff, "open_run", lambda folder, data: SimpleNamespace(folder=folder))
            monkeypatch.setattr(tradeoff, "_real_share", lambda setting, folder: 0.1)
            every = partial(figures_of, extent=extent, seeds=1)
            kept = results.Pieces(tmp_path / folder, "tradeoff", every, page, "tradeoff")
            with pytest.raises(KeyboardInterrupt) if moment is not None else nullcontext():
                for work in works(Trainer(kept.get, None, tmp_path / folder / "runs"), extent, 1).values():
                    work()
            numbers.append(machine.done)
        found[folder] = results.load("tradeoff", tmp_path / folder)
    whole, *parts = numbers
    assert sum(parts) == whole == 22
    for name in ("table", "frontier", "is_complete"):
        assert found["parts"][name] == found["whole"][name]
    assert found["whole"]["is_complete"]


@pytest.mark.parametrize(("extent", "seeds"), [(Extent(), 1), (Extent([("clc", "atis")]), 2), (REDUCED, 1)])
def test_what_is_complete_lacks_no_piece(extent, seeds) -> None:
    """Without any of them, whatever it is, or with one of other settings, something is left to be done."""
    pieces = whole(extent, seeds)
    assert figures_of(pieces, extent, seeds)["is_complete"]
    assert not figures_of(pieces, extent, seeds + 1)["is_complete"]
    assert not figures_of({}, extent, seeds)["is_complete"]
    assert len([name for name in pieces if name.startswith("frontier-")]) == 1 + 1 + 3 * len(extent.epsilons)
    for name in pieces if len(extent.pairs) == 1 else ():
        assert not figures_of({n: one for n, one in pieces.items() if n != name}, extent, seeds)["is_complete"], name
        changed = {**pieces, name: {**pieces[name], "settings": {**pieces[name]["settings"], "epochs": 99}}}
        assert not figures_of(changed, extent, seeds)["is_complete"]


@pytest.mark.parametrize(("model", "task"), [*recipes.RECIPES, *REDUCED.pairs])
def test_recipes(model, task) -> None:
    """All units of the frontier divide the batch, and plain training differs in nothing but privacy."""
    private, plain = recipes.settings(model, task, 8.0), recipes.settings(model, task, None)
    assert all(private["batch_size"] % (number or 1) == 0 for number in UNITS.values())
    assert (private["private"], private["sampling"], private["epsilon"]) == ("example", "poisson", 8.0)
    assert {**private, **plain} == {**private, "private": "off"}
