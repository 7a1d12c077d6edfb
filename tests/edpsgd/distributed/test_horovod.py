"""Horovod's functions, as they are called; with real workers in tests/parallel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from edpsgd.distributed import horovod
from edpsgd.distributed.horovod import Horovod, horovod_broadcast_root


class Recorder(SimpleNamespace):
    """In place of horovod.torch: two workers that have the same tensors."""

    Sum = "sum"

    def __init__(self) -> None:
        super().__init__(calls=[])

    def is_initialized(self) -> bool:
        return True

    def allreduce_(self, tensor, op, name) -> None:
        self.calls.append(("one", tensor.dtype, op, name))
        tensor.mul_(2)

    def grouped_allreduce_(self, tensors, op, name) -> None:
        self.calls.append(("several", [tensor.dtype for tensor in tensors], op, name))
        for tensor in tensors:
            tensor.mul_(2)


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(horovod, "import_horovod", lambda: found)
    return found


def test_one_tensor_is_summed_where_it_is(recorder) -> None:
    tensor = torch.ones(3)
    Horovod().sum_([tensor])
    assert tensor.tolist() == [2.0] * 3
    assert recorder.calls == [("one", torch.float32, "sum", "edpsgd.sum")]


def test_bfloat16_is_sent_as_float32(recorder) -> None:
    tensors = [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64)]
    Horovod().sum_(tensors)
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 2.0]] * 2
    assert tensors[0].dtype is torch.bfloat16
    assert recorder.calls == [("several", [torch.float32, torch.float64], "sum", "edpsgd.sum")]


def test_workers_that_are_not_initialised_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(horovod, "import_horovod", lambda: SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(ValueError, match=r"call hvd\.init\(\)"):
        Horovod()


def test_outside_of_a_broadcast() -> None:
    assert horovod_broadcast_root() is None
