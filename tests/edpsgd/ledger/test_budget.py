"""Budgets: the step that would exceed one is not taken."""

from __future__ import annotations

from edpsgd import Budget
from edpsgd.accounting.pld import Steps
from edpsgd.ledger import Ledger
from edpsgd.ledger.budget import Allowance

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
