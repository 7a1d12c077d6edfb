"""Clipping: the norms of a micro-batch's gradient, the factor that clips it, and the scales of the layers.

A layer is one parameter tensor. Section numbers are those of privacy.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from edpsgd import noise

FLOOR = 0.05
GUARD = 1.0 - 1e-6  # of the clip norm, so that rounding of norms, factors and products does not exceed it
_NOT_CLIPPED = 1.0 - 1.2e-6  # the factor of a gradient that has the clip norm is the guard
_PART = 1 << 15  # elements whose squares can be summed in single precision with an error of some millionths
_SAFE = 1e-13  # a norm above this hardly notices what its squares lose below the range of single precision


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


def layer_norms(gradients: Sequence[torch.Tensor | None], home: torch.device) -> torch.Tensor:
    """The norm of each layer's gradient, 0 where there is none; on one device, without a host sync."""
    precision = torch.float32
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(index)
            precision = torch.promote_types(precision, gradient.dtype)
    norms = [torch.zeros((), device=home, dtype=precision)] * len(gradients)
    for (_, dtype), indices in by_kind.items():
        kind = [g for i in indices if (g := gradients[i]) is not None]
        for index, norm in zip(indices, _norms(kind, torch.promote_types(dtype, torch.float32)), strict=True):
            norms[index] = noise.moved(norm.to(precision), home)
    return torch.stack(norms)


def _norms(gradients: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """One for each gradient. Squares may leave the range of single precision, where the gradient does not."""
    if not _is_at_hand(gradients[0]):
        found = torch._foreach_norm(gradients, 2, dtype=_wide(gradients[0].device))
        return [norm.to(dtype) for norm in found]
    norms = _norms_of_parts(gradients, dtype)
    if dtype is torch.float32:  # double precision is slow on CPUs, so only where it is needed
        left = [i for i, norm in enumerate(norms) if not _SAFE < float(norm) < math.inf]
        again = _norms_of_parts([gradients[i] for i in left], torch.float64)
        for i, norm in zip(left, again, strict=True):
            norms[i] = norm.to(dtype)
    return norms


def _is_at_hand(tensor: torch.Tensor) -> bool:
    """Whether the host can read a value without waiting for a device."""
    return tensor.is_cpu


def _norms_of_parts(gradients: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """In parts, as torch's sum of very many squares comes out too small on CPUs."""
    parts = [torch.split(gradient.reshape(-1), _PART) for gradient in gradients]
    pieces = [part for one in parts for part in one]
    found = iter(torch._foreach_norm(pieces, 2, dtype=dtype) if pieces else ())
    of_parts = [list(itertools.islice(found, len(one))) for one in parts]
    return [one[0] if len(one) == 1 else torch.linalg.vector_norm(torch.stack(one)) for one in of_parts]


def _wide(device: torch.device) -> torch.dtype:
    """Double precision, in which no square of single precision leaves the range; Apple's GPUs have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def _lengths(norms: torch.Tensor) -> torch.Tensor:
    """Of the vectors of layer norms, in double precision."""
    lengths: torch.Tensor = torch.linalg.vector_norm(norms, dim=-1, dtype=_wide(norms.device))
    return lengths


def is_finite(norms: torch.Tensor) -> torch.Tensor:
    """A boolean scalar: whether the micro-batch can be used. NaN and infinities show in the norms."""
    return torch.isfinite(norms.sum())


def flat_factor(norms: torch.Tensor, clip_norm: float, scales: torch.Tensor | None) -> torch.Tensor:
    """min(1, C / sqrt(Σ ‖g_k‖²/α_k²)): scale, clip and rescale of Algorithm 1 in one number (section 1).

    Norms of many units, units x layers, give one number for each. C is taken a millionth smaller than it is.
    """
    total = _lengths(norms if scales is None else norms / scales)
    return torch.clamp(GUARD * clip_norm / total, max=1.0).to(norms.dtype)


def per_layer_factors(norms: torch.Tensor, clip_norm: float, scales: torch.Tensor | None) -> torch.Tensor:
    """min(1, C_k/‖g_k‖) for each layer, of one unit or of many, with C_k = C·α_k/‖α‖ (section 6).

    C_k is taken a millionth smaller than it is.
    """
    weights = norms.new_ones(norms.shape[-1]) if scales is None else scales
    clip_norms: torch.Tensor = GUARD * clip_norm * weights / torch.linalg.vector_norm(weights)
    return torch.clamp(clip_norms / norms, max=1.0)


class ClipCounter:
    """Which share of the micro-batches was clipped: a diagnostic that no noise covers.

    It counts on the device; only ``share`` waits for it.

    Example:
        >>> counter = ClipCounter()
        >>> for norm in (0.5, 4.0):
        ...     counter.add(flat_factor(torch.tensor([norm]), 1.0, None), torch.tensor(True))
        >>> counter.share()
        0.5
    """

    def __init__(self) -> None:
        self._counts: torch.Tensor | None = None  # clipped ones, and all that were finite

    def add(self, factors: torch.Tensor, finite: torch.Tensor) -> None:
        """Counts a micro-batch with its factor, or its factors by layer, unless it was discarded; or many of them."""
        clipped = factors < _NOT_CLIPPED
        if clipped.dim() > finite.dim():
            clipped = clipped.any(dim=-1)
        self.add_known(clipped, finite)

    def add_known(self, clipped: torch.Tensor, finite: torch.Tensor) -> None:
        """The same for micro-batches of which it is known whether they were clipped."""
        counts = torch.stack([(clipped & finite).sum(), finite.sum()]).long()
        self._counts = counts if self._counts is None else self._counts.to(counts.device) + counts

    def share(self) -> float:
        """Clipped ones over all; NaN if there was no micro-batch."""
        clipped, finite = (0, 0) if self._counts is None else self._counts.tolist()
        return clipped / finite if finite else math.nan


def norm_contribution(norms: torch.Tensor, private: bool) -> torch.Tensor:
    """What a micro-batch tells of its layer norms: all of them (the paper) or, privately, only their proportions."""
    if not private:
        return norms
    length = _lengths(norms).unsqueeze(-1)
    return (norms / torch.where(length > 0, length, 1.0)).to(norms.dtype)
