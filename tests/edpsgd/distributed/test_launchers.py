"""Which workers "auto" finds, and what it says when the library of the launcher is missing."""

from __future__ import annotations

import sys

import pytest

from edpsgd.distributed.collectives import Local
from edpsgd.distributed.launchers import resolve

LAUNCHERS = (
    "HOROVOD_RANK",
    "HOROVOD_HOSTNAME",
    "TORCHELASTIC_RUN_ID",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "WORLD_SIZE",
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch) -> None:
    for variable in LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)


def test_one_process() -> None:
    assert isinstance(resolve("auto"), Local)
    assert resolve("local").gather("x") == ["x"]


def test_horovodrun_without_horovod(monkeypatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    with pytest.raises(ValueError, match="needs Horovod with its torch extension"):
        resolve("auto")


def test_horovodrun_without_init(monkeypatch) -> None:
    pytest.importorskip("horovod.torch")
    monkeypatch.setenv("HOROVOD_RANK", "0")
    with pytest.raises(ValueError, match=r"call hvd\.init\(\)"):
        resolve("auto")


def test_torchrun_without_init(monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(ValueError, match="init_process_group"):
        resolve("auto")


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"])
def test_several_processes_that_do_not_know_of_each_other(monkeypatch, variable) -> None:
    monkeypatch.setenv(variable, "2")
    with pytest.raises(ValueError, match=f"{variable}=2 says that there are several workers"):
        resolve("auto")
    assert isinstance(resolve("local"), Local)
