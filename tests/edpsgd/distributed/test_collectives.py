"""The protocol of the workers, and one process as its own only worker."""

from __future__ import annotations

import copy

import pytest
import torch

from edpsgd.distributed.collectives import Collective, Local, Torch


def test_one_process_is_its_own_sum() -> None:
    tensor = torch.arange(3.0)
    Local().sum_([tensor])
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    assert Local().gather({"a": 1}) == [{"a": 1}]
    assert (Local().rank, Local().size) == (0, 1)


def test_what_has_the_protocol() -> None:
    assert isinstance(Local(), Collective)
    assert not isinstance(object(), Collective)


def test_a_process_group_of_torch(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group\(\)"):
        Torch()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        workers = Torch()
        tensors = [torch.ones(2), torch.ones(3, dtype=torch.float64)]
        workers.sum_(tensors)
        assert [tensor.tolist() for tensor in tensors] == [[1.0] * 2, [1.0] * 3]
        assert workers.gather("x") == ["x"]
        assert (workers.rank, workers.size) == (0, 1)
        assert copy.deepcopy(workers) is workers
        assert isinstance(workers, Collective)
    finally:
        torch.distributed.destroy_process_group()
