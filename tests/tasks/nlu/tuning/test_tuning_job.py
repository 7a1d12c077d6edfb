"""Whole tunings of tiny models: what they cost, what they leave, and how they go on."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import yaml

import edpsgd
from edpsgd import Ledger
from edpsgd.accounting import Steps, TrialLaw, selected_epsilon
from edpsgd.ledger.guarantee import format_epsilon
from tasks.common.workers import workers
from tasks.nlu.configuration import Config, read_file
from tasks.nlu.training_job import train
from tasks.nlu.training_loop import Training
from tasks.nlu.training_state import Diverged
from tasks.nlu.tuning import tuning_job
from tasks.nlu.tuning.tuning_folder import TuningFolder, best_of
from tasks.nlu.tuning.tuning_job import Tuned, Wishes, tune
from tests.helpers.jobs import _losses_checked_once, tiny, tiny_encoder
from tests.helpers.training_commands import names

SINGLE = {"private": "example", "epsilon": 8.0, "delta": 1e-4}
POISSON = {**SINGLE, "sampling": "poisson"}
SEARCH = "learning_rate: [0.01, 0.02]\nbatch_size: [6, 12]\nepochs: [1]\n"


class Fixed:
    """Draws three trainings by a geometric law of mean 3, of the candidates 3, 0 and 2."""

    def __init__(self) -> None:
        self._drawn = iter([3, 0, 2])

    def random(self) -> float:
        return 1 - (2 / 3) ** 2.5

    def randrange(self, _: int) -> int:
        return next(self._drawn)


@pytest.fixture
def draws():
    with mock.patch.object(tuning_job, "SystemRandom", Fixed):
        yield


def tuned(config: Config, wishes: Wishes | None = None, **more) -> Tuned | None:
    with workers("cpu", 1) as team, _losses_checked_once():
        return tune(config, wishes or Wishes(), team, **more)


def space(folder: Path, text: str = SEARCH) -> str:
    file = folder / "space.yaml"
    file.write_text(text)
    return str(file)


def epsilon_of(folder: Path, mean: float, score_noise: float | None) -> float:
    """From the noise of the candidates and their batch sizes: an epoch of sampled steps, or a shuffled pass."""
    run = Ledger.read(folder / "best" / "ledger.jsonl").runs[-1].batches
    multipliers = json.loads((folder / "tuning.json").read_text())["multipliers"]
    trials = []
    for place, size in ((0, 6), (1, 12)):
        steps = Steps(multipliers[place], 1.0, 1)
        if run.kind == "poisson":
            steps = Steps(multipliers[place], size / run.examples, -(-run.examples // size))
        trials.append([steps])
    law = TrialLaw(mean)
    of_score = 0.0 if score_noise is None else selected_epsilon([[Steps(score_noise, 1.0, 1)]], 1e-4, law)
    return max(selected_epsilon(trials, 1e-4, law), of_score)


def test_a_private_tuning_costs_what_was_asked_for(tmp_path, draws, capsys) -> None:
    folder = tmp_path / "tuning"
    found = tuned(tiny(folder, **POISSON), Wishes(trials=3.0, search=space(tmp_path)))
    assert found is not None
    output = capsys.readouterr().out
    assert "3 on average (geometric law)" in output
    assert "training 3 " in output
    assert names(folder) == {"best", "config.yaml", "tuning.json", "scores.jsonl", "settings.yaml"}
    about = json.loads((folder / "tuning.json").read_text())
    assert about["drawn"] == [3, 0, 2]
    rule, z = about["score"].split(":")
    card = json.loads((folder / "best" / "privacy_card.json").read_text())
    assert card["epsilon"] == pytest.approx(epsilon_of(folder, 3.0, float(z)))
    assert 7.9 < card["epsilon"] <= 8.0
    assert rule == "noisy"
    assert any("an example alone decides" in condition for condition in card["conditions"])
    assert "best of a random number of trainings, 3 on average" in card["method"]
    assert edpsgd.card.make(Ledger.read(folder / "best" / "ledger.jsonl"), 1e-4).epsilon == card["epsilon"]
    assert found.page == (folder / "best" / "privacy_card.md").read_text()
    scores = TuningFolder(folder).scores()
    best = best_of(scores)
    drawn = yaml.safe_load(SEARCH)
    candidates = [(rate, size) for rate in drawn["learning_rate"] for size in drawn["batch_size"]]
    settings = read_file(folder / "best" / "config.yaml")
    assert (settings["learning_rate"], settings["batch_size"]) == candidates[[3, 0, 2][best]]
    assert settings["output"] == str(folder / "best")
    assert found.table.splitlines()[1].split()[0] == str(best + 1)
    with workers("cpu", 1) as team:
        capsys.readouterr()
        train(Config(**settings), team, folder / "best", dry_run=True)
    assert f"{format_epsilon(card['epsilon'])} at δ" in capsys.readouterr().out  # also if it goes on by itself
    again = tuned(tiny(folder, **POISSON), resume=folder)  # complete: nothing changes
    assert again == found


def test_going_on_draws_nothing_anew_and_begins_an_interrupted_training_again(tmp_path, draws) -> None:
    folder = tmp_path / "tuning"
    config, wishes = tiny(folder, **SINGLE), Wishes(trials=3.0, search=space(tmp_path))
    step, begun = Training._step, []

    def dying(self, *arguments):
        begun.append((self.folder.name, self.state.step))
        if self.folder.name == "001" and self.state.step == 2 and len(begun) < 20:
            raise KeyboardInterrupt
        step(self, *arguments)

    with mock.patch.object(Training, "_step", dying):
        with pytest.raises(KeyboardInterrupt):
            tuned(config, wishes)
        before = TuningFolder(folder).scores()
        assert set(before) == {0}
        assert (folder / "trainings" / "001" / "ledger.jsonl").exists()
        begun.extend([("", 0)] * 20)
        with mock.patch.object(tuning_job, "SystemRandom", None):  # nothing is left to draw
            found = tuned(config, resume=folder)
    assert found is not None
    later = [place for place in begun[begun.index(("", 0)) :] if place[0]]
    assert ("000", 0) not in later
    assert later[0] == ("001", 0)
    scores = TuningFolder(folder).scores()
    assert scores[0] == before[0]
    assert set(scores) == {0, 1, 2}
    steps = [e.steps for e in Ledger.read(folder / "best" / "ledger.jsonl").events]
    assert len(steps) == 1  # no step was charged twice
    card = json.loads((folder / "best" / "privacy_card.json").read_text())
    assert 7.9 < card["epsilon"] <= 8.0


def test_a_training_that_ended_unscored_is_only_scored(tmp_path, draws) -> None:
    folder = tmp_path / "tuning"
    config, wishes = tiny(folder, **SINGLE), Wishes(trials=3.0, search=space(tmp_path))
    with mock.patch.object(TuningFolder, "note", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        tuned(config, wishes)
    ledger = (folder / "trainings" / "000" / "ledger.jsonl").read_bytes()
    with mock.patch.object(tuning_job, "train", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        tuned(config, resume=folder)
    assert set(TuningFolder(folder).scores()) == {0}
    assert (folder / "trainings" / "000" / "ledger.jsonl").read_bytes() == ledger


def test_a_training_that_diverged_counts_and_is_not_tried_again(tmp_path, draws) -> None:
    folder = tmp_path / "tuning"
    config, wishes = tiny(folder, **SINGLE), Wishes(trials=3.0, search=space(tmp_path), score="exact")
    seen = []

    def diverging(one, team, **more):
        seen.append(Path(one.output).name)
        if seen[-1] != "001":
            raise Diverged("after step 1 the model holds NaN")
        return train(one, team, **more)

    with mock.patch.object(tuning_job, "train", diverging):
        found = tuned(config, wishes)
    assert seen == ["000", "001", "002"]
    assert found.table.count("diverged") == 2
    card = json.loads((folder / "best" / "privacy_card.json").read_text())
    assert any(condition.startswith("the choice is not covered") for condition in card["conditions"])
    assert any("exact score" in text for text in card["not_covered"])
    assert card["epsilon"] == pytest.approx(epsilon_of(folder, 3.0, None))
    other = tiny(tmp_path / "other", **SINGLE)
    with (
        mock.patch.object(tuning_job, "train", side_effect=Diverged("NaN")),
        pytest.raises(ValueError, match="all trainings diverged"),
    ):
        tuned(other, wishes)


def test_public_data_are_free_to_tune_on(tmp_path, capsys) -> None:
    folder = tmp_path / "tuning"
    wishes = Wishes(trials=2.0, search=space(tmp_path), public=True)
    found = tuned(tiny(folder, seed=1, **SINGLE), wishes)
    assert "nothing is charged" in capsys.readouterr().out
    assert found.is_free
    assert len(TuningFolder(folder).scores()) == 2
    card = json.loads((folder / "best" / "privacy_card.json").read_text())
    assert card["method"] == "exact Gaussian"
    chosen = read_file(found.settings)
    assert {"learning_rate", "batch_size", "epochs", "optimizer"} <= set(chosen)
    assert not {"epsilon", "delta", "data", "seed"} & set(chosen)
    plain = tuned(tiny(tmp_path / "plain", private="off"), Wishes(trials=1.0, search=space(tmp_path)))
    assert plain.page is None
    assert TuningFolder(tmp_path / "plain").scores().keys() == {0}


def test_a_given_noise_multiplier_and_a_public_score(tmp_path, draws) -> None:
    folder = tmp_path / "tuning"
    public = tmp_path / "public.jsonl"
    public.write_text('{"tokens": ["call", "anna"], "tags": ["O", "B-name"], "intent": "call"}\n')
    wishes = Wishes(trials=3.0, search=space(tmp_path, "epochs: [1]\nlearning_rate: [1e-3, 2e-3, 3e-3, 4e-3]\n"))
    found = tuned(tiny(folder), Wishes(**{**vars(wishes), "score": f"public:{public}", "law": "logarithmic"}))
    card = json.loads((folder / "best" / "privacy_card.json").read_text())
    assert card["epsilon"] == pytest.approx(selected_epsilon([[Steps(1.0, 1.0, 1)]], 5e-4, TrialLaw(3.0, 0.0)))
    assert any("said to be public" in condition for condition in card["conditions"])
    assert found.page is not None


def test_states_of_a_frozen_encoder_are_computed_once(tmp_path, draws, capsys) -> None:
    encoder = tiny_encoder(tmp_path / "encoder")
    settings = {"model": "bert", "pretrained": encoder, "freeze": "encoder", **SINGLE}
    config = tiny(tmp_path / "tuning", **settings)
    assert tuned(config, Wishes(trials=3.0, search=space(tmp_path))) is not None
    assert names(tmp_path / "tuning") == {"best", "config.yaml", "tuning.json", "scores.jsonl", "settings.yaml"}
    assert "encoder_states" not in names(tmp_path / "tuning" / "best")
    assert read_file(tmp_path / "tuning" / "best" / "config.yaml")["states_from"] is None
    card = json.loads((tmp_path / "tuning" / "best" / "privacy_card.json").read_text())
    assert not any("encoder_states" in text for text in card["not_covered"])
    assert capsys.readouterr().out.count("hidden states of") == 4  # said when they are opened too


@pytest.mark.parametrize(
    ("settings", "wishes", "message"),
    [
        ({"seed": 1}, {}, "--seed 1 is not for a private tuning"),
        ({"canaries": 2}, {}, "--canaries 2 is not"),
        ({"early_stopping": 1}, {}, "--early-stopping 1 is not"),
        ({"split": "random"}, {}, "needs --split hash"),
        ({"epsilon": None, "noise_multiplier": 1.0}, {}, "noisy:Z must say Z"),
        ({}, {"score": "bleu"}, "score must be public:FILE"),
        ({}, {"score": "public:none.jsonl"}, "none.jsonl"),
        ({}, {"score": "noisy", "public": True}, "score noisy is for private data"),
        ({}, {"search": "none.yaml"}, "cannot read the search space"),
    ],
)
def test_what_a_tuning_cannot_cover_is_refused(tmp_path, settings, wishes, message) -> None:
    with pytest.raises(ValueError, match=message):
        tuned(tiny(tmp_path / "tuning", **{**SINGLE, **settings}), Wishes(**wishes))
    assert not (tmp_path / "tuning").exists()


@pytest.mark.parametrize("flag", ["noise", "layer_scaling"])
def test_noise_that_promises_nothing_is_refused(tmp_path, flag) -> None:
    value = {"noise": "paper", "layer_scaling": "raw"}[flag]
    with pytest.raises(ValueError, match="is not for a private tuning"):
        tuned(tiny(tmp_path / "tuning", **{flag: value}), Wishes(score="exact"))


def test_other_data_or_workers_are_refused_when_it_goes_on(tmp_path, draws) -> None:
    folder = tmp_path / "tuning"
    config, wishes = tiny(folder, **SINGLE), Wishes(trials=3.0, search=space(tmp_path))
    assert tuned(config, wishes, dry_run=True) is None
    assert not folder.exists()
    with mock.patch.object(tuning_job, "train", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        tuned(config, wishes)
    with pytest.raises(ValueError, match="the data are not those of the tuning"):
        tuned(tiny(folder, **{**SINGLE, "examples": 130}), resume=folder)
    about = json.loads((folder / "tuning.json").read_text())
    (folder / "tuning.json").write_text(json.dumps({**about, "workers": 2}))
    with pytest.raises(ValueError, match="goes on with as many"):
        tuned(config, resume=folder)
    (folder / "tuning.json").write_text("{}")
    with pytest.raises(ValueError, match="is not the folder of a tuning"):
        tuned(config, resume=folder)
