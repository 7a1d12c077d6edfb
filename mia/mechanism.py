"""The audit of the mechanism itself: the real PrivateOptimizer, one step, and the claim of its printed multiplier.

It tries to tell two neighbouring data sets apart (privacy.md section 10). Micro-batches are handed over as gradients,
single examples as losses of a small model (``mia.example_worlds``). ``mia.noise_audit`` looks at the noise alone.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from edpsgd import FirstStepNorms, PrivateOptimizer
from edpsgd.accounting import gaussian_epsilon
from edpsgd.distributed.collectives import Collective
from edpsgd.mechanism.layer_scales import unit_rms
from mia import example_worlds
from mia.audited_step import CLIP_NORM, SMALL, AuditedOptimizer, Maker, Recorder, Setup, parse_scaling, spread
from mia.bounds import Floats, LowerBounds, lower_bounds, noticeable_mu

TRIALS, CONFIDENCE = 2000, 0.99
_HARD = 1000.0  # how far beyond the clip norm a canary pushes


# -------------------------------------------------------------------- two worlds


@dataclass(frozen=True)
class Finding:
    """The claim beside what was found.

    Attributes:
        multiplier: the printed noise multiplier, decayed to the audited epoch.
        mu: 1/multiplier, the claim.
        epsilon: that of the claim, at the δ of the bounds.
        bounds: what the trials show; None where the furthest move is too far, which needs no trials.
        noticeable: about the least true μ that they would refute the claim for.
        move: how many clip norms an example moved the sum of a step furthest; None for micro-batches.
        shape: examples and tokens of that step's batch.
    """

    multiplier: float
    mu: float
    epsilon: float
    bounds: LowerBounds | None
    noticeable: float
    move: float | None = None
    shape: tuple[int, int] | None = None

    @property
    def is_refuted(self) -> bool:
        """Whether the mechanism leaks more than it claims."""
        return self.bounds is None or self.bounds.mu > self.mu


def audit_mechanism(
    setup: Setup,
    collective: Collective,
    *,
    trials: int = TRIALS,
    delta: float = 1e-5,
    confidence: float = CONFIDENCE,
    release: str = "gradient",
    make: Maker = PrivateOptimizer,
) -> Finding:
    """Runs one step often in two neighbouring worlds; all workers together, with the same finding on each.

    Args:
        setup: the settings to audit.
        collective: the workers.
        trials: steps in each world.
        delta: the δ of the ε beside the claim.
        confidence: of each bound.
        release: "gradient", or "scales" for the layer norms that FirstStepNorms releases, with their own multiplier.
        make: what makes the optimizer.

    Example:
        >>> from edpsgd.distributed.collectives import Local
        >>> audit_mechanism(Setup(noise="paper", micro_batches=8, seed=1), Local(), trials=100).is_refuted
        True
    """
    multiplier = _claim(setup, release)
    noticeable = noticeable_mu(1.0 / multiplier, trials, confidence)
    if math.isinf(noticeable):
        raise ValueError(f"trials={trials} cannot refute a noise multiplier as small as {multiplier:.6g}, give more")
    move: example_worlds.Move | None = None
    found: Floats | None
    if release == "scales":
        found = _scale_statistics(setup, collective, trials, make)
    elif setup.unit == "example":
        move, found = _example_statistics(setup, collective, trials, make)
    else:
        found = _gradient_statistics(setup, collective, trials, make)
    bounds: LowerBounds | None = None
    if found is not None:
        own = lower_bounds(found[0], found[1], delta, confidence)
        bounds = collective.gather(own)[0]  # the same finding on each worker
    return Finding(
        multiplier=multiplier,
        mu=1.0 / multiplier,
        epsilon=gaussian_epsilon([multiplier], delta),
        bounds=bounds,
        noticeable=noticeable,
        move=None if move is None else move.distance,
        shape=None if move is None else (move.examples, move.tokens),
    )


def _claim(setup: Setup, release: str) -> float:
    if release not in ("gradient", "scales"):
        raise ValueError(f"release must be gradient or scales, got {release!r}")
    if release == "gradient":
        return setup.claimed_multiplier
    scaling = parse_scaling(setup.scaling)
    if not isinstance(scaling, FirstStepNorms) or scaling.noise_multiplier is None:
        raise ValueError(f"release='scales' needs scaling private:Z, got {setup.scaling!r}")
    return scaling.noise_multiplier


def _gradient_statistics(setup: Setup, collective: Collective, trials: int, make: Maker) -> Floats:
    """The noised sum along the direction in which the canary pushes, for each world and trial."""
    audited = AuditedOptimizer(setup, collective, make, SMALL)
    direction = spread(_direction(setup, audited.scales()), audited.parameters)
    pushed = [_HARD * CLIP_NORM * part for part in direction]
    opposite = [-part for part in pushed]
    found = np.empty((2, trials))
    for trial in range(trials):
        for world, gradients in enumerate((opposite, pushed)):
            released = audited.step(gradients)
            found[world, trial] = sum(float(a @ b) for a, b in zip(released, direction, strict=True))
    return found


def _example_statistics(
    setup: Setup, collective: Collective, trials: int, make: Maker
) -> tuple[example_worlds.Move, Floats | None]:
    """The furthest move of the sum by an example and, unless it is too far, the trials along it."""
    own_seed = secrets.randbits(31) if setup.seed is None else setup.seed
    seed = collective.gather(own_seed)[0]
    names = example_worlds.layer_names()
    given = _scaling_of_layers(setup.scaling, names)
    arguments = {**setup.arguments(collective.size), "layer_scaling": given}
    world = example_worlds.World(collective, make, seed, arguments, setup.epoch)
    if isinstance(given, FirstStepNorms):  # the first step measures the scales
        world.step(example_worlds.batches([(4, 3)], torch.Generator().manual_seed(seed))[0])
        given = world.optimizer.state_dict()["edpsgd"]["scales"]
    weights = [1.0] * len(names)
    if given is not None and setup.clipping != "per_layer":
        weights = unit_rms(list(given.values()))
    without_noise = {
        **arguments,
        "noise_multiplier": 0.0,
        "noise_decay": None,
        "compression": None,
        "layer_scaling": given,
    }
    moves = example_worlds.moves(collective, make, seed, without_noise, weights)
    furthest = max(moves, key=example_worlds.Move.rank)
    if furthest.is_too_far:
        return furthest, None
    return furthest, example_worlds.statistics(world, weights, furthest, trials)


def _scaling_of_layers(text: str, names: Sequence[str]) -> Mapping[str, float] | FirstStepNorms | None:
    """The layer scales of a setup; its three public numbers go to more layers in turn."""
    scaling = parse_scaling(text)
    if not isinstance(scaling, Mapping):
        return scaling
    numbers = list(scaling.values())
    return {name: numbers[index % len(numbers)] for index, name in enumerate(names)}


def _direction(setup: Setup, scales: Sequence[float]) -> list[float]:
    """Norms of the layers of a unit vector along which one example moves the clipped sum furthest for its noise.

    Flat clipping: the layers with the largest scale (the paper's noise is the same for all). Per layer: every layer up
    to its own clip norm.
    """
    largest = max(scales)
    weights = [a if setup.clipping == "per_layer" or a == largest else 0.0 for a in scales]
    return [weight / math.hypot(*weights) for weight in weights]


def _scale_statistics(setup: Setup, collective: Collective, trials: int, make: Maker) -> Floats:
    """The noised layer norms that a first step releases: all of the canary's gradient in one layer, or in another."""
    found = np.empty((2, trials))
    for trial in range(trials):
        for world in range(2):
            seed = None if setup.seed is None else setup.seed + 2 * trial + world  # each is a first step
            recorder = Recorder(collective)
            audited = AuditedOptimizer(replace(setup, seed=seed), recorder, make, SMALL)
            is_absent = setup.unit == "example" and world == 0
            audited.step(None if is_absent else spread((1.0 - world, float(world), 0.0), audited.parameters), is_absent)
            found[world, trial] = float(recorder.received[1] - recorder.received[0])
    return found
