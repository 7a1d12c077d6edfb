"""A budget: the step that would exceed it is not taken."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from edpsgd._arguments import check_number
from edpsgd.ledger.events import Event
from edpsgd.ledger.ledger import Ledger

_HORIZON = 1024  # steps to look ahead where nobody says how many there will be


class BudgetExhausted(RuntimeError):
    """The next step would cost more than the budget allows; nothing of it was released."""


@dataclass(frozen=True)
class Budget:
    """How much privacy a training may spend.

    Example:
        >>> Budget(epsilon=8.0, delta=1e-5)
        Budget(epsilon=8.0, delta=1e-05)
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_number("epsilon of a Budget", self.epsilon, 0.0, strict=True)
        if isinstance(self.delta, bool) or not isinstance(self.delta, float) or not 0 < self.delta < 1:
            raise ValueError(f"delta of a Budget must be between 0 and 1, both excluded, got {self.delta!r}")


class Allowance:
    """How many more steps of the open event a budget allows; worked out once for many of them."""

    def __init__(self, budget: Budget, ledger: Ledger) -> None:
        self._budget = budget
        self._ledger = ledger
        self._event: tuple[int, float] | None = None  # what the allowance is for: an event and its noise
        self._left = 0

    def refusal(self, noise_multiplier: float, event: Event, remaining: int | None) -> BudgetExhausted | None:
        """Why the next step cannot be paid, if it cannot.

        Args:
            noise_multiplier: of the step.
            event: what the step would belong to: the open event, or one like the next.
            remaining: how many steps the event can still get, None if nobody knows.
        """
        key = (len(self._ledger.events), noise_multiplier)
        if key != self._event or self._left == 0:
            self._event = key
            self._left = self._count(noise_multiplier, event, remaining)
        if self._left == 0:
            return self._exhausted()
        self._left -= 1
        return None

    def refusal_of_layer_norms(self, noise_multiplier: float) -> BudgetExhausted | None:
        """Why measured scales cannot be paid, if they cannot."""
        event = Event("layer_norms", None, noise_multiplier, 1)
        return None if self._fits([*self._ledger.events, event]) else self._exhausted()

    def _count(self, noise_multiplier: float, event: Event, remaining: int | None) -> int:
        """The largest affordable number of steps, up to what can still come: by halving."""
        others = [e for e in self._ledger.events if e is not event]
        noise = min(noise_multiplier, math.inf if event.noise_multiplier is None else event.noise_multiplier)

        def fits(number: int) -> bool:
            return self._fits([*others, replace(event, noise_multiplier=noise, steps=event.steps + number)])

        low, high = 0, remaining or _HORIZON
        if fits(high):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _fits(self, events: list[Event]) -> bool:
        return self._ledger.epsilon(self._budget.delta, events).epsilon <= self._budget.epsilon

    def _exhausted(self) -> BudgetExhausted:
        spent = self._ledger.epsilon(self._budget.delta)
        return BudgetExhausted(
            f"the next step would exceed the budget of ε = {self._budget.epsilon:g} at δ = {self._budget.delta:g}; "
            "nothing of it was released, and the model of the last paid step can be used. Spent so far: "
            f"{spent}"
        )
