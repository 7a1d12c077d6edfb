"""Whether the loss of an example depends on the other examples of its batch: tried before training (section 14).

What is clipped must be the gradient of one example (privacy.md section 14). If its loss changes with the others of its
batch, one example can move the clipped gradients of all others, and no noise is meant for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from edpsgd._arguments import check_number
from edpsgd.validation.loss_trial import Losses, LossTrial
from edpsgd.validation.perturbed_weights import move_parameters
from edpsgd.validation.quiet_forward import QuietTraining, quiet_training

_ROUNDS = 3  # each with other random numbers, for what mixes only sometimes, and with other weights


class ToldOptimizer(Protocol):
    """What is told that the losses passed: a PrivateOptimizer."""

    def note_checked_losses(self) -> None:
        """Says that no loss depends on other examples."""


def check_losses(
    losses: Losses | nn.Module,
    examples: Sequence[Any],
    *,
    model: nn.Module | None = None,
    optimizer: ToldOptimizer | None = None,
    tolerance: float | None = None,
) -> None:
    """Refuses losses that depend on other examples: clipping them one by one would protect nobody.

    ``losses`` is called on all examples, on each alone, and on random selections in other orders and sizes: with and
    without the longest, with examples repeated, and with as many examples as tokens. Every dropout is off meanwhile,
    the rest is in training mode. Gradients are compared too. Parameters, buffers, attributes, modes and random
    generators are left as they were.

    It is a trial and no proof. Give it examples of different lengths and labels, eight or more. What it finds in
    half precision is coarser: a loss may change by 2 % under bfloat16 autocast (and one below 1.5 by 0.03) and by 1 %
    under float16, but by 0.01 % in float32.

    Args:
        losses: a function or module from a list of examples to one loss for each, (B,); padding and collation are
            in it.
        examples: two or more.
        model: the module that it computes with, if that is not ``losses`` itself. Without one, dropout is still off in
            all functions of torch, but the model's mode stays, and what the calls change in it is not put back.
        optimizer: the PrivateOptimizer to tell that the losses passed.
        tolerance: the largest relative change of a loss that counts as rounding, ten times as much for gradients.
            None follows the coarsest precision that the losses are computed in.

    Raises:
        ValueError: saying by how much which example's loss or gradient changed, by its number in ``examples``.

    Example:
        >>> import torch
        >>> layer = nn.Linear(3, 1)
        >>> check_losses(lambda batch: layer(torch.stack(batch)).square().mean(1), list(torch.randn(8, 3)), model=layer)
    """
    examples = list(examples)
    if len(examples) < 2:
        raise ValueError(f"examples must be at least two to see whether they are independent, got {len(examples)}")
    if not callable(losses):
        raise ValueError(f"losses must be a function or module of a list of examples, got {type(losses).__name__}")
    if tolerance is not None:
        check_number("tolerance", tolerance, 0.0, strict=True)
    modules = [module for module in (losses, model) if isinstance(module, nn.Module)]
    with quiet_training(modules) as training:
        trial = LossTrial(losses, examples, training, tolerance, modules)
        trial.compare_losses(seed=0)
        trial.compare_gradients(seed=0)
        _check_parameters(training, modules)
        trial.compare_draws()
        for seed in range(1, _ROUNDS):
            move_parameters(modules, seed, trial.distance)
            trial.compare_with_moved_weights(seed)
    if optimizer is not None:
        optimizer.note_checked_losses()


def _check_parameters(training: QuietTraining, modules: Sequence[nn.Module]) -> None:
    """Refuses losses whose calls have changed a parameter."""
    names = {name for module in modules for name, _ in module.named_parameters()}
    changed = [name for name in training.before.changes() if name in names]
    if changed:
        raise ValueError(
            f"parameters change in forward and would carry private data unprotected: {', '.join(changed[:5])}. "
            "Only the optimizer may change them"
        )
