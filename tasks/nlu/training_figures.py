"""What a training tells of itself: the mean loss of an epoch, clipping and noise.

The figures are those of worker 0, for people who run the job. No noise covers them.
"""

from __future__ import annotations

import torch

import edpsgd
from tasks.nlu.noise_plan import Plan
from tasks.nlu.training_state import State


class LossSum:
    """Losses since the last checkpoint, which are not in the state of the training yet.

    The sum stays on the device: to read it after every step would wait for the device.

    Args:
        device: where the losses are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), device=device)
        self._utterances = 0

    def add(self, loss_sum: torch.Tensor, utterances: int) -> None:
        """Adds the summed losses, a scalar without a graph, of so many utterances."""
        self._sum += loss_sum
        self._utterances += utterances

    def move_into(self, state: State) -> None:
        """Adds the sum to the state, and begins anew."""
        state.loss += float(self._sum)
        state.utterances += self._utterances
        self.clear()

    def clear(self) -> None:
        """Begins anew."""
        self._sum.zero_()
        self._utterances = 0

    def mean_with(self, state: State) -> float:
        """The mean loss of the utterances of this epoch: those of the state and those here."""
        utterances = state.utterances + self._utterances
        return (state.loss + float(self._sum)) / max(1, utterances)


def epoch_figures(
    mean_loss: float,
    epoch: int,
    optimizer: edpsgd.PrivateOptimizer | None,
    plan: Plan | None,
) -> dict[str, float]:
    """The figures of an epoch by their names in metrics.jsonl.

    Args:
        mean_loss: of the epoch so far.
        epoch: counted from 0.
        optimizer: the private one; None for plain training, whose only figure is the loss.
        plan: the noise; None for plain training.
    """
    if optimizer is None or plan is None:
        return {"loss": mean_loss}
    decay_factor = 1.0 if plan.decay is None else plan.decay(epoch)
    return {
        "loss": mean_loss,
        # since the epoch or, after a resume, the process began
        "clip_fraction": optimizer.clip_fraction,
        "discarded": optimizer.discarded,
        "noise_multiplier": plan.noise_multiplier * decay_factor,
    }


def figures_text(figures: dict[str, float], epsilon: object) -> str:
    """The figures as part of a line; those of privacy only if there is an ε to show."""
    text = f"loss {figures['loss']:.3f}"
    if epsilon is None:
        return text
    clipped, noise = figures["clip_fraction"], figures["noise_multiplier"]
    return f"{text}   clipped {clipped:.0%}   noise {noise:.3g}   ε {epsilon}"
