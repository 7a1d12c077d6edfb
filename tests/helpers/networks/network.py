"""Networks of random operations, each from its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import nn

from tests.helpers.networks import attention, features, moving, sequences, special  # noqa: F401 (they fill the list)
from tests.helpers.networks.batches import Batch, make_batch, random_sizes
from tests.helpers.networks.ends import BEGINS, LOSSES
from tests.helpers.networks.operations import OPERATIONS, Make, Operation

TURN, AGAIN = "layout turned for all that follows", "an earlier operation again"
KINDS = (*OPERATIONS, TURN, AGAIN)
MOST = 8  # operations, with the first and the last one
_FREQUENT = {TURN: 8, AGAIN: 10}  # as likely as so many others: they are what makes layouts differ


@dataclass(frozen=True)
class Plan:
    """All that there is to know of a network and its batches, so that parts can be left out.

    Attributes:
        seed: of the whole, from which the rest follows.
        width: features of each token.
        dtype: of parameters and numbers.
        dim: the dimension of the examples at first.
        begin: kind of the first operation.
        operations: kinds of those between, each with a seed of its own.
        losses: kind of the last one.
        by_optimizer: whether batches go through a whole PrivateOptimizer, not only through the engine.
        per_layer: whether each layer is clipped by itself.
        batches: (examples, tokens) and the seed of each.
    """

    seed: int
    width: int
    dtype: torch.dtype
    dim: int
    begin: str
    operations: tuple[tuple[str, int], ...]
    losses: str
    by_optimizer: bool
    per_layer: bool
    batches: tuple[tuple[tuple[int, int], int], ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of all operations, in their order."""
        return (self.begin, *(kind for kind, _ in self.operations), self.losses)

    def without(self, place: int) -> Plan:
        """The same without one of the operations between."""
        return replace(self, operations=self.operations[:place] + self.operations[place + 1 :])

    def without_batch(self, place: int) -> Plan:
        return replace(self, batches=self.batches[:place] + self.batches[place + 1 :])

    def data(self) -> list[Batch]:
        return [make_batch(size, seed, self.width, self.dtype) for size, seed in self.batches]

    def __str__(self) -> str:
        first = "(B, T, d)" if self.dim == 0 else "(T, B, d)"
        way = "PrivateOptimizer" if self.by_optimizer else "engine"
        way += ", clipped by layers" if self.per_layer else ""
        sizes = " ".join(f"{examples}x{tokens}" for (examples, tokens), _ in self.batches)
        return (
            f"seed {self.seed}: {' → '.join(self.kinds)}\n"
            f"  begins as {first}, width {self.width}, {self.dtype}, {way}; batches {sizes}"
        )


def make_plan(seed: int) -> Plan:
    """Two to eight operations, and twelve batches."""
    chance = random.Random(f"network {seed}")
    weights = [_FREQUENT.get(kind, 1) for kind in KINDS]
    between = chance.choices(KINDS, weights, k=chance.randint(1, MOST - 2))
    if chance.random() < 0.03:
        between = []
    begin, losses = chance.choice(list(BEGINS)), chance.choice(list(LOSSES))
    return Plan(
        seed=seed,
        width=chance.choice([4, 6, 8]),
        dtype=chance.choice([torch.float32, torch.float64]),
        dim=chance.randrange(2),
        begin="embedding" if begin == "numbers" and len(between) < 2 else begin,
        operations=tuple((kind, chance.getrandbits(32)) for kind in between),
        losses=losses,
        by_optimizer=chance.random() < 0.2,
        per_layer=chance.random() < 0.2,
        batches=tuple((size, chance.getrandbits(32)) for size in random_sizes(chance)),
    )


class Turn(nn.Module):
    """Another layout from here on."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.is_copied = make.chance(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = x.transpose(0, 1)
        return turned.contiguous() if self.is_copied else turned


class Network(nn.Module):
    """The operations of a plan. Called with a batch, it gives one loss for each example."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, shared = plan, dict[str, nn.Module]()

        def make(seed: object) -> Make:
            torch.manual_seed(random.Random(f"weights {seed}").getrandbits(32))
            return Make(plan.width, random.Random(f"form {seed}"), shared)

        with torch.random.fork_rng(devices=[]):
            self.begin = BEGINS[plan.begin](make(f"{plan.seed} begin"))
            self.operations = nn.ModuleList()
            for kind, seed in plan.operations:
                self._add(kind, make(seed))
            self.losses = LOSSES[plan.losses](make(f"{plan.seed} losses"))
            self._shake()
        self.to(plan.dtype)

    def _add(self, kind: str, make: Make) -> None:
        if kind == TURN:
            self.operations.append(Turn(make))
        elif kind != AGAIN:
            self.operations.append(OPERATIONS[kind](make))
        else:
            before = [one for one in self.operations if isinstance(one, Operation)]
            self.operations.append(make.random.choice(before) if before else OPERATIONS["layer norm"](make))

    def _shake(self) -> None:
        """No weights of exactly one or zero, with which mistakes might not show, but for those that are meant."""
        with torch.no_grad():
            for parameter in self.parameters():
                if not hasattr(parameter, "begins_at_zero"):
                    parameter.add_(0.2 * torch.randn_like(parameter))

    @torch.no_grad()
    def wake(self) -> None:
        """What began at zero is so no longer, as after some steps of training."""
        for parameter in self.parameters():
            if hasattr(parameter, "begins_at_zero"):
                parameter.add_(0.3 * torch.randn_like(parameter))

    def forward(self, batch: Batch) -> torch.Tensor:
        dim = self.plan.dim
        x = self.begin(batch, dim)
        for one in self.operations:
            if isinstance(one, Turn):
                x, dim = one(x), 1 - dim
                continue
            wanted = {"batch": 0, "time": 1}.get(one.layout, dim)
            x, dim = one(x if wanted == dim else x.transpose(0, 1), batch, wanted), wanted
        losses: torch.Tensor = self.losses(x, batch, dim) * batch.scale
        return losses
