"""Training jobs that take a second: the smallest models on a few generated utterances."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import BertModel

from models.bert import BertInputs
from tasks.common.workers import Workers, workers
from tasks.nlu import generator
from tasks.nlu.configuration import Config
from tasks.nlu.training_job import Outcome, train
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


def tiny(folder: Path, **settings: Any) -> Config:
    """The settings of a job whose run folder is the given one; private with noise 1 unless they say otherwise."""
    noise = {} if settings.get("private") == "off" or "epsilon" in settings else {"noise_multiplier": 1.0}
    return Config(**{**TINY, **noise, "output": str(folder), **settings})


def run(config: Config, **more: Any) -> Outcome:
    """A job in this process, with these arguments for train."""
    with workers("cpu", 1) as team:
        outcome = train(config, team, **more)
    assert isinstance(outcome, Outcome)
    return outcome


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
