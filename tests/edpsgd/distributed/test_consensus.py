"""What workers tell each other in a step's trailer, and how they fail together."""

from __future__ import annotations

import pytest
import torch

from edpsgd.distributed.consensus import (
    StepReport,
    check_alike,
    exchange,
    read_rows,
    together,
    trailer_size,
    write_row,
)
from tests.helpers.threads import run_workers

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def report(state: dict, flags: int = 0, units: int = 0, discarded: int = 0) -> StepReport:
    return StepReport(state, flags, units, torch.tensor(discarded))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 255, 256, 40_000, 65_535])
def test_rows_add_up_exactly_in_every_dtype(dtype, count) -> None:
    total = torch.zeros(trailer_size(3), dtype=dtype)
    for rank in range(3):
        trailer = torch.full((trailer_size(3),), 7.0, dtype=dtype)  # what an earlier step left
        write_row(trailer, rank, report({"epoch": 1}, 200 + rank, count, count // 2))
        total += trailer
    is_alike, reports = read_rows(total)
    assert is_alike
    assert reports.flags == [200, 201, 202]
    assert (reports.units, reports.discarded) == (3 * count, 3 * (count // 2))


def test_counts_end_at_two_bytes() -> None:
    trailer = torch.zeros(trailer_size(1))
    write_row(trailer, 0, report({}, units=70_000))
    assert read_rows(trailer)[1].units == 65_535


def test_states_that_differ_have_other_fingerprints() -> None:
    assert report({"epoch": 1}).fingerprint == report({"epoch": 1}).fingerprint
    assert report({"epoch": 1}).fingerprint != report({"epoch": 2}).fingerprint
    total = torch.zeros(trailer_size(2))
    for rank in range(2):
        trailer = torch.zeros(trailer_size(2))
        write_row(trailer, rank, report({"epoch": rank}))
        total += trailer
    assert not read_rows(total)[0]


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_an_exchange_sums_and_tells(dtype) -> None:
    def work(worker) -> tuple[list[float], list[int], int]:
        buffer = torch.zeros(2 + trailer_size(2))
        buffer[:2] = 1.0 + worker.rank
        noted: list[list[int]] = []
        found = exchange(worker, [buffer], buffer[2:], report({"epoch": 1}, 1 + worker.rank, 3, 1), noted.append, dtype)
        assert noted == [found.flags]
        return buffer[:2].tolist(), found.flags, found.units + found.discarded

    assert run_workers(2, work) == [([3.0, 3.0], [1, 2], 8)] * 2


def test_an_exchange_of_other_states_is_the_same_error_on_all() -> None:
    noted: list[list[int]] = []

    def work(worker) -> None:
        buffer = torch.zeros(trailer_size(2))
        exchange(worker, [buffer], buffer, report({"epoch": worker.rank}), noted.append, None)

    errors = run_workers(2, work)
    assert [str(e) for e in errors] == ["the workers disagree on epoch: worker 0: 0; worker 1: 1"] * 2
    assert noted == [[0, 0]] * 2  # flags are told all the same


def test_a_damaged_sum_is_noticed() -> None:
    class Damaging:
        rank, size = 0, 2

        def sum_(self, tensors) -> None:
            tensors[0][0] += 1.0

        def gather(self, value) -> list:
            return [value, value]

    buffer = torch.zeros(trailer_size(2))
    with pytest.raises(RuntimeError, match="the sum over the workers is damaged"):
        exchange(Damaging(), [buffer], buffer, report({}), lambda flags: None, None)


def test_results_of_all_or_an_error_on_all() -> None:
    assert run_workers(2, lambda worker: together(worker, lambda: worker.rank)) == [[0, 1]] * 2

    def fail(worker) -> None:
        def prepare() -> None:
            if worker.rank == 1:
                raise OSError("no space")

        together(worker, prepare)

    first, second = run_workers(2, fail)
    assert isinstance(first, ValueError)
    assert str(first) == "worker 1 failed: no space"
    assert isinstance(second, OSError)


def test_the_first_difference_is_named() -> None:
    check_alike([{"a": 1, "b": 2}] * 3)
    with pytest.raises(ValueError, match="the workers disagree on b: worker 0: 2; worker 1: 3"):
        check_alike([{"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "c": 4}])
    with pytest.raises(ValueError, match="the workers disagree on b: worker 0: None; worker 1: 3"):
        check_alike([{"a": 1}, {"a": 1, "b": 3}])
