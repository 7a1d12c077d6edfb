"""Layer scales α: given by the user, or measured in the first step (privacy.md sections 1 and 5).

A layer is one parameter tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from edpsgd.tensors import row_lengths

FLOOR = 0.05  # of a measured scale: a layer that noise has made small still gets its share of the clip norm


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
        """The std √2·z of the noise on the sum of the contributions; 0 without noise (section 5).

        Two of them are at most √2 apart: they have length 1, and no negative element.
        """
        return math.sqrt(2.0) * (self.noise_multiplier or 0.0)

    def describe(self) -> dict[str, bool | float | None]:
        """As JSON-ready data, which no mapping of given scales can be."""
        multiplier = None if self.noise_multiplier is None else float(self.noise_multiplier)
        return {"measured": True, "noise_multiplier": multiplier}


def unit_rms(scales: Sequence[float]) -> list[float]:
    """The scales times a common factor, so that their root mean square is 1 (section 1)."""
    rms = math.sqrt(math.fsum(scale * scale for scale in scales) / len(scales))
    return [scale / rms for scale in scales]


def given_scales(mapping: Mapping[str, float], names: Sequence[str]) -> list[float]:
    """A user's scales for the named layers, in their order, at root mean square 1 (section 1).

    A ValueError names layers without a scale, or with one that is not above 0.
    """
    missing = [name for name in names if name not in mapping]
    if missing:
        raise ValueError(f"layer_scaling has no entry for the parameters {', '.join(missing)}")
    for name in names:
        if not (math.isfinite(mapping[name]) and mapping[name] > 0):
            raise ValueError(f"layer_scaling[{name!r}] must be a finite number > 0, got {mapping[name]!r}")
    return unit_rms([float(mapping[name]) for name in names])


def measured_scales(norm_sums: Sequence[float]) -> list[float]:
    """Scales in proportion to (noisy) sums of layer norms, at root mean square 1 (section 5).

    They are floored at 0.05 before they are brought to root mean square 1 again. The mean over the units would give
    the same ones, as a common factor does not matter.
    """
    positive = [max(norm_sum, 0.0) for norm_sum in norm_sums]  # noise may have made a sum negative
    if not any(positive):
        return [1.0] * len(positive)
    floored = [max(scale, FLOOR) for scale in unit_rms(positive)]
    return unit_rms(floored)


def norm_contribution(norms: torch.Tensor, private: bool) -> torch.Tensor:
    """What a unit adds to the sum of layer norms (section 5).

    Args:
        norms: of the layers, (layers,) for a unit or (units, layers) for many.
        private: whether only their proportions are told, a vector of length 1, so that noise can cover it. Otherwise
            the norms are told as they are, as in the paper.

    Returns:
        A tensor of the shape of the norms.
    """
    if not private:
        return norms
    length = row_lengths(norms).unsqueeze(-1)
    return (norms / torch.where(length > 0, length, 1.0)).to(norms.dtype)
