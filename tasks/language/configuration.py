"""Every setting of a training job of tasks.language_model."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from edpsgd import ClippedDenominator, FixedDenominator
from tasks.common import flags, shared_settings
from tasks.common.flags import Settings, require, setting


@dataclass(frozen=True)
class Config(Settings):
    """The settings. Those of the group "machine" may differ when a run goes on."""

    task: str = setting("generated", "what to train on", ("generated", "shakespeare", "jsonl"), "data")
    data: str | None = setting(None, "the file or folder to read", group="data")
    users: int = setting(1000, "users to generate", group="data")
    sentences: int = setting(40, "generated sentences of a user, on average", group="data")
    words: int = setting(2000, "words of the generator", group="data")
    data_seed: int = setting(0, "of generated users, of the held-out users and of --iid", group="data")
    iid: bool = setting(False, "deal all sentences anew to the training users", group="data")
    budget: int = setting(1600, "words of a user that are trained on, at most", group="data")
    held_out: float = setting(0.1, "share of the users for the test", group="data")
    test_data: str | None = setting(
        None, "jsonl: a file of other users for the test, instead of a share of these", group="data"
    )
    dictionary: str = setting(
        "public",
        "public (the generator's words), a file with one word a line, text:FILE (the most frequent of a public text), "
        "or training-set",
        group="data",
    )
    dictionary_size: int = setting(10_000, "words, for text: and training-set", group="data")

    dimension: int = setting(96, "of the word embeddings", group="model")
    hidden: int = setting(256, "width of the LSTM", group="model")
    unroll: int = setting(10, "words that training looks back at most", group="model")

    algorithm: str = setting("fedavg", "how to train", ("fedavg", "fedsgd", "sgd"), "training")
    rounds: int = setting(100, "rounds; steps for sgd", group="training")
    batch_size: int = setting(8, "windows in a user's batch; sentences in a step of sgd", group="training")
    local_epochs: int = setting(1, "fedavg: passes of a user over their data in a round", group="training")
    learning_rate: float = setting(6.0, "of the users; of sgd", group="training")
    server: str = setting("sgd", "the server's optimizer; that of sgd", ("sgd", "momentum", "adam"), "training")
    server_learning_rate: float = setting(1.0, "of the server", group="training")
    weight_cap: float | None = setting(
        None, "words from which on a user has weight 1; all have it if not given", group="training"
    )
    seed: int | None = shared_settings.seed_setting()

    cohort: float = setting(100.0, "users in a round: expected with poisson, exactly with fixed", group="privacy")
    sampling: str = setting("poisson", "how users are drawn", ("poisson", "fixed"), "privacy")
    denominator: str = setting(
        "fixed", "fixed, fixed:W with the public total weight W, or clipped:W with the least one", group="privacy"
    )
    clip_norm: float | None = setting(
        None, "S, the largest norm of an update; no clipping if not given", group="privacy"
    )
    clip_changes: str = setting("", "S@ROUND,...: another S from that round on, with noise to match", group="privacy")
    clipping: str = setting("flat", "of the whole update or layer by layer", ("flat", "per_layer"), "privacy")
    epsilon: float | None = shared_settings.target_epsilon_setting()
    noise_multiplier: float = setting(0.0, "z, instead of an ε; 0 for none", group="privacy")
    delta: float = setting(1e-6, "the δ of ε", group="privacy")
    placement: str = shared_settings.placement_setting()
    as_if_users: int | None = setting(
        None, "print the ε that the same noise on the mean has with so many users", group="privacy"
    )
    as_if_cohort: float | None = setting(None, "and with so many of them in a round", group="privacy")

    output: str | None = setting(None, "the run folder; runs/TASK-ALGORITHM-TIME if not given", group="machine")
    checkpoint_every: int = setting(20, "rounds between checkpoints, and tests on held-out users", group="machine")
    device: str = shared_settings.device_setting()
    threads: int | None = shared_settings.threads_setting()
    tensorboard: bool = shared_settings.tensorboard_setting()

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("users", "sentences", "words", "budget", "dictionary_size", "dimension", "hidden", "unroll")
        counts = ("rounds", "batch_size", "local_epochs", "checkpoint_every", "threads", "as_if_users")
        self.check((*sizes, *counts), "at least 1", lambda value: value >= 1)
        rates = ("learning_rate", "server_learning_rate", "weight_cap", "cohort", "clip_norm", "epsilon")
        self.check((*rates, "as_if_cohort"), "above 0", lambda value: value > 0)
        self.check(("noise_multiplier", "data_seed", "seed"), "at least 0", lambda value: value >= 0)
        self.check(("held_out", "delta"), "between 0 and 1", lambda value: 0 < value < 1)
        require(self.task == "generated" or self.data is not None, "data", self.data, "the file or folder to read")
        require(self.task == "jsonl" or self.test_data is None, "test_data", self.test_data, "for --task jsonl only")
        self._check_privacy()

    def _check_privacy(self) -> None:
        has_noise = self.epsilon is not None or self.noise_multiplier > 0
        if self.epsilon is not None and self.noise_multiplier > 0:
            raise ValueError("give --epsilon or --noise-multiplier, not both")
        if has_noise and self.clip_norm is None:
            raise ValueError("noise needs --clip-norm: without it a user may move the model as far as they like")
        if self.algorithm == "sgd" and (has_noise or self.clip_norm is not None):
            raise ValueError("--algorithm sgd is the plain baseline: it has neither clipping nor noise")
        parse_denominator(self.denominator)
        if parse_changes(self.clip_changes) and self.clip_norm is None:
            raise ValueError("--clip-changes needs --clip-norm, which holds before")
        self._check_outlook(has_noise)

    def _check_outlook(self, has_noise: bool) -> None:
        if (self.as_if_users is None) != (self.as_if_cohort is None):
            raise ValueError("--as-if-users and --as-if-cohort belong together")
        if self.as_if_users is None or self.as_if_cohort is None:
            return
        if not has_noise or self.sampling != "poisson":
            raise ValueError("--as-if-users is for training with noise and --sampling poisson")
        require(self.as_if_cohort <= self.as_if_users, "as_if_cohort", self.as_if_cohort, "at most as_if_users")

    @property
    def is_private(self) -> bool:
        """Whether there is noise."""
        return self.epsilon is not None or self.noise_multiplier > 0


def parse(arguments: Sequence[str] | None = None) -> tuple[Config, argparse.Namespace]:
    """The settings of a command line; and what it says beside them: config, resume, dry_run."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.language_model",
        description="Trains a language model on users' texts, privately or not; also under horovodrun and torchrun.",
    )
    return flags.parse(Config, parser, arguments)


def parse_denominator(text: str) -> FixedDenominator | ClippedDenominator:
    """How updates are averaged.

    Example:
        >>> parse_denominator("clipped:50")
        ClippedDenominator(least_weight=50.0)
    """
    if text == "fixed":
        return FixedDenominator()
    name, _, weight = text.partition(":")
    try:
        if name == "fixed":
            return FixedDenominator(float(weight))
        if name == "clipped":
            return ClippedDenominator(float(weight))
    except ValueError:
        pass  # the weight is no number, or none that may divide
    raise ValueError(f"denominator must be fixed, fixed:W or clipped:W with W above 0, got {text!r}")


def parse_changes(text: str) -> dict[int, float]:
    """The clip norms that a text names, by the round from which on each holds.

    Example:
        >>> parse_changes("10@100,7.9@4885")
        {100: 10.0, 4885: 7.9}
    """
    changes: dict[int, float] = {}
    for part in filter(None, text.split(",")):
        norm, _, number = part.partition("@")
        try:
            begin, value = int(number), float(norm)
        except ValueError:
            raise ValueError(f"clip_changes must be S@ROUND,..., as in 7.9@4885, got {text!r}") from None
        fits = 0 < value < math.inf and begin >= 0 and begin not in changes
        require(fits, "clip_changes", text, "of norms above 0, and of different rounds from 0 on")
        changes[begin] = value
    return changes
