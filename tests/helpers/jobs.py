"""Training jobs that take a second: the smallest models on a few generated utterances."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from transformers import BertModel

from models.bert import BertInputs
from tasks.common.workers import Workers, workers
from tasks.nlu import generator
from tasks.nlu.configuration import Config
from tasks.nlu.example_batches import Examples
from tasks.nlu.training_job import Outcome, train
from tasks.nlu.training_loop import Training
from tests.helpers.small_models import tiny_configuration

TINY = {
    "examples": 120,
    "hidden": 4,
    "layers": 1,
    "dimension": 4,
    "batch_size": 12,
    "epochs": 2,
    "threads": 1,
    "device": "cpu",
    "tensorboard": False,
}

# Settings that the losses of a job do not depend on.
_NOT_OF_LOSSES = {
    "checkpoint_every",
    "clip_norm",
    "clipping",
    "data_seed",
    "decay",
    "early_stopping",
    "epochs",
    "epsilon",
    "head_learning_rate",
    "learning_rate",
    "noise",
    "noise_multiplier",
    "output",
    "placement",
    "sampling",
    "schedule",
    "seed",
    "tensorboard",
    "warmup",
}
checked_losses: set[str] = set()  # of which jobs' losses this process has checked


def tiny(folder: Path, **settings: Any) -> Config:
    """The settings of a job whose run folder is the given one; private with noise 1 unless they say otherwise."""
    noise = {} if settings.get("private") == "off" or "epsilon" in settings else {"noise_multiplier": 1.0}
    return Config(**{**TINY, **noise, "output": str(folder), **settings})


def run(config: Config, **more: Any) -> Outcome:
    """A job in this process, with these arguments for train; equal losses are checked only once."""
    with workers("cpu", 1) as team, _losses_checked_once():
        outcome = train(config, team, **more)
    assert isinstance(outcome, Outcome)
    return outcome


@contextmanager
def _losses_checked_once() -> Iterator[None]:
    """The trial of the losses is three quarters of a tiny private job.

    A job whose losses are made as those of an earlier job takes over what was found there.
    """
    check = Training._check_losses

    def check_once(self: Training, train: Examples) -> None:
        settings = {k: v for k, v in self.config.given().items() if k not in _NOT_OF_LOSSES}
        if repr(settings) in checked_losses:
            self.private.note_checked_losses()
            return
        check(self, train)
        checked_losses.add(repr(settings))

    with mock.patch.object(Training, "_check_losses", check_once):
        yield


def here(launcher: str, collective: Any) -> Workers:
    """The workers of a launcher that somebody else has started."""
    return Workers(launcher, collective, torch.device("cpu"))


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "weights.safetensors")


def assert_same_weights(folder: Path, other: Path) -> None:
    """Every bit of them."""
    found, expected = weights(folder), weights(other)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def tiny_encoder(folder: Path) -> str:
    """A BERT of one layer that knows the words of the generator."""
    inputs = BertInputs.from_words(generator.words())
    inputs.tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(tiny_configuration(len(inputs.tokenizer), layers=1)).save_pretrained(folder)
    return str(folder)
