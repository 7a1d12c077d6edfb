"""What the workers must agree on: checked at construction, and in every step without a message of its own.

A step's message ends with a trailer, which has one row for each worker. A worker fills in its own row and leaves the
others at zero, so that the sum over the workers holds the rows of all of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from edpsgd.distributed.collectives import Collective

T = TypeVar("T")

# A row of the trailer: the fingerprint of the worker's state, a byte of flags, and two counts of two
# bytes each. Every element is a byte, because even bfloat16 adds those exactly.
_FINGERPRINT = 4
_ROW = _FINGERPRINT + 1 + 2 + 2
_LARGEST_COUNT = 0xFFFF


def trailer_size(workers: int) -> int:
    """How many elements a step's message has behind what it sums."""
    return _ROW * workers


@dataclass(frozen=True)
class StepReport:
    """What one worker says of its step.

    Attributes:
        state: what must be alike on all workers, in words.
        flags: what the worker has done on which a condition of ε depends, one bit each.
        units: how many units it has closed.
        discarded: how many of them held NaN or infinities, an integer on the device.
    """

    state: Mapping[str, Any]
    flags: int
    units: int
    discarded: torch.Tensor

    @property
    def fingerprint(self) -> bytes:
        """Four bytes that differ if the states do, but for one pair of states in four billion."""
        return zlib.crc32(repr(self.state).encode()).to_bytes(_FINGERPRINT, "little")


@dataclass(frozen=True)
class StepReports:
    """What all workers have said of a step.

    Attributes:
        flags: of each worker, by rank.
        units: of all workers together; more than 65535 of one worker count as so many.
        discarded: how many of them held NaN or infinities.
    """

    flags: list[int]
    units: int
    discarded: int


def write_row(trailer: torch.Tensor, rank: int, report: StepReport) -> None:
    """Fills in the worker's own row of the trailer, and sets the others to zero."""
    trailer.zero_()
    own = trailer[_ROW * rank : _ROW * (rank + 1)]
    units = divmod(min(report.units, _LARGEST_COUNT), 256)
    known = [*report.fingerprint, report.flags, *units]
    own[:7] = torch.tensor(known, dtype=trailer.dtype).to(trailer.device, non_blocking=True)
    # The host does not know this count yet, and shall not wait for it.
    own[7:] = torch.stack([report.discarded // 256, report.discarded % 256]).to(trailer.dtype)


def read_rows(trailer: torch.Tensor) -> tuple[bool, StepReports]:
    """Whether the fingerprints in the summed trailer are alike, and what else is in it.

    This is the one read of a step for which the host waits.
    """
    rows = trailer.view(-1, _ROW).tolist()
    first_fingerprint = rows[0][:_FINGERPRINT]
    is_alike = all(row[:_FINGERPRINT] == first_fingerprint for row in rows)
    flags = [int(row[4]) for row in rows]
    units = sum(256 * row[5] + row[6] for row in rows)
    discarded = sum(256 * row[7] + row[8] for row in rows)
    return is_alike, StepReports(flags, int(units), int(discarded))


def exchange(
    collective: Collective,
    tensors: list[torch.Tensor],
    trailer: torch.Tensor,
    report: StepReport,
    note_flags: Callable[[list[int]], None],
    dtype: torch.dtype | None,
) -> StepReports:
    """The one message of a step: replaces the tensors by their sums over workers whose states are alike.

    Args:
        collective: the workers.
        tensors: what is summed.
        trailer: a part of them, of ``trailer_size`` elements.
        report: of this worker.
        note_flags: is told the flags of all workers, by rank, also if their states differ.
        dtype: what the tensors are rounded to on the way; None to send them as they are.

    Returns:
        What the workers have said.

    Raises:
        ValueError: the same on all workers, if their states differ.
    """
    write_row(trailer, collective.rank, report)
    sent = tensors if dtype is None else [tensor.to(dtype) for tensor in tensors]
    collective.sum_(sent)
    if dtype is not None:
        torch._foreach_copy_(tensors, sent)
    is_alike, reports = read_rows(trailer)
    note_flags(reports.flags)
    if not is_alike:
        # Fingerprints say that there is a difference, but not which: the states themselves do.
        check_alike(collective.gather(report.state))
        raise RuntimeError("the sum over the workers is damaged: what rides along in it does not add up")
    return reports


def together(collective: Collective, prepare: Callable[[], T]) -> list[T]:
    """Every worker's result, by rank; or an error on every worker, if any of them failed."""
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
    """Raises the same error on all workers if their descriptions differ; it names the first difference."""
    longest = max(values, key=len)
    for key in longest:
        if any(value.get(key) != values[0].get(key) for value in values):
            listing = "; ".join(f"worker {rank}: {value.get(key)!r}" for rank, value in enumerate(values))
            raise ValueError(f"the workers disagree on {key}: {listing}")
