"""Scalar products of the rows of each unit, of which ghost norms are made."""

from __future__ import annotations

import torch

from edpsgd.per_example.fast_products import multiply_pairs
from edpsgd.per_example.layout import Rows
from edpsgd.per_example.precision import UNDERFLOW, exact


class Products:
    """The products of a batch; made once for a matrix that several layers read."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], tuple[torch.Tensor, Rows, torch.Tensor]] = {}

    def of(self, matrix: torch.Tensor, rows: Rows) -> torch.Tensor:
        """The products of each unit's rows with each other: units x most rows x most rows."""
        key = (matrix.data_ptr(), matrix.shape, matrix.stride(), id(rows))
        if key not in self._made:  # the matrix is kept too: no other one gets its address
            blocks = rows.blocks(exact(matrix))
            self._made[key] = (matrix, rows, multiply_pairs(blocks, blocks.mT))
        return self._made[key][2]


# Each of the following returns three numbers for each unit, 3 x units: a part of its squared norm,
# the sum of the sizes of what was added up for that, and what the squared norm must exceed so that
# nothing of it was lost to underflow.


def ghost_squares(
    left: torch.Tensor,
    right: torch.Tensor,
    rows: Rows,
    products: Products,
) -> torch.Tensor:
    """Of Σ leftᵢ rightᵢᵀ: the sum of (leftᵢ·leftⱼ)(rightᵢ·rightⱼ) over pairs of a unit's rows."""
    of_left, of_right = products.of(left, rows), products.of(right, rows)
    largest = 1.0 + _largest_square(of_left) + _largest_square(of_right)
    lost = UNDERFLOW * rows.most**2 * max(left.shape[1], right.shape[1]) * largest
    return _summed(of_left * of_right, lost)


def chosen_squares(
    numbers: torch.Tensor,
    right: torch.Tensor,
    rows: Rows,
    products: Products,
) -> torch.Tensor:
    """Of rightᵢ added to row numbersᵢ: the sum of rightᵢ·rightⱼ over pairs of one number."""
    blocks = rows.blocks(numbers)  # where they are filled up, the products are zero
    are_equal = blocks.unsqueeze(1) == blocks.unsqueeze(2)
    of_right = products.of(right, rows)
    lost = of_right.new_full((rows.count,), UNDERFLOW * rows.most**2 * right.shape[1])
    return _summed(of_right * are_equal, lost)


def cross_products(
    dense: tuple[torch.Tensor, torch.Tensor, Rows],
    sparse: tuple[torch.Tensor, torch.Tensor, Rows],
) -> torch.Tensor:
    """Of Σ leftᵢ rightᵢᵀ with otherⱼ in row numbersⱼ: Σ leftᵢ[numbersⱼ] (rightᵢ·otherⱼ)."""
    left, right, rows = dense
    numbers, others, other_rows = sparse
    # Rows that fill up are zero.
    places = other_rows.blocks(numbers).unsqueeze(1).expand(-1, rows.most, -1)
    picked = rows.blocks(exact(left)).gather(2, places)
    products = multiply_pairs(rows.blocks(exact(right)), other_rows.blocks(exact(others)).mT)
    largest = 1.0 + picked.abs().amax((1, 2))
    lost = UNDERFLOW * rows.most * other_rows.most * right.shape[1] * largest
    return _summed(picked * products, lost)


def _summed(products: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
    return torch.stack((products.sum((1, 2)), products.abs().sum((1, 2)), lost))


def _largest_square(products: torch.Tensor) -> torch.Tensor:
    """The largest squared length of each unit's rows."""
    return products.diagonal(dim1=1, dim2=2).amax(1)
