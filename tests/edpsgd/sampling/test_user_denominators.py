"""What sums over users are divided by."""

from __future__ import annotations

import pytest

from edpsgd import ClippedDenominator, FixedDenominator


def test_a_fixed_denominator_ignores_the_draw() -> None:
    assert FixedDenominator().weight(users=7) == 7
    assert FixedDenominator(3.5).weight(users=7) == 3.5
    assert FixedDenominator().share(expected=4.0, drawn=9.0) == 1.0
    assert not FixedDenominator().follows_draw


@pytest.mark.parametrize("drawn", [0.0, 3.0, 4.0, 10.0])
def test_a_clipped_denominator_is_the_larger_weight(drawn) -> None:
    """The share over the expected weight is one over the larger of both."""
    clipped = ClippedDenominator(400.0)
    assert clipped.weight(users=7) == 400.0
    assert clipped.share(expected=4.0, drawn=drawn) / 4.0 == pytest.approx(1 / max(4.0, drawn))
    assert clipped.follows_draw


@pytest.mark.parametrize("weight", [2.0, 0.3])
def test_reach_is_the_sensitivity_in_clip_norms(weight) -> None:
    """One user more, of the largest update against all others: 2·S with the clipped denominator, never more."""
    expected, others = 4.0, 6.0  # all others push to +1, with their weight
    clipped = ClippedDenominator(1.0)
    without = others * clipped.share(expected, others)
    with_user = (others - min(weight, 1.0)) * clipped.share(expected, others + min(weight, 1.0))
    assert abs(with_user - without) <= clipped.reach
    assert FixedDenominator.reach == 1.0
