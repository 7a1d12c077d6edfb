"""The noise of every candidate, with which the whole tuning costs what it may, and the record of the choice."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from edpsgd import accounting
from edpsgd.accounting import TrialLaw
from edpsgd.distributed.collectives import Collective
from edpsgd.ledger.selection import Candidate as PlannedTraining
from edpsgd.ledger.selection import PlannedSteps
from edpsgd.schedules import parse_decay
from tasks.nlu.configuration import Config
from tasks.nlu.noise_plan import layer_scaling
from tasks.nlu.samplers import make_batches


@dataclass(frozen=True)
class Shape:
    """What the cost of a training depends on, beside its noise.

    Attributes:
        sampling_rate: of Poisson sampling, else None.
        steps: of an epoch.
        factors: of the noise multiplier, by epochs.
        measured: the noise multipliers of measured layer scales.
    """

    sampling_rate: float | None
    steps: int
    factors: tuple[float, ...]
    measured: tuple[float, ...]

    def planned(self, multiplier: float) -> PlannedTraining:
        """The releases of a training with this noise in the first epoch."""
        found = [PlannedSteps(z, None, 1, 1) for z in self.measured]
        for factor, alike in itertools.groupby(self.factors):
            found.append(PlannedSteps(multiplier * factor, self.sampling_rate, self.steps, len(list(alike))))
        return tuple(found)


def shape_of(config: Config, examples: int, collective: Collective) -> Shape:
    """Of a training on so many utterances."""
    batches = make_batches(config, examples, collective)
    scaling = layer_scaling(config)
    measured = () if scaling is None else (scaling.noise_multiplier or 0.0,)
    factors = accounting.decay_factors(config.epochs, parse_decay(config.decay))
    return Shape(batches.sampling_rate, batches.steps_per_epoch, tuple(factors), measured)


def calibrated(shapes: Sequence[Shape], epsilon: float, delta: float, law: TrialLaw) -> dict[Shape, float]:
    """A noise multiplier for each of the shapes, with which the best of trainings that draw one costs at most ε.

    Each alone would cost about the same. Together they cost a little more than the dearest of them, since the theorem
    takes the largest divergence at two orders: so all have a little more noise, by a common factor.
    """
    alone = {shape: _multiplier(shape, epsilon, delta, law) for shape in dict.fromkeys(shapes)}

    def together(factor: float) -> float:
        return cost([shape.planned(z * factor) for shape, z in alone.items()], delta, law)

    factor = accounting.scale_to_target(epsilon, together)
    return {shape: z * factor for shape, z in alone.items()}


def _multiplier(shape: Shape, epsilon: float, delta: float, law: TrialLaw) -> float:
    def decay(epoch: int) -> float:
        return shape.factors[epoch]

    return accounting.calibrate_selected(
        epsilon,
        delta,
        len(shape.factors),
        law,
        decay,
        sampling_rate=shape.sampling_rate,
        steps_per_epoch=None if shape.sampling_rate is None else shape.steps,
        also=shape.measured,
    )


def cost(plans: Sequence[PlannedTraining], delta: float, law: TrialLaw) -> float:
    """ε of the best of trainings that each draw one of the plans."""
    return accounting.selected_epsilon([[steps.releases() for steps in plan] for plan in plans], delta, law)
