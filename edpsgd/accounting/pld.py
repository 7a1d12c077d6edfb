"""Privacy loss distributions of Poisson-sampled Gaussian steps, composed by a tilted FFT.

A step includes an example with probability q and adds Gaussian noise of multiplier z. Its privacy loss, with or
without the example, is a random variable; the losses of all steps add up, and ε follows from the distribution of the
sum (Koskela et al. 2020). Four things keep this fast and tight for many noise levels and small q:

- The loss of a step is rounded to a grid, pessimistically (``loss_grid.py``). Where the loss is large the grid is
  coarse, so a step has about a thousand points, whatever the length of the transform. Far above ε, where it makes no
  difference any more, the grid ends with an interval to infinity.
- Distributions are multiplied by exp(λ·loss) before the transform and divided after it (exponential tilting), which
  moves the precision of the FFT to the tail that δ asks for (``loss_transform.py``). λ is found from the moments, as in
  Rényi accounting (``loss_cumulants.py``).
- A rough pass tells ε, and how much of it comes from the rounding; the spacing of the next pass follows from that.
- Grids are made of powers of two and four, so that a list that grows keeps its grid, and its transforms, for a while.

Whatever is cut off is added to δ, and so is a bound on the rounding errors: the result is rounded up, never down. What
cannot be computed, because a value is not finite or no probability is left, makes ε infinite.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from edpsgd.accounting.loss_cumulants import CUT, Moments, Window, rough_epsilon, round_down
from edpsgd.accounting.loss_grid import Grid
from edpsgd.accounting.loss_transform import SMALLEST, GridBound, LossTransform
from edpsgd.accounting.steps import LEAST_NOISE, MOST_NOISE, StepCounts, Steps, count_alike

__all__ = ["LEAST_DELTA", "LEAST_NOISE", "MOST_NOISE", "TOLERANCE", "Composition", "Steps"]

TOLERANCE = 7e-5  # relative, on ε
LEAST_DELTA = 1e-100  # below, cut probabilities would underflow
_MOST_PASSES = 6
_LAST_DIGIT = 4e-4  # the tolerance where more would take long
_MANY = 1000.0  # an ε that is of no use
_LAST_OF_MANY = 0.01  # relative, on such an ε
_COARSE = 0.02  # spacing over ε at which the estimate of its effect would not hold
_COSTLY = 3e7  # how many elements to transform are many


class Composition:
    """ε of a growing list of steps; what was composed before is not composed again.

    Args:
        tolerance: relative error of ε, upwards.
        patience: how many elements may be transformed for the last digit.

    Example:
        >>> f"{Composition().epsilon([Steps(1.0, 0.01, 1000)], delta=1e-5):.3f}"
        '1.828'
    """

    def __init__(self, tolerance: float = TOLERANCE, patience: float = _COSTLY) -> None:
        self._tolerance = tolerance
        self._patience = patience
        self._transforms: dict[tuple[int, int], LossTransform] = {}  # by direction and pass
        self._answers: deque[_Answer] = deque(maxlen=64)

    def epsilon(self, steps: Sequence[Steps], delta: float) -> float:
        """An upper bound on the smallest ε at which the steps together are (ε, δ)-private for add/remove.

        It is never below what the same object said of some of the steps. By itself, a bound that is rounded up could be
        lower for more steps, in its last digit.
        """
        counts = count_alike(steps)
        if not counts:
            return 0.0
        if delta < LEAST_DELTA or any(z == 0 for z, _ in counts):
            return math.inf
        epsilon = self._composed(counts, delta)
        for answer in self._answers:
            if answer.delta >= delta and answer.is_part_of(counts):
                epsilon = max(epsilon, answer.epsilon)
        self._answers.append(_Answer(counts, delta, epsilon))
        return epsilon

    def _composed(self, counts: StepCounts, delta: float) -> float:
        """ε of the steps by themselves.

        A step with next to no noise is taken for one without: it reveals an example that is in it (probability q, part
        of δ), and otherwise says that it is not, a loss of −ln(1 − q) for adding it.
        """
        noisy = [Steps(z, q, number) for (z, q), number in counts.items() if z >= LEAST_NOISE]
        revealing = {key: number for key, number in counts.items() if key[0] < LEAST_NOISE}
        loss = _loss_of_absence(revealing)
        left = delta * (1 - 1e-12) + math.expm1(-loss) if revealing else delta
        if left < LEAST_DELTA:
            return math.inf
        if not noisy:
            return loss
        removing = self._one_direction(noisy, left, 1, 0.0)
        adding = self._one_direction(noisy, delta, -1, removing - loss) + loss
        return min(max(removing, adding), _epsilon_if_revealing(counts, delta))

    def _one_direction(self, steps: list[Steps], delta: float, sign: int, floor: float) -> float:
        """ε for removing (sign 1) or adding (sign −1) the example: roughly first, then on a grid that fits.

        Any bound up to ``floor`` is as good as the best.
        """
        count = sum(group.number for group in steps)
        cut = delta * CUT / 4.0 ** math.ceil(math.log(count, 4))  # of each step; the same over many steps
        everything = Moments.of_steps(steps, sign, cut, math.inf)
        rough = max(rough_epsilon(steps, sign, cut, delta), SMALLEST)
        # The first pass is never fine enough: it only says how much comes from the rounding.
        aim = _Aim(rough, everything.spacing(rough, 100 * self._tolerance), 0.0, 0.0)
        lowest = everything.lowest(delta)
        bound, relative_error, tried = math.inf, math.inf, None
        for pass_ in range(_MOST_PASSES):
            moments = Moments.of_steps(steps, sign, cut, 4 * round_down(aim.epsilon - lowest, 4.0))
            grid, window, tolerance = self._plan(moments, aim, delta, pass_, len(steps))
            is_costly = grid.size * len(steps) > self._patience / 8
            if grid == tried or (relative_error < _LAST_OF_MANY and is_costly):
                break
            tried = grid
            found = self._transform(sign, pass_, grid, steps).epsilon(steps, delta, window)
            bound = min(bound, found.epsilon)
            relative_error = found.error / found.epsilon if found.epsilon > _MANY else math.inf
            is_fine = found.error <= 1.25 * tolerance * found.epsilon and grid.spacing < _COARSE * found.epsilon
            has_exact_transform = found.rounding < max(tolerance, self._tolerance) / 8
            is_exact = has_exact_transform or grid.tilt <= aim.least_tilt / 2
            if bound <= max(floor, SMALLEST) or (is_fine and is_exact):
                break
            aim = self._next_aim(aim, grid, found, bound, is_fine, is_exact)
        return bound * (1 + self._tolerance / 16)  # for the rounding errors that no bound above covers

    def _plan(self, moments: Moments, aim: _Aim, delta: float, pass_: int, groups: int) -> tuple[Grid, Window, float]:
        """Grid and window of a pass, and the tolerance of its result, larger where the grid would be long."""
        ratio = 0.02 if pass_ == 0 else min(0.02, 0.5 * math.sqrt(self._tolerance))
        grid, window = moments.plan(aim.epsilon, delta, aim.spacing, ratio, aim.least_tilt)
        if pass_ == 0 or grid.size * groups <= self._patience:
            return grid, window, aim.tolerance
        tolerance = max(aim.tolerance, _LAST_DIGIT)
        wider = aim.spacing * math.sqrt(tolerance / self._tolerance)
        grid, window = moments.plan(aim.epsilon, delta, wider, ratio, aim.least_tilt)
        return grid, window, tolerance

    def _next_aim(self, aim: _Aim, grid: Grid, found: GridBound, bound: float, is_fine: bool, is_exact: bool) -> _Aim:
        """What the next pass aims at, after one whose result was not good enough."""
        spacing, least_tilt = aim.spacing, aim.least_tilt
        if math.isinf(found.epsilon + found.error):
            spacing = grid.spacing / 2
        elif not is_fine:
            # The error falls with the square of the spacing.
            share = self._tolerance * found.epsilon / max(found.error, SMALLEST * found.epsilon)
            spacing = min(grid.spacing * math.sqrt(min(0.5, share)), _COARSE * found.epsilon)
        if not is_exact and found.epsilon > aim.epsilon / 2:  # else the tilt was for another ε
            least_tilt = 4 * grid.tilt
        return _Aim(min(aim.epsilon, found.guess, bound), spacing, least_tilt, self._tolerance)

    def _transform(self, sign: int, pass_: int, grid: Grid, steps: list[Steps]) -> LossTransform:
        """The one of the last call, if it has the same grid and has seen the first of the steps; or a new one."""
        transform = self._transforms.get((sign, pass_))
        if transform is None or transform.grid != grid or not transform.leads_to(steps):
            transform = LossTransform(grid)
            self._transforms[sign, pass_] = transform
        return transform


class _Aim(NamedTuple):
    """What a pass aims at.

    Attributes:
        epsilon: where the result is expected.
        spacing: of the grid.
        least_tilt: smaller ones had too large rounding errors.
        tolerance: relative, on ε, of what comes from the spacing.
    """

    epsilon: float
    spacing: float
    least_tilt: float
    tolerance: float


class _Answer(NamedTuple):
    """What was said of a list of steps."""

    counts: StepCounts
    delta: float
    epsilon: float

    def is_part_of(self, counts: StepCounts) -> bool:
        """Whether all of its steps are among the given ones."""
        return all(counts.get(key, 0) >= number for key, number in self.counts.items())


def _loss_of_absence(counts: StepCounts) -> float:
    """−ln of the probability to be in none of the steps."""
    logs = [number * math.log1p(-q) if q < 1 else -math.inf for (_, q), number in counts.items()]
    return -math.fsum(logs)


def _epsilon_if_revealing(counts: StepCounts, delta: float) -> float:
    """ε if all steps revealed who is in them: finite where that is less probable than δ."""
    loss = _loss_of_absence(counts)
    return loss if -math.expm1(-loss) <= delta * (1 - 1e-12) else math.inf
