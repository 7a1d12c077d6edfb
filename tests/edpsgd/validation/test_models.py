"""check_model: models that keep or mix what they see are refused."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import edpsgd


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean += x.mean()
        return self.weight * x


def test_check_model() -> None:
    edpsgd.check_model(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.Dropout()))
    edpsgd.check_model(nn.InstanceNorm1d(2), lambda: None)
    for norm in (nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True)):
        with pytest.raises(ValueError, match=rf"1 \({type(norm).__name__}\).*LayerNorm") as caught:
            edpsgd.check_model(nn.Sequential(nn.Linear(2, 2), norm))
        assert "track_running_stats" not in str(caught.value)  # without them, it is still no layer for examples


class FunctionalNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, None, None, training=True)


def test_check_model_refuses_statistics_of_the_batch() -> None:
    """For single examples; they are within the unit where micro-batches or users are clipped."""
    for norm in (nn.BatchNorm1d(2, track_running_stats=False), nn.BatchNorm2d(2, track_running_stats=False)):
        with pytest.raises(ValueError, match=rf"1 \({type(norm).__name__}\).*depends on the others"):
            edpsgd.check_model(nn.Sequential(nn.Linear(2, 2), norm))
        for unit in ("micro_batch", "user"):
            edpsgd.check_model(norm, unit=unit)
    model, batch = FunctionalNorm(), torch.randn(3, 2, 4)
    with pytest.raises(ValueError, match="statistics of the batch"):
        edpsgd.check_model(model, lambda: model(batch))
    edpsgd.check_model(model, lambda: model(batch), unit="micro_batch")
    per_example = nn.InstanceNorm1d(2)
    edpsgd.check_model(per_example, lambda: per_example(batch))
    with pytest.raises(ValueError, match="unit must be"):
        edpsgd.check_model(model, unit="batch")


class Keeper(nn.Module):
    """Keeps what it saw in a place of the test's choice."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.plain, self.several, self.pair = torch.zeros(2), [torch.zeros(2)], (torch.zeros(2), 1)
        self.named, self.last, self.array = {"a": {"b": torch.zeros(2)}}, deque([torch.zeros(2)]), np.zeros(2)
        self.object, self.none = SimpleNamespace(seen=torch.zeros(2)), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.place:
            case "plain":
                self.plain = x.mean(0)
            case r"several\[1\]":
                self.several.append(x.mean(0))
            case r"pair\[0\]":
                self.pair[0].data.add_(x.mean(0))
            case r"named\.a\.b":
                self.named["a"]["b"] = x.mean(0)
            case r"last\[0\]":
                self.last[0].add_(x.mean(0))
            case "array":
                self.array += x.mean(0).numpy()
            case r"object\.seen":
                self.object.seen = x.mean(0)
            case "none":
                self.none = x.mean(0)
        return x


@pytest.mark.parametrize(
    "place",
    ["plain", r"several\[1\]", r"pair\[0\]", r"named\.a\.b", r"last\[0\]", "array", r"object\.seen", "none"],
)
def test_check_model_watches_attributes(place) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Keeper(place))
    with pytest.raises(ValueError, match=rf"these change in forward .*: 1\.{place}\. Compute"):
        edpsgd.check_model(model, lambda: model(torch.ones(3, 2)))
    kept = model[1]
    held = [kept.plain, kept.several[0], kept.pair[0], kept.named["a"]["b"], kept.last[0], kept.object.seen]
    assert not any(bool(tensor.any()) for tensor in held)
    assert (kept.none, len(kept.several), kept.array.tolist()) == (None, 1, [0.0, 0.0])


def test_check_model_accepts_attributes_that_stay() -> None:
    model = nn.Sequential(nn.LSTM(2, 2), Keeper(""))  # an LSTM holds its weights in a list too
    edpsgd.check_model(model, lambda: (model[0](torch.ones(3, 2)), model[1](torch.ones(3, 2))))


@pytest.mark.parametrize("is_tracking", [True, False])
def test_check_model_refuses_statistics_over_workers(is_tracking) -> None:
    import horovod.torch as hvd

    for kind in (nn.SyncBatchNorm, hvd.SyncBatchNorm):
        with pytest.raises(ValueError, match=r"all of them: 1\. Use LayerNorm"):
            edpsgd.check_model(nn.Sequential(nn.Linear(2, 2), kind(2, track_running_stats=is_tracking)))


def test_check_model_refuses_observers() -> None:
    from torch.ao.quantization import MinMaxObserver

    with pytest.raises(ValueError, match=r"0 \(MinMaxObserver\)"):
        edpsgd.check_model(nn.Sequential(MinMaxObserver()))


def test_check_model_watches_buffers() -> None:
    model = Counter().eval()
    edpsgd.check_model(model)  # nothing known about it
    with pytest.raises(ValueError, match="these change in forward .* mean"):
        edpsgd.check_model(model, forward=lambda: model(torch.ones(3)))
    assert model.mean == 0
    assert not model.training
    mixed = nn.Sequential(model, nn.Dropout())
    with pytest.raises(ValueError, match=r"0\.mean"):
        edpsgd.check_model(mixed, forward=lambda: mixed(torch.ones(3)))
    assert (mixed.training, model.training) == (True, False)
    fixed = nn.LayerNorm(3)
    edpsgd.check_model(fixed, forward=lambda: fixed(torch.ones(3)))


def test_check_model_refuses_embeddings_that_move() -> None:
    with pytest.raises(ValueError, match="max_norm rescale the rows .* 1"):
        edpsgd.check_model(nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, max_norm=1.0)))
