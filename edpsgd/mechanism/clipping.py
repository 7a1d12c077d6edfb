"""Clipping: from the layer norms of a unit to the factor that clips its gradient (privacy.md sections 1 and 6)."""

from __future__ import annotations

import math

import torch

from edpsgd.tensors import row_lengths

GUARD = 1.0 - 1e-6  # of the clip norm, so that rounding of norms, factors and products does not exceed it
_NOT_CLIPPED = 1.0 - 1.2e-6  # the factor of a gradient that has the clip norm is the guard


def is_finite(norms: torch.Tensor) -> torch.Tensor:
    """A boolean scalar: whether the micro-batch can be used. NaN and infinities show in the norms."""
    return torch.isfinite(norms.sum())


def flat_factor(norms: torch.Tensor, clip_norm: float, scales: torch.Tensor | None) -> torch.Tensor:
    """min(1, C / sqrt(Σ ‖g_k‖²/α_k²)): scale, clip and rescale of Algorithm 1 in one number (section 1).

    Norms of many units, units x layers, give one number for each. C is taken a millionth smaller than it is.
    """
    total = row_lengths(norms if scales is None else norms / scales)
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
