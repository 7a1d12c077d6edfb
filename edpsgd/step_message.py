"""The one message of a step: the noised sum, and behind it what the workers must know of each other."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from edpsgd.bookkeeping import Books
from edpsgd.distributed import consensus
from edpsgd.distributed.collectives import Collective
from edpsgd.ledger.budget import BudgetExhausted
from edpsgd.mechanism.accumulator import Contributions


class StepMessage:
    """Sends a step of one worker, and takes it only if all workers agree.

    Args:
        collective: the workers.
        books: told of the step.
        parts: what this worker puts into it.
        expected: of examples over all workers, where they are counted and no sampler knows better; else None.
    """

    def __init__(self, collective: Collective, books: Books, parts: Contributions, expected: float | None) -> None:
        self._collective, self._books, self._parts, self._expected = collective, books, parts, expected

    def sum_(
        self,
        tensors: list[torch.Tensor],
        tail: torch.Tensor,
        state: Mapping[str, Any],
        refusal: Exception | None,
        dtype: torch.dtype | None = None,
    ) -> int:
        """Replaces the tensors by their sums over the workers; how many units of all workers were discarded.

        Args:
            tensors: what is summed.
            tail: the part of them that is free for what rides along.
            state: what must be alike on all workers, beside what the books know.
            refusal: why this worker must not take the step, if it must not.
            dtype: to be rounded to on the wire.

        Raises:
            Exception: on all workers in the same step, if any of them refuses it or their states differ.
        """
        state = {
            "whether the workers are those of the start": _worded(self._books.displaced()),
            "whether the step may be taken": _worded(refusal),
            **state,
            "the step of the epoch": self._books.position,
            "the draws": self._books.draws,
        }
        parts = self._parts
        try:
            told = consensus.exchange(
                self._collective,
                tensors,
                tail,
                state,
                self._books.marks,
                parts.closed,
                parts.discarded,
                dtype,
                self._books.note_of_others,
            )
            if refusal is None:
                self._check_units(told.units)
        except BaseException:
            self._books.lose(state["the epoch"])
            raise
        if refusal is not None:
            raise refusal
        self._books.take()
        return told.discarded

    def _check_units(self, units: int) -> None:
        """More single examples than any Poisson draw of so many expected ones has: no draw, but a mistake."""
        if self._expected is None:
            return
        most = self._expected + 10 * math.sqrt(self._expected) + 10
        if units > most:
            raise ValueError(
                f"the step had {units} examples over all workers, and divisor says that {self._expected:g} are "
                "expected: give one loss for each example, for example the mean of those of its tokens, or the divisor "
                "that is meant"
            )


def _worded(refusal: Exception | None) -> str:
    """What workers compare; not what each of them has spent, as they may know of other conditions."""
    if refusal is None:
        return "yes"
    return "no, the budget" if isinstance(refusal, BudgetExhausted) else f"no, {refusal}"


def warn_of_discards(discarded: int, number: int) -> None:
    """Says once that micro-batches could not be used; the warning points at the caller's step()."""
    warnings.warn(
        f"{discarded} micro-batch(es) held NaN or infinities in step {number} and counted as zero; later ones are "
        "counted in optimizer.discarded without a warning",
        stacklevel=8,
    )
