"""How far a batch is from autograd, and the factors of a mixture."""

from __future__ import annotations

import torch
from torch import nn

from edpsgd.per_example.batch import compute_batch
from edpsgd.per_example.deviations import find_deviations, mixing_factors
from edpsgd.per_example.layout import make_units
from edpsgd.per_example.results import BatchGradients
from tests.helpers.unit_loop import trained


def batch_of(model: nn.Module, losses: torch.Tensor) -> BatchGradients:
    units = make_units(losses, None, None)
    return compute_batch(trained(model), losses, torch.ones(len(losses)), units, set(), set(), True)


def test_right_norms_do_not_deviate_and_wrong_ones_do() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    batch = batch_of(model, model(torch.randn(5, 3)).square().sum(1))
    norms = batch.norms()
    deviations = list(find_deviations(batch, norms, of_all_norms=True))
    assert len(deviations) == 2 + 5 * 2  # the sums of two layers, and the norms of all units
    assert all(one.is_comparable and one.distance < 1e-4 * one.size for one in deviations)
    norms[3, 1] *= 0.5
    wrong = [one for one in find_deviations(batch, norms, True) if one.distance > 1e-3 * one.size]
    assert [one.number for one in wrong] == [1]


def test_what_a_broken_unit_spoils_in_autograd_is_not_comparable() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    factors = torch.tensor([1.0, torch.inf, 1.0])
    batch = batch_of(model, model(torch.randn(3, 3)).square().sum(1) * factors)
    found = list(find_deviations(batch, batch.norms(), of_all_norms=False))
    assert all(one.distance < 1e-4 * one.size for one in found if one.is_comparable)
    assert not list(find_deviations(batch, torch.full((3, 2), torch.nan), of_all_norms=False))


def test_factors_make_the_chosen_units_count_alike() -> None:
    norms = torch.tensor([[1.0, 0.0], [16.0, 0.0], [5.0, 5.0], [1e-9, 0.0]])
    for _ in range(20):
        factors = mixing_factors(norms, [0, 1, 3])
        assert factors[2] == 0.0
        parts = (norms.norm(dim=1) * factors).abs()[[0, 1]]
        assert float(parts.max() / parts.min()) <= 2.0**4
        assert all(float(torch.frexp(one.abs())[0]) == 0.5 for one in factors[[0, 1, 3]])
    few = mixing_factors(torch.ones(9, 1), range(8)).tolist()
    assert (len(set(few)), few[8]) == (9, 0.0)
    many = mixing_factors(torch.ones(100, 1), range(100))
    assert len(set(many.tolist())) == 100
    assert float(many.abs().min()) >= 0.125
