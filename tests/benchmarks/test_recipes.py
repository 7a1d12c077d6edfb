"""Trainings whose ε alone is given: which there are, what they read, and that the command may be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import lira, recipes
from benchmarks.harness import recipe_jobs, results, trainings
from benchmarks.harness.recipe_jobs import ADDED, LEFT_OUT, MINILM, PUBLIC, RATES, REDUCED, ROWS, Extent, jobs
from benchmarks.harness.recipe_rows import BOTH, WHOLE, figures
from benchmarks.harness.tradeoff_rows import UNITS
from benchmarks.recipes import Trainer, works
from benchmarks.report.render import page
from tasks.nlu import dataset, encoder_states
from tasks.nlu.configuration import Config, parse
from tasks.nlu.splits import split
from tests.helpers.corpora import data_folder
from tests.helpers.paths import ROOT
from tests.test_launchers import environment

# -------------------------------------------------------------------- the whole command


def start(folder: Path) -> subprocess.Popen:
    """The hidden states, and one training that reads them."""
    flags = ["--reduced", "--only", "generated-8-0", "--jobs", "1", "--out", str(folder), "--runs", f"{folder}/runs"]
    command = [sys.executable, "-m", "benchmarks.recipes", *flags]
    return subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True)


def wait_for(folder: Path, pattern: str, job: subprocess.Popen) -> None:
    end = time.monotonic() + 200
    while not list(folder.glob(pattern)):
        assert job.poll() is None, "it ended before"
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_command_that_is_killed_goes_on(tmp_path) -> None:
    """Hidden states are computed once; the training begins again, and follows the recipe that was resolved before."""
    killed = start(tmp_path)
    wait_for(tmp_path, "runs/generated-8-0-*/config.yaml", killed)  # it is about to train
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    kept = results.load("recipes", tmp_path)
    assert list(kept["pieces"]) == ["features-generated-MiniLM"]
    [states] = tmp_path.glob(f"runs/*/{encoder_states.FOLDER}/states.f16")
    written = states.stat().st_mtime_ns
    assert start(tmp_path).wait(300) == 0
    found = results.load("recipes", tmp_path)
    assert states.stat().st_mtime_ns == written
    assert found["pieces"]["features-generated-MiniLM"] == kept["pieces"]["features-generated-MiniLM"]
    [row] = found["rows"]
    [run] = row["runs"]
    assert 7.9 < run["spent"] <= 8
    assert run["seconds"] == pytest.approx(60 * run["minutes"], abs=0.1)
    assert row["recipe"] == jobs(REDUCED)["generated-8-0"].hangs_on["recipe"]
    assert row["utterances"] == recipe_jobs.UTTERANCES["generated"]
    assert not found["is_complete"]
    assert "Not complete" in (tmp_path / "recipes.md").read_text(encoding="utf-8")


# -------------------------------------------------------------------- which trainings


def parsed(job: recipe_jobs.Job) -> Config:
    """What tasks.train makes of the flags."""
    return parse(trainings.flags({**job.flags, "data": "somewhere"}))[0]


def test_every_training_is_accepted() -> None:
    """Those whose ε alone is given have secret noise, and hang on the recipe that they follow."""
    for name, job in {**jobs(Extent()), **jobs(REDUCED)}.items():
        config = parsed(job)
        assert config.epsilon == job.about["epsilon"], name
        assert config.seed is None
        is_private = job.about["epsilon"] is not None
        assert ("recipe" in job.hangs_on) == (is_private and "private" not in job.flags)


def test_plain_training_has_the_model_of_the_recipe() -> None:
    for row in ROWS.values():
        recipe = recipe_jobs.resolved(recipe_jobs.private(row, 8.0))
        plain = recipe_jobs.plain(row)
        for name in ("model", "freeze", "transitions", "zero_heads", "dropout"):
            assert plain[name] == recipe[name]
        assert plain["private"] == "off"


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_one_part_of_a_recipe_is_changed_at_a_time(epsilon) -> None:
    row = ROWS["snips"]
    whole = recipe_jobs.resolved(recipe_jobs.private(row, epsilon))
    for change in LEFT_OUT:
        other = recipe_jobs.resolved(recipe_jobs.changed(row, change, epsilon))
        differ = {name for name in {**whole, **other} if whole.get(name) != other.get(name)}
        expected = {"layers": {"features", "window"}, "neighbours": {"window"}, "pieces": {"features"}}
        expected |= {"fixed-transitions": {"transitions"}, "zero-heads": {"zero_heads"}, "fall": {"schedule"}}
        expected |= {"sgd": {"optimizer", "learning_rate", "momentum"}, "no-dropout": {"dropout"}}
        expected |= {"large-batches": {"batch_size", "epochs"}}
        assert differ == expected[change], change
    steps = [one["epochs"] * -(-6548 // one["batch_size"]) for one in (whole, other)]
    assert change == "large-batches"
    assert other["batch_size"] == round(0.06 * 6548)
    assert abs(steps[1] / steps[0] - 1) < 0.1


def test_what_is_added_takes_the_place_of_the_encoder() -> None:
    found = recipe_jobs.changed(ROWS["snips"], "tuning", 8.0)
    assert (found["init_from"], "pretrained" in found) == (PUBLIC, False)
    assert recipe_jobs.changed(ROWS["snips"], "schema", 8.0)["pretrained"] == MINILM


def test_units_are_of_every_size_and_of_one_batch() -> None:
    found = jobs(Extent())
    sizes = set()
    for unit, number in UNITS.items():
        same = [job for job in found.values() if job.about.get("unit") == unit]
        assert len(same) == len(Extent().units_at) * (1 if number is None else len(RATES))
        for job in same:
            config = parsed(job)
            if number is not None:
                sizes.add(config.micro_batches * config.batch_size)
                assert (config.private, config.sampling, config.freeze) == ("edp", "poisson", "encoder")
    assert sizes == {recipe_jobs.BATCH}


@pytest.mark.parametrize("task", ["snips", "atis", "nlu-eval"])
def test_the_utterances_that_recipes_are_chosen_by(task) -> None:
    config = Config(task=task, data=str(data_folder()), private="off")
    train = split(dataset.read(config), config.split, config.split_seed).train
    assert len(train) == recipe_jobs.UTTERANCES[task]


# -------------------------------------------------------------------- running them


class Trained:
    """Trains by a formula, and writes down what it was told."""

    def __init__(self) -> None:
        self.flags: dict[str, dict[str, Any]] = {}

    def train(self, settings: dict, folder: Path) -> None:
        name = folder.name.rpartition("-")[0]
        assert name not in self.flags or self.flags[name] == settings
        self.flags[name] = settings
        kept = folder / encoder_states.FOLDER
        if settings.get("keep_features"):
            kept.mkdir(parents=True, exist_ok=True)
            (kept / "about.json").write_text("{}")
            Path(f"{folder}.log").write_text("hidden states of 160 utterances: 1 MB in a private file, 7 s\n")
        elif settings.get("states_from") is not None:
            assert (Path(settings["states_from"]) / encoder_states.FOLDER / "about.json").exists()

    def measured(self, folder: Path) -> dict[str, Any]:
        flags = self.flags[folder.name.rpartition("-")[0]]
        recipe = {"model": "bert", "learning_rate": flags.get("learning_rate", 0.5)}
        validation = 20.0 if flags.get("learning_rate") == RATES[0] else 30.0
        found = {"test_ser": validation + 1, "validation_ser": validation, "spent": flags.get("epsilon")}
        found |= {"test_intent_accuracy": 90.0, "test_slot_f1": 80.0, "clip_fraction": 0.5, "seconds": 6.0}
        return {**found, "minutes": 0.1, "epochs": 3, "utterances": 80, "precision": "fp32", "recipe": recipe}


def run(folder: Path, extent: Extent, monkeypatch) -> tuple[dict, dict[str, dict[str, Any]]]:
    """All of an extent; the results, and the flags of what was trained."""
    trained = Trained()
    monkeypatch.setattr(trainings, "train", trained.train)
    monkeypatch.setattr(trainings, "scores", lambda folder: {"test_ser": 9.0, "minutes": 1.0})
    monkeypatch.setattr(recipes, "measured", trained.measured)
    kept = results.Pieces(folder, "recipes", lambda pieces: figures(pieces, extent), page, "recipes")
    trainer = Trainer(kept.get, None, folder / "runs", extent.tuning)
    for work in works(trainer, jobs(extent)).values():
        work()
    return results.load("recipes", folder), trained.flags


def test_what_trainings_begin_with_is_made_once(tmp_path, monkeypatch) -> None:
    found, flags = run(tmp_path, REDUCED, monkeypatch)
    assert found["is_complete"]
    assert [(one["encoder"], one["computed"], one["seconds"]) for one in found["features"]] == [
        (MINILM, 160, 7.0),
        (PUBLIC, 160, 7.0),
    ]
    private, public = flags["generated-8-0"], flags["generated-public-8-0"]
    assert Path(private["states_from"]).name.startswith("features-generated-MiniLM")
    assert Path(public["states_from"]).name.startswith("features-generated-public")
    assert Path(public["init_from"]).name.startswith("public-")
    assert public["labels"] == tmp_path / "runs" / "generated.yaml"
    assert "states_from" not in flags["without-pieces-8-0"]  # its layers are others
    assert "states_from" in flags["without-large-batches-8-0"]
    hangs_on = str([piece["settings"] for piece in found["pieces"].values()])
    assert str(tmp_path) not in hangs_on
    assert "states_from" not in hangs_on


def test_tables_are_of_what_was_run(tmp_path, monkeypatch) -> None:
    found, _ = run(tmp_path, REDUCED, monkeypatch)
    assert [(row["name"], row["epsilon"]) for row in found["rows"]] == [
        (name, epsilon) for name in REDUCED.rows for epsilon in (8.0, None)
    ]
    texts = [{**LEFT_OUT, **ADDED}[change][0] for change in REDUCED.changes]
    assert [row["text"] for row in found["changes"]] == [WHOLE, *texts, BOTH]
    points = {point["unit"]: point for point in found["frontier"]["points"]}
    assert points["4"]["recipe"]["learning_rate"] == RATES[0]  # the better one on validation data
    assert found["frontier"]["plain"] == {"test_ser": 31.0}
    assert found["tuning"]["test_ser"] == 9.0


def test_a_recipe_that_has_changed_is_measured_again(tmp_path, monkeypatch) -> None:
    """And nothing else."""
    before, _ = run(tmp_path, REDUCED, monkeypatch)
    found, flags = run(tmp_path, REDUCED, monkeypatch)
    assert found["pieces"] == before["pieces"]
    assert not [name for name in flags if not name.startswith(("features", "public"))]
    monkeypatch.setattr(recipe_jobs, "PLAIN", {**recipe_jobs.PLAIN, "epochs": 99})
    wanted = jobs(REDUCED)
    assert not figures(before["pieces"], REDUCED)["is_complete"]
    _, flags = run(tmp_path, REDUCED, monkeypatch)
    again = {name for name in flags if not name.startswith(("features", "public"))}
    assert again == {name for name, job in wanted.items() if job.flags.get("private") == "off"}


def test_states_that_were_deleted_are_computed_again(tmp_path, monkeypatch) -> None:
    run(tmp_path, REDUCED, monkeypatch)
    removed = []
    monkeypatch.setattr(trainings, "final", lambda folder: {})
    monkeypatch.setattr(recipes.shutil, "rmtree", removed.append)
    [kept] = tmp_path.glob(f"runs/features-generated-MiniLM-*/{encoder_states.FOLDER}/about.json")
    kept.unlink()
    run(tmp_path, REDUCED, monkeypatch)
    assert removed == [kept.parents[1]]


# -------------------------------------------------------------------- LiRA


def test_lira_attacks_the_first_repetition_of_a_row() -> None:
    assert [(name, job.about["row"]) for name, job in lira.targets(Extent()).items()] == [
        ("snips-1-0", "snips"),
        ("snips-8-0", "snips"),
        ("snips-plain-0", "snips"),
    ]


def test_lira_from_the_command_to_the_page(tmp_path, monkeypatch) -> None:
    """What is attacked is trained like a row of recipes; an attack that is there is not made again."""
    asked: list[tuple[str, int, int]] = []

    def attack(folder: Path, data: Path | None, epsilon: float | None, shadows: int, at_once: int) -> dict:
        asked.append((folder.name.rpartition("-")[0], shadows, at_once))
        report = {"value": 0.5, "low": 0.4, "high": 0.6}
        found = {"auc": report, "tpr_at_1_percent": report, "epsilon": epsilon, "spent": epsilon, "test_ser": 9.0}
        return {**found, "shadows": shadows, "members": 40, "non_members": 41, "minutes": 1.0}

    monkeypatch.setattr(trainings, "train", Trained().train)
    monkeypatch.setattr(lira, "attack", attack)
    monkeypatch.setattr(lira.torch, "set_num_threads", lambda number: None)
    command = ["--reduced", "--shadows", "5", "--jobs", "2", "--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
    for _ in range(2):
        lira.main(command)
    assert asked == [("generated-8-0", 5, 2), ("generated-plain-0", 5, 2)]
    found = results.load("lira", tmp_path)
    assert found["is_complete"]
    assert [row["epsilon"] for row in found["rows"]] == [8.0, None]
    assert "LiRA with 5 shadow models on BERT (MiniLM), generated" in (tmp_path / "lira.md").read_text(encoding="utf-8")
