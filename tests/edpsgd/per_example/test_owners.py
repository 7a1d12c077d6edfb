"""Owners by hand."""

from __future__ import annotations

import torch

from edpsgd.per_example.owners import NOBODY, SHARED, merged, merged_along, reshaped, scattered


def test_owners_by_hand() -> None:
    rows = torch.tensor([[0], [1], [2]])
    assert reshaped(rows, (3, 4), (12,)).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert reshaped(rows, (3, 4), (3, 2, 2)).shape == (3, 1, 1)
    assert reshaped(rows.T, (4, 3), (12,)).tolist() == [0, 1, 2] * 4
    assert merged_along(rows, [0]).tolist() == [[SHARED]]
    assert merged(rows, torch.tensor([[0], [NOBODY], [1]])).flatten().tolist() == [0, 1, SHARED]
    picked = torch.tensor([0, 2, 2, 4])
    assert scattered(torch.tensor([5, 6, 6, 7]), picked, (5,)).tolist() == [5, NOBODY, 6, NOBODY, 7]
    assert scattered(torch.tensor([5, 6, 7, 7]), picked, (5,)).tolist() == [5, NOBODY, SHARED, NOBODY, 7]
