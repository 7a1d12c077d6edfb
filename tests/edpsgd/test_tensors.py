"""Norms and moves of tensors, on any device."""

from __future__ import annotations

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

from edpsgd import tensors
from edpsgd.tensors import layer_norms
from tests.helpers.common import Bag, private


@pytest.mark.parametrize("shape", [(30_000_000,), (3, 10_000_000)])
def test_norms_of_many_elements(shape) -> None:
    """torch's own sum of so many equal squares in single precision is one and a half percent too small on CPUs."""
    [norm] = layer_norms([torch.full(shape, 1e-3)], torch.device("cpu"))
    assert float(norm) == pytest.approx(1e-3 * 30_000_000**0.5, rel=1e-5)


class Moves(TorchFunctionMode):
    """Notes what goes to which device without being waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.hasty: list[torch.device] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.to and (kwargs or {}).get("non_blocking"):
            self.hasty.append(args[1])
        return function(*args, **(kwargs or {}))


def test_what_comes_to_the_cpu_is_waited_for() -> None:
    """Else factors and norms of a model on two devices would be read before they are there."""
    with Moves() as moves:
        tensors.moved(torch.ones(1), torch.device("meta"))
        assert moves.hasty.pop() == torch.device("meta")
        tensors.moved(torch.ones(1), torch.device("cpu"))
        model = Bag()
        optimizer = private(model)
        model.p0.grad = torch.ones_like(model.p0)
        optimizer.accumulate()
        model.p1.grad = torch.ones_like(model.p1)
        optimizer.step()
    own = [device for device in moves.hasty if device == torch.device("cpu")]
    assert len(own) <= 1  # the fingerprint, which is made on the CPU


def test_the_precision_of_sums() -> None:
    found = [tensors.precision(torch.zeros(1, dtype=dtype)) for dtype in (torch.float16, torch.bfloat16, torch.float64)]
    assert found == [torch.float32, torch.float32, torch.float64]


@pytest.mark.parametrize("count", [0, 1, tensors.CPU_CHUNK, 2 * tensors.CPU_CHUNK + 3])
def test_chunks_are_views_of_all_elements(count) -> None:
    flat = torch.zeros(count)
    parts = list(tensors.chunks(flat))
    assert all(len(part) <= tensors.CPU_CHUNK for part in parts)
    for part in parts:
        part += 1.0
    assert sum(len(part) for part in parts) == count
    assert (flat == 1.0).all()


def test_norms_of_layers() -> None:
    gradients = [torch.tensor([3.0, 4.0]), None, torch.full((2, 2), 2.0, dtype=torch.bfloat16), torch.zeros(3)]
    assert layer_norms(gradients, torch.device("cpu")).tolist() == [5.0, 0.0, 4.0, 0.0]
    doubles = layer_norms([torch.tensor([1e-100, 0.0], dtype=torch.float64), torch.ones(4)], torch.device("cpu"))
    assert doubles.dtype == torch.float64
    assert doubles.tolist() == [1e-100, 2.0]


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e25])
def test_norms_whose_squares_leave_the_range_of_single_precision(size) -> None:
    [norm] = layer_norms([torch.full((100,), size)], torch.device("cpu"))
    assert float(norm) == pytest.approx(10 * size, rel=1e-5)


def test_norms_show_what_is_not_finite() -> None:
    norms = layer_norms([torch.tensor([1.0, math.nan]), torch.tensor([math.inf, 1.0])], torch.device("cpu"))
    assert norms.isnan().tolist() == [True, False]
    assert norms.isinf().tolist() == [False, True]


def test_lengths_of_rows_and_of_all_elements() -> None:
    rows = tensors.row_lengths(torch.tensor([[3.0, 4.0], [0.0, 1e-30]]))
    assert rows.dtype == torch.float64
    assert rows.tolist() == pytest.approx([5.0, 1e-30])
    assert tensors.vector_norm(torch.full((2, 2), 1e-30)) == pytest.approx(2e-30)
