"""What a job shows while it runs."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tasks.common.progress import Progress
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


def test_lines_say_what_is_counted(tmp_path, capsys) -> None:
    """Where there is no terminal; nothing is said by other workers."""
    for is_shown in (True, False):
        shown = Progress(tmp_path, total=10, done=0, is_shown=is_shown, tensorboard=False, unit="utterance")
        shown.move(4)
        shown.move()
        shown.show("hidden states")
        shown.close()
    assert capsys.readouterr().out == "  utterance 5/10   hidden states   00:00 left\n"
