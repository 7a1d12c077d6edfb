"""What the sum of user updates is divided by, and its sensitivity to one user (McMahan et al. 2018, section 2).

S is the clip norm, q the sampling rate, and W the sum of the weights of all users. The attribute ``reach`` is the
sensitivity of the weighted sum in clip norms: q·W, or q·W_min, times that of the mean update over S.
"""

from __future__ import annotations

from dataclasses import dataclass

from edpsgd._arguments import check_number


@dataclass(frozen=True)
class FixedDenominator:
    """The mean update is the weighted sum over q·W, a public number: its sensitivity is S/(qW) at most.

    Args:
        total_weight: W, from public knowledge; None for the number of users, which W never exceeds.

    Example:
        >>> FixedDenominator(500.0)
        FixedDenominator(total_weight=500.0)
    """

    total_weight: float | None = None

    reach = 1.0
    follows_draw = False

    def __post_init__(self) -> None:
        if self.total_weight is not None:
            check_number("total_weight", self.total_weight, 0.0, strict=True)

    def weight(self, users: int) -> float:
        """W, which is the number of users unless it was given."""
        return users if self.total_weight is None else self.total_weight

    def share(self, expected: float, drawn: float) -> float:
        """What every contribution is multiplied by, before the sum is divided by the expected weight."""
        return 1.0

    def describe(self, expected: float) -> str:
        """What the card says of it, in words; ``expected`` is q·W."""
        return f"the sum is divided by {expected:.6g}, whoever was drawn"


@dataclass(frozen=True)
class ClippedDenominator:
    """The sum over the weight that was drawn, or over q·W_min if that is more: its sensitivity is 2S/(qW_min).

    Args:
        least_weight: W_min, from public knowledge.

    Example:
        >>> ClippedDenominator(400.0).share(expected=4.0, drawn=5.0)
        0.8
    """

    least_weight: float

    reach = 2.0
    follows_draw = True

    def __post_init__(self) -> None:
        check_number("least_weight", self.least_weight, 0.0, strict=True)

    def weight(self, users: int) -> float:
        """W_min, whatever the number of users."""
        return self.least_weight

    def share(self, expected: float, drawn: float) -> float:
        """What every contribution is multiplied by, before the sum is divided by the expected weight."""
        return expected / max(expected, drawn)

    def describe(self, expected: float) -> str:
        """What the card says of it, in words; ``expected`` is q·W_min."""
        return f"the sum is divided by the weight that was drawn, {expected:.6g} at least"
