"""From losses of examples to the units that are clipped: one call of ``backward(losses)``."""

from __future__ import annotations

import torch

from edpsgd.sampling.base import Batches

_OPEN_EXAMPLE = (
    "step() found a gradient that was not closed as that of one example, and the mean over a batch is none: with "
    "unit='example' call optimizer.backward(losses) with one loss for each example, or optimizer.accumulate() after "
    "the backward of each"
)


def check_one_for_each(losses: object) -> None:
    """Refuses losses that are no vector."""
    if isinstance(losses, torch.Tensor) and losses.dim() == 1:
        return
    shape = getattr(losses, "shape", None)
    found = f"a {type(losses).__name__}" if shape is None else f"shape {tuple(shape)}"
    raise ValueError(f"losses must be one number for each example, a tensor of shape (B,), got {found}")


def refusal_of_open_unit(unit: str, batches: Batches | None) -> Exception | None:
    """Why a gradient that step() finds cannot be a unit, if it cannot.

    Without a sampler nobody knows how many examples are in it.
    """
    is_known = unit != "example" or batches is not None
    return None if is_known else RuntimeError(_OPEN_EXAMPLE)


def expected_units(given: float | None, unit: str, batches: Batches | None) -> float | None:
    """The public, expected number of examples or users in a step, over all workers.

    It is the one given, or what the sampler expects. For micro-batches there is none, as they are
    counted.
    """
    if batches is None or unit == "micro_batch":
        return given
    return given or batches.expected_batch


# ---------------------------------------------------------------- which unit an example is in


def group_examples(
    losses: torch.Tensor,
    units: torch.Tensor | None,
    count: int | None,
    unit: str,
    batches: Batches | None,
) -> tuple[torch.Tensor | None, int | None]:
    """The unit of each example, and how many units there are.

    Args:
        losses: one for each example, (B,).
        units: the number of each example's micro-batch, (B,), as the user says it.
        count: how many micro-batches there are, as the user says it.
        unit: what is clipped, "example" or "micro_batch".
        batches: the sampler that drew the examples, if there is one.

    Returns:
        The number of each example's unit, (B,), or None if each is its own; and the number of units,
        of which the last may be empty, or None if nobody has said.
    """
    if unit == "user":
        raise ValueError("backward(losses) is for examples and micro-batches: use edpsgd.Federated for users")
    if unit == "example":
        if units is not None:
            raise ValueError("units are for unit='micro_batch': with unit='example' every loss is one of its own")
        return _single_examples(len(losses), batches)
    if units is None:
        sizes = [len(losses)] if batches is None else batches.sizes(len(losses))
        return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)), len(sizes)
    if batches is not None:
        raise ValueError("units are for training without a sampler: this one knows its micro-batches")
    return units, count


def _single_examples(examples: int, batches: Batches | None) -> tuple[torch.Tensor | None, int]:
    """Every example is a unit of its own.

    In the last step of an epoch a sampler with batches of one example may have fewer examples than
    batches: then the last units are empty.
    """
    if batches is None or not batches.is_whole(examples):
        return None, examples
    made = batches.micro_batches or 0
    if made > examples:
        return torch.arange(examples), made
    return None, examples


def empty_units(batches: Batches | None, closed: int) -> int:
    """How many empty units a step closes that finds no gradient, after so many were closed before."""
    if batches is None:
        return int(closed < 1)
    made = batches.micro_batches or 1
    if batches.is_whole(0):  # they would have come together, and the draw was empty
        return max(0, made - closed)
    return int(closed < made)


# ---------------------------------------------------------------- losses that come again


def claim_losses(losses: torch.Tensor, owner: object) -> None:
    """Refuses losses that went through backward() before.

    What they tell of their examples would be released twice.
    """
    if losses.grad_fn is None:
        return
    claims: dict[str, int] = losses.grad_fn.metadata  # type: ignore[assignment]  # lives as long as the graph
    key = _claim(losses)
    if key not in claims:
        claims[key] = id(owner)
        return
    if claims[key] == id(owner):
        raise RuntimeError(
            "these losses went through backward() before: every example would count twice. Compute them again"
        )
    raise RuntimeError(
        "these losses went through backward() of another PrivateOptimizer: every example would be released by both, "
        "and neither ledger counts what the other releases. Give all parameters to one PrivateOptimizer, in several "
        "groups if they need different learning rates"
    )


def release_losses(losses: torch.Tensor) -> None:
    """Withdraws the claim, if nothing came of it."""
    if losses.grad_fn is not None:
        losses.grad_fn.metadata.pop(_claim(losses), None)  # type: ignore[attr-defined]


def _claim(losses: torch.Tensor) -> str:
    """The claim's name: a node can have several outputs, such as the parts of a split."""
    return f"edpsgd.backward {losses.output_nr}"
