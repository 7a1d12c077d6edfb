"""The job that trains a language model on users' texts: run folder, card, and going on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import edpsgd
from tasks import language_model
from tasks.language.run_folder import load_model
from tasks.language.training_loops import SentenceTraining, UserTraining
from tests.helpers.jobs import metrics
from tests.helpers.language_jobs import FEDAVG, PRIVATE, train


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


def test_what_a_larger_run_would_cost_is_shown(tmp_path, capsys) -> None:
    train(tmp_path / "run", *PRIVATE, "--as-if-users", "1000000", "--as-if-cohort", "1000")
    assert "with 1000000 users, 1000 of them in a round" in capsys.readouterr().out
