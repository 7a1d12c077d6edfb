"""The file memorization.json: what language models know by heart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from typing_extensions import NotRequired

from benchmarks.harness.rows.common import Made


class KnownCanaries(TypedDict):
    """How many canaries a model knows by heart; of a configuration also its rates."""

    users_rate: NotRequired[float]
    examples_rate: NotRequired[float]
    canaries: int
    sharers: float
    insertions: float
    random_sampling: int
    by_chance: float
    beam_search: int
    median_exposure: float


class Memorised(TypedDict):
    """What was found of the canaries, by configuration and altogether."""

    configurations: list[KnownCanaries]
    all: KnownCanaries


class ScaleOfRun(TypedDict):
    """The fields of Scale of benchmarks.memorization; in files, tuples are lists."""

    users: int
    sentences: int
    words: int
    size: Sequence[int]
    rates: Sequence[Sequence[float]]
    per: int
    cohorts: Sequence[int]
    rounds: int
    batches: Sequence[int]
    suffixes: int
    noise: float
    clip_norm: float


class RowOfRun(TypedDict):
    """The fields of Row of benchmarks.memorization."""

    tables: list[int]
    name: str
    is_iid: bool
    batch: int
    steps: int
    flags: list[str]


class MeasuredRun(TypedDict):
    """What a run folder says."""

    test_accuracy: float
    test_perplexity: float
    seconds: float
    epsilon: NotRequired[float]
    memorised: Memorised


class MemorizationRow(RowOfRun, MeasuredRun):
    """A language model and the canaries that it knows."""


class Memorization(Made):
    """The file memorization.json."""

    scale: ScaleOfRun
    delta: float
    rows: list[MemorizationRow]
