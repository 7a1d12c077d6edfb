"""The comparisons behind ``check_losses``: each example alone, against the same example in other batches.

A change that is no rounding is refused (privacy.md section 14). "Rounding" is a share of the loss that follows from the
precision, and with weights that were moved at random also what weights make that are rounded otherwise.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NoReturn

import torch
from torch import nn

from edpsgd.validation.perturbed_weights import rounded_otherwise
from edpsgd.validation.quiet_forward import QuietTraining, seed_generators
from edpsgd.validation.selections import Selection, selections_of

Losses = Callable[[list[Any]], torch.Tensor]
# Changes that are rounding, relative and absolute: a batch of another shape is computed in another order, and a small
# loss can be a difference of large numbers.
_TOLERANCES = {
    torch.float64: (1e-9, 1e-12),
    torch.float32: (1e-4, 2e-5),
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (2e-2, 3e-2),
}
_GRADIENTS_ROUND = 10.0  # how much more than losses gradients may change
_SMALL = 10.0  # times the absolute tolerance: changes of a few per cent would not be seen in smaller losses
_OTHER_SEED = 3  # added to a seed of the comparisons, it gives none of them
# How far weights are moved at random, over their size; farther ones make half precision chaotic.
_DISTANCE, _DISTANCE_IN_HALF_PRECISION = 1.0, 0.1
_DRAWS = 12  # tries with random numbers of their own, for what mixes only sometimes
_CHAOS = 10.0  # a change is rounding if weights that are rounded otherwise make one that is a tenth of it
_TOGETHER = 10.0  # how much more sums of gradients may differ than single ones
_CAUSES = (
    "What usually does that: padding in a mean or under max-pooling, a bidirectional LSTM on padding that is not "
    "packed, attention without a mask, batch normalisation or other statistics of the batch (detached ones too), "
    "in-batch negatives, class weights or a number of tokens counted over the batch, choosing the hardest examples, "
    "mixup, or a state or queue that the model keeps from call to call"
)


class _NotFiniteError(ValueError):
    """A loss that cannot be compared."""


class LossTrial:
    """Calls of one function on the same examples in changing batches.

    Args:
        losses: from a list of examples to one loss for each.
        examples: what it is called on.
        training: dropout is off in it, and its start is where calls can begin anew.
        tolerance: as in ``check_losses``.
        modules: that the losses are computed with.
    """

    def __init__(
        self,
        losses: Losses,
        examples: list[Any],
        training: QuietTraining,
        tolerance: float | None,
        modules: Sequence[nn.Module],
    ) -> None:
        self._losses, self._examples, self._training = losses, examples, training
        self._given_tolerance, self._modules = tolerance, modules
        self._numbers = list(range(len(examples)))
        # Of each example, what may be its number of tokens.
        self._token_counts: list[list[int]] = [[] for _ in examples]
        self._largest = 0.0  # loss or norm of a gradient
        self._are_weights_moved = False

    @property
    def tolerance(self) -> float:
        """The largest change of a loss that counts as rounding, relative to its size."""
        return self._given_tolerance or _TOLERANCES[self._training.watch.precision][0]

    @property
    def distance(self) -> float:
        """How far weights may be moved before rounding drowns everything, over their size."""
        is_half = self._training.watch.precision not in (torch.float64, torch.float32)
        return _DISTANCE_IN_HALF_PRECISION if is_half else _DISTANCE

    def _floor(self, sizes: Sequence[float]) -> float:
        """A loss or norm below this is compared as if it were this large."""
        return max(0.1 * median(sizes), _TOLERANCES[self._training.watch.precision][1] / self.tolerance)

    def compare_with_moved_weights(self, seed: int) -> None:
        """Once more, after the weights were moved; where these make a loss infinite, they prove nothing."""
        self._are_weights_moved = True
        try:
            self.compare_losses(seed)
            self.compare_gradients(seed)
        except _NotFiniteError:
            return

    # ---------------------------------------------------------------- losses

    def compare_draws(self) -> None:
        """Some examples alone and with all others, each time with other random numbers that nobody can foresee."""
        secret = secrets.SystemRandom()
        for _ in range(_DRAWS):
            seed = secret.randrange(1 << 31)
            together = self._call(self._numbers, seed, anew=True).tolist()
            for number in secret.sample(self._numbers, 2):
                alone = float(self._call([number], seed, anew=True))
                size = max(abs(alone), self._floor([abs(alone)]))
                change = abs(together[number] - alone) / size
                if not change <= self.tolerance:
                    self._refuse(number, seed, f"the loss of example {number} changes by {_percent(change)}")

    def compare_losses(self, seed: int) -> None:
        """Each example alone, from the state in which the model was given, against batches of all kinds.

        None of these begin from a fresh state, so that what a call leaves behind in the model is found.
        """
        alone = [self._alone(number, seed) for number in self._numbers]
        floor = self._floor([abs(loss) for loss in alone])
        self._largest = max(self._largest, *map(abs, alone))
        for selection in selections_of(seed, self._token_counts):
            values = self._call(selection, seed).tolist()
            for number, value in zip(selection, values, strict=True):
                change = abs(value - alone[number]) / max(abs(alone[number]), floor)
                if change <= self.tolerance:  # NaN is not
                    continue
                by_rounding = self._loss_change_by_rounding(number, seed, alone[number], floor)
                if _is_chaotic(change, by_rounding, self.tolerance):
                    return
                self._refuse(number, seed, f"the loss of example {number} changes by {_percent(change)}")

    def _loss_change_by_rounding(self, number: int, seed: int, alone: float, floor: float) -> float:
        """By how much an example's own loss changes, relatively, if moved weights change by rounding; else 0."""
        if not self._are_weights_moved:
            return 0.0
        with rounded_otherwise(self._modules, self._training.watch.precision, seed):
            loss = float(self._call([number], seed, anew=True))
        return abs(loss - alone) / max(abs(alone), floor)

    def _gradient_change_by_rounding(
        self, number: int, seed: int, alone: list[torch.Tensor], leaves: list[torch.Tensor]
    ) -> float:
        """The length of the change of an example's own gradient if moved weights change by rounding; else 0."""
        if not self._are_weights_moved:
            return 0.0
        with rounded_otherwise(self._modules, self._training.watch.precision, seed):
            return _distance(self._gradient([number], [1.0], leaves, seed, anew=True), alone)

    def _alone(self, number: int, seed: int) -> float:
        """The loss of one example by itself; notes what may be its number of tokens."""
        self._training.watch.sizes.clear()
        loss = float(self._call([number], seed, anew=True))
        if not math.isfinite(loss):
            raise _NotFiniteError(f"the loss of example {number} is not finite when it is alone: {loss}")
        self._token_counts[number] = [size for size, _ in self._training.watch.sizes.most_common() if size > 1]
        return loss

    def _call(self, selection: Selection, seed: int, anew: bool = False) -> torch.Tensor:
        """The values of the losses of some examples, (len(selection),) in float64."""
        return self._graph(selection, seed, anew).detach().double().cpu()

    def _graph(self, selection: Selection, seed: int, anew: bool = False) -> torch.Tensor:
        """The losses of some examples, (len(selection),); with ``anew``, as if nothing had been called before."""
        if anew:
            self._training.start.restore()
        seed_generators(seed)
        try:
            found = self._losses([self._examples[number] for number in selection])
        except Exception as error:
            raise ValueError(
                f"losses failed on a list of {len(selection)} of the examples with a {type(error).__name__}; it must "
                "work for any number of them, also for one (batch normalisation does not)"
            ) from error
        if not isinstance(found, torch.Tensor) or found.shape != (len(selection),):
            shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ValueError(f"losses must give one loss for each example, of shape ({len(selection)},), got {shape}")
        return found

    # ---------------------------------------------------------------- gradients

    def compare_gradients(self, seed: int) -> None:
        """A sum of all gradients, each at length 1 and with a random sign, against the same sum of single ones.

        The order of examples changes, so that every gradient is seen with others before and behind it. Only if the
        sums differ is every example looked at.
        """
        draw = random.Random(seed)
        least = self._floor([0.0])
        everybody = self._graph(self._numbers, seed, anew=True)
        leaves = _leaves(everybody)
        if not leaves:
            self._check_size()
            return
        norms, weights = [], []
        expected = [torch.zeros_like(leaf) for leaf in leaves]
        for number in self._numbers:
            alone = self._gradient([number], [1.0], leaves, seed, anew=True)
            norms.append(_norm(alone))
            weights.append(draw.choice((-1.0, 1.0)) / max(norms[-1], least))
            torch._foreach_add_(expected, alone, alpha=weights[-1])
        self._largest = max(self._largest, *norms)
        self._check_size()
        for selection in (self._numbers, draw.sample(self._numbers, len(self._numbers))):
            found = self._gradient(selection, [weights[number] for number in selection], leaves, seed)
            distance = _distance(found, expected)
            if distance <= _GRADIENTS_ROUND * self.tolerance:
                continue
            if self._compare_each(selection, leaves, seed, norms):
                self._check_sum(distance)

    def _check_sum(self, distance: float) -> None:
        """Refuses gradients that are right one by one, while their sum is this far from what it should be."""
        allowed = min(_TOGETHER * _GRADIENTS_ROUND * self.tolerance, 0.5 * len(self._numbers) ** 0.5)
        if not distance <= allowed:
            raise ValueError(
                f"the gradient of all examples together is not the sum of the single ones{self._where()}: a hook or a "
                "function with a backward of its own clamps or normalises gradients, or rounds them. Clipped in one "
                "pass, such gradients have no sensitivity of C, and ε would not hold"
            )

    def _check_size(self) -> None:
        """Refuses losses and gradients that are all so small that nothing but rounding was compared."""
        if self._largest < _SMALL * _TOLERANCES[self._training.watch.precision][1]:
            raise ValueError(
                "all of these losses and their gradients are too small to be compared: give examples that the model "
                "has not learned, and losses that are not scaled down"
            )

    def _compare_each(self, selection: Selection, leaves: list[torch.Tensor], seed: int, norms: list[float]) -> bool:
        """Refuses a gradient that changes with its batch; False if rounding leaves no room for that to be seen."""
        floor = self._floor(norms)
        tolerance = _GRADIENTS_ROUND * self.tolerance
        for place, number in enumerate(selection):
            only_this = [float(other == place) for other in range(len(selection))]
            alone = self._gradient([number], [1.0], leaves, seed, anew=True)
            size = max(norms[number], floor)
            change = _distance(self._gradient(selection, only_this, leaves, seed), alone) / size
            if change <= tolerance:  # NaN is not
                continue
            by_rounding = self._gradient_change_by_rounding(number, seed, alone, leaves) / size
            if _is_chaotic(change, by_rounding, tolerance):
                return False
            text = f"the gradient of example {number}'s loss changes by {_percent(change)} of its norm"
            self._refuse(number, seed, text)
        return True

    def _gradient(
        self, selection: Selection, weights: list[float], leaves: list[torch.Tensor], seed: int, anew: bool = False
    ) -> list[torch.Tensor]:
        """The gradient of the weighted sum of the losses, of each leaf's shape; .grad is not touched."""
        losses = self._graph(selection, seed, anew)
        total = (losses * losses.new_tensor(weights)).sum()
        parts = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return [part.to_dense() if part.is_sparse else part for part in parts]

    # ---------------------------------------------------------------- what to say

    def _where(self) -> str:
        return " (weights moved at random, as noise moves them)" if self._are_weights_moved else ""

    def _refuse(self, number: int, seed: int, what: str) -> NoReturn:
        """Raises what was found, and whether random numbers or a state cause it, as far as single calls can tell."""
        what += self._where()
        first, again = self._call([number], seed, anew=True), self._call([number], seed)
        if not torch.allclose(first, again, rtol=self.tolerance):
            raise ValueError(
                f"{what} when losses was called on other examples before, since it does so from call to call with the "
                f"same example alone: the model carries a state of private data from step to step, for which ε counts "
                f"nothing. {_CAUSES}"
            )
        other = self._call([number], seed + _OTHER_SEED, anew=True)
        if not torch.allclose(first, other, rtol=self.tolerance):
            raise ValueError(
                f"{what} between two calls, and also with the seed of torch, numpy and Python while it is alone: "
                "losses draws random numbers that are no dropout of torch, and cannot be compared. Leave them out "
                "for this check, or draw masks with torch.nn.functional.dropout"
            )
        raise ValueError(
            f"{what} with the other examples in its batch, where rounding explains {_percent(self.tolerance)}. Clipped "
            f"one by one, such losses have no sensitivity of C, and ε would not hold. {_CAUSES}"
        )


def _is_chaotic(change: float, by_rounding: float, tolerance: float) -> bool:
    """Whether rounding grows beyond everything, as in long recurrences with moved weights: then nothing is proven."""
    return by_rounding > tolerance or change <= _CHAOS * by_rounding


def _leaves(losses: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that these losses have gradients for, by their graph."""
    waiting, leaves = [losses.grad_fn], []
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting.extend(following for following, _ in node.next_functions)
    return leaves


def _norm(gradient: list[torch.Tensor]) -> float:
    """The length of all parts together."""
    return float(torch.stack([part.double().norm().cpu() for part in gradient]).norm())


def _distance(gradient: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return _norm([one - two for one, two in zip(gradient, other, strict=True)])


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
