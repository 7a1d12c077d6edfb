"""The comparisons of check_losses, one by one. What they find in models is in test_losses.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edpsgd.validation.loss_trial import LossTrial
from edpsgd.validation.quiet_forward import quiet_training

EXAMPLES = list(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))


def compare(kind: str, losses, modules) -> None:
    with quiet_training(modules) as training:
        trial = LossTrial(losses, EXAMPLES, training, None, modules)
        if kind == "draws":
            trial.compare_draws()
        else:
            getattr(trial, f"compare_{kind}")(seed=0)


@pytest.mark.parametrize("kind", ["losses", "gradients", "draws"])
def test_losses_of_single_examples_pass(kind) -> None:
    layer = nn.Linear(4, 1)
    compare(kind, lambda batch: layer(torch.stack(batch)).squeeze(1).square(), [layer])


@pytest.mark.parametrize("kind", ["losses", "draws"])
def test_a_mean_over_the_batch_is_found_by_its_losses(kind) -> None:
    layer = nn.Linear(4, 1)

    def losses(batch):
        return layer(torch.stack(batch) - torch.stack(batch).mean(0)).squeeze(1).square()

    with pytest.raises(ValueError, match="the loss of example"):
        compare(kind, losses, [layer])


def test_gradients_that_mix_are_found_though_losses_are_right() -> None:
    layer = nn.Linear(4, 1)

    def losses(batch):
        single = layer(torch.stack(batch)).squeeze(1).square()
        return single + single.sum() - single.sum().detach()

    compare("losses", losses, [layer])
    with pytest.raises(ValueError, match="the gradient of example"):
        compare("gradients", losses, [layer])


@pytest.mark.parametrize(
    ("precision", "tolerance", "distance"),
    [(torch.float64, 1e-9, 1.0), (torch.float32, 1e-4, 1.0), (torch.float16, 1e-2, 0.1), (torch.bfloat16, 2e-2, 0.1)],
)
def test_the_precision_sets_the_tolerance(precision, tolerance, distance) -> None:
    with quiet_training([]) as training:
        training.watch.precision = precision
        trial = LossTrial(len, EXAMPLES, training, None, [])
        assert (trial.tolerance, trial.distance) == (tolerance, distance)
        assert LossTrial(len, EXAMPLES, training, 0.5, []).tolerance == 0.5
