"""What the workers of a training must have alike, in words; ``distributed/consensus.py`` compares it.

It is compared when the optimizer is made, and in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from edpsgd.bookkeeping import Bookkeeping
from edpsgd.ledger.budget import Budget, BudgetExhausted
from edpsgd.ledger.records import RunRecord
from edpsgd.mechanism.accumulator import StepAccumulator
from edpsgd.mechanism.parameters import Layers, describe_parameters


def describe_start(
    run: RunRecord,
    named: Mapping[str, torch.Tensor],
    layers: Layers,
    budget: Budget | None,
    has_ledger_file: bool,
) -> dict[str, Any]:
    """What is compared between the workers when they make their optimizers.

    Args:
        run: the settings, as the ledger records them.
        named: all parameters of the model, by name.
        layers: those that are trained.
        budget: what may be spent, if there is a limit.
        has_ledger_file: whether this worker was given one.
    """
    return {
        **run.to_json(),
        **describe_parameters(named),
        "the trained parameters": layers.description,
        "budget": repr(budget),
        "whether there is a ledger file": has_ledger_file,
    }


def describe_step(
    bookkeeping: Bookkeeping,
    accumulator: StepAccumulator,
    *,
    refusal: Exception | None,
    number: int,
    epoch: int | None,
    noise_multiplier: float,
) -> dict[str, Any]:
    """What is compared between the workers in a step, as a fingerprint in its message.

    The first difference is what the error names, so that reasons stand before what follows from
    them.

    Args:
        bookkeeping: of this worker.
        accumulator: of this worker, with its settings and layers.
        refusal: why this worker must not take the step, if it must not.
        number: of the step.
        epoch: what set_epoch said last, None before.
        noise_multiplier: of the epoch.
    """
    settings = accumulator.settings
    is_counted = settings.unit == "micro_batch"  # other units follow each worker's draw
    return {
        "whether the workers are those of the start": _in_words(bookkeeping.displaced()),
        "whether the step may be taken": _in_words(refusal),
        "the number of micro-batches in a step": accumulator.closed if is_counted else None,
        "the step counter": number,
        "the epoch": epoch,
        "the noise multiplier": noise_multiplier,
        "the clip norm": settings.clip_norm,
        "the trained parameters": accumulator.layers.description,
        "the step of the epoch": bookkeeping.position,
        "the draws": bookkeeping.draws,
    }


def _in_words(refusal: Exception | None) -> str:
    """What workers compare; not what each has spent, as they may know of other conditions."""
    if refusal is None:
        return "yes"
    return "no, the budget" if isinstance(refusal, BudgetExhausted) else f"no, {refusal}"
