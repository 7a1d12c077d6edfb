"""The command of Table 1 and the frontier: what it trains, and that it may be interrupted."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import tradeoff
from benchmarks.harness import frontier_settings, results, trainings
from benchmarks.harness.grid_search import (
    Setting,
    without_search,
)
from benchmarks.harness.published import CHANGES
from benchmarks.harness.tradeoff_rows import UNITS
from benchmarks.report.render import page
from benchmarks.tradeoff import REDUCED, Extent, Trainer, one_unit, works
from benchmarks.tradeoff import figures as figures_of
from mia.metrics import Estimate
from tasks.nlu.configuration import Config, parse
from tests.benchmarks.harness.test_grid_search import Trainings
from tests.benchmarks.harness.test_tradeoff_rows import piece


def parsed(settings) -> Config:
    """What tasks.train makes of the flags."""
    needed = {} if settings["task"] == "generated" else {"data": "somewhere"}
    return parse(trainings.flags({**settings, **needed}))[0]


@pytest.mark.parametrize("pair", [*CHANGES, *REDUCED.pairs])
def test_trainings_are_accepted(pair) -> None:
    for setting in without_search(*pair).values():
        config = parsed(setting.flags())
        assert (config.private == "off") == (setting.kind == "plain")


@pytest.mark.parametrize(("model", "task"), frontier_settings.CHOSEN)
def test_settings_of_the_frontier(model, task) -> None:
    """All units divide the batch, and plain training differs in nothing but privacy."""
    private, plain = (frontier_settings.settings(model, task, epsilon) for epsilon in (8.0, None))
    assert parsed(private).epsilon == 8.0
    assert all(private["batch_size"] % (number or 1) == 0 for number in UNITS.values())
    assert (private["private"], private["sampling"]) == ("example", "poisson")
    assert {**private, **plain} == {**private, "private": "off"}


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
