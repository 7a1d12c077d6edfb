"""Who takes part in a round of user-level training: samplers of users, on whose draws the accounting relies.

As with examples, user k belongs to worker k modulo the number of workers. Users are clipped one by one, so that it does
not matter to a user whether another one is added, removed or replaced (privacy.md section 7).

Names as in McMahan et al. 2018: q the sampling rate, w_k = min(n_k/ŵ, 1) the weight of a user with n_k examples, W the
sum of all weights, S the clip norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from edpsgd._arguments import check_count, check_number
from edpsgd.distributed.collectives import Collective
from edpsgd.sampling.base import Batches
from edpsgd.sampling.poisson import PoissonBatches
from edpsgd.sampling.secret_draws import RandomDraws
from edpsgd.sampling.user_denominators import ClippedDenominator, FixedDenominator


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 0


def _listed(users: int | Sequence[int]) -> int | tuple[int, ...]:
    """The number of users, or a copy of their numbers of examples that nobody else can change."""
    if isinstance(users, str | bytes | bool):
        raise ValueError(f"users must be a count, or the number of examples of each, got {type(users).__name__}")
    if isinstance(users, int | np.integer):
        return int(users)
    return tuple(users)


def _number_of_users(counts: int | tuple[int, ...]) -> int:
    return counts if isinstance(counts, int) else len(counts)


class Users(Batches):
    """What both samplers share: weights, and how updates are averaged. Use PoissonUsers or FixedSizeUsers."""

    _names = ("users", "rounds_per_epoch")
    _counts: int | tuple[int, ...]
    _cap: float | None
    _denominator: FixedDenominator | ClippedDenominator

    def _prepare(self) -> tuple[dict[str, Any], bytes | None]:
        if not isinstance(self._denominator, FixedDenominator | ClippedDenominator):
            raise ValueError(
                f"denominator must be FixedDenominator() or ClippedDenominator(least_weight), got {self._denominator!r}"
            )
        if not isinstance(self._counts, int) and not all(_is_count(count) for count in self._counts):
            raise ValueError("users must be a count, or a whole number >= 0 for each, of examples")
        if self._cap is not None:
            check_number("weight_cap", self._cap, 0.0, strict=True)
            if isinstance(self._counts, int):
                raise ValueError("weight_cap needs the number of examples of each user: give these instead of a count")
        return super()._prepare()

    def _order_digest(self, examples: object) -> bytes | None:
        """A digest of the users' numbers of examples, if they were given, to see that all workers have the same."""
        return super()._order_digest(self._counts)

    def _compare_order(self, digests: Sequence[bytes | None]) -> None:
        """Refuses other numbers. The same ones do not say that they are of the same users in the same order."""
        super()._compare_order(digests)
        self.is_order_compared = False

    def fits(self, unit: str) -> bool:
        """Whether the optimizer's unit is a user."""
        return unit == "user"

    @property
    def expected_batch(self) -> float:
        """The weight that sums are divided by, q·W or q·W_min: a public number."""
        return (self.sampling_rate or 0.0) * self._denominator.weight(self.examples)

    @property
    def follows_draw(self) -> bool:
        """Whether the share depends on who was drawn."""
        return self._denominator.follows_draw

    def weight(self, user: int) -> float:
        """The weight w_k of one user, by number; from 0 to 1."""
        if self._cap is None or isinstance(self._counts, int):
            return 1.0
        return min(self._counts[user] / self._cap, 1.0)

    def share(self, drawn: float) -> float:
        """What contributions are multiplied by if users of this weight were drawn, over all workers."""
        return self._denominator.share(self.expected_batch, drawn)

    def describe(self) -> dict[str, Any]:
        """What the ledger and the card say about it."""
        weights = "1" if self._cap is None else f"the number of examples over {self._cap:g}, at most 1"
        about = {
            "weights": weights,
            "denominator": self._denominator.describe(self.expected_batch),
            "follows_draw": self.follows_draw,
        }
        return {**super().describe(), **about}


class PoissonUsers(Users, PoissonBatches):
    """Every user joins every round with probability q, independently: sound for adding or removing one user.

    Args:
        users: how many there are, or the number of examples of each.
        sampling_rate: q.
        weight_cap: ŵ, the number of examples from which on a user has weight 1; None if all have weight 1.
        denominator: how updates are averaged.
        rounds_per_epoch: what set_epoch counts; 1/q, rounded up, if None.
        collective: as for PrivateOptimizer.
        seed: None for secret draws. An int repeats them, for tests: ε holds only while it is secret.

    Example:
        >>> users = PoissonUsers([10, 200, 1000], sampling_rate=0.5, weight_cap=400, collective="local")
        >>> [users.weight(user) for user in range(3)]
        [0.025, 0.5, 1.0]
    """

    _units = ("user",)

    def __init__(
        self,
        users: int | Sequence[int],
        sampling_rate: float,
        *,
        weight_cap: float | None = None,
        denominator: FixedDenominator | ClippedDenominator = FixedDenominator(),  # noqa: B008 (it is frozen)
        rounds_per_epoch: int | None = None,
        collective: str | Collective = "auto",
        seed: int | None = None,
    ) -> None:
        self._counts, self._cap, self._denominator = _listed(users), weight_cap, denominator
        PoissonBatches.__init__(
            self,
            _number_of_users(self._counts),
            sampling_rate,
            steps_per_epoch=rounds_per_epoch,
            unit="user",
            collective=collective,
            seed=seed,
        )

    def _prepare(self) -> tuple[dict[str, Any], bytes | None]:
        prepared = super()._prepare()
        self.reach = self._denominator.reach
        return prepared


class FixedSizeUsers(Users, RandomDraws):
    """Rounds of a fixed number of users, drawn without replacement: sound for replacing one user.

    All workers draw the same round, and each keeps its own users of it. The accounting is looser than with
    PoissonUsers, and the sensitivity of replacing a user is 2S: prefer those unless a fixed number is needed.

    Args:
        users: how many there are, or the number of examples of each.
        cohort: users in a round, over all workers.
        weight_cap: as in PoissonUsers.
        denominator: as in PoissonUsers.
        rounds_per_epoch: as in PoissonUsers.
        collective: as for PrivateOptimizer.
        seed: as in PoissonUsers.

    Example:
        >>> users = FixedSizeUsers(100, cohort=10, collective="local")
        >>> [len(drawn) for drawn in users]
        [10, 10, 10, 10, 10, 10, 10, 10, 10, 10]
    """

    kind = "fixed_size"
    micro_batches = None

    def __init__(
        self,
        users: int | Sequence[int],
        cohort: int,
        *,
        weight_cap: float | None = None,
        denominator: FixedDenominator | ClippedDenominator = FixedDenominator(),  # noqa: B008
        rounds_per_epoch: int | None = None,
        collective: str | Collective = "auto",
        seed: int | None = None,
    ) -> None:
        self._counts, self._cap, self._denominator = _listed(users), weight_cap, denominator
        self.cohort, self._rounds = cohort, rounds_per_epoch
        super().__init__(_number_of_users(self._counts), 0, collective, seed)

    def _prepare(self) -> tuple[dict[str, Any], bytes | None]:
        check_count(self._names[0], self.examples)
        check_count("cohort", self.cohort)
        if self.cohort > self.examples:
            raise ValueError(f"cohort must be at most the number of users, {self.examples}, got {self.cohort}")
        self.sampling_rate = self.cohort / self.examples
        self.steps_per_epoch = math.ceil(self.examples / self.cohort) if self._rounds is None else self._rounds
        check_count(self._names[1], self.steps_per_epoch)
        prepared = super()._prepare()
        self.reach = 2.0  # one user out and one in; with a ClippedDenominator too, since S·(w + w' + |w − w'|) ≤ 2S
        return prepared

    @property
    def _is_common(self) -> bool:
        return True

    def describe(self) -> dict[str, Any]:
        """What the ledger and the card say about it."""
        return {**super().describe(), "sampling_rate": self.sampling_rate, "cohort": self.cohort}

    def _draw(self, step: int) -> list[list[int]]:
        self._check_process()
        generator = self._common_generator(f"round {step}")
        chosen = generator.choice(self.examples, self.cohort, replace=False, shuffle=False)
        return [sorted(int(user) for user in chosen if user % self._workers == self._rank)]
