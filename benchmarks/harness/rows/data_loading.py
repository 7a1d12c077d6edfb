"""The file data_loading.json: drawing and assembling batches."""

from __future__ import annotations

from typing import TypedDict

from benchmarks.harness.rows.common import Made


class EpochOfData(TypedDict):
    """Seconds of an epoch, and of drawing and assembling its batches."""

    seconds: float
    data_seconds: float
    share: float


class HeldData(TypedDict):
    """Bytes of a process that holds so many utterances."""

    examples: int
    grown: int
    peak: int
    arrays: int


class LoadedData(TypedDict):
    """What data cost one model."""

    epoch: EpochOfData
    memory: list[HeldData]


class DataLoading(Made):
    """The file data_loading.json."""

    examples: int
    workers: int
    clc: LoadedData
    bert: LoadedData
