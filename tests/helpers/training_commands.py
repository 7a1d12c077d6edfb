"""Command lines of `tasks.train`, and what they say when they end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.train import main
from tests.helpers.jobs import TINY, tiny

ALWAYS = {"config.yaml", "data.json", "labels.json", "model.json", "vocabulary", "weights.safetensors", "metrics.jsonl"}


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def flags(folder: Path, **settings) -> list[str]:
    """The command line of a job."""
    given = tiny(folder, **settings)
    shown = {name: value for name, value in given.given().items() if name in {*TINY, "output", *settings}}
    if given.noise_multiplier is not None:
        shown["noise_multiplier"] = given.noise_multiplier
    shown.pop("tensorboard")
    pairs = [part for name, value in shown.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return [*pairs, "--no-tensorboard"]


def failure(arguments: list[str]) -> str:
    """The message with which the command ends; its exit code is then 1."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, str)
    return ended.value.code
