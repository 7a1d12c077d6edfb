"""Samplers of users: weights, shares, and who is in a round. Training with them is in test_federated.py."""

from __future__ import annotations

import pytest

from edpsgd import ClippedDenominator, FixedSizeUsers, PoissonUsers


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
