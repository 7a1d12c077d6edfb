"""Groups of alike steps."""

from __future__ import annotations

from edpsgd.accounting.steps import MOST_NOISE, Steps, count_alike


def test_alike_steps_are_counted_together_in_their_order() -> None:
    steps = [Steps(1.0, 0.1, 3), Steps(2.0, 0.1, 4), Steps(1.0, 0.1, 5), Steps(1.0, 0.2, 1)]
    assert list(count_alike(steps).items()) == [((1.0, 0.1), 8), ((2.0, 0.1), 4), ((1.0, 0.2), 1)]


def test_what_costs_nothing_is_left_out_and_large_noise_counts_as_less() -> None:
    assert count_alike([Steps(1.0, 0.1, 0), Steps(1.0, 0.0, 7)]) == {}
    assert count_alike([Steps(1e9, 0.1, 1), Steps(1e8, 0.1, 2)]) == {(MOST_NOISE, 0.1): 3}
