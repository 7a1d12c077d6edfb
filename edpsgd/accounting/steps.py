"""Groups of alike steps: what every accountant of sampled steps is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LEAST_NOISE = 1e-3  # multipliers below count as 0: whoever is in such a step is revealed
MOST_NOISE = 1e5  # larger multipliers count as this one


class Steps(NamedTuple):
    """Steps that are alike: each includes an example with probability ``sampling_rate``, 1 meaning always.

    Attributes:
        noise_multiplier: z, the noise's standard deviation over the sensitivity.
        sampling_rate: q.
        number: how many steps there are.
    """

    noise_multiplier: float
    sampling_rate: float
    number: int


StepCounts = dict[tuple[float, float], int]  # number of steps, by noise multiplier and sampling rate


def count_alike(steps: Sequence[Steps]) -> StepCounts:
    """How many steps there are of each noise multiplier and sampling rate, in order of appearance.

    Groups that cannot cost anything, without steps or without examples, are left out.
    """
    counts: StepCounts = {}
    for group in steps:
        if group.number and group.sampling_rate:
            key = (min(float(group.noise_multiplier), MOST_NOISE), float(group.sampling_rate))
            counts[key] = counts.get(key, 0) + group.number
    return counts
