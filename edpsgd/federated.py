"""User-level private training: DP-FedAvg and DP-FedSGD (McMahan et al. 2018) on the core of PrivateOptimizer.

A round is a step whose units are users. Each drawn user trains the model on their own data; the update, clipped and
weighted, is handed to PrivateOptimizer as if it were a gradient, which adds the noise, sums over the workers, pays the
ledger and steps the server's optimizer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from edpsgd import tensors
from edpsgd._arguments import check_count, check_number
from edpsgd.distributed.collectives import Collective
from edpsgd.distributed.launchers import resolve
from edpsgd.ledger.budget import Budget
from edpsgd.mechanism import clipping
from edpsgd.optimizer import PrivateOptimizer
from edpsgd.sampling.users import Users
from edpsgd.validation.models import check_model

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class FedAvg:
    """A user's update is what some passes of SGD over their batches make of the model.

    Args:
        learning_rate: η, of the user's SGD.
        epochs: E, passes over the user's batches.

    Example:
        >>> FedAvg(learning_rate=0.5)
        FedAvg(learning_rate=0.5, epochs=1)
    """

    learning_rate: float
    epochs: int = 1

    def __post_init__(self) -> None:
        check_number("learning_rate", self.learning_rate, 0.0, strict=True)
        check_count("epochs of FedAvg", self.epochs)

    def batches(self, data: Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
        """All batches that the user trains on, in order: those of ``data``, which is asked anew in every pass."""
        for _ in range(self.epochs):
            yield from data()


@dataclass(frozen=True)
class FedSGD:
    """A user's update is one step of SGD, on their first batch.

    Args:
        learning_rate: η.

    Example:
        >>> FedSGD(learning_rate=6.0)
        FedSGD(learning_rate=6.0)
    """

    learning_rate: float

    def __post_init__(self) -> None:
        check_number("learning_rate", self.learning_rate, 0.0, strict=True)

    def batches(self, data: Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
        """The one batch; none if the user has no data."""
        for batch in data():
            yield batch
            return


class Federated:
    """Private training on users, one round at a time.

    The server's optimizer gets the noised mean update as its gradient, with the opposite sign: SGD with a rate of 1 is
    plain averaging; momentum and Adam work too.

    Args:
        model: what all users train. It must not change in forward (``edpsgd.check_model``).
        server: the server's optimizer, over the model's parameters.
        users: the PoissonUsers or FixedSizeUsers who are drawn from.
        local: what a user does, FedAvg(...) or FedSGD(...).
        clip_norm: S, the largest norm of a user's update. ``optimizer.clip_norm`` may be changed between rounds.
        noise_multiplier: z, the noise's std over the sensitivity of the sum to one user: S with PoissonUsers, 2S with
            FixedSizeUsers or a ClippedDenominator. 0 switches the noise off.
        clipping: "flat", or "per_layer" for each of the m parameter tensors at S/√m.
        noise_placement, collective, seed, ledger, budget: as for PrivateOptimizer.

    Attributes:
        optimizer: the PrivateOptimizer inside, with ledger, epsilon() and state_dict().

    Example:
        >>> from edpsgd import PoissonUsers
        >>> model = nn.Linear(2, 1)
        >>> server = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> users = PoissonUsers(4, sampling_rate=0.5, collective="local")
        >>> training = Federated(model, server, users, FedAvg(0.1), clip_norm=1.0, noise_multiplier=2.0)
        >>> training.round(lambda user: [torch.ones(3, 2)] * 5, lambda batch: model(batch).square().mean())
        >>> training.optimizer.ledger.events[0].steps
        1
    """

    def __init__(
        self,
        model: nn.Module,
        server: torch.optim.Optimizer,
        users: Users,
        local: FedAvg | FedSGD,
        *,
        clip_norm: float,
        noise_multiplier: float,
        clipping: str = "flat",
        noise_placement: str = "sharded",
        collective: str | Collective = "auto",
        seed: int | None = None,
        ledger: str | os.PathLike[str] | None = None,
        budget: Budget | None = None,
    ) -> None:
        check_model(model, unit="user")
        if not isinstance(local, FedAvg | FedSGD):
            raise ValueError(f"local must be FedAvg(...) or FedSGD(...), got {local!r}")
        self.model, self.users, self.local = model, users, local
        self._collective = resolve(collective)
        self._clipping = clipping
        self.optimizer = PrivateOptimizer(
            server,
            model.named_parameters(),
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
            clipping=clipping,
            unit="user",
            noise_placement=noise_placement,
            collective=self._collective,
            seed=seed,
            ledger=ledger,
            batches=users,
            budget=budget,
        )
        self._rounds: Iterator[list[int]] | None = None  # this worker's users, round by round
        self._moves = users.moves  # when the iterator was made
        # A round, by the sampler's moves and position, and the weight of all its users.
        self._gathered: tuple[tuple[int, int], float] | None = None

    def round(self, data: Callable[[int], Iterable[Batch]], loss: Callable[[Batch], torch.Tensor]) -> None:
        """One round: draws users, trains each on their own data, and updates the model with the noised mean.

        Args:
            data: the batches of a user, by number. Only this worker's users of the round are asked for. A user without
                batches contributes nothing.
            loss: the model's loss on a batch, a scalar.
        """
        drawn = self._draw()
        try:
            share = self._share(drawn)
            for user in drawn:
                was_clipped = self._train(partial(data, user), loss, share * self.users.weight(user))
                self.optimizer._accumulate_update(was_clipped)
            self.optimizer.step()
        except BaseException:  # if nothing was released, the same round can be tried again
            self.optimizer.abandon()
            self._rounds = None
            raise

    def _draw(self) -> list[int]:
        """This worker's users of the next round; epochs follow each other."""
        self.optimizer.zero_grad()
        epoch = self.optimizer.epoch
        if epoch is None or self.users.position >= self.users.steps_per_epoch:
            self.optimizer.set_epoch(0 if epoch is None else epoch + 1)
        if self._rounds is None or self._moves != self.users.moves:
            self._rounds, self._moves = iter(self.users), self.users.moves
        return next(self._rounds)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rounds": None, "_gathered": None}

    def _share(self, drawn: Sequence[int]) -> float:
        """What contributions are multiplied by, in (0, 1]; other workers are asked only if it follows the draw.

        They are asked once for a round, as they do not ask again when this worker tries one again.
        """
        own_weight = math.fsum(self.users.weight(user) for user in drawn)
        if not self.users.follows_draw:
            return self.users.share(own_weight)
        this_round = (self.users.moves, self.users.position)
        if self._gathered is None or self._gathered[0] != this_round:
            self._gathered = this_round, math.fsum(self._collective.gather(own_weight))
        _, weight = self._gathered
        return self.users.share(weight)

    def _train(
        self, data: Callable[[], Iterable[Batch]], loss: Callable[[Batch], torch.Tensor], weight: float
    ) -> torch.Tensor | None:
        """Leaves the user's clipped and weighted update in .grad, with the opposite sign, and the model as it was.

        Args:
            data: the user's batches.
            loss: of the model on a batch.
            weight: what the clipped update is multiplied by.

        Returns:
            Whether any of the user's steps had to be brought back into the ball, on the device; None without a batch.
        """
        was_clipped: torch.Tensor | None = None
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        start = [p.detach().clone() for p in parameters]
        try:
            for batch in self.local.batches(data):
                gradients = torch.autograd.grad(loss(batch), parameters, allow_unused=True, materialize_grads=True)
                clips = self._descend(parameters, start, gradients)
                was_clipped = clips if was_clipped is None else was_clipped | clips
            difference = torch._foreach_sub(start, [p.detach() for p in parameters])
            self._clip(difference)  # once more: in half precision, the last step into the ball is rounded
        finally:
            with torch.no_grad():
                torch._foreach_copy_(parameters, start)
        if was_clipped is None:  # no data: an empty unit
            return None
        for parameter, weighted in zip(parameters, torch._foreach_mul(difference, weight), strict=True):
            parameter.grad = weighted
        return was_clipped

    @torch.no_grad()
    def _descend(
        self, parameters: list[torch.Tensor], start: list[torch.Tensor], gradients: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """A step of SGD, then back into the ball of radius S around where the user started.

        Returns:
            Whether that was needed, a scalar on the device.
        """
        torch._foreach_add_(parameters, gradients, alpha=-self.local.learning_rate)
        difference = torch._foreach_sub(parameters, start)
        factors = self._clip(difference)
        torch._foreach_copy_(parameters, torch._foreach_add(start, difference))
        return (factors < 1.0).any()

    @torch.no_grad()
    def _clip(self, update: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Clips an update to the clip norm, in place, and returns the factor of each layer, (layers,)."""
        norms = tensors.layer_norms(update, update[0].device)
        factors_of = clipping.per_layer_factors if self._clipping == "per_layer" else clipping.flat_factor
        factors = factors_of(norms, self.optimizer.clip_norm, None).expand(len(update))
        torch._foreach_mul_(update, [factor.to(part) for factor, part in zip(factors.unbind(), update, strict=True)])
        return factors
