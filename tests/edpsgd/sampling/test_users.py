"""Samplers of users: weights, shares, and who is in a round. Training with them is in test_federated.py."""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import pytest
from scipy.stats import chi2

from edpsgd import ClippedDenominator, FixedSizeUsers, PoissonUsers
from tests.helpers.common import SIGNIFICANCE


def test_weights_are_capped() -> None:
    users = PoissonUsers([0, 10, 400, 4000], 0.5, weight_cap=400.0, collective="local")
    assert [users.weight(user) for user in range(4)] == [0.0, 0.025, 1.0, 1.0]
    assert PoissonUsers([5, 9], 0.5, collective="local").weight(1) == 1.0


def test_the_expected_weight_is_public() -> None:
    assert PoissonUsers(8, 0.25, collective="local").expected_batch == 2.0
    clipped = PoissonUsers(8, 0.25, denominator=ClippedDenominator(6.0), collective="local")
    assert clipped.expected_batch == 1.5
    assert clipped.share(3.0) == 0.5


def test_sensitivities_in_clip_norms() -> None:
    assert PoissonUsers(8, 0.25, collective="local").reach == 1.0
    assert PoissonUsers(8, 0.25, denominator=ClippedDenominator(6.0), collective="local").reach == 2.0
    assert FixedSizeUsers(8, 2, collective="local").reach == 2.0


def test_rounds_of_a_fixed_size_have_different_users() -> None:
    users = FixedSizeUsers(50, cohort=20, rounds_per_epoch=5, collective="local", seed=1)
    rounds = list(users)
    assert [len(set(drawn)) for drawn in rounds] == [20] * 5
    assert len({tuple(drawn) for drawn in rounds}) == 5


@pytest.mark.parametrize("unit", ["micro_batch", "example"])
def test_only_users_fit(unit) -> None:
    assert PoissonUsers(8, 0.25, collective="local").fits("user")
    assert not PoissonUsers(8, 0.25, collective="local").fits(unit)


def test_draws_of_a_fixed_size() -> None:
    users = FixedSizeUsers(20, 6, rounds_per_epoch=400, collective="local", seed=3)
    drawn = list(users)
    assert all(len(set(d)) == 6 for d in drawn)
    counts = np.bincount(np.concatenate(drawn), minlength=20)
    statistic = float(((counts - 120) ** 2 / 120).sum())
    assert statistic < chi2.ppf(1 - SIGNIFICANCE, 19)
    fresh = [list(FixedSizeUsers(20, 6, collective="local")) for _ in range(2)]
    assert fresh[0] != fresh[1]


@pytest.mark.parametrize(
    "make", [lambda **more: FixedSizeUsers(900, 9, **more), lambda **more: PoissonUsers(900, 0.01, **more)]
)
def test_copies_draw_other_users(make) -> None:
    """Two runs with the same draws would be accounted as if these were independent."""
    users = make(collective="local")
    copies = [users, copy.deepcopy(users), *(pickle.loads(pickle.dumps(users)) for _ in range(2))]
    draws = [list(one) for one in copies]
    assert all(one != other for one, other in itertools.combinations(draws, 2))
    seeded = make(collective="local", seed=1)
    assert list(copy.deepcopy(seeded)) == list(seeded)


def test_steps_that_are_run_again_draw_anew() -> None:
    """A second draw must not repeat the first: the accounting takes them to be independent."""
    users = FixedSizeUsers(1000, 10, collective="local")
    users.set_epoch(0)
    state, first = users.state_dict(), next(iter(users))
    users.load_state_dict(state)
    assert next(iter(users)) != first
    assert "key" not in state
