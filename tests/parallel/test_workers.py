"""The workers of a training job: the mean gradient of plain training, the same model, and errors that reach all."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from tasks.common.workers import Workers
from tests.helpers.common import layers_of


@pytest.fixture
def team(workers) -> Workers:
    launcher = "horovod" if "HOROVOD_RANK" in os.environ else "torch" if workers.size > 1 else "local"
    return Workers(launcher, workers, torch.device("cpu"))


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def test_the_mean_gradient(team) -> None:
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = team.averaged(torch.optim.SGD(model.parameters(), lr=1.0), model)
    (model.weight.sum() * (team.collective.rank + 1)).backward()
    optimizer.step()
    mean = sum(range(1, team.collective.size + 1)) / team.collective.size
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 3), -mean))


def test_a_worker_without_data_counts_as_zero(team) -> None:
    model = nn.Linear(3, 2)
    optimizer = team.averaged(torch.optim.SGD(model.parameters(), lr=1.0), model)
    team.broadcast(model)
    before = layers_of(model)
    for number in range(2):
        optimizer.zero_grad()
        if team.is_first:
            model(torch.ones(4, 3)).sum(dim=1).mean().backward()
        optimizer.step()
        moved = (number + 1) / team.collective.size
        torch.testing.assert_close(model.weight.detach(), before["weight"] - moved)
        torch.testing.assert_close(model.bias.detach(), before["bias"] - moved)


def test_plain_training_equals_one_process(team) -> None:
    """Each worker has its share of every batch; the model is that of one process with whole batches."""
    model, alone = network(), network()
    for parameter in (model[0].bias, alone[0].bias):
        parameter.requires_grad_(False)
    settings = {"lr": 0.05, "weight_decay": 0.1, "fused": True}
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **settings)
    optimizer = team.averaged(inner, model)
    reference = torch.optim.AdamW([p for p in alone.parameters() if p.requires_grad], **settings)
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        inputs = torch.randn(12, 5, generator=generator)
        targets = inputs.prod(dim=1, keepdim=True)
        mine = slice(team.collective.rank, None, team.collective.size)
        for network_, stepped, part in ((model, optimizer, mine), (alone, reference, slice(None))):
            stepped.zero_grad()
            nn.functional.mse_loss(network_(inputs[part]), targets[part]).backward()
            stepped.step()
    assert max(float((alone.state_dict()[name] - old).abs().max()) for name, old in layers_of(network()).items()) > 0.1
    for (name, found), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_every_worker_gets_the_model_of_the_first(team) -> None:
    model = network(seed=team.collective.rank)
    team.broadcast(model)
    for name, expected in network(seed=0).state_dict().items():
        assert torch.equal(model.state_dict()[name], expected)


def test_what_is_done_together(team) -> None:
    assert team.together(lambda: team.collective.rank) == team.collective.rank
    assert team.on_first(lambda: "done") == ("done" if team.is_first else None)


@pytest.mark.parametrize("who", ["first", "last"])
def test_an_error_of_one_is_an_error_of_all(team, who) -> None:
    rank = 0 if who == "first" else team.collective.size - 1

    def fail() -> None:
        if team.collective.rank == rank:
            raise OSError(28, "No space left on device")

    mine = team.collective.rank == rank
    with pytest.raises(
        OSError if mine else ValueError, match="No space" if mine else f"worker {rank} failed: .*No space"
    ):
        team.together(fail)
    assert team.together(lambda: 1) == 1  # nobody waits for anybody
