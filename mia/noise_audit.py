"""The audit of the noise: its size in every layer, and whether workers, shards and steps draw it independently."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.stats import kstest

from edpsgd import PrivateOptimizer
from edpsgd.distributed.collectives import Collective
from mia.audited_step import CLIP_NORM, LARGE, AuditedOptimizer, Maker, Recorder, Setup
from mia.bounds import Floats
from mia.noise_checks import Check, NoiseFinding, check_independence, check_std


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
    audited = AuditedOptimizer(setup, recorder, make, LARGE)
    promised = _promised(setup, audited.scales())
    sums, messages = np.empty((2, steps, len(promised)))
    for step in range(steps):
        sums[step] = torch.cat(audited.step(None)).numpy() / promised
        messages[step] = recorder.sent[: len(promised)].numpy() * audited.divisor / promised
    workers = np.stack(collective.gather(messages))
    own = _check_shards(workers) if setup.is_sharded else _check_workers(workers)
    checks = (*_check_layers(sums), *own, *check_independence(_streams(workers, setup.is_sharded)))
    finding: NoiseFinding = collective.gather(NoiseFinding(checks, error_rate))[0]
    return finding


def _promised(setup: Setup, scales: Sequence[float]) -> Floats:
    """The std that makes the step a Gaussian mechanism with the printed multiplier, for each coordinate of the sum."""
    sensitivity = CLIP_NORM * (1.0 if setup.unit == "example" else 2.0)
    layers = [1.0 if setup.clipping == "per_layer" else scale for scale in scales]
    return np.repeat(layers, LARGE) * sensitivity * setup.claimed_multiplier


def _check_layers(sums: Floats) -> list[Check]:
    layers = np.split(sums, np.cumsum(LARGE)[:-1], axis=1)
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
