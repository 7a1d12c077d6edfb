"""Clipping: from the layer norms of a unit to the factor that clips its gradient (privacy.md sections 1 and 6)."""

from __future__ import annotations

import math

import torch

from edpsgd.tensors import row_lengths

GUARD = 1.0 - 1e-6  # of the clip norm, so that rounding of norms, factors and products does not exceed it
_NOT_CLIPPED = 1.0 - 1.2e-6  # the factor of a gradient that has the clip norm is the guard


def is_finite(norms: torch.Tensor) -> torch.Tensor:
    """Whether a unit with these layer norms can be used, a boolean scalar on the device.

    A gradient that holds NaN or infinities has a norm that shows it.
    """
    return torch.isfinite(norms.sum())


def flat_factor(norms: torch.Tensor, clip_norm: float, scales: torch.Tensor | None) -> torch.Tensor:
    """min(1, C / sqrt(Σ ‖g_k‖²/α_k²)): scale, clip and rescale of Algorithm 1 in one number (section 1).

    C is made a millionth smaller than it is, so that rounding exceeds it by nothing.

    Args:
        norms: ‖g_k‖ of a unit, (layers,), or of many of them, (units, layers).
        clip_norm: C.
        scales: α of the layers; None if all are 1.

    Returns:
        The factor, a scalar, or that of each unit, (units,).
    """
    total = row_lengths(norms if scales is None else norms / scales)
    return torch.clamp(GUARD * clip_norm / total, max=1.0).to(norms.dtype)


def per_layer_factors(norms: torch.Tensor, clip_norm: float, scales: torch.Tensor | None) -> torch.Tensor:
    """min(1, C_k/‖g_k‖) for each layer, with C_k = C·α_k/‖α‖ (section 6).

    C_k is made a millionth smaller than it is, as in ``flat_factor``, which says what the arguments are.

    Returns:
        The factors, of the shape of the norms.
    """
    weights = norms.new_ones(norms.shape[-1]) if scales is None else scales
    clip_norms: torch.Tensor = GUARD * clip_norm * weights / torch.linalg.vector_norm(weights)
    return torch.clamp(clip_norms / norms, max=1.0)


class ClipCounter:
    """Which share of the units was clipped: a diagnostic that no noise covers.

    It counts on the device; only ``share`` waits for it.

    Example:
        >>> counter = ClipCounter()
        >>> for norm in (0.5, 4.0):
        ...     counter.add(flat_factor(torch.tensor([norm]), 1.0, None), torch.tensor(True))
        >>> counter.share()
        0.5
    """

    def __init__(self) -> None:
        self._counts: torch.Tensor | None = None  # of units that were clipped, and of all that count

    def add(self, factors: torch.Tensor, finite: torch.Tensor) -> None:
        """Counts a unit, or many of them; with per-layer clipping, one clipped layer is enough.

        Args:
            factors: that of each unit, or those of its layers in a last dimension.
            finite: whether each unit counts: discarded and empty ones do not.
        """
        clipped = factors < _NOT_CLIPPED
        if clipped.dim() > finite.dim():
            clipped = clipped.any(dim=-1)
        self.add_known(clipped, finite)

    def add_known(self, clipped: torch.Tensor, finite: torch.Tensor) -> None:
        """The same for units of which it is known whether they were clipped."""
        counts = torch.stack([(clipped & finite).sum(), finite.sum()]).long()
        self._counts = counts if self._counts is None else self._counts.to(counts.device) + counts

    def share(self) -> float:
        """Clipped units over all that count; NaN if there was none."""
        if self._counts is None:
            return math.nan
        clipped, finite = self._counts.tolist()
        return clipped / finite if finite else math.nan
