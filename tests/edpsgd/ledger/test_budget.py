"""Budgets: the step that would exceed one is not taken."""

from __future__ import annotations

import copy

import pytest

import edpsgd
from edpsgd import Budget
from edpsgd.accounting.pld import Steps
from edpsgd.ledger import Ledger
from edpsgd.ledger.budget import Allowance
from tests.helpers.common import Bag, private

FORGOTTEN = [Steps(1.0, 0.01, 1000)], Steps(0.004, 5e-7, 1)  # hardly any noise, hardly any draws


def test_a_budget_that_is_used_up_stays_so() -> None:
    steps, rare = FORGOTTEN
    ledger = Ledger()
    ledger.open_epoch(0, "poisson", steps[0].sampling_rate)
    for _ in range(steps[0].number):
        ledger.charge(steps[0].noise_multiplier)
    allowance = Allowance(Budget(float(ledger.epsilon(1e-6)) * 1.0001, 1e-6), ledger)

    def refusal():
        ledger.open_epoch(ledger.events[-1].epoch + 1, "poisson", steps[0].sampling_rate)
        return allowance.refusal(steps[0].noise_multiplier, ledger.open_event, 1000)

    assert refusal() is not None
    ledger.open_epoch(1, "poisson", rare.sampling_rate)
    assert allowance.refusal(rare.noise_multiplier, ledger.open_event, 1) is not None
    ledger.charge(rare.noise_multiplier)  # all the same, as by another run on the same ledger
    assert refusal() is not None


def test_a_resumed_epoch_is_within_its_budget_with_and_without_set_epoch() -> None:
    budget = edpsgd.Budget(4.4, 1e-5)  # one pass at multiplier 1
    batches = edpsgd.ShuffledBatches(20, 2)
    optimizer = private(Bag((5,)), batches=batches, budget=budget)
    optimizer.set_epoch(0)
    for _ in zip(range(4), batches, strict=False):
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    for calls_set_epoch in (True, False):
        again = edpsgd.ShuffledBatches(20, 2)
        resumed = private(Bag((5,)), batches=again, budget=budget)
        resumed.load_state_dict(state)
        if calls_set_epoch:
            resumed.set_epoch(0)
        for _ in again:
            resumed.step()
        assert [e.steps for e in resumed.ledger.events if e.steps] == [10]


def test_an_exhausted_budget_names_its_conditions() -> None:
    optimizer = private(Bag((5,)), layer_scaling=edpsgd.FirstStepNorms(), budget=edpsgd.Budget(4.4, 1e-5))
    for epoch in range(2):
        optimizer.set_epoch(epoch)
        if epoch == 0:
            optimizer.step()
            optimizer.step()
    with pytest.raises(edpsgd.BudgetExhausted, match=r"(?s)raw first-step norms.*no sampler vouches"):
        optimizer.step()
