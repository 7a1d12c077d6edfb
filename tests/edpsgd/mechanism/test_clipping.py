"""The share of clipped micro-batches, on gradients whose norms are known."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

import edpsgd
from edpsgd import FedAvg, FedSGD, PoissonUsers
from edpsgd.mechanism.clipping import ClipCounter
from tests.helpers.common import Bag, private, quiet
from tests.helpers.federation import Point, pushed, training

NAN, INF = float("nan"), float("inf")


def close(model: Bag, optimizer: edpsgd.PrivateOptimizer, *norms: float | None) -> None:
    """A micro-batch whose layers have these gradient norms."""
    for parameter, norm in zip(model.parameters(), norms, strict=True):
        parameter.grad = None
        if norm is not None:
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[0] = norm
    optimizer.accumulate()


def made(**settings) -> tuple[Bag, edpsgd.PrivateOptimizer]:
    model = Bag((4, 4))
    return model, private(model, **settings)


def test_flat() -> None:
    model, optimizer = made(clip_norm=5.0)
    close(model, optimizer, 3.0, 4.0)  # exactly the bound
    close(model, optimizer, 3.0, 4.5)  # 5.41
    close(model, optimizer, 0.0, 0.0)
    close(model, optimizer, 4.9, None)
    optimizer.step()
    assert optimizer.clip_fraction == 0.25


def test_flat_with_scales() -> None:
    """α = (0.6, 0.8)·√2, so the norm is that of (3/0.849, 4/1.131) = (3.536, 3.536): exactly 5."""
    scales = {"p0": 3.0, "p1": 4.0}
    for clip_norm, expected in ((5.1, 0.0), (4.9, 1.0)):
        model, optimizer = made(clip_norm=clip_norm, layer_scaling=scales)
        close(model, optimizer, 3.0, 4.0)
        assert optimizer.clip_fraction == expected


def test_per_layer() -> None:
    """Two layers share C = √2 evenly: each has 1. One that exceeds it is enough."""
    model, optimizer = made(clip_norm=math.sqrt(2.0), clipping="per_layer")
    for norms in ((0.9, 0.9), (0.1, 1.1), (1.1, None), (1.1, 1.1), (None, 0.9)):
        close(model, optimizer, *norms)
    optimizer.step()
    assert optimizer.clip_fraction == pytest.approx(3 / 5)
    close(model, optimizer, 0.0, 1.3)  # as flat clipping, 1.3 would be below √2
    assert optimizer.clip_fraction == pytest.approx(4 / 6)


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_discarded_and_empty_micro_batches_do_not_count(clipping) -> None:
    model, optimizer = made(clipping=clipping)
    for norms in ((NAN, 1.0), (INF, 9.0), (9.0, -INF), (None, None), (9.0, 9.0), (0.1, 0.1), (0.1, None)):
        close(model, optimizer, *norms)
    with quiet():
        optimizer.step()
    assert optimizer.discarded == 3
    assert optimizer.clip_fraction == pytest.approx(1 / 3)


def test_every_epoch_begins_anew() -> None:
    model, optimizer = made()
    assert math.isnan(optimizer.clip_fraction)
    for epoch in range(2):
        optimizer.set_epoch(epoch)
        assert math.isnan(optimizer.clip_fraction)
        close(model, optimizer, 9.0, 9.0)
        optimizer.step()
        assert optimizer.clip_fraction == 1.0
    close(model, optimizer, 0.1, 0.1)
    assert optimizer.clip_fraction == pytest.approx(1 / 2)
    assert optimizer.clip_fraction == pytest.approx(1 / 2)  # reading changes nothing


def test_the_step_that_measures_scales_clips_nothing() -> None:
    model, optimizer = made(layer_scaling=edpsgd.FirstStepNorms(1.0))
    close(model, optimizer, 9.0, 9.0)
    optimizer.step()
    assert math.isnan(optimizer.clip_fraction)
    close(model, optimizer, 9.0, 9.0)
    assert optimizer.clip_fraction == 1.0


def test_a_scaled_loss_is_no_reason_to_clip() -> None:
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))  # lets it make its tensors
    for norm in (0.5, 2.0):
        model.p0.grad = torch.tensor([1024.0 * norm, 0.0, 0.0, 0.0])
        optimizer.accumulate(scaler=scaler)
        assert optimizer.clip_fraction == (0.0 if norm < 1 else 0.5)


def test_copies_count_by_themselves() -> None:
    model, optimizer = made()
    close(model, optimizer, 9.0, 9.0)
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert math.isnan(other.clip_fraction)
    assert optimizer.clip_fraction == 1.0


def test_counting_follows_the_model_to_another_device() -> None:
    counter, meta = ClipCounter(), torch.device("meta")
    counter.add(torch.tensor(0.5), torch.tensor(True))
    counter.add(torch.ones((), device=meta), torch.ones((), dtype=torch.bool, device=meta))
    assert counter._counts is not None
    assert counter._counts.device == meta


@pytest.mark.parametrize("local", [FedSGD(1.0), FedAvg(1.0, epochs=2)])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_the_clip_fraction_of_users_counts_their_own_updates(local, clipping) -> None:
    sizes = [100.0, 0.01, 50.0, 0.02, 1000.0]
    model = Point()
    users = PoissonUsers(len(sizes) + 1, 1.0, collective="local")
    federated = training(model, users, local, clip_norm=1.0, clipping=clipping)
    direction = torch.ones(5) / 5**0.5
    federated.round(lambda user: [sizes[user] * direction] if user < len(sizes) else [], pushed(model))
    assert federated.optimizer.clip_fraction == 3 / 5  # and the user without data does not count
