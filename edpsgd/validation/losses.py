"""Whether the loss of an example depends on the other examples of its batch: tried before training (section 14).

What is clipped must be the gradient of one example. If its loss changes with its company, one example can move the
clipped gradients of all others, and no noise is meant for that.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from edpsgd._arguments import check_number
from edpsgd.validation.quiet_forward import QuietTraining, quiet_training, seed_generators


class ToldOptimizer(Protocol):
    """What is told that the losses passed: a PrivateOptimizer."""

    def note_checked_losses(self) -> None:
        """Says that no loss depends on other examples."""


Losses = Callable[[list[Any]], torch.Tensor]
Company = list[int]  # numbers of examples, as they are handed over in one list
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
_ROUNDS = 3  # each with other random numbers, for what mixes only sometimes, and with other weights
_FAR, _NEAR = 1.0, 0.1  # how far weights are moved at random, over their size; far ones make half precision chaotic
_DRAWS = 12  # tries with random numbers of their own, for what mixes only sometimes
_CHAOS = 10.0  # a change is rounding if weights that are rounded otherwise make one that is a tenth of it
_TOGETHER = 10.0  # how much more sums of gradients may differ than single ones
_MOST_COPIES = 32  # examples in the batches that have as many examples as tokens
_CAUSES = (
    "What usually does that: padding in a mean or under max-pooling, a bidirectional LSTM on padding that is not "
    "packed, attention without a mask, batch normalisation or other statistics of the batch (detached ones too), "
    "in-batch negatives, class weights or a number of tokens counted over the batch, choosing the hardest examples, "
    "mixup, or a state or queue that the model keeps from call to call"
)


def check_losses(
    losses: Losses | nn.Module,
    examples: Sequence[Any],
    *,
    model: nn.Module | None = None,
    optimizer: ToldOptimizer | None = None,
    tolerance: float | None = None,
) -> None:
    """Refuses losses that depend on other examples: clipping them one by one would protect nobody.

    ``losses`` is called on all examples, on each alone, and on random selections in other orders and sizes: with and
    without the longest, with examples repeated, and with as many examples as tokens. Every dropout is off meanwhile,
    the rest is in training mode. Gradients are compared too. Parameters, buffers, attributes, modes and random
    generators are left as they were.

    It is a trial and no proof. Give it examples of different lengths and labels, eight or more. What it finds in
    half precision is coarser: a loss may change by 2 % under bfloat16 autocast (and one below 1.5 by 0.03) and by 1 %
    under float16, but by 0.01 % in float32.

    Args:
        losses: a function or module from a list of examples to one loss for each, (B,); padding and collation are
            in it.
        examples: two or more.
        model: the module that it computes with, if that is not ``losses`` itself. Without one, dropout is still off in
            all functions of torch, but the model's mode stays, and what the calls change in it is not put back.
        optimizer: the PrivateOptimizer to tell that the losses passed.
        tolerance: the largest relative change of a loss that counts as rounding, ten times as much for gradients.
            None follows the coarsest precision that the losses are computed in.

    Raises:
        ValueError: saying by how much which example's loss or gradient changed, by its number in ``examples``.

    Example:
        >>> layer = nn.Linear(3, 1)
        >>> check_losses(lambda batch: layer(torch.stack(batch)).square().mean(1), list(torch.randn(8, 3)), model=layer)
    """
    examples = list(examples)
    if len(examples) < 2:
        raise ValueError(f"examples must be at least two to see whether they are independent, got {len(examples)}")
    if not callable(losses):
        raise ValueError(f"losses must be a function or module of a list of examples, got {type(losses).__name__}")
    if tolerance is not None:
        check_number("tolerance", tolerance, 0.0, strict=True)
    modules = [module for module in (losses, model) if isinstance(module, nn.Module)]
    with quiet_training(modules) as training:
        trial = _Trial(losses, examples, training, tolerance, modules)
        trial.compare_losses(seed=0)
        trial.compare_gradients(seed=0)
        _check_parameters(training, modules)
        trial.compare_draws()
        for seed in range(1, _ROUNDS):
            _move_parameters(modules, seed, trial.distance)
            trial.compare_moved(seed)
    if optimizer is not None:
        optimizer.note_checked_losses()


def _check_parameters(training: QuietTraining, modules: Sequence[nn.Module]) -> None:
    names = {name for module in modules for name, _ in module.named_parameters()}
    changed = [name for name in training.before.changes() if name in names]
    if changed:
        raise ValueError(
            f"parameters change in forward and would carry private data unprotected: {', '.join(changed[:5])}. "
            "Only the optimizer may change them"
        )


@torch.no_grad()
def _move_parameters(modules: Sequence[nn.Module], seed: int, distance: float) -> None:
    """Adds noise to what will be trained; zeros hide what they are multiplied with, as in new adapters and gates."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in {p: None for module in modules for p in module.parameters() if p.requires_grad}:
        size = float(parameter.float().square().mean().sqrt()) or 1.0
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(distance * size * noise.to(parameter))


@contextmanager
def _rounded_otherwise(modules: Sequence[nn.Module], precision: torch.dtype, seed: int) -> Iterator[None]:
    """Within, each weight differs by about as much as it was rounded."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [*dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad)]
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            share = torch.finfo(precision).eps * torch.randn(parameter.shape, generator=generator)
            parameter.mul_(1.0 + share.to(parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, kept in zip(parameters, before, strict=True):
                parameter.copy_(kept)


class _NotFiniteError(ValueError):
    """A loss that cannot be compared."""


class _Trial:
    """Calls of one function on the same examples in changing company."""

    def __init__(
        self,
        losses: Losses,
        examples: list[Any],
        training: QuietTraining,
        tolerance: float | None,
        modules: Sequence[nn.Module],
    ) -> None:
        self._losses, self._examples, self._training, self._tolerance = losses, examples, training, tolerance
        self._numbers = list(range(len(examples)))
        self._sizes: list[list[int]] = [[] for _ in examples]  # what may be the number of tokens of each
        self._largest = 0.0  # loss or norm of a gradient
        self._where = ""
        self._modules = modules

    @property
    def tolerance(self) -> float:
        """Of losses, relative to their size."""
        return self._tolerance or _TOLERANCES[self._training.watch.precision][0]

    @property
    def distance(self) -> float:
        """How far weights may be moved before rounding drowns everything."""
        return _FAR if self._training.watch.precision in (torch.float64, torch.float32) else _NEAR

    def _floor(self, sizes: Sequence[float]) -> float:
        """A loss or norm below this is compared as if it were this large."""
        return max(0.1 * median(sizes), _TOLERANCES[self._training.watch.precision][1] / self.tolerance)

    def compare_moved(self, seed: int) -> None:
        """Once more with other weights; where these make a loss infinite, they prove nothing."""
        self._where = " (weights moved at random, as noise moves them)"
        try:
            self.compare_losses(seed)
            self.compare_gradients(seed)
        except _NotFiniteError:
            return

    # ---------------------------------------------------------------- losses

    def compare_draws(self) -> None:
        """Some alone and with everybody else, each time with other random numbers that nobody can foresee."""
        secret = secrets.SystemRandom()
        for _ in range(_DRAWS):
            seed = secret.randrange(1 << 31)
            together = self._call(self._numbers, seed, anew=True).tolist()
            for number in secret.sample(self._numbers, 2):
                alone = float(self._call([number], seed, anew=True))
                change = abs(together[number] - alone) / max(abs(alone), self._floor([abs(alone)]))
                if not change <= self.tolerance:
                    self._refuse(number, seed, f"the loss of example {number} changes by {_percent(change)}")

    def compare_losses(self, seed: int) -> None:
        """Each example alone, from the state in which the model was given, against all kinds of company."""
        alone = [self._alone(number, seed) for number in self._numbers]
        floor = self._floor([abs(loss) for loss in alone])
        self._largest = max(self._largest, *map(abs, alone))
        for company in self._companies(seed):
            values = self._call(company, seed).tolist()
            for number, value in zip(company, values, strict=True):
                change = abs(value - alone[number]) / max(abs(alone[number]), floor)
                if not change <= self.tolerance:  # NaN too
                    rounded = self._loss_of_rounded(number, seed, alone[number], floor) if self._where else 0.0
                    if rounded > self.tolerance or change <= _CHAOS * rounded:
                        return  # with these weights rounding grows beyond everything, as in long recurrences
                    self._refuse(number, seed, f"the loss of example {number} changes by {_percent(change)}")

    def _loss_of_rounded(self, number: int, seed: int, alone: float, floor: float) -> float:
        """By how much an example's own loss changes if the weights change by rounding."""
        with _rounded_otherwise(self._modules, self._training.watch.precision, seed):
            loss = float(self._call([number], seed, anew=True))
        return abs(loss - alone) / max(abs(alone), floor)

    def _gradient_of_rounded(
        self, number: int, seed: int, alone: list[torch.Tensor], leaves: list[torch.Tensor]
    ) -> float:
        """The same of its gradient: the length of the change."""
        with _rounded_otherwise(self._modules, self._training.watch.precision, seed):
            return _distance(self._gradient([number], [1.0], leaves, seed, anew=True), alone)

    def _alone(self, number: int, seed: int) -> float:
        self._training.watch.sizes.clear()
        loss = float(self._call([number], seed, anew=True))
        if not math.isfinite(loss):
            raise _NotFiniteError(f"the loss of example {number} is not finite when it is alone: {loss}")
        self._sizes[number] = [size for size, _ in self._training.watch.sizes.most_common() if size > 1]
        return loss

    def _call(self, company: Company, seed: int, anew: bool = False) -> torch.Tensor:
        return self._graph(company, seed, anew).detach().double().cpu()

    def _graph(self, company: Company, seed: int, anew: bool = False) -> torch.Tensor:
        """The losses of some examples; with ``anew``, as if nothing had been called before."""
        if anew:
            self._training.start.restore()
        seed_generators(seed)
        try:
            found = self._losses([self._examples[number] for number in company])
        except Exception as error:
            raise ValueError(
                f"losses failed on a list of {len(company)} of the examples with a {type(error).__name__}; it must "
                "work for any number of them, also for one (batch normalisation does not)"
            ) from error
        if not isinstance(found, torch.Tensor) or found.shape != (len(company),):
            shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ValueError(f"losses must give one loss for each example, of shape ({len(company)},), got {shape}")
        return found

    # ---------------------------------------------------------------- company

    def _companies(self, seed: int) -> Iterator[Company]:
        """All, some, one; none of them from a fresh state, so that what a call leaves behind is found."""
        draw, everybody = random.Random(seed), self._numbers
        yield everybody
        yield [draw.choice(everybody)]
        yield draw.sample(everybody, len(everybody))
        yield draw.sample(everybody, draw.randint(2, len(everybody)))
        if seed == 0:
            yield draw.sample(everybody, draw.randint(2, len(everybody)))
            yield draw.choices(everybody, k=2 * len(everybody) + 1)
            yield from self._squares(draw)
        yield [everybody[0]]
        yield [everybody[-1]]

    def _squares(self, draw: random.Random) -> Iterator[Company]:
        """As many examples as tokens, and as many as whatever else was seen that could be the number of tokens."""
        longest = [max(sizes, default=0) for sizes in self._sizes]
        first = min(self._numbers, key=lambda number: (len(self._sizes[number]) == 0, longest[number]))
        others = [number for number in self._numbers if set(self._sizes[number]) <= set(self._sizes[first])]
        for size in [size for size in self._sizes[first] if size <= _MOST_COPIES][:3]:
            yield [first, *draw.choices(others, k=size - 1)]

    # ---------------------------------------------------------------- gradients

    def compare_gradients(self, seed: int) -> None:
        """A sum of all gradients, each at length 1 and with a random sign, against the same sum of single ones.

        The order of examples changes, so that every gradient is seen with others before and behind it. Only if the
        sums differ is every example looked at.
        """
        draw, least = random.Random(seed), self._floor([0.0])
        everybody = self._graph(self._numbers, seed, anew=True)
        leaves = _leaves(everybody)
        if not leaves:
            return self._check_size()
        norms, weights = [], []
        expected = [torch.zeros_like(leaf) for leaf in leaves]
        for number in self._numbers:
            alone = self._gradient([number], [1.0], leaves, seed, anew=True)
            norms.append(_norm(alone))
            weights.append(draw.choice((-1.0, 1.0)) / max(norms[-1], least))
            torch._foreach_add_(expected, alone, alpha=weights[-1])
        self._largest = max(self._largest, *norms)
        self._check_size()
        for company in (self._numbers, draw.sample(self._numbers, len(self._numbers))):
            found = self._gradient(company, [weights[number] for number in company], leaves, seed)
            distance = _distance(found, expected)
            if distance <= _GRADIENTS_ROUND * self.tolerance:
                continue
            if self._compare_each(company, leaves, seed, norms):
                self._refuse_sum(distance)
        return None

    def _refuse_sum(self, distance: float) -> None:
        """Every gradient alone is what it should be, and their sum is not."""
        allowed = min(_TOGETHER * _GRADIENTS_ROUND * self.tolerance, 0.5 * len(self._numbers) ** 0.5)
        if not distance <= allowed:
            raise ValueError(
                f"the gradient of all examples together is not the sum of the single ones{self._where}: a hook or a "
                "function with a backward of its own clamps or normalises gradients, or rounds them. Clipped in one "
                "pass, such gradients have no sensitivity of C, and ε would not hold"
            )

    def _check_size(self) -> None:
        """Where everything is rounding, nothing was compared."""
        if self._largest < _SMALL * _TOLERANCES[self._training.watch.precision][1]:
            raise ValueError(
                "all of these losses and their gradients are too small to be compared: give examples that the model "
                "has not learned, and losses that are not scaled down"
            )

    def _compare_each(self, company: Company, leaves: list[torch.Tensor], seed: int, norms: list[float]) -> bool:
        """Refuses a gradient that changes with its company; whether rounding leaves room for that to be seen."""
        floor = self._floor(norms)
        for place, number in enumerate(company):
            weights = [float(other == place) for other in range(len(company))]
            alone = self._gradient([number], [1.0], leaves, seed, anew=True)
            size = max(norms[number], floor)
            change = _distance(self._gradient(company, weights, leaves, seed), alone) / size
            if not change <= _GRADIENTS_ROUND * self.tolerance:
                rounded = self._gradient_of_rounded(number, seed, alone, leaves) / size if self._where else 0.0
                if rounded > _GRADIENTS_ROUND * self.tolerance or change <= _CHAOS * rounded:
                    return False
                text = f"the gradient of example {number}'s loss changes by {_percent(change)} of its norm"
                self._refuse(number, seed, text)
        return True

    def _gradient(
        self, company: Company, weights: list[float], leaves: list[torch.Tensor], seed: int, anew: bool = False
    ) -> list[torch.Tensor]:
        """Of the weighted sum of the losses; .grad is not touched."""
        found = self._graph(company, seed, anew)
        total = (found * found.new_tensor(weights)).sum()
        parts = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return [part.to_dense() if part.is_sparse else part for part in parts]

    # ---------------------------------------------------------------- what to say

    def _refuse(self, number: int, seed: int, what: str) -> NoReturn:
        """Tells random numbers and a state from company, as far as single calls can."""
        what += self._where
        first, again = self._call([number], seed, anew=True), self._call([number], seed)
        if not torch.allclose(first, again, rtol=self.tolerance):
            raise ValueError(
                f"{what} when losses was called on other examples before, since it does so from call to call with the "
                f"same example alone: the model carries a state of private data from step to step, for which ε counts "
                f"nothing. {_CAUSES}"
            )
        other = self._call([number], seed + _ROUNDS, anew=True)
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


def _leaves(losses: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that these losses have gradients for, by their graph."""
    waiting, seen, leaves = [losses.grad_fn], set(), []
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
    return float(torch.stack([part.double().norm().cpu() for part in gradient]).norm())


def _distance(gradient: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return _norm([one - two for one, two in zip(gradient, other, strict=True)])


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
