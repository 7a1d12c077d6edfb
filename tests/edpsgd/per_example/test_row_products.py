"""Squared norms by products of rows, against instantiated gradients in double precision."""

from __future__ import annotations

import torch

from edpsgd.per_example.layout import Rows
from edpsgd.per_example.row_products import (
    Products,
    chosen_squares,
    cross_products,
    ghost_squares,
)

UNITS, HEIGHT, WIDTH = 3, 7, 4
ROWS = Rows(torch.tensor([0, 2, 2, 1, 0, 2]), UNITS, torch.device("cpu"))
OTHERS = Rows(torch.tensor([1, 1, 0, 2]), UNITS, torch.device("cpu"))


def dense_parts() -> tuple[torch.Tensor, torch.Tensor, Rows]:
    return torch.randn(6, HEIGHT), torch.randn(6, WIDTH), ROWS


def sparse_parts() -> tuple[torch.Tensor, torch.Tensor, Rows]:
    return torch.tensor([5, 5, 0, 3]), torch.randn(4, WIDTH), OTHERS


def of_dense(left: torch.Tensor, right: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Units x height x width."""
    outer = left.double().unsqueeze(2) * right.double().unsqueeze(1)
    return torch.zeros(UNITS, HEIGHT, WIDTH, dtype=torch.float64).index_add(0, rows.units, outer)


def of_sparse(numbers: torch.Tensor, right: torch.Tensor, rows: Rows) -> torch.Tensor:
    gradients = torch.zeros(UNITS, HEIGHT, WIDTH, dtype=torch.float64)
    return gradients.index_put((rows.units, numbers), right.double(), accumulate=True)


def test_squared_norms() -> None:
    torch.manual_seed(0)
    dense, sparse, products = dense_parts(), sparse_parts(), Products()
    first, second = of_dense(*dense), of_sparse(*sparse)
    pairs = (
        (ghost_squares(*dense, products)[0], first * first),
        (chosen_squares(*sparse, products)[0], second * second),
        (cross_products(dense, sparse)[0], first * second),
    )
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted.sum((1, 2)).float(), rtol=1e-5, atol=1e-5)


def test_sizes_bound_the_squares_and_nothing_is_lost_of_ordinary_numbers() -> None:
    torch.manual_seed(0)
    dense, sparse, products = dense_parts(), sparse_parts(), Products()
    parts = (
        ghost_squares(*dense, products),
        chosen_squares(*sparse, products),
        cross_products(dense, sparse),
    )
    for squares, sizes, lost in parts:
        assert bool((squares.abs() <= sizes * (1 + 1e-5)).all())
        assert bool((lost < 1e-20).all())


def test_products_of_one_matrix_are_made_once() -> None:
    matrix, products = torch.randn(6, WIDTH), Products()
    first = products.of(matrix, ROWS)
    assert first.shape == (UNITS, 3, 3)
    assert products.of(matrix, ROWS) is first
    assert products.of(matrix.clone(), ROWS) is not first
