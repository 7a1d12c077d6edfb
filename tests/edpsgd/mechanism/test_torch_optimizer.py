"""Everything that works on a torch optimizer works on the wrapped one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from edpsgd.mechanism.torch_optimizer import named_group
from tests.helpers.common import (
    Bag,
    assert_same,
    layers_of,
    private,
    set_gradients,
)
from tests.helpers.small_steps import build, train


def exact(model: nn.Module, inner: torch.optim.Optimizer, **settings):
    """A wrapper that changes nothing, to compare with the plain optimizer."""
    return private(model, inner, clip_norm=1e9, noise_multiplier=0.0, **settings)


def test_is_an_optimizer() -> None:
    model = build()
    inner = torch.optim.Adam(model.parameters())
    optimizer = exact(model, inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert "PrivateOptimizer" in repr(optimizer)
    assert "lr: 0.001" in repr(optimizer)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=30),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
    ],
)
def test_schedulers(schedule) -> None:
    model, plain = build(), build()
    optimizer = exact(model, torch.optim.Adam(model.parameters(), lr=0.05))
    reference = torch.optim.Adam(plain.parameters(), lr=0.05)
    scheduler, expected = schedule(optimizer), schedule(reference)
    train(model, optimizer, 10, scheduler.step)
    train(plain, reference, 10, expected.step)
    assert_same(model, layers_of(plain))
    assert scheduler.get_last_lr() == expected.get_last_lr()


def test_reduce_on_plateau() -> None:
    model = build()
    optimizer = exact(model, torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_parameter_groups(inner) -> None:
    def groups(model: nn.Module):
        return inner([{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}], lr=0.1)

    model, plain = build(), build()
    train(model, exact(model, groups(model)), 5)
    train(plain, groups(plain), 5)
    assert_same(model, layers_of(plain))


def test_add_param_group() -> None:
    model, plain = build(), build()
    optimizer = exact(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    reference = torch.optim.SGD(plain[2].parameters(), lr=0.1)
    train(model, optimizer, 2)
    train(plain, reference, 2)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
    reference.add_param_group({"params": plain[0].parameters(), "lr": 0.01})
    plain[0].zero_grad()  # plain torch would use the gradients that piled up
    train(model, optimizer, 3)
    train(plain, reference, 3)
    assert_same(model, layers_of(plain))


def test_zero_grad() -> None:
    model = build()
    optimizer = exact(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_gradients_are_consumed() -> None:
    """Forgetting zero_grad() does not use a gradient twice."""
    model, plain = build(), build()
    optimizer = exact(model, torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for seed in range(3):
        for network, opt in ((model, optimizer), (plain, reference)):
            torch.manual_seed(seed)
            network(torch.randn(2, 4)).sum().backward()
            opt.step()
        assert all(p.grad is None for p in model.parameters())
        reference.zero_grad()
    assert_same(model, layers_of(plain))


def test_hooks() -> None:
    model, calls = build(), []
    optimizer = exact(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.register_step_pre_hook(lambda *_: calls.append("before step"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after step"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("before save"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(f"before load {state['mine']}"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after load"))
    train(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before step", "after step", "before save", "before load 1", "after load"]


def test_inner_hooks_and_state_survive_wrapping() -> None:
    model, calls = build(), []
    inner = torch.optim.Adam(model.parameters())
    train(model, inner, 2)
    inner.register_step_post_hook(lambda *_: calls.append(1))
    optimizer = exact(model, inner)
    train(model, optimizer, 1)
    assert calls == [1]
    assert all(state["step"] == 3 for state in optimizer.state.values())


DATA = torch.ones(2, 4)


class Keeps(torch.optim.SGD):
    """Remembers the last gradient: the tensor, or a copy."""

    def __init__(self, parameters, copies: bool) -> None:
        super().__init__(parameters, lr=1.0)
        self.copies = copies

    def step(self, closure=None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["last"] = p.grad.clone() if self.copies else p.grad


@pytest.mark.parametrize("copies", [True, False])
def test_what_an_optimizer_keeps_of_a_gradient_stays_noised(copies) -> None:
    """The tensor itself would hold the next step's gradient before its noise, in a checkpoint too."""
    model = Bag()
    optimizer = private(model, Keeps(model.parameters(), copies))
    if not copies:
        with pytest.raises(ValueError, match="Keeps keeps .grad itself as 'last'"):
            optimizer.step()
        return
    optimizer.step()
    released = optimizer.state[model.p0]["last"].clone()
    set_gradients(model, 1e-3)
    optimizer.accumulate()
    assert torch.equal(optimizer.state_dict()["state"][0]["last"], released)


def test_a_group_as_torch_would_make_it() -> None:
    first, second = torch.zeros(1), torch.zeros(2)
    assert named_group({"params": first, "lr": 1.0})[0] == {"params": [first], "lr": 1.0}
    group, tensors = named_group({"params": iter([("a", first), ("b", second)])})
    assert [tensor is expected for tensor, expected in zip(tensors, (first, second), strict=True)] == [True, True]
    assert [name for name, _ in group["params"]] == ["a", "b"]
