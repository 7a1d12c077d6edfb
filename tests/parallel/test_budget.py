"""Budgets: the step that would exceed one is refused on all workers."""

from __future__ import annotations

import pytest

import edpsgd
from edpsgd import accounting
from tests.helpers.common import Bag, assert_same, layers_of, private, set_gradients

DELTA = 1e-5


def test_the_step_that_would_exceed_the_budget_is_refused_everywhere(workers) -> None:
    """Poisson: in the middle of an epoch, at the step that an independent count says."""
    budget = edpsgd.Budget(epsilon=2.5, delta=DELTA)
    affordable = max(
        n for n in range(200) if accounting.compose([accounting.Steps(1.0, 0.1, n)], DELTA) <= budget.epsilon
    )
    model = Bag()
    batches = edpsgd.PoissonBatches(40, 0.1)
    optimizer = private(model, batches=batches, budget=budget)
    states = []

    def epochs() -> None:
        for epoch in range(100):
            optimizer.set_epoch(epoch)
            for batch in batches:
                if batch:
                    set_gradients(model, 1.0)
                states.append(layers_of(model))
                optimizer.step()

    with pytest.raises(edpsgd.BudgetExhausted, match=r"would exceed the budget of ε = 2\.5 at δ = 1e-05"):
        epochs()
    assert workers.gather(len(states) - 1) == [affordable] * workers.size
    assert_same(model, states[-1], tolerance=0.0)
    assert sum(e.steps for e in optimizer.ledger.events) == affordable
    assert float(optimizer.epsilon(DELTA)) <= budget.epsilon
    with pytest.raises(edpsgd.BudgetExhausted):
        optimizer.step()


@pytest.mark.parametrize("vouched", [True, False])
def test_a_budget_of_whole_epochs(workers, vouched) -> None:
    budget = edpsgd.Budget(accounting.gaussian_epsilon([2.0] * 3, DELTA) * 1.001, DELTA)
    model = Bag()
    batches = edpsgd.ShuffledBatches(20 * workers.size, 5) if vouched else None
    optimizer = private(model, noise_multiplier=2.0, batches=batches, budget=budget)

    def epoch(number) -> None:
        optimizer.set_epoch(number)
        for _ in batches or range(4):
            set_gradients(model, 1.0)
            optimizer.step()

    for number in range(3):
        epoch(number)
    before = layers_of(model)
    with pytest.raises(edpsgd.BudgetExhausted):
        epoch(3)
    assert_same(model, before, tolerance=0.0)
    assert len([e for e in optimizer.ledger.events if e.steps]) == 3


def test_a_budget_pays_for_measured_scales(workers) -> None:
    optimizer = private(Bag(), layer_scaling=edpsgd.FirstStepNorms(0.5), budget=edpsgd.Budget(epsilon=3.0, delta=DELTA))
    optimizer.set_epoch(0)
    with pytest.raises(edpsgd.BudgetExhausted):
        optimizer.step()
    assert all(e.steps == 0 for e in optimizer.ledger.events)


def test_a_budget_counts_steps_if_set_epoch_is_never_called(workers) -> None:
    optimizer = private(Bag(), noise_multiplier=4.0, budget=edpsgd.Budget(2.0, DELTA))
    affordable = max(n for n in range(1, 200) if accounting.gaussian_epsilon([4.0] * n, DELTA) <= 2.0)
    for _ in range(affordable):
        optimizer.step()
    with pytest.raises(edpsgd.BudgetExhausted):
        optimizer.step()
