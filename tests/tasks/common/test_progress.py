"""What a job shows while it runs."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.jobs import metrics, run, tiny


def test_tensorboard(tmp_path) -> None:
    run(tiny(tmp_path / "run", tensorboard=True))
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    for line in metrics(tmp_path / "run")[:-1]:
        for name in line.keys() - {"epoch", "step"}:
            [found] = [event.value for event in board.Scalars(name) if event.step == line["step"]]
            assert found == pytest.approx(line[name], rel=1e-6), name
    assert {"loss", "epsilon", "clip_fraction", "validation_ser"} <= set(board.Tags()["scalars"])
