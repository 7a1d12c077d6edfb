"""Rounds on users' windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import edpsgd
from models.language_model import LanguageModel
from tasks.common.workers import workers
from tasks.language.configuration import Config
from tasks.language.dataset import load_texts
from tasks.language.dictionary import BOS
from tasks.language.training_loops import UserTraining
from tests.helpers.language_jobs import PRIVATE, train


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
