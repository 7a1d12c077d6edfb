"""The time of drawing and assembling batches is counted without changing what is drawn."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import edpsgd
from benchmarks.data_loading import Stopwatch, TimedBatches


class SlowBatches:
    """Takes its time for each batch."""

    steps_per_epoch = 3

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.steps_per_epoch):
            time.sleep(0.02)
            yield [number]


def test_only_drawing_is_counted() -> None:
    watch = Stopwatch()
    drawn = []
    for batch in TimedBatches(SlowBatches(), watch):
        time.sleep(0.05)  # a training step
        drawn.append(batch)
    assert drawn == [[0], [1], [2]]
    assert 0.06 <= watch.seconds < 0.15


def test_a_failing_draw_is_counted_too() -> None:
    def failing() -> Iterator[list[int]]:
        time.sleep(0.02)
        raise ValueError("no data")
        yield []

    watch = Stopwatch()
    drawn = iter(TimedBatches(failing(), watch))
    with pytest.raises(ValueError, match="no data"):
        next(drawn)
    assert watch.seconds >= 0.02


def test_the_sampler_itself_is_moved() -> None:
    batches = edpsgd.ShuffledBatches(10, 2, seed=0)
    timed = TimedBatches(batches, Stopwatch())
    timed.set_epoch(1)
    assert timed.epoch == batches.epoch == 1
    assert timed.steps_per_epoch == 5
    drawn = list(timed)
    again = edpsgd.ShuffledBatches(10, 2, seed=0)
    again.set_epoch(1)
    assert drawn == list(again)
