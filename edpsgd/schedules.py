"""Decays: how the noise multiplier falls from epoch to epoch (privacy.md section 4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Decay = Callable[[int], float]  # from an epoch, counted from 0, to a factor above 0


def _check_tau(tau: float) -> None:
    if not (math.isfinite(tau) and tau >= 0):
        raise ValueError(f"tau must be a finite number >= 0, got {tau!r}")


@dataclass(frozen=True)
class LinearDecay:
    """The factor 1/(1 + tau·t) on the noise multiplier of epoch t, counted from 0.

    Example:
        >>> LinearDecay(0.5)(2)
        0.5
    """

    tau: float

    def __post_init__(self) -> None:
        _check_tau(self.tau)

    def __call__(self, epoch: int) -> float:
        """The factor 1/(1 + tau·t) of an epoch."""
        return 1.0 / (1.0 + self.tau * epoch)


@dataclass(frozen=True)
class ExponentialDecay:
    """The factor exp(−tau·t) on the noise multiplier of epoch t, counted from 0.

    Example:
        >>> round(ExponentialDecay(0.5)(2), 6)
        0.367879
    """

    tau: float

    def __post_init__(self) -> None:
        _check_tau(self.tau)

    def __call__(self, epoch: int) -> float:
        """The factor exp(−tau·t) of an epoch."""
        return math.exp(-self.tau * epoch)


def parse_decay(text: str) -> Decay | None:
    """A decay from its name, none, linear:TAU or exponential:TAU; None for none.

    Example:
        >>> parse_decay("linear:0.05")
        LinearDecay(tau=0.05)
    """
    name, colon, tau = text.partition(":")
    if text == "none":
        return None
    kinds: dict[str, Callable[[float], Decay]] = {"linear": LinearDecay, "exponential": ExponentialDecay}
    if name not in kinds or not colon:
        raise ValueError(f"decay must be none, linear:TAU or exponential:TAU, got {text!r}")
    try:
        return kinds[name](float(tau))
    except ValueError:
        raise ValueError(f"decay must have a finite TAU >= 0, as in {name}:0.05, got {text!r}") from None
