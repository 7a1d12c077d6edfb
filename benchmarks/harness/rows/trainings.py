"""What benchmarks tell tasks.train, and what its run folders say about a training."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from typing_extensions import NotRequired


class Flags(TypedDict, total=False):
    """Flags of tasks.train; what is not there has its default."""

    task: str
    data: Path | str | None
    examples: int
    split: str
    split_seed: int
    data_seed: int
    labels: str
    model: str
    vectors: str
    pretrained: str
    init_from: str
    freeze: str
    features: str
    window: int
    transitions: str
    zero_heads: bool
    dimension: int
    hidden: int
    layers: int
    dropout: float
    epochs: int
    batch_size: int
    micro_batches: int
    learning_rate: float
    head_learning_rate: float
    intent_weight: float
    warmup: float
    schedule: str
    optimizer: str
    momentum: float
    precision: str
    seed: int
    private: str
    sampling: str
    epsilon: float
    delta: float
    noise: str
    noise_multiplier: float
    decay: str
    clip_norm: float
    layer_scaling: str
    tensorboard: bool
    keep_features: bool
    states_from: str


class Metrics(TypedDict, total=False):
    """A line of metrics: of an epoch, or the last one, of the test set."""

    epoch: int
    step: int
    seconds: float
    epsilon: float
    clip_fraction: float | None
    validation_ser: float
    test_ser: float
    test_intent_accuracy: float
    test_slot_f1: float
    test_utterances: int


class Scores(TypedDict):
    """Of a complete run, as pieces of results files keep them; older ones lack some."""

    test_ser: float
    test_intent_accuracy: float
    test_slot_f1: float
    epsilon: NotRequired[float]
    validation_ser: float
    clip_fraction: float | None
    epochs: int
    utterances: int
    precision: NotRequired[str]
    minutes: float
