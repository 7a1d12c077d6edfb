"""What the sum of user updates is divided by (McMahan et al. 2018), and how far one user then moves it."""

from __future__ import annotations

from dataclasses import dataclass

from edpsgd._arguments import check_number


@dataclass(frozen=True)
class FixedDenominator:
    """The mean update is the weighted sum over q·W, a public number: one user moves it by S/(qW) at most.

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
        """W."""
        return users if self.total_weight is None else self.total_weight

    def share(self, expected: float, drawn: float) -> float:
        """What every contribution is multiplied by, before the sum is divided by the expected weight."""
        return 1.0

    def describe(self, expected: float) -> str:
        """For the card."""
        return f"the sum is divided by {expected:.6g}, whoever was drawn"


@dataclass(frozen=True)
class ClippedDenominator:
    """The sum over the weight that was drawn, or over q·W_min if that is more: one user moves it by 2S/(qW_min).

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
        """W_min."""
        return self.least_weight

    def share(self, expected: float, drawn: float) -> float:
        """What every contribution is multiplied by, before the sum is divided by the expected weight."""
        return expected / max(expected, drawn)

    def describe(self, expected: float) -> str:
        """For the card."""
        return f"the sum is divided by the weight that was drawn, {expected:.6g} at least"
