"""What the workers must agree on: checked at construction, and in every step without a message of its own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from edpsgd.collectives import Collective

T = TypeVar("T")
_SLOTS = 7  # a fingerprint of four bytes, marks, and a count of two, in elements that every dtype adds up exactly


def slots(workers: int) -> int:
    """How many elements ride along in the step's message."""
    return _SLOTS * workers


def write(tail: torch.Tensor, rank: int, fingerprint: int, discarded: torch.Tensor, marks: int) -> None:
    """Puts what this worker says into its own slots. Bytes, because even bfloat16 adds those exactly."""
    tail.zero_()
    own, known = tail[_SLOTS * rank : _SLOTS * (rank + 1)], [*fingerprint.to_bytes(4, "little"), marks]
    own[:5] = torch.tensor(known, dtype=tail.dtype).to(tail.device, non_blocking=True)
    own[5:] = torch.stack([discarded // 256, discarded % 256]).to(tail.dtype)


def read(tail: torch.Tensor) -> tuple[bool, int, list[int]]:
    """Whether all fingerprints in the summed tail are alike, the total count, each one's marks. The one host read."""
    rows = tail.view(-1, _SLOTS).tolist()
    marks = [int(row[4]) for row in rows]
    return all(row[:4] == rows[0][:4] for row in rows), int(sum(256 * row[5] + row[6] for row in rows)), marks


def exchange(
    collective: Collective,
    tensors: list[torch.Tensor],
    tail: torch.Tensor,
    state: Mapping[str, Any],
    discarded: torch.Tensor,
    marks: int,
    dtype: torch.dtype | None,
) -> tuple[int, list[int]]:
    """The one message of a step: sums the tensors, ``tail`` among them, over workers whose state is alike.

    Returns:
        The discarded micro-batches of all workers, and the marks of each.

    Raises:
        ValueError: the same on all workers, if their states differ.
    """
    write(tail, collective.rank, zlib.crc32(repr(state).encode()), discarded, marks)
    wire = tensors if dtype is None else [tensor.to(dtype) for tensor in tensors]
    collective.sum_(wire)
    if dtype is not None:
        torch._foreach_copy_(tensors, wire)
    alike, total, of_workers = read(tail)
    if not alike:
        check_alike(collective.gather(state))
        raise RuntimeError("the sum over the workers is damaged: what rides along in it does not add up")
    return total, of_workers


def together(collective: Collective, prepare: Callable[[], T]) -> list[T]:
    """Every worker's result, or an error on every worker if any of them failed."""
    result, error = None, None
    try:
        result = prepare()
    except Exception as failure:
        error = failure
    answers = collective.gather((result, None if error is None else str(error)))
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(answers):
        if message is not None:
            raise ValueError(f"worker {rank} failed: {message}")
    return [answer for answer, _ in answers]


def check_alike(values: Sequence[Mapping[str, Any]]) -> None:
    """Raises the same error on all workers if their descriptions differ."""
    for key in max(values, key=len):
        if any(value.get(key) != values[0].get(key) for value in values):
            listing = "; ".join(f"worker {rank}: {value.get(key)!r}" for rank, value in enumerate(values))
            raise ValueError(f"the workers disagree on {key}: {listing}")
