"""Without noise: workers equal micro-batches equal the algorithm written in ten lines."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.common import Bag, Spy, assert_same, layers_of, private, reference_mean, set_gradients

STEPS, CLIP = 20, 0.3


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


SCALES = {"0.weight": 3.0, "0.bias": 0.5, "2.weight": 1.0, "2.bias": 0.7}


def data(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1000 * step + index)
    return torch.randn(5, 6), torch.randn(5, 3)


def backward(model: nn.Module, step: int, index: int) -> None:
    inputs, targets = data(step, index)
    nn.functional.mse_loss(model(inputs), targets).backward()


def train(per_worker: int, first: int, **settings) -> nn.Module:
    """Adam on micro-batches first, first + 1, … of every step."""
    model = build()
    optimizer = private(
        model, torch.optim.Adam(model.parameters(), lr=0.01), clip_norm=CLIP, noise_multiplier=0.0, **settings
    )
    for step in range(STEPS):
        for k in range(per_worker):
            optimizer.zero_grad()
            backward(model, step, first + k)
            if k < per_worker - 1:
                optimizer.accumulate()
        optimizer.step()
    return model


def train_reference(micro_batches: int, per_layer: bool, scales) -> nn.Module:
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        gradients = []
        for index in range(micro_batches):
            model.zero_grad()
            backward(model, step, index)
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        mean = reference_mean(gradients, CLIP, per_layer, scales)
        for name, parameter in model.named_parameters():
            parameter.grad = mean[name]
        optimizer.step()
    return model


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("scales", [None, SCALES], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("placement", ["sharded", "per_worker"])
def test_workers_equal_micro_batches_equal_reference(workers, clipping, scales, k, placement) -> None:
    settings = {"clipping": clipping, "layer_scaling": scales, "noise_placement": placement}
    spread = train(k, workers.rank * k, **settings)
    alone = train(k * workers.size, 0, collective="local", **settings)
    reference = train_reference(k * workers.size, clipping == "per_layer", scales)
    assert_same(spread, layers_of(alone))
    assert_same(spread, layers_of(reference))


def test_clipping_does_something() -> None:
    """The equalities above are worth something only if the clip norm bites."""
    model = build()
    backward(model, 0, 0)
    assert torch.stack([p.grad.norm() for p in model.parameters()]).norm() > 2 * CLIP


def test_clip_fraction_is_that_of_the_worker_itself(workers) -> None:
    """Worker r has r large gradients among its three."""
    model = Bag()
    optimizer = private(model, clip_norm=1.0)
    for k in range(3):
        set_gradients(model, 1.0 if k < workers.rank else 1e-6)
        optimizer.accumulate()
    optimizer.step()
    assert workers.gather(optimizer.clip_fraction) == [min(rank, 3) / 3 for rank in range(workers.size)]


def test_one_message_a_step(workers) -> None:
    model, spy = build(), Spy()
    optimizer = private(model, collective=spy)
    for _ in range(3):
        for _ in range(4):
            backward(model, 0, workers.rank)
            optimizer.accumulate()
        optimizer.step()
    assert spy.messages == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(workers, dtype) -> None:
    model = build().to(dtype)
    before, spy = layers_of(model), Spy()
    optimizer = private(model, clip_norm=1e4, noise_multiplier=0.0, collective=spy)
    inputs, targets = (t.to(dtype) for t in data(0, workers.rank))
    (model(inputs) - targets).square().mean().backward()
    own = {name: p.grad.float() for name, p in model.named_parameters()}
    optimizer.step()
    assert spy.sent[0].dtype == torch.promote_types(dtype, torch.float32)
    for name, gradients in own.items():
        mean = torch.stack(workers.gather(gradients)).mean(0)
        moved = before[name].float() - dict(model.named_parameters())[name].detach().float()
        torch.testing.assert_close(moved, mean, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compression(workers, compression) -> None:
    spy = Spy()
    if compression == "bf16" and type(spy.inner).__name__ == "Horovod":
        with pytest.raises(ValueError, match="bf16"):
            private(build(), noise_placement="per_worker", compression="bf16")
        return
    model = build()
    before = layers_of(model)
    optimizer = private(
        model,
        clip_norm=1e6,
        noise_multiplier=0.0,
        noise_placement="per_worker",
        compression=compression,
        collective=spy,
    )
    backward(model, 0, workers.rank)
    own = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    assert spy.sent[0].dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}[compression]
    for name, parameter in model.named_parameters():
        mean = torch.stack(workers.gather(own[name])).mean(0)
        torch.testing.assert_close(before[name] - parameter.detach(), mean, rtol=0.02, atol=1e-3)


def test_equals_horovod_without_privacy(hvd) -> None:
    def run(wrap) -> nn.Module:
        model = build()
        optimizer = wrap(model, torch.optim.Adam(model.parameters(), lr=0.01))
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, step, hvd.rank())
            optimizer.step()
        return model

    plain = run(lambda m, o: hvd.DistributedOptimizer(o, named_parameters=m.named_parameters()))
    wrapped = run(lambda m, o: private(m, o, clip_norm=1e9, noise_multiplier=0.0))
    assert_same(wrapped, layers_of(plain))
