"""The job that trains a language model on users' texts: run folder, card, resume, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import edpsgd
from models.language_model import LanguageModel
from tasks import language_model
from tasks.common.workers import workers
from tasks.language.configuration import Config
from tasks.language.dataset import has_private_dictionary, load_texts
from tasks.language.dictionary import BOS
from tasks.language.readers import write_jsonl
from tasks.language.run_folder import load_model
from tasks.language.training_loops import SentenceTraining, UserTraining
from tasks.language.user_generator import generate
from tests.helpers.corpora import data_folder
from tests.helpers.jobs import metrics

SMALL = ["--users", "60", "--sentences", "6", "--words", "40", "--hidden", "8", "--dimension", "6", "--no-tensorboard"]
FEDAVG = [*SMALL, "--cohort", "10", "--rounds", "6", "--checkpoint-every", "3", "--learning-rate", "1", "--seed", "3"]
PRIVATE = [*FEDAVG, "--clip-norm", "2", "--noise-multiplier", "1"]


def train(folder: Path, *flags: str) -> None:
    language_model.main([*flags, "--output", str(folder)])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_model(folder)[0].state_dict()


@pytest.mark.parametrize("flags", [[], ["--sampling", "fixed", "--denominator", "clipped:20", "--weight-cap", "30"]])
def test_a_private_run(tmp_path, capsys, flags) -> None:
    train(tmp_path / "run", *PRIVATE, *flags)
    said = capsys.readouterr().out
    model, dictionary = load_model(tmp_path / "run")
    assert len(dictionary) == 43 == model.settings()["words"]
    ledger = edpsgd.Ledger.read(tmp_path / "run" / "ledger.jsonl")
    assert sum(event.steps for event in ledger.events) == 6
    assert {event.noise_multiplier for event in ledger.events} == {1.0}
    epsilon = ledger.epsilon(1e-6)
    assert f"planned: {epsilon}" in said  # with the condition that the seed is secret
    last = metrics(tmp_path / "run")[-1]
    assert last["epsilon"] == pytest.approx(float(epsilon))
    assert 0 <= last["test_accuracy"] <= last["test_top3"] <= last["test_top5"] <= 1
    page = (tmp_path / "run" / "privacy_card.md").read_text(encoding="utf-8")
    assert ("replace one user" if flags else "add or remove one user") in page
    heads = json.loads((tmp_path / "run" / "head_words.json").read_text())
    assert all(sum(counts) == last["test_words"] for counts in heads.values())


def test_the_noise_follows_a_target(tmp_path, capsys) -> None:
    for sampling in ("poisson", "fixed"):
        train(tmp_path / sampling, *FEDAVG, "--clip-norm", "2", "--epsilon", "3", "--sampling", sampling)
        assert 2.9 < metrics(tmp_path / sampling)[-1]["epsilon"] <= 3.0


def test_learning(tmp_path) -> None:
    """FedAvg without noise, with and without clipping, FedSGD and SGD find more than that there are 43 words."""
    runs = {
        "fedavg": ["--rounds", "12", "--learning-rate", "4"],
        "clipped": ["--rounds", "12", "--learning-rate", "4", "--clip-norm", "3", "--clip-changes", "2@6"],
        "fedsgd": ["--rounds", "40", "--learning-rate", "8", "--algorithm", "fedsgd"],
        "sgd": ["--rounds", "300", "--learning-rate", "3", "--algorithm", "sgd"],
        "adam": ["--rounds", "12", "--learning-rate", "2", "--server", "adam", "--server-learning-rate", "0.1"],
    }
    for name, flags in runs.items():
        train(tmp_path / name, *FEDAVG, *flags)
        last = metrics(tmp_path / name)[-1]
        assert last["test_perplexity"] < 0.85 * 43, name
        assert "epsilon" not in last
        assert not (tmp_path / name / "ledger.jsonl").exists()


@pytest.mark.parametrize("flags", [PRIVATE, [*FEDAVG, "--algorithm", "sgd", "--server", "momentum"]])
def test_going_on_is_like_not_stopping(tmp_path, monkeypatch, flags) -> None:
    train(tmp_path / "whole", *flags)
    kind = SentenceTraining if "sgd" in flags else UserTraining
    step = kind.step

    def stop(self, number: int) -> None:
        if number == 4:
            raise KeyboardInterrupt
        step(self, number)

    monkeypatch.setattr(kind, "step", stop)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", *flags)
    monkeypatch.undo()
    language_model.main(["--resume", str(tmp_path / "run")])
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "run")[name])
    kept = [{k: v for k, v in line.items() if k not in ("seconds", "epsilon")} for line in metrics(tmp_path / "run")]
    other = [{k: v for k, v in line.items() if k not in ("seconds", "epsilon")} for line in metrics(tmp_path / "whole")]
    assert kept == other
    if flags is PRIVATE:  # the round that ran twice was paid twice
        paid = edpsgd.Ledger.read(tmp_path / "run" / "ledger.jsonl").events
        assert sum(event.steps for event in paid) >= 7


def test_files_of_users(tmp_path, capsys) -> None:
    write_jsonl(tmp_path / "users.jsonl", generate(40, seed=2, sentences=4, words=30))
    flags = ["--task", "jsonl", "--data", str(tmp_path / "users.jsonl"), "--cohort", "5", "--rounds", "2"]
    small = ["--hidden", "4", "--dimension", "4", "--no-tensorboard", "--clip-norm", "1", "--noise-multiplier", "2"]
    train(tmp_path / "run", *flags, *small, "--dictionary", "training-set", "--dictionary-size", "10", "--iid")
    assert len(load_model(tmp_path / "run")[1]) == 13
    page = (tmp_path / "run" / "privacy_card.md").read_text(encoding="utf-8")
    assert "the dictionary: it was read from the private texts" in page
    assert "users are made up, with sentences of many (--iid)" in page
    (tmp_path / "public.txt").write_text("A public text.\nPublic words.\n", encoding="utf-8")
    train(tmp_path / "other", *flags, *small, "--dictionary", f"text:{tmp_path / 'public.txt'}")
    assert load_model(tmp_path / "other")[1].words[:2] == [".", "public"]
    page = (tmp_path / "other" / "privacy_card.md").read_text(encoding="utf-8")
    assert "the dictionary: it was read" not in page
    assert "made up" not in page
    for dictionary, is_private in ((f"text:{tmp_path}/users.jsonl", True), (f"text:{tmp_path}/public.txt", False)):
        config = Config(task="jsonl", data=str(tmp_path / "users.jsonl"), dictionary=dictionary)
        assert has_private_dictionary(config) == is_private
    assert has_private_dictionary(Config(task="jsonl", data=str(tmp_path), dictionary=f"text:{tmp_path}/public.txt"))
    write_jsonl(tmp_path / "test.jsonl", generate(3, seed=9, sentences=4, words=30))
    listed = [*flags, "--dictionary", str(tmp_path / "run" / "dictionary.txt"), "--dry-run"]
    language_model.main([*listed, "--test-data", str(tmp_path / "test.jsonl")])
    assert "40 training users" in capsys.readouterr().out
    language_model.main(listed)
    assert "no noise, no promise" in capsys.readouterr().out


def test_every_round_of_fedsgd_has_another_batch() -> None:
    config = Config(users=20, sentences=12, words=40, algorithm="fedsgd", batch_size=4, cohort=5.0)
    data = load_texts(config).train
    with workers("cpu") as team:
        training = UserTraining(config, team, LanguageModel(43, 4, 4), data, Path())
        found = [training._batches(number, 0)[0][0] for number in range(4)]
    assert len({tuple(batch.flatten().tolist()) for batch in found}) > 1
    seen = torch.cat([*found, *(training._batches(number, 0)[0][0] for number in range(4, 12))])
    spoken = sum(len(words) > 0 for words in data.of_user(0))
    assert (seen[:, 0] == BOS).sum() >= spoken  # all of them, in turn


def test_speakers_are_users(tmp_path) -> None:
    plays = data_folder() / "shakespeare"
    flags = ["--task", "shakespeare", "--data", str(plays), "--dictionary", f"text:{plays / 'input.txt'}"]
    small = ["--dictionary-size", "200", "--hidden", "4", "--dimension", "4", "--budget", "40", "--no-tensorboard"]
    train(tmp_path / "run", *flags, *small, "--cohort", "4", "--rounds", "1")
    assert metrics(tmp_path / "run")[-1]["test_words"] > 10_000


def test_what_a_larger_run_would_cost_is_shown(tmp_path, capsys) -> None:
    train(tmp_path / "run", *PRIVATE, "--as-if-users", "1000000", "--as-if-cohort", "1000")
    assert "with 1000000 users, 1000 of them in a round" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--noise-multiplier", "1"], "noise needs --clip-norm"),
        (["--epsilon", "1", "--noise-multiplier", "1", "--clip-norm", "1"], "not both"),
        (["--algorithm", "sgd", "--clip-norm", "1"], "plain baseline"),
        (["--as-if-users", "5"], "belong together"),
        (["--denominator", "clipped:x"], "fixed, fixed:W or clipped:W"),
        (["--clip-changes", "3"], "S@ROUND"),
        (["--clip-norm", "1", "--clip-changes", "3@5,2@5"], "different rounds"),
        (["--clip-changes", "3@5"], "needs --clip-norm"),
        (["--as-if-users", "5", "--as-if-cohort", "2"], "with noise and --sampling poisson"),
        (["--task", "jsonl"], "data must be the file or folder to read"),
        (["--held-out", "1"], "between 0 and 1"),
        (["--cohort", "0"], "above 0"),
    ],
)
def test_bad_settings(capsys, flags, message) -> None:
    with pytest.raises(SystemExit):
        language_model.main([*SMALL, *flags])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cohort", "1000"], "at most the number of training users"),
        (["--cohort", "2.5", "--sampling", "fixed"], "a whole number"),
        (["--users", "1", "--cohort", "1"], "users have no words"),
        (["--task", "jsonl", "--data", "nowhere.jsonl", "--dictionary", "training-set"], "nowhere.jsonl"),
    ],
)
def test_bad_data(tmp_path, flags, message) -> None:
    with pytest.raises(SystemExit, match=message):
        train(tmp_path / "run", *SMALL, *flags)
    assert not (tmp_path / "run").exists()


def test_damaged_folders(tmp_path) -> None:
    with pytest.raises(ValueError, match="not the run folder of a language model"):
        load_model(tmp_path)
    train(tmp_path / "run", *FEDAVG)
    with pytest.raises(SystemExit, match="holds a run"):
        train(tmp_path / "run", *FEDAVG)
    words = (tmp_path / "run" / "dictionary.txt").read_text(encoding="utf-8")
    (tmp_path / "run" / "dictionary.txt").write_text(words.partition("\n")[2], encoding="utf-8")
    with pytest.raises(ValueError, match="43 words in the model, 42 in its dictionary"):
        load_model(tmp_path / "run")


def test_a_model_that_remembers_users_is_refused(tmp_path, monkeypatch) -> None:
    """Before the first round; otherwise the optimizer is told that it does not."""
    told = []
    monkeypatch.setattr(edpsgd.PrivateOptimizer, "note_checked_losses", lambda self: told.append(True))
    train(tmp_path / "sound", *PRIVATE)
    assert told == [True]
    plain = LanguageModel.mean_loss

    def mean_loss(self, tokens, targets):
        loss = plain(self, tokens, targets)
        self.before, before = loss.detach(), getattr(self, "before", 0.0)
        return loss + 0.1 * before

    monkeypatch.setattr(LanguageModel, "mean_loss", mean_loss)
    with pytest.raises(SystemExit, match="from step to step"):
        train(tmp_path / "run", *PRIVATE)
    assert told == [True]
