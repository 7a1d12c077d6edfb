"""Settings of a training job: their defaults, and what is refused."""

from __future__ import annotations

import pytest

from tasks.nlu.configuration import Config, parse
from tests.helpers.command_lines import refused

PRIVATE = ["--noise-multiplier", "1"]


def test_defaults() -> None:
    config, flags = parse(PRIVATE)
    assert config == Config(noise_multiplier=1.0)
    assert (config.task, config.model, config.private, config.sampling) == ("generated", "clc", "edp", "shuffled")
    assert (flags.config, flags.resume, flags.dry_run) == (None, None, False)


def test_an_empty_name_of_the_data_is_refused(capsys) -> None:
    """As an unset variable of the shell gives it."""
    assert "data must be the folder or file to read" in refused(capsys, "--task", "jsonl", "--data", "", *PRIVATE)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *((name, "0") for name in ("--examples", "--epochs", "--batch-size", "--micro-batches", "--hidden")),
        *((name, "0") for name in ("--layers", "--dimension", "--max-words", "--bucket-size", "--threads")),
        *((name, "0") for name in ("--learning-rate", "--head-learning-rate", "--clip-norm", "--early-stopping")),
        *((name, "-1") for name in ("--weight-decay", "--checkpoint-every", "--seed", "--dropout", "--warmup")),
        *((name, "1") for name in ("--dropout", "--word-dropout", "--warmup", "--delta")),
        ("--delta", "0"),
        ("--clip-norm", "nan"),
        ("--clip-norm", "inf"),
        ("--epochs", "1.5"),
        ("--epochs", "x"),
        ("--seed", str(2**63)),
        ("--model", "lstm"),
        ("--task", "imdb"),
        ("--domains", "cars"),
        ("--domains", ""),
        ("--sampling", "random"),
        ("--device", "tpu"),
        ("--private", "yes"),
    ],
)
def test_flags_out_of_range(capsys, flag, value) -> None:
    assert flag[2:].replace("-", "_") in refused(capsys, *PRIVATE, flag, value).replace("-", "_")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--epsilon or --noise-multiplier"),
        (["--epsilon", "3", "--noise-multiplier", "1"], "one of the two"),
        (["--epsilon", "0"], "epsilon"),
        (["--task", "snips", "--data", "data", "--labels", "grammar", *PRIVATE], "labels must be a file"),
        (["--noise-multiplier", "-1"], "noise_multiplier"),
        (["--private", "example", "--micro-batches", "2", *PRIVATE], "--micro-batches"),
        (["--noise", "paper", "--epsilon", "3"], "--noise paper"),
        (["--noise", "paper", "--private", "example", *PRIVATE], "--noise paper"),
        (["--layer-scaling", "raw", "--epsilon", "3"], "--layer-scaling raw"),
        (["--task", "atis", *PRIVATE], "data"),
    ],
)
def test_settings_that_contradict_each_other(capsys, arguments, named) -> None:
    assert named in refused(capsys, *arguments)


def test_plain_training_needs_no_privacy_settings() -> None:
    assert parse(["--private", "off"])[0].private == "off"
