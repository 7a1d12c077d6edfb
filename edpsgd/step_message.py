"""The one message of a step: the noised sum, and what the workers must know of each other."""

from __future__ import annotations

import math
import warnings

import torch

from edpsgd import agreement
from edpsgd.bookkeeping import Bookkeeping
from edpsgd.distributed import consensus
from edpsgd.distributed.collectives import Collective
from edpsgd.distributed.compression import transfer_dtype
from edpsgd.distributed.consensus import StepReport
from edpsgd.mechanism.accumulator import StepAccumulator
from edpsgd.mechanism.scale_measurement import ScaleMeasurement


class StepMessage:
    """The message of one worker in one step, which all workers take or none.

    Args:
        collective: the workers.
        bookkeeping: told of the step.
        accumulator: what this worker puts into the step.
        number: of the step.
        epoch: what set_epoch said last, None before.
        noise_multiplier: of the epoch.
    """

    def __init__(
        self,
        collective: Collective,
        bookkeeping: Bookkeeping,
        accumulator: StepAccumulator,
        number: int,
        epoch: int | None,
        noise_multiplier: float,
    ) -> None:
        self._collective = collective
        self._bookkeeping = bookkeeping
        self._accumulator = accumulator
        self._number = number
        self._epoch = epoch
        self._noise_multiplier = noise_multiplier

    def sum_gradients(self, refusal: Exception | None) -> int:
        """Replaces the worker's noised part by the noised mean over all workers.

        It is rounded on the way, if the settings say so.

        Args:
            refusal: why this worker must not take the step, if it must not.

        Returns:
            How many units of all workers were discarded.

        Raises:
            Exception: on all workers in the same step, if any of them refuses it or their states
                differ.
        """
        gradients = self._accumulator.layers.sum
        dtype = transfer_dtype(self._accumulator.settings.compression)
        factor = 1.0
        if dtype is torch.float16:
            factor = self._accumulator.fit_float16_(self._noise_multiplier)
        discarded = self._sum_(gradients.buffers, gradients.trailer, refusal, dtype)
        gradients.scale_(1.0 / factor)
        return discarded

    def sum_norms(self, measurement: ScaleMeasurement, refusal: Exception | None) -> int:
        """Replaces the worker's noised layer norms by their sum over all workers; else as above."""
        return self._sum_([measurement.message], measurement.trailer, refusal, None)

    def _sum_(
        self,
        tensors: list[torch.Tensor],
        trailer: torch.Tensor,
        refusal: Exception | None,
        dtype: torch.dtype | None,
    ) -> int:
        """Replaces the tensors by their sums over the workers, which must agree on the step.

        Args:
            tensors: what is summed.
            trailer: the part of them that is free for what the workers tell each other.
            refusal: why this worker must not take the step, if it must not.
            dtype: what the tensors are rounded to on the way; None to send them as they are.
        """
        state = agreement.describe_step(
            self._bookkeeping,
            self._accumulator,
            refusal=refusal,
            number=self._number,
            epoch=self._epoch,
            noise_multiplier=self._noise_multiplier,
        )
        flags = self._bookkeeping.flags
        report = StepReport(state, flags, self._accumulator.closed, self._accumulator.discarded)
        try:
            reports = consensus.exchange(
                self._collective, tensors, trailer, report, self._bookkeeping.note_flags, dtype
            )
            if refusal is None:
                self._check_units(reports.units)
        except BaseException:  # other workers may have the sum
            self._bookkeeping.record_failed_step(self._epoch)
            raise
        if refusal is not None:  # alike on all workers, whose messages held nothing but noise
            raise refusal
        self._bookkeeping.record_step()
        return reports.discarded

    def _check_units(self, units: int) -> None:
        """Refuses more single examples than any Poisson draw of so many expected ones has."""
        expected = self._accumulator.settings.divisor
        if expected is None or self._bookkeeping.batches is not None:  # a sampler knows better
            return
        most = expected + 10 * math.sqrt(expected) + 10
        if units > most:
            raise ValueError(
                f"the step had {units} examples over all workers, and divisor says that {expected:g} are "
                "expected: give one loss for each example, for example the mean of those of its tokens, or the divisor "
                "that is meant"
            )


def warn_of_discards(discarded: int, number: int) -> None:
    """Says once that micro-batches could not be used; the warning points at the caller's step()."""
    warnings.warn(
        f"{discarded} micro-batch(es) held NaN or infinities in step {number} and counted as zero; later ones are "
        "counted in optimizer.discarded without a warning",
        stacklevel=7,
    )
