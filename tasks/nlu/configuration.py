"""Every setting of a training job of tasks.train."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.heads import TRANSITIONS
from tasks.common import flags, shared_settings
from tasks.common.flags import Settings, require, setting, write_file
from tasks.nlu import generator

__all__ = ["TASKS", "Config", "parse", "read_file", "write_file"]

FEW = 64  # utterances in a step of one worker: its micro-batches are not worth a loop
OPTIMIZERS = ("adamw", "adam", "sgd")
TASKS = ("atis", "snips", "nlu-eval", "jsonl", "conll", "generated")


@dataclass(frozen=True)
class Config(Settings):
    """The settings. Those of the group "machine" change speed and place only, and may differ when a run goes on."""

    task: str = setting("generated", "what to train on", TASKS, "data")
    data: str | None = setting(None, "the data folder, or for jsonl and conll a file or folder", group="data")
    examples: int = setting(20_000, "utterances to generate, for the task generated", group="data")
    domains: str = setting(
        ",".join(generator.EASIER), f"what they are about: some of {', '.join(generator.DOMAINS)}", group="data"
    )
    split: str = setting("hash", "45:5:50 by hash of the utterance, or at random", ("hash", "random"), "data")
    split_seed: int = setting(0, "another seed, another split", group="data")
    data_seed: int = setting(0, "of generated utterances", group="data")
    canaries: int = setting(0, "random utterances, each trained on or not by a coin, for mia.audit", group="data")
    skip_bad_lines: bool = setting(False, "leave out and count lines that cannot be read", group="data")
    longest: int | None = setting(None, "leave out and count utterances with more words than this", group="data")
    labels: str = setting(
        "training-set",
        "a YAML or JSON file of intents and slots (tasks.schema writes one), grammar (that of generated utterances) "
        "or training-set",
        group="data",
    )

    model: str = setting("clc", "the kind of model", ("clc", "bert"), "model")
    vectors: str | None = setting(
        None, "clc: fastText .vec or .bin, or a Hugging Face encoder whose word pieces serve", group="model"
    )
    vocabulary: str = setting(
        "public", "word list if there are no vectors: public (built in), training-set, or a file", group="model"
    )
    max_words: int = setting(50_000, "clc: words taken from the vectors", group="model")
    train_vectors: bool = setting(False, "clc: train the word vectors too", group="model")
    dimension: int = setting(100, "clc: of word vectors that are learned", group="model")
    hidden: int = setting(384, "clc: width of an LSTM in one direction", group="model")
    layers: int = setting(2, "clc: BiLSTM layers", group="model")
    pretrained: str | None = setting(None, "bert: a Hugging Face encoder's name or folder", group="model")
    init_from: str | None = setting(
        None, "a run folder, of a training on public data, that this one begins with: all but its heads", group="model"
    )
    freeze: str = setting(
        "none",
        "none or encoder (heads only: a clc then has fixed features of words, and no BiLSTM); bert: also embeddings, "
        "layers:N or adapters:R (all but these)",
        group="model",
    )
    features: str | None = setting(
        None,
        "bert: what the heads read: last, auto or layers:N,M,...; auto if the whole encoder is frozen, else last",
        group="model",
    )
    window: int | None = setting(
        None,
        "neighbours of a word that its slot head sees; bert: 1 with chosen layers, else 0; frozen clc: 2",
        group="model",
    )
    transitions: str = setting("trained", "of the CRF: trained, or fixed to the BIO rules", TRANSITIONS, "model")
    zero_heads: bool = setting(False, "begin with linear heads of zeros", group="model")
    dropout: float | None = setting(None, "0.4 for clc and 0.1 for bert or a frozen clc if not given", group="model")
    word_dropout: float = setting(0.0, "clc: how often a word's vector is hidden", group="model")

    epochs: int = setting(20, "passes over the training set", group="training")
    batch_size: int = setting(16, "utterances in a micro-batch of one worker", group="training")
    micro_batches: int = setting(1, "micro-batches of one worker in a step", group="training")
    learning_rate: float | None = setting(None, "1e-3 for clc and 5e-5 for bert if not given", group="training")
    head_learning_rate: float | None = setting(None, "of the heads; 1e-3 if not given", group="training")
    schedule: str = setting("linear", "of the learning rate", ("linear", "constant"), "training")
    warmup: float = setting(0.05, "share of the steps in which the learning rate rises", group="training")
    optimizer: str = setting("adamw", "of the steps", OPTIMIZERS, "training")
    momentum: float = setting(0.9, "of sgd", group="training")
    weight_decay: float = setting(0.0, "of the optimizer", group="training")
    intent_weight: float = setting(1.0, "of the intent's loss beside that of the slots", group="training")
    early_stopping: int | None = setting(
        None,
        "epochs without a better SER on validation data after which to stop, and to keep the best",
        group="training",
    )
    precision: str = setting("fp32", "of the forward pass; bf16 by autocast", ("fp32", "bf16"), "training")
    seed: int | None = shared_settings.seed_setting()

    private: str = setting(
        "edp", "off: plain; edp: micro-batches; example: vanilla DP-SGD", ("off", "edp", "example"), "privacy"
    )
    delta: float = setting(5e-4, "the δ of ε", group="privacy")
    epsilon: float | None = shared_settings.target_epsilon_setting()
    noise_multiplier: float | None = setting(None, "z of the first epoch, instead of an ε", group="privacy")
    decay: str = setting("none", "of the noise by epochs: none, linear:TAU or exponential:TAU", group="privacy")
    noise: str = setting(
        "calibrated", "calibrated, or paper for the published algorithm", ("calibrated", "paper"), "privacy"
    )
    clip_norm: float = setting(1.0, "C", group="privacy")
    clipping: str = setting("flat", "of the whole gradient or layer by layer", ("flat", "per_layer"), "privacy")
    layer_scaling: str = setting(
        "none",
        "none, private:Z (measured in the first step with noise Z) or raw (as published, not covered)",
        group="privacy",
    )
    sampling: str = setting("shuffled", "how batches are drawn", ("shuffled", "poisson"), "privacy")
    placement: str = shared_settings.placement_setting()

    output: str | None = setting(None, "the run folder; runs/TASK-MODEL-PRIVATE-TIME if not given", group="machine")
    checkpoint_every: int = setting(0, "steps between checkpoints; 0: at the end of every epoch only", group="machine")
    bucket_size: int = setting(32, "utterances of similar length that are computed at once", group="machine")
    feature_memory: int = setting(
        2000,
        "megabytes of a frozen encoder's states in each worker's memory; more go to a file",
        group="machine",
    )
    keep_features: bool = setting(
        False, "write them to that file, and keep it in the run folder when the training ends", group="machine"
    )
    states_from: str | None = setting(
        None,
        "a run folder that kept its file, of the same encoder and data: nothing is computed again",
        group="machine",
    )
    device: str = shared_settings.device_setting()
    threads: int | None = shared_settings.threads_setting()
    tensorboard: bool = shared_settings.tensorboard_setting()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_amounts()
        self._check_privacy()

    @property
    def in_one_pass(self) -> bool:
        """Whether all units of a step are clipped in one backward pass: examples, or micro-batches too small to loop.

        Canaries that are left out would make a micro-batch smaller than the sampler says.
        """
        is_small = self.micro_batches > 1 and self.micro_batches * self.batch_size <= FEW
        return self.private == "example" or (self.private == "edp" and is_small and self.canaries == 0)

    @property
    def domain_names(self) -> list[str]:
        """Of generated utterances."""
        return self.domains.split(",")

    def _check_amounts(self) -> None:
        sizes = ("examples", "epochs", "batch_size", "micro_batches", "hidden", "layers", "dimension", "max_words")
        self.check((*sizes, "bucket_size", "longest"), "at least 1", lambda value: value >= 1)
        self.check(("dropout", "word_dropout", "warmup", "momentum"), "from 0 to below 1", lambda value: 0 <= value < 1)
        positive = (
            "learning_rate",
            "head_learning_rate",
            "epsilon",
            "clip_norm",
            "early_stopping",
            "threads",
            "intent_weight",
        )
        self.check(positive, "above 0", lambda value: value > 0)
        others = (
            "weight_decay",
            "checkpoint_every",
            "noise_multiplier",
            "split_seed",
            "data_seed",
            "canaries",
            "window",
            "feature_memory",
        )
        self.check(others, "at least 0", lambda value: value >= 0)
        require(2 * self.canaries * self.delta <= 1, "canaries", self.canaries, "at most 1/(2δ), or δ smaller")
        generator.check_domains(self.domain_names)
        require(0 < self.delta < 1, "delta", self.delta, "between 0 and 1")
        require(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "from 0 to below 2**63")
        is_generated = self.task == "generated"
        require(is_generated or self.labels != "grammar", "labels", self.labels, "a file or training-set")
        require(is_generated or bool(self.data), "data", self.data, "the folder or file to read")

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


def parse(arguments: Sequence[str] | None = None) -> tuple[Config, argparse.Namespace]:
    """The settings of a command line; and what it says beside them: config, resume, dry_run."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.train",
        description="Fine-tunes an intent and slot model, privately or not; also under horovodrun and torchrun.",
    )
    return flags.parse(Config, parser, arguments)


def read_file(path: str | Path) -> dict[str, Any]:
    """Settings of a YAML or TOML file; names as in flags, with - or _."""
    return flags.read_file(Config, path)
