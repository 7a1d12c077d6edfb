"""One step of a training: its micro-batches, their losses, and the gradients of these.

It reads in the order of the work: what the sampler draws for a step, the losses of utterances, and
the backward passes, plain or private.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator
from itertools import islice

import torch

import edpsgd
from edpsgd.sampling.base import Batches
from models.heads import IntentSlotModel
from tasks.nlu.configuration import Config
from tasks.nlu.example_batches import Examples, to_device
from tasks.nlu.training_figures import LossSum

MicroBatches = list[list[int]]


# ---------------------------------------------------------------- what a step draws


def micro_batches_of_steps(batches: Batches, blanks: Container[int]) -> Iterator[MicroBatches]:
    """What is left of an epoch, step by step.

    Args:
        batches: the sampler.
        blanks: numbers of examples that are drawn like the others, and then left out.

    Yields:
        The micro-batches of a step, each a list of numbers of examples, which may be empty. A
        sampler that draws single examples gives one micro-batch for each example.
    """
    # With `together`, one draw holds all micro-batches of the step.
    draws_per_step = 1 if batches.together else (batches.micro_batches or 1)
    drawn = iter(batches)
    while step := list(islice(drawn, draws_per_step)):
        if batches.micro_batches is None:  # single examples, drawn in one batch
            step = [[row] for row in step[0]]
        yield [_without_blanks(rows, blanks) for rows in step]


def _without_blanks(rows: list[int], blanks: Container[int]) -> list[int]:
    return [row for row in rows if row not in blanks]


def dropout_seed(seed: int, rank: int, step: int) -> int:
    """The seed of a worker's dropout in a step, so that a resumed run drops the same."""
    digest = hashlib.blake2b(f"{seed}/{rank}/{step}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


# ---------------------------------------------------------------- losses


class StepLosses:
    """The losses of a model, added up for the figures of the epoch.

    Args:
        model: what gives a loss for each utterance of a batch.
        config: says in which precision the forward pass runs.
        device: where the model is.
        total: what the losses are added to.
    """

    def __init__(
        self,
        model: IntentSlotModel,
        config: Config,
        device: torch.device,
        total: LossSum,
    ) -> None:
        self._model, self._device, self._total = model, device, total
        self._is_half_precision = config.precision == "bf16"

    def of_batch(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of each utterance, (utterances,), added to nothing."""
        device = self._device
        with torch.autocast(device.type, torch.bfloat16, enabled=self._is_half_precision):
            losses: torch.Tensor = self._model(to_device(batch, device))
        return losses

    def mean_loss(self, train: Examples, rows: list[int]) -> torch.Tensor:
        """The mean over the utterances of a micro-batch, a scalar.

        It is computed in buckets of similar length, which pads less.
        """
        bucket_sums = [self.of_batch(bucket).sum() for bucket in train.buckets(rows)]
        loss_sum = torch.stack(bucket_sums).sum()
        self._total.add(loss_sum.detach(), len(rows))
        return loss_sum / len(rows)

    def losses_by_bucket(self, train: Examples, rows: list[int]) -> Iterator[torch.Tensor]:
        """The loss of each utterance, in tensors (utterances,) of similar length."""
        for bucket in train.buckets(rows):
            losses = self.of_batch(bucket)
            self._total.add(losses.detach().sum(), len(losses))
            yield losses

    def losses_in_one_pass(self, train: Examples, rows: list[int]) -> torch.Tensor:
        """The loss of each utterance, (utterances,), in the order of the rows; maybe of none."""
        if not rows:
            return torch.zeros(0, device=self._device)
        losses = self.of_batch(train.batch(rows))
        self._total.add(losses.detach().sum(), len(rows))
        return losses


# ---------------------------------------------------------------- gradients


def plain_backward(losses: StepLosses, train: Examples, micro_batches: MicroBatches) -> None:
    """The gradient of the mean over the micro-batches; an empty one counts as zero."""
    means = [losses.mean_loss(train, rows) for rows in micro_batches if rows]
    if means:
        mean = torch.stack(means).sum() / len(micro_batches)
        mean.backward()


def private_backward(
    optimizer: edpsgd.PrivateOptimizer,
    losses: StepLosses,
    train: Examples,
    micro_batches: MicroBatches,
    is_example_unit: bool,
    is_one_pass: bool,
) -> None:
    """Gives the optimizer one gradient for each unit of privacy, empty units included.

    Args:
        optimizer: what clips the gradients and adds them up.
        losses: of the model.
        train: the training examples.
        micro_batches: of this step.
        is_example_unit: whether each utterance is a unit; else each micro-batch is one.
        is_one_pass: whether the optimizer takes the micro-batches of a step in one backward pass.
    """
    if is_example_unit:
        rows = [unit[0] for unit in micro_batches if unit]
        _clip_examples(optimizer, losses, train, rows, drawn=len(micro_batches))
    elif is_one_pass:
        # The sampler knows which utterance is in which micro-batch, also of empty ones.
        optimizer.backward(losses.losses_in_one_pass(train, micro_batches[0]))
    else:
        _clip_one_by_one(optimizer, losses, train, micro_batches)


def _clip_examples(
    optimizer: edpsgd.PrivateOptimizer,
    losses: StepLosses,
    train: Examples,
    rows: list[int],
    drawn: int,
) -> None:
    """The gradient of every utterance by itself, those of a bucket in one backward pass."""
    for bucket_losses in losses.losses_by_bucket(train, rows):
        optimizer.backward(bucket_losses)
    # An utterance that was left out is a unit without a gradient.
    for _ in range(drawn - len(rows)):
        optimizer.accumulate()


def _clip_one_by_one(
    optimizer: edpsgd.PrivateOptimizer,
    losses: StepLosses,
    train: Examples,
    micro_batches: MicroBatches,
) -> None:
    """A backward pass for each micro-batch."""
    for number, rows in enumerate(micro_batches, 1):
        if rows:
            losses.mean_loss(train, rows).backward()
        # step() closes the last micro-batch by itself, but only if it finds a gradient.
        is_closed_by_step = number == len(micro_batches) and bool(rows)
        if not is_closed_by_step:
            optimizer.accumulate()
