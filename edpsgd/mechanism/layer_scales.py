"""Layer scales α: given by the user, or measured in the first step (privacy.md sections 1 and 5).

A layer is one parameter tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from edpsgd.tensors import row_lengths

FLOOR = 0.05


@dataclass(frozen=True)
class FirstStepNorms:
    """Layer scales measured in the first step, which then releases nothing else and updates nothing (section 5).

    Without noise these are the paper's raw first-iteration norms: a release of private data that no noise covers, and
    the ledger says so. With ``noise_multiplier`` each micro-batch contributes its layer norms at length 1, Gaussian
    noise is added to the sum, and the ledger is charged. With few micro-batches the estimate is rough: a typical
    layer's share of the mean is 1/√layers, the noise on it √2·z/(number of micro-batches).

    Example:
        >>> FirstStepNorms(noise_multiplier=2.0)
        FirstStepNorms(noise_multiplier=2.0)
    """

    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        z = self.noise_multiplier
        if z is not None and not (math.isfinite(z) and z > 0):
            raise ValueError(f"noise_multiplier of FirstStepNorms must be None or a finite number > 0, got {z!r}")

    @property
    def noise_std(self) -> float:
        """Noise on the sum of the contributions: non-negative vectors of length 1 differ by at most √2."""
        return math.sqrt(2.0) * (self.noise_multiplier or 0.0)

    def describe(self) -> dict[str, bool | float | None]:
        """As JSON-ready data, which no mapping of given scales can be."""
        multiplier = None if self.noise_multiplier is None else float(self.noise_multiplier)
        return {"measured": True, "noise_multiplier": multiplier}


def unit_rms(scales: Sequence[float]) -> list[float]:
    """The scales times a common factor, so that their root mean square is 1 (section 1)."""
    rms = math.sqrt(math.fsum(a * a for a in scales) / len(scales))
    return [a / rms for a in scales]


def given_scales(mapping: Mapping[str, float], names: Sequence[str]) -> list[float]:
    """A user's scales for the named layers, at root mean square 1."""
    missing = [name for name in names if name not in mapping]
    if missing:
        raise ValueError(f"layer_scaling has no entry for the parameters {', '.join(missing)}")
    for name in names:
        if not (math.isfinite(mapping[name]) and mapping[name] > 0):
            raise ValueError(f"layer_scaling[{name!r}] must be a finite number > 0, got {mapping[name]!r}")
    return unit_rms([float(mapping[name]) for name in names])


def measured_scales(norm_sums: Sequence[float]) -> list[float]:
    """Scales in proportion to (noisy) sums of layer norms, floored at 0.05 times their root mean square."""
    positive = [max(s, 0.0) for s in norm_sums]
    if not any(positive):
        return [1.0] * len(positive)
    return unit_rms([max(a, FLOOR) for a in unit_rms(positive)])


def norm_contribution(norms: torch.Tensor, private: bool) -> torch.Tensor:
    """What a micro-batch tells of its layer norms: all of them (the paper) or, privately, only their proportions."""
    if not private:
        return norms
    length = row_lengths(norms).unsqueeze(-1)
    return (norms / torch.where(length > 0, length, 1.0)).to(norms.dtype)
