"""What the workers must agree on: checked at construction, and in every step without a message of its own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from edpsgd.distributed.collectives import Collective

T = TypeVar("T")
_SLOTS = 9  # a fingerprint of four bytes, marks, two counts of two bytes, in elements that every dtype adds up exactly


def slots(workers: int) -> int:
    """How many elements ride along in the step's message."""
    return _SLOTS * workers


@dataclass(frozen=True)
class Told:
    """What the workers have told each other in a step.

    Attributes:
        marks: of each worker.
        units: of all workers together; more than 65535 of one worker count as so many.
        discarded: how many of them held NaN or infinities.
    """

    marks: list[int]
    units: int
    discarded: int


def write(tail: torch.Tensor, rank: int, fingerprint: int, marks: int, units: int, discarded: torch.Tensor) -> None:
    """Puts what this worker says into its own slots. Bytes, because even bfloat16 adds those exactly."""
    tail.zero_()
    own = tail[_SLOTS * rank : _SLOTS * (rank + 1)]
    known = [*fingerprint.to_bytes(4, "little"), marks, *divmod(min(units, 65535), 256)]
    own[:7] = torch.tensor(known, dtype=tail.dtype).to(tail.device, non_blocking=True)
    own[7:] = torch.stack([discarded // 256, discarded % 256]).to(tail.dtype)


def read(tail: torch.Tensor) -> tuple[bool, Told]:
    """Whether all fingerprints in the summed tail are alike, and what else is in it. The one host read of a step."""
    rows = tail.view(-1, _SLOTS).tolist()
    is_alike = all(row[:4] == rows[0][:4] for row in rows)
    units = sum(256 * row[5] + row[6] for row in rows)
    discarded = sum(256 * row[7] + row[8] for row in rows)
    return is_alike, Told([int(row[4]) for row in rows], int(units), int(discarded))


def exchange(
    collective: Collective,
    tensors: list[torch.Tensor],
    tail: torch.Tensor,
    state: Mapping[str, Any],
    marks: int,
    units: int,
    discarded: torch.Tensor,
    dtype: torch.dtype | None,
    note: Callable[[list[int]], None],
) -> Told:
    """The one message of a step: sums the tensors, ``tail`` among them, over workers whose state is alike.

    ``note`` is told the marks of all workers, also if the step fails.

    Raises:
        ValueError: the same on all workers, if their states differ.
    """
    write(tail, collective.rank, zlib.crc32(repr(state).encode()), marks, units, discarded)
    wire = tensors if dtype is None else [tensor.to(dtype) for tensor in tensors]
    collective.sum_(wire)
    if dtype is not None:
        torch._foreach_copy_(tensors, wire)
    is_alike, told = read(tail)
    note(told.marks)
    if not is_alike:
        check_alike(collective.gather(state))
        raise RuntimeError("the sum over the workers is damaged: what rides along in it does not add up")
    return told


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
