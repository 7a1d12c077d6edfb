"""The audit of the mechanism itself: the real PrivateOptimizer, one step, and the claim of its printed multiplier.

``audit_mechanism`` tries to tell two neighbouring data sets apart (privacy.md section 10); ``audit_noise`` looks at the
noise: its size in every layer, and whether it is independent between workers, shards and steps. Micro-batches are
handed over as gradients, single examples as losses of a small model (``mia.example_worlds``).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from scipy.stats import kstest
from torch import nn

from edpsgd import FirstStepNorms, PrivateOptimizer
from edpsgd.accounting import gaussian_epsilon
from edpsgd.distributed.collectives import Collective
from edpsgd.mechanism.layer_scales import unit_rms
from edpsgd.schedules import Decay
from mia import example_worlds
from mia.bounds import (
    Check,
    Floats,
    LowerBounds,
    NoiseFinding,
    check_independence,
    check_std,
    lower_bounds,
    noticeable_mu,
)

CLIP_NORM = 0.5  # not 1, so that a forgotten factor shows
TRIALS, CONFIDENCE = 2000, 0.99
_HARD = 1000.0  # how far beyond the clip norm a canary pushes
_SMALL, _LARGE = (8, 4, 16), (1200, 600, 2400)  # sizes of the layers, for many steps and for few
_NORMS = (1.0, 2.0, 4.0)  # of the layers of the gradients from which scales are measured

Maker = Callable[..., PrivateOptimizer]


@dataclass(frozen=True)
class Setup:
    """The settings to audit; the names are those of PrivateOptimizer's arguments or close to them.

    Attributes:
        micro_batches: per worker and step.
        epoch: the one to audit; its claim is the multiplier times the decay.
        scaling: "none", "public:A,B,C" for the scales of the three layers, or "private:Z" for FirstStepNorms(Z).

    Example:
        >>> from edpsgd import LinearDecay
        >>> Setup(noise_multiplier=2.0, noise_decay=LinearDecay(0.5), epoch=2).claimed_multiplier
        1.0
    """

    noise_multiplier: float = 1.0
    noise: str = "calibrated"
    micro_batches: int = 1
    clipping: str = "flat"
    noise_placement: str = "sharded"
    noise_decay: Decay | None = None
    epoch: int = 0
    scaling: str = "none"
    unit: str = "micro_batch"
    compression: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise ValueError(f"noise_multiplier must be a finite number > 0, got {self.noise_multiplier!r}")
        for name, least in (("micro_batches", 1), ("epoch", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be an int >= {least}, got {getattr(self, name)!r}")
        parse_scaling(self.scaling)

    @property
    def claimed_multiplier(self) -> float:
        """The printed one, decayed to the audited epoch."""
        return self.noise_multiplier * (1.0 if self.noise_decay is None else self.noise_decay(self.epoch))

    @property
    def is_sharded(self) -> bool:
        """Whether each worker noises its own coordinates; the paper's noise never is."""
        return self.noise == "calibrated" and self.noise_placement == "sharded"

    def arguments(self, workers: int) -> dict[str, Any]:
        """For PrivateOptimizer."""
        others = ("micro_batches", "epoch", "scaling")
        return {
            **{field.name: getattr(self, field.name) for field in fields(self) if field.name not in others},
            "clip_norm": CLIP_NORM,
            "layer_scaling": parse_scaling(self.scaling),
            "divisor": float(workers * self.micro_batches) if self.unit == "example" else None,
        }


def parse_scaling(text: str) -> Mapping[str, float] | FirstStepNorms | None:
    """Layer scales from none, public:A,B,C or private:Z.

    Example:
        >>> parse_scaling("public:1,2,4")
        {'p0': 1.0, 'p1': 2.0, 'p2': 4.0}
    """
    if text == "none":
        return None
    kind, _, values = text.partition(":")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        numbers = []
    is_good = bool(numbers) and all(math.isfinite(number) and number > 0 for number in numbers)
    if is_good and kind == "private" and len(numbers) == 1:
        return FirstStepNorms(numbers[0])
    if is_good and kind == "public" and len(numbers) == len(_SMALL):
        return {f"p{index}": number for index, number in enumerate(numbers)}
    raise ValueError(f"scaling must be none, public:A,B,C or private:Z with numbers > 0, got {text!r}")


# -------------------------------------------------------------------- the optimizer under audit


class Recorder:
    """A collective that keeps what this worker sent in the last message, and what came back."""

    def __init__(self, inner: Collective) -> None:
        self.inner = inner
        self.sent = self.received = torch.empty(0)

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.inner.size

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """The sum of the workers, noted down."""
        self.sent = torch.cat([tensor.flatten() for tensor in tensors]).float()
        self.inner.sum_(tensors)
        self.received = torch.cat([tensor.flatten() for tensor in tensors]).float()

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value."""
        return self.inner.gather(value)


class _Rig:
    """An optimizer with three loose parameters, to hand gradients to and to see what becomes of them."""

    def __init__(self, setup: Setup, collective: Collective, make: Maker, sizes: Sequence[int]) -> None:
        model = nn.ParameterDict({f"p{index}": nn.Parameter(torch.zeros(size)) for index, size in enumerate(sizes)})
        self.parameters = list(model.values())
        inner = torch.optim.SGD(self.parameters, lr=1.0)
        self._optimizer = make(inner, list(model.items()), collective=collective, **setup.arguments(collective.size))
        self._setup, self._collective = setup, collective
        self.divisor = collective.size * setup.micro_batches
        self._optimizer.set_epoch(setup.epoch)

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor] | None, is_absent: bool = False) -> list[torch.Tensor]:
        """One step with these gradients in one micro-batch of worker 0 and nothing in all others.

        Args:
            gradients: those of the micro-batch, None for an empty one.
            is_absent: leaves the micro-batch out altogether.

        Returns:
            The noised sum over all micro-batches, as the parameters show it.
        """
        for parameter in self.parameters:
            parameter.zero_()
        is_first = self._collective.rank == 0
        for _ in range(self._setup.micro_batches - 1):
            self._optimizer.accumulate()
        if is_first and gradients is not None:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
        if not (is_first and is_absent):
            self._optimizer.accumulate()
        self._optimizer.step()
        return [parameter.detach() * -self.divisor for parameter in self.parameters]

    def scales(self) -> list[float]:
        """Those of the layers at root mean square 1; measured by a first step if need be."""
        given = parse_scaling(self._setup.scaling)
        if given is None:
            return [1.0] * len(self.parameters)
        if isinstance(given, Mapping):
            return unit_rms(list(given.values()))
        self.step(_spread(_NORMS, self.parameters))
        return list(self._optimizer.state_dict()["edpsgd"]["scales"].values())


def _spread(weights: Sequence[float], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A gradient whose layers have these norms, alike in all coordinates of a layer."""
    return [torch.full_like(p, weight / math.sqrt(p.numel())) for weight, p in zip(weights, parameters, strict=True)]


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
    return Finding(
        multiplier,
        1.0 / multiplier,
        gaussian_epsilon([multiplier], delta),
        None if found is None else collective.gather(lower_bounds(found[0], found[1], delta, confidence))[0],
        noticeable,
        None if move is None else move.distance,
        None if move is None else (move.examples, move.tokens),
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
    rig = _Rig(setup, collective, make, _SMALL)
    direction = _spread(_direction(setup, rig.scales()), rig.parameters)
    pushed = [_HARD * CLIP_NORM * part for part in direction]
    opposite = [-part for part in pushed]
    found = np.empty((2, trials))
    for trial in range(trials):
        for world, gradients in enumerate((opposite, pushed)):
            released = rig.step(gradients)
            found[world, trial] = sum(float(a @ b) for a, b in zip(released, direction, strict=True))
    return found


def _example_statistics(
    setup: Setup, collective: Collective, trials: int, make: Maker
) -> tuple[example_worlds.Move, Floats | None]:
    """The furthest move of the sum by an example and, unless it is too far, the trials along it."""
    seed = collective.gather(secrets.randbits(31) if setup.seed is None else setup.seed)[0]
    names = example_worlds.layer_names()
    given = parse_scaling(setup.scaling)
    if isinstance(given, Mapping):  # three numbers for more layers: in turn
        given = {name: list(given.values())[number % len(given)] for number, name in enumerate(names)}
    arguments = {**setup.arguments(collective.size), "layer_scaling": given}
    world = example_worlds.World(collective, make, seed, arguments, setup.epoch)
    if isinstance(given, FirstStepNorms):
        world.step(example_worlds.batches([(4, 3)], torch.Generator().manual_seed(seed))[0])
        given = world.optimizer.state_dict()["edpsgd"]["scales"]
    scales = [1.0] * len(names) if given is None else unit_rms(list(given.values()))
    weights = [1.0] * len(names) if setup.clipping == "per_layer" else scales
    bare = {"noise_multiplier": 0.0, "noise_decay": None, "compression": None, "layer_scaling": given}
    moves = example_worlds.moves(collective, make, seed, {**arguments, **bare}, weights)
    furthest = max(moves, key=example_worlds.Move.rank)
    if furthest.is_too_far:
        return furthest, None
    return furthest, example_worlds.statistics(world, weights, furthest, trials)


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
            rig = _Rig(replace(setup, seed=seed), recorder, make, _SMALL)
            is_absent = setup.unit == "example" and world == 0
            rig.step(None if is_absent else _spread((1.0 - world, float(world), 0.0), rig.parameters), is_absent)
            found[world, trial] = float(recorder.received[1] - recorder.received[0])
    return found


# -------------------------------------------------------------------- the noise


def audit_noise(
    setup: Setup,
    collective: Collective,
    *,
    steps: int = 20,
    error_rate: float = 1e-3,
    make: Maker = PrivateOptimizer,
) -> NoiseFinding:
    """Looks at the noise of steps without data, in the parameters and in what each worker sent.

    Example:
        >>> from edpsgd.distributed.collectives import Local
        >>> audit_noise(Setup(seed=1), Local(), steps=4).is_refuted
        False
    """
    if steps < 2 or not 0 < error_rate < 1:
        raise ValueError(f"steps must be an int >= 2 and error_rate in (0, 1), got {steps!r} and {error_rate!r}")
    recorder = Recorder(collective)
    rig = _Rig(setup, recorder, make, _LARGE)
    promised = _promised(setup, rig.scales())
    sums, messages = np.empty((2, steps, len(promised)))
    for step in range(steps):
        sums[step] = torch.cat(rig.step(None)).numpy() / promised
        messages[step] = recorder.sent[: len(promised)].numpy() * rig.divisor / promised
    workers = np.stack(collective.gather(messages))
    own = _check_shards(workers) if setup.is_sharded else _check_workers(workers)
    checks = (*_check_layers(sums), *own, *check_independence(_streams(workers, setup.is_sharded)))
    finding: NoiseFinding = collective.gather(NoiseFinding(checks, error_rate))[0]
    return finding


def _promised(setup: Setup, scales: Sequence[float]) -> Floats:
    """The std that makes the step a Gaussian mechanism with the printed multiplier, for each coordinate of the sum."""
    sensitivity = CLIP_NORM * (1.0 if setup.unit == "example" else 2.0)
    layers = [1.0 if setup.clipping == "per_layer" else scale for scale in scales]
    return np.repeat(layers, _LARGE) * sensitivity * setup.claimed_multiplier


def _check_layers(sums: Floats) -> list[Check]:
    layers = np.split(sums, np.cumsum(_LARGE)[:-1], axis=1)
    checks = [check_std(f"layer {number}", layer) for number, layer in enumerate(layers)]
    shape = kstest(sums.ravel(), "norm")
    return [*checks, Check("Gaussian shape", f"Kolmogorov-Smirnov distance {shape.statistic:.4f}", float(shape.pvalue))]


def _check_workers(workers: Floats) -> list[Check]:
    """Per worker: each adds 1/N of the variance everywhere."""
    share = math.sqrt(len(workers))
    return [check_std(f"worker {rank}'s share", own * share) for rank, own in enumerate(workers)]


def _check_shards(workers: Floats) -> list[Check]:
    """Sharded: each coordinate is noised by exactly one worker, in every step."""
    noised = (workers != 0).sum(axis=0)
    found = f"{int((noised == 0).sum())} bare, {int((noised > 1).sum())} noised twice, of {noised.size}"
    cover = Check("shards cover every coordinate once", found, float((noised == 1).all()))
    return [cover, *(check_std(f"worker {rank}'s shard", own[own != 0]) for rank, own in enumerate(workers))]


def _streams(workers: Floats, is_sharded: bool) -> Floats:
    """What each worker drew in each step, side by side from the first number on: workers, steps, numbers."""
    if not is_sharded:
        return workers
    drawn = [[step[step != 0] for step in own] for own in workers]
    shortest = min(len(step) for own in drawn for step in own)
    return np.array([[step[:shortest] for step in own] for own in drawn])
