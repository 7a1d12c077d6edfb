"""How a job finds out who started it."""

from __future__ import annotations

import pytest

from tasks.common import workers

NAMES = ("HOROVOD_RANK", "HOROVOD_HOSTNAME", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({}, "local"),
        ({"WORLD_SIZE": "1"}, "local"),
        ({"HOROVOD_RANK": "0"}, "horovod"),
        ({"HOROVOD_HOSTNAME": "node1"}, "horovod"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "horovod"),
        ({"PMI_SIZE": "4"}, "horovod"),
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"}, "torch"),
    ],
)
def test_launcher(monkeypatch, variables, launcher) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert workers._launcher() == launcher


def test_processes_that_horovod_does_not_know(monkeypatch) -> None:
    """Started by mpirun without MPI in Horovod: each would train alone, into one folder."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    for name in ("HOROVOD_RANK", "HOROVOD_HOSTNAME", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(workers, "_horovod", lambda: Alone)
    with pytest.raises(ValueError, match="2 processes were started, and Horovod knows of 1"), workers.workers("cpu"):
        pass


class Alone:
    """Horovod in one process."""

    @staticmethod
    def init() -> None:
        pass

    @staticmethod
    def size() -> int:
        return 1
