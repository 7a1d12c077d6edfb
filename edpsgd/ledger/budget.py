"""A budget: the step that would exceed it is not taken."""

from __future__ import annotations

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

    Attributes:
        epsilon: the largest ε that its ledger may have.
        delta: at this δ.

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
        # The steps left are for this number of events and this noise multiplier.
        self._event: tuple[int, float] | None = None
        self._left = 0

    def refusal(self, noise_multiplier: float, event: Event, remaining: int | None) -> BudgetExhausted | None:
        """Why the next step cannot be paid, None if it can, which is then one of those that are left.

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
        """Why measured scales of this noise multiplier cannot be paid, None if they can."""
        event = Event("layer_norms", None, noise_multiplier, 1)
        if self._is_affordable([*self._ledger.events, event]):
            return None
        return self._exhausted()

    def _count(self, noise_multiplier: float, event: Event, remaining: int | None) -> int:
        """The largest affordable number of steps, up to what can still come: by halving."""
        others = [other for other in self._ledger.events if other is not event]
        noise = noise_multiplier  # the smallest of an event counts for all of its steps
        if event.noise_multiplier is not None:
            noise = min(noise, event.noise_multiplier)

        def is_affordable(number: int) -> bool:
            longer = replace(event, noise_multiplier=noise, steps=event.steps + number)
            return self._is_affordable([*others, longer])

        low, high = 0, remaining or _HORIZON
        if is_affordable(high):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if is_affordable(middle):
                low = middle
            else:
                high = middle
        return low

    def _is_affordable(self, events: list[Event]) -> bool:
        return self._ledger.epsilon(self._budget.delta, events).epsilon <= self._budget.epsilon

    def _exhausted(self) -> BudgetExhausted:
        spent = self._ledger.epsilon(self._budget.delta)
        return BudgetExhausted(
            f"the next step would exceed the budget of ε = {self._budget.epsilon:g} at δ = {self._budget.delta:g}; "
            "nothing of it was released, and the model of the last paid step can be used. Spent so far: "
            f"{spent}"
        )
