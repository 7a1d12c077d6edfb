"""Units, and the unit of each row."""

from __future__ import annotations

import pytest
import torch

from edpsgd.per_example.layout import Layout, Rows, make_units

CPU = torch.device("cpu")


def test_units_of_examples() -> None:
    losses = torch.ones(4)
    units = make_units(losses, torch.tensor([2, 0, 2, 2]), 4)
    assert (units.count, units.present) == (4, [0, 2])
    assert units.sizes().tolist() == [1, 0, 3, 0]
    assert units.only(2).tolist() == [0.0, 0.0, 1.0, 0.0]
    assert make_units(losses, None, None).of_examples.tolist() == [0, 1, 2, 3]


def test_rows_of_a_layout_are_made_once() -> None:
    units = make_units(torch.ones(3), torch.tensor([1, 0, 1]), 2)
    layout = Layout(0, torch.tensor([0, 1, 2]))
    rows = units.rows(layout, 2, CPU)
    assert rows.units.tolist() == [1, 1, 0, 0, 1, 1]
    assert units.rows(layout, 2, CPU) is rows
    assert units.rows(Layout(1, layout.labels), 2, CPU) is rows  # the same examples in another dimension
    assert units.rows(layout, 1, CPU) is not rows
    assert units.rows(Layout(0, torch.tensor([1, 0, 2])), 2, CPU).units.tolist() == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("owners", [[0, 0, 1, 1, 2, 2], [2, 0, 0, 2, 1, 2]])
def test_sums_and_blocks_of_rows(owners: list[int]) -> None:
    rows, matrix = Rows(torch.tensor(owners), 3, CPU), torch.randn(6, 2)
    assert rows.is_regular == (owners == sorted(owners))
    assert rows.most == max(owners.count(unit) for unit in range(3))
    sums, blocks = rows.sums(matrix), rows.blocks(matrix)
    assert blocks.shape == (3, rows.most, 2)
    for unit in range(3):
        own = matrix[torch.tensor(owners) == unit]
        torch.testing.assert_close(sums[unit], own.sum(0))
        torch.testing.assert_close(blocks[unit, : len(own)], own)
        assert not blocks[unit, len(own) :].any()


def test_rows_of_some_units_and_of_several_matrices() -> None:
    rows = Rows(torch.tensor([2, 0, 1, 2]), 3, CPU)
    chosen = torch.tensor([True, False, True])
    is_kept, kept = rows.of_units(chosen, chosen.cumsum(0) - 1, 2)
    assert is_kept.tolist() == [True, True, False, True]
    assert kept.units.tolist() == [1, 0, 1]
    assert Rows.joined([rows, kept]).units.tolist() == [2, 0, 1, 2, 1, 0, 1]
    assert Rows.joined([rows]) is rows
