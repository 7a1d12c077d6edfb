"""Every setting of a training job: defaults here, a YAML or TOML file over them, flags over both."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TASKS = ("atis", "snips", "nlu-eval", "jsonl", "conll", "generated")


def _setting(default: Any, text: str, choices: Sequence[str] = (), group: str = "") -> Any:
    return field(default=default, metadata={"help": text, "choices": choices, "group": group})


@dataclass(frozen=True)
class Config:
    """The settings. Those of the group "machine" change speed and place only, and may differ when a run goes on."""

    task: str = _setting("generated", "what to train on", TASKS, "data")
    data: str | None = _setting(None, "the data folder, or for jsonl and conll a file or folder", group="data")
    examples: int = _setting(20_000, "utterances to generate, for the task generated", group="data")
    split: str = _setting("hash", "45:5:50 by hash of the utterance, or at random", ("hash", "random"), "data")
    split_seed: int = _setting(0, "another seed, another split", group="data")
    data_seed: int = _setting(0, "of generated utterances", group="data")
    canaries: int = _setting(0, "random utterances, each trained on or not by a coin, for mia.audit", group="data")
    skip_bad_lines: bool = _setting(False, "leave out and count lines that cannot be read", group="data")
    labels: str = _setting(
        "training-set", "a JSON file with the lists intents and slots, or training-set", group="data"
    )

    model: str = _setting("clc", "the kind of model", ("clc", "bert"), "model")
    vectors: str | None = _setting(
        None, "clc: fastText .vec or .bin, or a Hugging Face encoder whose word pieces serve", group="model"
    )
    vocabulary: str = _setting(
        "public", "word list if there are no vectors: public (built in), training-set, or a file", group="model"
    )
    max_words: int = _setting(50_000, "clc: words taken from the vectors", group="model")
    train_vectors: bool = _setting(False, "clc: train the word vectors too", group="model")
    dimension: int = _setting(100, "clc: of word vectors that are learned", group="model")
    hidden: int = _setting(384, "clc: width of an LSTM in one direction", group="model")
    layers: int = _setting(2, "clc: BiLSTM layers", group="model")
    pretrained: str | None = _setting(None, "bert: a Hugging Face encoder's name or folder", group="model")
    freeze: str = _setting("none", "bert: none, embeddings, layers:N or encoder (heads only)", group="model")
    dropout: float | None = _setting(None, "0.4 for clc and 0.1 for bert if not given", group="model")
    word_dropout: float = _setting(0.0, "clc: how often a word's vector is hidden", group="model")

    epochs: int = _setting(20, "passes over the training set", group="training")
    batch_size: int = _setting(16, "utterances in a micro-batch of one worker", group="training")
    micro_batches: int = _setting(1, "micro-batches of one worker in a step", group="training")
    learning_rate: float | None = _setting(None, "1e-3 for clc and 5e-5 for bert if not given", group="training")
    head_learning_rate: float | None = _setting(None, "of the heads; 1e-3 if not given", group="training")
    schedule: str = _setting("linear", "of the learning rate", ("linear", "constant"), "training")
    warmup: float = _setting(0.05, "share of the steps in which the learning rate rises", group="training")
    weight_decay: float = _setting(0.0, "AdamW's", group="training")
    early_stopping: int | None = _setting(
        None,
        "epochs without a better SER on validation data after which to stop, and to keep the best",
        group="training",
    )
    seed: int | None = _setting(
        None, "repeats a run exactly, noise included; ε holds only while it is secret", group="training"
    )

    private: str = _setting(
        "edp", "off: plain; edp: micro-batches; example: vanilla DP-SGD", ("off", "edp", "example"), "privacy"
    )
    delta: float = _setting(5e-4, "the δ of ε", group="privacy")
    epsilon: float | None = _setting(None, "the ε to end with; the noise follows", group="privacy")
    noise_multiplier: float | None = _setting(None, "z of the first epoch, instead of an ε", group="privacy")
    decay: str = _setting("none", "of the noise by epochs: none, linear:TAU or exponential:TAU", group="privacy")
    noise: str = _setting(
        "calibrated", "calibrated, or paper for the published algorithm", ("calibrated", "paper"), "privacy"
    )
    clip_norm: float = _setting(1.0, "C", group="privacy")
    clipping: str = _setting("flat", "of the whole gradient or layer by layer", ("flat", "per_layer"), "privacy")
    layer_scaling: str = _setting(
        "none",
        "none, private:Z (measured in the first step with noise Z) or raw (as published, not covered)",
        group="privacy",
    )
    sampling: str = _setting("shuffled", "how batches are drawn", ("shuffled", "poisson"), "privacy")
    placement: str = _setting("sharded", "who adds which noise", ("sharded", "per_worker"), "privacy")

    output: str | None = _setting(None, "the run folder; runs/TASK-MODEL-PRIVATE-TIME if not given", group="machine")
    checkpoint_every: int = _setting(0, "steps between checkpoints; 0: at the end of every epoch only", group="machine")
    bucket_size: int = _setting(32, "utterances of similar length that are computed at once", group="machine")
    device: str = _setting("auto", "where to compute", ("auto", "cpu", "cuda"), "machine")
    threads: int | None = _setting(
        None, "of each worker; the cores shared among the workers if not given", group="machine"
    )
    tensorboard: bool = _setting(True, "write TensorBoard scalars", group="machine")

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for item in fields(self):
            _check_type(item, getattr(self, item.name), hints[item.name])
        self._check_amounts()
        self._check_privacy()

    def _check_amounts(self) -> None:
        for name in (
            "examples",
            "epochs",
            "batch_size",
            "micro_batches",
            "hidden",
            "layers",
            "dimension",
            "max_words",
            "bucket_size",
        ):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("dropout", "word_dropout", "warmup"):
            value = getattr(self, name)
            _require(value is None or 0 <= value < 1, name, value, "from 0 to below 1")
        for name in ("learning_rate", "head_learning_rate", "epsilon", "clip_norm", "early_stopping", "threads"):
            value = getattr(self, name)
            _require(value is None or value > 0, name, value, "above 0")
        for name in ("weight_decay", "checkpoint_every", "noise_multiplier", "split_seed", "data_seed", "canaries"):
            value = getattr(self, name)
            _require(value is None or value >= 0, name, value, "at least 0")
        _require(2 * self.canaries * self.delta <= 1, "canaries", self.canaries, "at most 1/(2δ), or δ smaller")
        _require(0 < self.delta < 1, "delta", self.delta, "between 0 and 1")
        _require(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "from 0 to below 2**63")
        _require(self.task == "generated" or self.data is not None, "data", self.data, "the folder or file to read")

    def _check_privacy(self) -> None:
        if self.private == "off":
            return
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("give --epsilon or --noise-multiplier, one of the two, or --private off")
        if self.private == "example" and self.micro_batches != 1:
            raise ValueError("--micro-batches is for --private edp: with example, every utterance is one of its own")
        if self.noise == "paper" and (self.epsilon is not None or self.private == "example"):
            raise ValueError("--noise paper goes with --noise-multiplier and --private edp: it holds no promised ε")
        if self.layer_scaling == "raw" and self.epsilon is not None:
            raise ValueError("--layer-scaling raw is covered by no ε: use none or private:Z with --epsilon")

    def given(self) -> dict[str, Any]:
        """All settings, as a configuration file has them."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def parse(arguments: Sequence[str] | None = None) -> tuple[Config, argparse.Namespace]:
    """The settings of a command line; and what it says beside them: config, resume, dry_run."""
    parser = _parser()
    flags = parser.parse_args(arguments)
    given = {item.name: getattr(flags, item.name) for item in fields(Config) if getattr(flags, item.name) is not None}
    try:
        settings = {**(read_file(flags.config) if flags.config else {}), **given}
        return (Config(**settings) if flags.resume is None else _resumed(Path(flags.resume), settings)), flags
    except ValueError as error:
        parser.error(str(error))


def read_file(path: str | Path) -> dict[str, Any]:
    """Settings of a YAML or TOML file; names as in flags, with - or _."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read the configuration {path}: {error}") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"the configuration {path} must be names and values")
    hints, settings = get_type_hints(Config), {}
    for name, value in content.items():
        plain = str(name).replace("-", "_")
        if plain not in hints:
            raise ValueError(f"the configuration {path} has the unknown setting {name!r}")
        settings[plain] = _meant(value, hints[plain])
    return settings


def _meant(value: Any, hint: Any) -> Any:
    """YAML reads a bare off as False, and 1e-3 as a text."""
    if value is False and hint is str:
        return "off"
    try:
        return float(value) if isinstance(value, str) and float in (*get_args(hint), hint) else value
    except ValueError:
        return value


def write_file(path: Path, config: Config) -> None:
    """The configuration as YAML, which read_file reads; the file is whole or not there."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(yaml.safe_dump(config.given(), sort_keys=False, allow_unicode=True), encoding="utf-8")
    os.replace(temporary, path)


def _resumed(folder: Path, given: Mapping[str, Any]) -> Config:
    """A run goes on with its own settings; only those of the machine may change."""
    config = replace(Config(**read_file(folder / "config.yaml")), output=str(folder))
    machine = {item.name for item in fields(Config) if item.metadata["group"] == "machine"} - {"output"}
    given = {name: str(Path(value)) if name == "output" and value else value for name, value in given.items()}
    fixed = sorted(name for name in given if name not in machine and given[name] != getattr(config, name))
    if fixed:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in fixed)
        raise ValueError(f"a run goes on with its own settings: {flags} cannot change with --resume")
    return replace(config, **{name: value for name, value in given.items() if name in machine})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.train",
        description="Fine-tunes an intent and slot model, privately or not; also under horovodrun and torchrun.",
    )
    parser.add_argument("--config", metavar="FILE", help="settings as YAML or TOML; flags go before it")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run folder, from its last checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and its ε, and train nothing")
    groups: dict[str, Any] = {}
    hints = get_type_hints(Config)
    for item in fields(Config):
        name = item.metadata["group"]
        group = groups.setdefault(name, parser.add_argument_group(name) if name not in groups else None)
        _add(group, item, hints[item.name])
    return parser


def _add(group: Any, item: Field[Any], hint: Any) -> None:
    flag, default = f"--{item.name.replace('_', '-')}", None if item.default is MISSING else item.default
    text = item.metadata["help"].replace("%", "%%") + ("" if default is None else f" (default: {default})")
    if hint is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    kind = next(t for t in (get_args(hint) or (hint,)) if t is not type(None))
    choices = item.metadata["choices"] or None
    metavar = None if choices else {int: "N", float: "X", str: "TEXT"}[kind]
    group.add_argument(flag, type=kind, choices=choices, default=None, metavar=metavar, help=text)


def _check_type(item: Field[Any], value: Any, hint: Any) -> None:
    """Configuration files may hold anything."""
    kinds = get_args(hint) or (hint,)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = any(
        (kind is float and is_number)
        or (kind is int and is_number and isinstance(value, int))
        or (kind in (str, bool, type(None)) and isinstance(value, kind))
        for kind in kinds
    )
    choices = item.metadata["choices"]
    if not fits or (choices and value not in choices):
        wanted = ", ".join(choices) or " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
        raise ValueError(f"{item.name} must be {wanted}, got {value!r}")
    _require(not isinstance(value, float) or math.isfinite(value), item.name, value, "a finite number")


def _require(condition: bool, name: str, value: Any, wanted: str) -> None:
    if not condition:
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
