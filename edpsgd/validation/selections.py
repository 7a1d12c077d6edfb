"""The batches in which an example's loss is tried: other examples, orders and sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator

Selection = list[int]  # numbers of examples, as they are handed over in one list
_MOST_COPIES = 32  # examples in the batches that have as many examples as tokens
_MOST_SIZES = 3  # of these batches


def selections_of(seed: int, token_counts: list[list[int]]) -> Iterator[Selection]:
    """All examples, some, and one, in a random order that follows from the seed.

    Args:
        seed: with 0, there are also larger batches, and those with as many examples as tokens.
        token_counts: of each example, what may be its number of tokens, the likeliest first.
    """
    draw = random.Random(seed)
    everybody = list(range(len(token_counts)))
    yield everybody
    yield [draw.choice(everybody)]
    yield draw.sample(everybody, len(everybody))
    yield draw.sample(everybody, draw.randint(2, len(everybody)))
    if seed == 0:
        yield draw.sample(everybody, draw.randint(2, len(everybody)))
        yield draw.choices(everybody, k=2 * len(everybody) + 1)
        yield from _square_selections(draw, token_counts)
    yield [everybody[0]]
    yield [everybody[-1]]


def _square_selections(draw: random.Random, token_counts: list[list[int]]) -> Iterator[Selection]:
    """As many examples as tokens, and as many as whatever else was seen that could be the number of tokens.

    Where both dimensions of a batch have the same size, code that confuses them does not fail.
    """
    first = _shortest_example(token_counts)
    sizes = [size for size in token_counts[first] if size <= _MOST_COPIES]
    # Examples that are no longer than the first: the batch then has its number of tokens.
    fitting = [number for number, counts in enumerate(token_counts) if set(counts) <= set(token_counts[first])]
    for size in sizes[:_MOST_SIZES]:
        yield [first, *draw.choices(fitting, k=size - 1)]


def _shortest_example(token_counts: list[list[int]]) -> int:
    """The first of those whose largest size is least; examples of which nothing was seen come last."""

    def length(number: int) -> tuple[bool, int]:
        counts = token_counts[number]
        return not counts, max(counts, default=0)

    return min(range(len(token_counts)), key=length)
