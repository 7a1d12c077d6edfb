"""Snapshots of modules: what has changed is named, and put back."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import nn

from edpsgd.validation.module_state import Snapshot


def kept() -> nn.Module:
    layer = nn.Linear(2, 1)
    layer.register_buffer("mean", torch.zeros(1))
    layer.queue = deque([torch.zeros(2)])
    layer.table = {"a": [np.zeros(2)]}
    layer.none = None
    return layer


def test_changes_are_named_and_put_back() -> None:
    layer = kept()
    before = Snapshot([layer])
    assert before.changes() == []
    layer.weight.data.add_(1.0)
    layer.mean += 1
    layer.queue.append(torch.ones(1))
    layer.table["a"][0] += 1
    layer.none = torch.ones(1)
    assert set(before.changes()) == {"weight", "mean", "queue[1]", "table.a[0]", "none"}
    before.restore()
    assert before.changes() == []
    assert (len(layer.queue), layer.none, layer.table["a"][0].tolist()) == (1, None, [0.0, 0.0])


def test_what_is_gone_or_resized_is_a_change_and_nan_is_none() -> None:
    layer = kept()
    layer.mean += torch.nan
    before = Snapshot([layer])
    assert before.changes() == []
    layer.mean = torch.zeros(3)
    layer.queue.clear()
    assert before.changes() == ["mean", "queue[0]"]


def test_without_parameters_only_the_rest_is_kept() -> None:
    layer = kept()
    before = Snapshot([layer], with_parameters=False)
    layer.weight.data.add_(1.0)
    assert before.changes() == []


def test_a_parameter_that_stayed_keeps_its_version() -> None:
    """Writing into it would spoil a graph that somebody has kept."""
    layer = kept()
    loss = layer(torch.ones(1, 2)).square().sum()
    Snapshot([layer]).restore()
    loss.backward()
    assert layer.weight.grad is not None
