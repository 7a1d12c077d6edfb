"""The figures of an epoch: the mean loss over checkpoints, clipping, noise, and the line for people."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from edpsgd.schedules import parse_decay
from tasks.nlu.noise_plan import Plan
from tasks.nlu.training_figures import LossSum, epoch_figures, figures_text
from tasks.nlu.training_state import State

PRIVATE = SimpleNamespace(clip_fraction=0.25, discarded=1)  # what the figures read of an optimizer


def test_the_mean_is_over_what_checkpoints_have_and_what_came_since() -> None:
    total, state = LossSum(torch.device("cpu")), State()
    assert total.mean_with(state) == 0.0
    total.add(torch.tensor(6.0), 3)
    assert total.mean_with(state) == 2.0
    total.move_into(state)
    assert (state.loss, state.utterances) == (6.0, 3)
    assert total.mean_with(state) == 2.0
    total.add(torch.tensor(4.0), 1)
    assert total.mean_with(state) == 2.5
    total.clear()
    assert total.mean_with(state) == 2.0


@pytest.mark.parametrize(("decay", "noise"), [("none", 1.5), ("linear:4", 1.5 / (1 + 4 * 2))])
def test_noise_of_the_epoch(decay, noise) -> None:
    plan = Plan(1.5, parse_decay(decay), epochs=3, steps=5, report=None)
    found = epoch_figures(0.5, 2, PRIVATE, plan)
    assert found.pop("noise_multiplier") == pytest.approx(noise)
    assert found == {"loss": 0.5, "clip_fraction": 0.25, "discarded": 1}


def test_plain_training_has_a_loss_and_nothing_else() -> None:
    assert epoch_figures(0.5, 2, None, None) == {"loss": 0.5}


def test_the_line_for_people() -> None:
    figures = {"loss": 0.5, "clip_fraction": 0.25, "discarded": 1, "noise_multiplier": 1.5}
    assert figures_text(figures, None) == "loss 0.500"
    assert figures_text(figures, "2.000*") == "loss 0.500   clipped 25%   noise 1.5   ε 2.000*"
