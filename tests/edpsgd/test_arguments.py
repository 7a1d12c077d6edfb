"""Bad input is a ValueError that names the argument, what was given and what is allowed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import edpsgd
from tests.helpers.common import Bag, private, set_gradients


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm must be a finite number > 0, got 0.0"),
        ({"clip_norm": math.nan}, "clip_norm must be a finite number > 0, got nan"),
        ({"clip_norm": "1"}, "clip_norm must be a finite number > 0, got a str"),
        ({"noise_multiplier": -0.1}, "noise_multiplier must be a finite number >= 0, got -0.1"),
        ({"noise_multiplier": math.inf}, "noise_multiplier must be a finite number >= 0, got inf"),
        ({"noise_decay": 0.5}, "noise_decay must be None or a callable"),
        ({"clipping": "layer"}, "clipping must be one of 'flat', 'per_layer', got 'layer'"),
        ({"unit": "word"}, "unit must be one of 'micro_batch', 'example', 'user', got 'word'"),
        ({"unit": "example"}, "unit='example' needs divisor"),
        ({"unit": "example", "divisor": 0}, "divisor must be a finite number > 0, got 0"),
        ({"unit": "example", "divisor": 8, "noise": "paper"}, "noise='paper' is defined for unit='micro_batch'"),
        ({"divisor": 8}, "divisor is for unit='example'"),
        ({"noise": "none"}, "noise must be one of 'calibrated', 'paper', got 'none'"),
        ({"noise_placement": "root"}, "noise_placement must be one of 'sharded', 'per_worker', got 'root'"),
        ({"compression": "int8"}, "compression must be one of None, 'fp16', 'bf16', got 'int8'"),
        ({"compression": "fp16"}, "compression needs noise_placement='per_worker'"),
        ({"seed": 1.5}, "seed must be None or an int, got a float"),
        ({"collective": "mpi"}, "collective must be 'auto', 'horovod', 'torch', 'local' or an object, got 'mpi'"),
        ({"collective": object()}, "collective must have rank, size, sum_ and gather"),
        ({"layer_scaling": 2.0}, "layer_scaling must be None, a mapping"),
        ({"layer_scaling": {"p0": 1.0}}, "layer_scaling has no entry for the parameters p1, p2"),
        ({"layer_scaling": {"p0": 1, "p1": 0, "p2": 1}}, r"layer_scaling\['p1'\] must be a finite number > 0, got 0"),
        ({"layer_scaling": {"p0": 1, "p1": 1, "p2": 1, "p3": 1}}, "parameters that do not exist: p3"),
    ],
)
def test_settings(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        private(Bag(), **settings)


def test_no_other_keywords_and_no_positions() -> None:
    model = Bag()
    with pytest.raises(TypeError):
        private(model, batch_size=3)
    with pytest.raises(TypeError):
        edpsgd.PrivateOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters(), 1.0, 1.0)


@pytest.mark.parametrize("tau", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("decay", [edpsgd.LinearDecay, edpsgd.ExponentialDecay])
def test_decays(decay, tau) -> None:
    with pytest.raises(ValueError, match="tau must be a finite number >= 0"):
        decay(tau)


@pytest.mark.parametrize("z", [0.0, -1.0, math.nan])
def test_first_step_norms(z) -> None:
    with pytest.raises(ValueError, match="noise_multiplier of FirstStepNorms"):
        edpsgd.FirstStepNorms(z)


@pytest.mark.parametrize("epoch", [-1, 1.0, True, None])
def test_epochs(epoch) -> None:
    with pytest.raises(ValueError, match="epoch must be an int >= 0"):
        private(Bag()).set_epoch(epoch)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, "a"])
def test_factors_of_a_callable(factor) -> None:
    optimizer = private(Bag(), noise_decay=lambda t: factor if t == 2 else 1.0)
    optimizer.set_epoch(1)
    with pytest.raises(ValueError, match=r"noise_decay\(2\) must be a finite number > 0"):
        optimizer.set_epoch(2)


def test_order_of_calls() -> None:
    model = Bag()
    optimizer = private(model)
    optimizer.accumulate()
    with pytest.raises(RuntimeError, match=r"set_epoch\(\) between"):
        optimizer.set_epoch(1)
    with pytest.raises(RuntimeError, match=r"add_param_group\(\) between"):
        optimizer.add_param_group({"params": [model.p0]})
    model.p0.requires_grad_(False)
    with pytest.raises(RuntimeError, match="added, frozen or moved between"):
        optimizer.accumulate()


def test_closures_and_sparse_gradients() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = private(model)
    with pytest.raises(ValueError, match=r"step\(closure\)"):
        optimizer.step(lambda: 0.0)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="weight has a sparse gradient"):
        optimizer.step()
    assert not any(event.steps for event in optimizer.ledger.events)


def test_parameters() -> None:
    model = Bag()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    def wrap(named, optimizer=inner):
        return edpsgd.PrivateOptimizer(optimizer, named, clip_norm=1.0, noise_multiplier=1.0)

    with pytest.raises(ValueError, match="pairs"):
        wrap(model.parameters())
    with pytest.raises(ValueError, match="is empty"):
        wrap([])
    with pytest.raises(ValueError, match="twice"):
        wrap([*model.named_parameters(), ("again", model.p0)])
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        wrap((f"module.{name}", p) for name, p in model.named_parameters())
    with pytest.raises(ValueError, match="must be a torch.optim.Optimizer, got Bag"):
        wrap(model.named_parameters(), model)
    with pytest.raises(ValueError, match="LBFGS"):
        wrap(model.named_parameters(), torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="private already"):
        wrap(model.named_parameters(), wrap(model.named_parameters()))
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        wrap(model.named_parameters())


def test_everything_frozen_during_training() -> None:
    model = Bag()
    optimizer = private(model)
    set_gradients(model)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda: private(Bag(), seed=np.int64(123456789)),
        lambda: edpsgd.ShuffledBatches(8, 2, collective="local", seed="123456789"),
        lambda: edpsgd.FedAvg(["call anna at 123456789"]),
        lambda: edpsgd.Budget(["call anna at 123456789"], 1e-5),
    ],
)
def test_seeds_and_texts_are_not_told(make) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        make()
    assert "123456789" not in str(caught.value)
