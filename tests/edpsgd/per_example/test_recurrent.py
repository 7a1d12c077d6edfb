"""The gates of LSTM layers that oneDNN runs as one operation."""

from __future__ import annotations

import pytest
import torch

from edpsgd.per_example import UnitGradients, recurrent
from tests.edpsgd.per_example.zoo import Sequences, lstm_layers, made
from tests.helpers.unit_loop import Fast, check, trained


@pytest.mark.parametrize("is_garbage", [True, False])
def test_gates_that_were_kept(is_garbage: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken, unless they are not what the weights make of the states."""
    used: list[bool] = []
    kept_gates = recurrent._kept_gates

    def spy(use: object, workspace: torch.Tensor, *states: torch.Tensor) -> torch.Tensor | None:
        gates = kept_gates(use, torch.zeros_like(workspace) if is_garbage else workspace, *states)
        used.append(gates is not None)
        return gates

    monkeypatch.setattr(recurrent, "_kept_gates", spy)
    model = made("LSTM, padded, both ways, 2 layers")
    losses = model(Sequences(4, 3, 0))
    lstm_layers(losses)
    with Fast():
        check(UnitGradients(trained(model)), model, losses)
    assert used
    assert not any(used) if is_garbage else all(used)
