"""Batches of random examples, of sizes that change from batch to batch."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

VOCABULARY = 11
LABELS = 3
LONGEST = 9  # tokens, and examples
HUGE = 1e4  # times the usual loss


@dataclass(frozen=True)
class Batch:
    """Examples that are all as long as each other: T is public. The last tokens of most are padding.

    Attributes:
        words: (B, T).
        inputs: (B, T, d), for networks that take numbers.
        lengths: (B,), how many tokens are not padding; at least 1.
        targets: (B,), numbers.
        labels: (B,), classes.
        next_words: (B, T).
        keys: (B,), a number for each example, to sort them by.
        scale: (B,), what the loss of each example is multiplied by.
        units: (B,), or None if each example is a unit.
        count: how many units there are.
    """

    words: torch.Tensor
    inputs: torch.Tensor
    lengths: torch.Tensor
    targets: torch.Tensor
    labels: torch.Tensor
    next_words: torch.Tensor
    keys: torch.Tensor
    scale: torch.Tensor
    units: torch.Tensor | None
    count: int

    @property
    def examples(self) -> int:
        return len(self.words)

    @property
    def tokens(self) -> int:
        return self.words.shape[1]

    @property
    def mask(self) -> torch.Tensor:
        """(B, T): True where there is no padding."""
        return torch.arange(self.tokens) < self.lengths.unsqueeze(1)

    def alone(self, example: int) -> Batch:
        """A batch with one of the examples only, as long as it is here."""
        kept = slice(example, example + 1)
        tensors = {name: value[kept] for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **{**tensors, "units": None, "count": 1})


def make_batch(size: tuple[int, int], seed: int, width: int, dtype: torch.dtype) -> Batch:
    """Random examples.

    Args:
        size: how many, and of how many tokens.
        seed: gives the same batch again.
        width: of the inputs.
        dtype: of the numbers.
    """
    examples, tokens = size
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def whole(largest: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, largest, shape, generator=generator)

    scale = torch.ones(examples, dtype=dtype)
    if chance.random() < 0.3:
        scale[chance.randrange(examples)] = HUGE
    units, count = None, examples
    if chance.random() < 0.2:
        count = chance.randint(1, 4)
        units = whole(count, examples)
    are_whole = chance.random() < 0.3
    lengths = torch.full((examples,), tokens) if are_whole else 1 + whole(tokens, examples)
    return Batch(
        words=whole(VOCABULARY, examples, tokens),
        inputs=normal(examples, tokens, width),
        lengths=lengths,
        targets=normal(examples) + 1.0,
        labels=whole(LABELS, examples),
        next_words=whole(VOCABULARY, examples, tokens),
        keys=normal(examples),
        scale=scale,
        units=units,
        count=count,
    )


def random_sizes(chance: random.Random) -> list[tuple[int, int]]:
    """Six with other numbers of examples than of tokens, and as many with the same.

    In most networks all the others come first; in the rest they are mixed, and an equal one comes last.
    """
    others: list[tuple[int, int]] = [(1, chance.randint(2, 5))]
    while len(others) < 6:
        size = (chance.randint(2, 7), chance.randint(1, 7))
        if size[0] != size[1] and size != others[-1]:
            others.append(size)
    chance.shuffle(others)
    equal = [(n, n) for n in (1, *(chance.randint(2, 6) for _ in range(5)))]
    chance.shuffle(equal)
    if chance.random() < 0.6:
        return others + equal
    mixed = others + equal[1:]
    chance.shuffle(mixed)
    return [*mixed, equal[0]]
