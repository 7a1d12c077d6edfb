"""What operations of random networks have in common, and the list of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from tests.helpers.networks.batches import VOCABULARY, Batch


@dataclass
class Make:
    """What an operation is made with.

    Attributes:
        width: features of each token, an even number.
        random: decides between the forms that an operation has.
        shared: modules that several operations of a network have in common.
    """

    width: int
    random: random.Random
    shared: dict[str, nn.Module] = field(default_factory=dict)

    def words(self) -> nn.Embedding:
        """The network's embedding of words, the same one each time."""
        found = self.shared.setdefault("words", nn.Embedding(VOCABULARY, self.width))
        assert isinstance(found, nn.Embedding)
        return found

    def chance(self, share: float = 0.5) -> bool:
        return self.random.random() < share


class Operation(nn.Module):
    """From hidden states to hidden states of the same shape.

    ``forward(x, batch, dim)``: ``dim`` is the dimension of the examples, 0 in (B, T, d) and 1 in (T, B, d). No row of
    an example may depend on another example.
    """

    kind = ""
    layout = "any"  # or "batch", "time": the only one that it takes

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.width = make.width

    def forward(self, x: torch.Tensor, batch: Batch, dim: int) -> torch.Tensor:
        raise NotImplementedError


OPERATIONS: dict[str, type[Operation]] = {}


def operation(kind: str, layout: str = "any") -> Callable[[type[Operation]], type[Operation]]:
    """Puts a class on the list."""

    def add(made: type[Operation]) -> type[Operation]:
        assert kind not in OPERATIONS, kind
        made.kind, made.layout = kind, layout
        OPERATIONS[kind] = made
        return made

    return add


def parameter(*shape: int, mean: float = 0.0) -> nn.Parameter:
    return nn.Parameter(mean + 0.5 * torch.randn(shape))


def over_time(values: torch.Tensor, dim: int) -> torch.Tensor:
    """(T, d) or (B, T), shaped so that it goes with hidden states whose examples are in dimension ``dim``."""
    return values.unsqueeze(dim)


def mask_of(batch: Batch, dim: int) -> torch.Tensor:
    """(B, T, 1) or (T, B, 1)."""
    return (batch.mask if dim == 0 else batch.mask.t()).unsqueeze(2)
