"""Trainings that have not happened yet. Larger rounds of users are in test_federated.py, the command in cli/."""

from __future__ import annotations

import pytest

import edpsgd
from edpsgd import (
    accounting,
    planning,
)
from edpsgd.planning import Training, as_if
from tests.helpers.user_ledgers import user_ledger


def test_steps_rate_and_noise_of_a_training() -> None:
    training = Training(1e-5, 1001, 100, 3, 2, 5, "poisson", "micro_batch")
    assert (training.steps, training.rate) == (11, 100 / 1001)
    assert training.noise_std(3.0) == pytest.approx(2 * 3.0 / 10)  # privacy.md section 2: 2C over N·K
    single = Training(1e-5, 1001, 100, 3, 2, 1, "shuffled", "example")
    assert single.noise_std(3.0) == pytest.approx(3.0 / 100)


def test_a_schedule_is_what_the_accountant_says() -> None:
    training = Training(1e-5, 1000, 100, 3, 1, 1, "shuffled", "micro_batch")
    schedule = training.schedule("halved", 2.0, lambda epoch: 0.5**epoch)
    assert schedule.z == [2.0, 1.0, 0.5]
    assert schedule.mean == pytest.approx(3.5 / 3)
    assert schedule.report.bounds[0].epsilon == accounting.gaussian_epsilon([2.0, 1.0, 0.5], 1e-5)


def test_what_is_json_ready() -> None:
    training = Training(1e-5, 1000, 100, 3, 1, 1, "shuffled", "micro_batch")
    assert training.data()["steps_per_epoch"] == 10
    assert "decay" not in training.schedule("", 1.0, None).data(training)
    assert training.schedule("none", 1.0, None).data(training)["decay"] == "none"


def test_the_curve_ends_at_the_target() -> None:
    training = planning.Training(1e-5, 8000, 80, 50, 1, 1, "shuffled", "micro_batch")
    ends, epsilons = training.cumulative([2.684306 * 50**0.5 / 20**0.5] * 50)
    assert (ends[-1], len(ends)) == (50, 20)
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] == pytest.approx(8, rel=1e-5)


def test_what_a_larger_run_would_cost() -> None:
    """Table 2's first row from a run with 100 users a round and the same noise on the mean: σ = 0.003, S = 15."""
    small = user_ledger("poisson", 100 / 763430, 0.003 * 100 / 15, 5000, users=763430)
    large = user_ledger("poisson", 5000 / 763430, 1.0, 5000)
    assert as_if(small, 1e-9, users=763430, cohort=5000) == pytest.approx(float(large.epsilon(1e-9)), rel=1e-6)
    with pytest.raises(ValueError, match="cohort must be > 0"):
        as_if(small, 1e-9, users=10, cohort=11)
    with pytest.raises(edpsgd.LedgerError, match="PoissonUsers"):
        as_if(user_ledger("fixed_size", 0.1, 1.0, 5), 1e-9, users=100, cohort=10)
