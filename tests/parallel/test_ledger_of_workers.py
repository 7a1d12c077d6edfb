"""A ledger that fails on one worker is an error on all, and costs nothing twice."""

from __future__ import annotations

import errno
import os

import pytest

from tests.helpers.common import Bag, assert_same, layers_of, private


def test_a_ledger_that_cannot_be_written_on_worker_0_is_an_error_on_all(workers, tmp_path, monkeypatch) -> None:
    model = Bag()
    optimizer = private(model, ledger=tmp_path / "ledger.jsonl")
    optimizer.set_epoch(0)
    optimizer.step()
    before = layers_of(model)

    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if workers.rank == 0:
            patch.setattr(os, "write", full)
        if workers.size > 1:
            optimizer.set_epoch(1)
        else:
            with pytest.raises(OSError, match="No space left"):
                optimizer.set_epoch(1)
        with pytest.raises((OSError, ValueError), match="No space left"):
            optimizer.step()
    assert_same(model, before, tolerance=0.0)
    optimizer.set_epoch(1)
    optimizer.step()


def test_a_step_can_be_tried_again_when_there_is_room(workers, tmp_path, monkeypatch) -> None:
    optimizer = private(Bag(), ledger=tmp_path / "ledger.jsonl")
    optimizer.set_epoch(0)

    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if workers.rank == 0:
            patch.setattr(os, "write", full)
        with pytest.raises((OSError, ValueError), match="No space left"):
            optimizer.step()
    optimizer.step()
    counts = workers.gather(sum(event.steps for event in optimizer.ledger.events))
    assert set(counts) == {2}  # with the one that failed


@pytest.mark.parametrize("when", ["in an epoch", "before one"])
def test_a_closed_ledger_refuses_on_all(workers, tmp_path, when) -> None:
    optimizer = private(Bag(), ledger=tmp_path / "ledger.jsonl")
    if when == "in an epoch":
        optimizer.set_epoch(0)
    if workers.rank == 0:
        optimizer.ledger.close()

    def go_on() -> None:
        if when == "before one":
            optimizer.set_epoch(0)
        optimizer.step()

    with pytest.raises(ValueError, match="was closed: nothing more can be charged|disagree on whether"):
        go_on()


@pytest.mark.parametrize("ledger", [123, b"x"])
def test_a_ledger_that_is_no_path(workers, ledger) -> None:
    with pytest.raises(ValueError, match="ledger must be None or a path"):
        private(Bag(), ledger=ledger)
