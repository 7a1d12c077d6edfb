"""Single examples under audit: ``PrivateOptimizer.backward(losses)`` with and without one of them.

Two copies of a small model are trained side by side on the same batches, of changing sizes, some with as many examples
as tokens; only one copy sees the canary. Without noise the step's sum must not move by more than the clip norm, which
is tested exactly. With noise, the batch that moved it furthest is what the two worlds are told apart by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from edpsgd import PrivateOptimizer
from edpsgd.distributed.collectives import Collective
from mia.bounds import Floats

_WORDS, _WIDTH = 20, 6
_FAR = 1e4  # the canary's target: its gradient is thousands of clip norms long
ROUNDING = 1e-4  # a move of the sum by so much more than the clip norm is no rounding error of single precision

# (examples, tokens) of the batches, the canary counted: first those without it, then those with it. There are as many
# examples as tokens with the canary, or without it.
_LEARNT_FROM = ((5, 7), (6, 4), (4, 9), (7, 5), (8, 6))
_PROBED = ((6, 6), (4, 7), (5, 4), (7, 7), (4, 4), (8, 5), (5, 5))

Maker = Callable[..., PrivateOptimizer]


class Model(nn.Module):
    """A norm that is used in two layouts, before and after a recurrence with the time first."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.norm = nn.LayerNorm(_WIDTH)
        self.recurrence = nn.LSTM(_WIDTH, _WIDTH)
        self.hidden = nn.Linear(_WIDTH, _WIDTH)
        self.output = nn.Linear(_WIDTH, 1)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of each example."""
        states = self.norm(self.recurrence(self.norm(self.words(words)).transpose(0, 1))[0])
        answers = self.output(torch.tanh(self.hidden(states))).mean(dim=(0, 2))
        return torch.square(answers - targets)


@dataclass(frozen=True)
class Examples:
    """A batch, (B, T) words and (B,) targets; the first example is the canary."""

    words: torch.Tensor
    targets: torch.Tensor

    def without_canary(self) -> Examples:
        """The other examples."""
        return Examples(self.words[1:], self.targets[1:])


@dataclass(frozen=True)
class Move:
    """How far the canary moved the sum of a step.

    Attributes:
        examples: in the batch, the canary counted.
        tokens: of each example.
        distance: in clip norms, layers measured by their scales.
        direction: the move over its length, by layer.
        batch: what it was measured on.
    """

    examples: int
    tokens: int
    distance: float
    direction: list[torch.Tensor]
    batch: Examples

    @property
    def is_too_far(self) -> bool:
        """Whether the move exceeds the clip norm."""
        return not self.distance <= 1.0 + ROUNDING  # NaN is too far

    def rank(self) -> tuple[float, int]:
        """To find the furthest: up to rounding, and of the same the one of the smallest batch, which is the fastest."""
        if math.isnan(self.distance):
            return math.inf, 0
        return round(self.distance, 3), -self.examples * self.tokens


class World:
    """A model with its optimizer, on all workers; worker 0 has the data, the others nothing.

    Args:
        collective: the workers.
        make: what makes the optimizer.
        seed: of the model, the same in both worlds.
        arguments: for PrivateOptimizer.
        epoch: the one to audit.
    """

    def __init__(
        self, collective: Collective, make: Maker, seed: int, arguments: Mapping[str, Any], epoch: int = 0
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = Model()
        self._begin = [parameter.detach().clone() for parameter in self.model.parameters()]
        inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        named = list(self.model.named_parameters())
        self.optimizer = make(inner, named, collective=collective, **{**arguments, "unit": "example"})
        self.optimizer.set_epoch(epoch)
        self._is_first, self._divisor = collective.rank == 0, float(arguments["divisor"])

    @torch.no_grad()
    def step(self, batch: Examples) -> list[torch.Tensor]:
        """One step on the batch from where the model began; the noised sum over all examples."""
        if self._is_first and len(batch.targets):
            with torch.enable_grad():
                self.optimizer.backward(self.model(batch.words, batch.targets))
        else:
            self.optimizer.accumulate()
        self.optimizer.step()
        found = []
        for parameter, begin in zip(self.model.parameters(), self._begin, strict=True):
            found.append((begin - parameter) * self._divisor)
            parameter.copy_(begin)
        return found


def batches(shapes: Iterable[tuple[int, int]], generator: torch.Generator) -> list[Examples]:
    """Batches of these sizes, the canary first, with a target far away.

    In every second one the others are the same words with a target as far away on the other side: they are pushed
    where the canary pulls from, so that an average over them turns round when it leaves.
    """
    found = []
    for number, (examples, tokens) in enumerate(shapes):
        words = torch.randint(_WORDS, (examples, tokens), generator=generator)
        targets = torch.randn(examples, generator=generator)
        if number % 2:
            words, targets = words[:1].repeat(examples, 1), torch.full((examples,), -_FAR)
        targets[0] = _FAR
        found.append(Examples(words, targets))
    return found


def moves(
    collective: Collective, make: Maker, seed: int, arguments: Mapping[str, Any], weights: Sequence[float]
) -> list[Move]:
    """How far the canary moves the sum of each probed batch, without noise.

    Args:
        collective: the workers.
        make: what makes the optimizers.
        seed: of model and batches.
        arguments: for PrivateOptimizer, without noise.
        weights: what the layers' moves are divided by: their scales, or 1.
    """
    absent, present = (World(collective, make, seed, arguments) for _ in range(2))
    generator = torch.Generator().manual_seed(seed)
    for batch in batches(_LEARNT_FROM, generator):
        absent.step(batch.without_canary())
        present.step(batch.without_canary())
    found: list[Move] = []
    for batch in batches(_PROBED, generator):
        try:
            move = [a - b for a, b in zip(present.step(batch), absent.step(batch.without_canary()), strict=True)]
        except RuntimeError:
            if any(one.is_too_far for one in found):
                return found  # the optimizer noticed too, but too late
            raise
        found.append(_measured(move, batch, weights, float(arguments["clip_norm"])))
    return found


def _measured(move: list[torch.Tensor], batch: Examples, weights: Sequence[float], clip_norm: float) -> Move:
    length = math.hypot(*(float(part.norm()) for part in move))
    scaled = [float(part.norm()) / weight for part, weight in zip(move, weights, strict=True)]
    direction = [part / max(length, 1e-30) for part in move]
    examples, tokens = batch.words.shape
    return Move(examples, tokens, math.hypot(*scaled) / clip_norm, direction, batch)


def statistics(world: World, weights: Sequence[float], move: Move, trials: int) -> Floats:
    """The noised sum along the canary's move, measured by the noise, without the canary and with it, for each trial."""
    along = [part / weight**2 for part, weight in zip(move.direction, weights, strict=True)]
    found = np.empty((2, trials))
    for trial in range(trials):
        for number, batch in enumerate((move.batch.without_canary(), move.batch)):
            released = world.step(batch)
            found[number, trial] = sum(float((a * b).sum()) for a, b in zip(released, along, strict=True))
    return found


def layer_names() -> list[str]:
    """Of the audited model."""
    return [name for name, _ in Model().named_parameters()]
