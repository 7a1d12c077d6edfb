"""Everything that works on a torch optimizer works on the wrapped one."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import edpsgd
from tests.helpers.common import (
    Bag,
    Spy,
    assert_same,
    assert_std,
    layers_of,
    private,
    set_gradients,
)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def exact(model: nn.Module, inner: torch.optim.Optimizer, **settings):
    """A wrapper that changes nothing, to compare with the plain optimizer."""
    return private(model, inner, clip_norm=1e9, noise_multiplier=0.0, **settings)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, after_step=None) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        if after_step:
            after_step()


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


def test_unnamed_parameters_are_refused() -> None:
    model, stranger = build(), nn.Parameter(torch.zeros(7))
    with pytest.raises(ValueError, match=r"position 4, shape \(7,\)"):
        private(model, torch.optim.SGD([*model.parameters(), stranger], lr=0.1))
    optimizer = private(model)
    with pytest.raises(ValueError, match="raw gradient would slip through"):
        optimizer.add_param_group({"params": [stranger]})
    assert len(optimizer.param_groups) == 1


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


@pytest.mark.parametrize(
    "copy_of", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_copies_go_on_from_the_same_place(copy_of) -> None:
    model = build()
    optimizer = private(model, torch.optim.Adam(model.parameters()), seed=3, noise_decay=edpsgd.LinearDecay(0.5))
    lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # wraps step()
    optimizer.set_epoch(2)
    train(model, optimizer, 3)
    twin_model, twin = copy_of((model, optimizer))
    assert twin.param_groups[0]["params"][0] is next(twin_model.parameters())
    train(model, optimizer, 3)
    train(twin_model, twin, 3)
    assert_same(twin_model, layers_of(model), tolerance=0.0)
    assert [e.steps for e in optimizer.ledger.events] == [6]
    assert [e.steps for e in twin.ledger.events] == [3, 3]


def test_state_dict_round_trip_through_a_file(tmp_path) -> None:
    model = build()
    optimizer = private(model, torch.optim.Adam(model.parameters()), layer_scaling=edpsgd.FirstStepNorms(), seed=8)
    optimizer.set_epoch(1)
    train(model, optimizer, 4)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)  # plain data and tensors only

    again = build()
    again.load_state_dict(saved["model"])
    resumed = private(again, torch.optim.Adam(again.parameters()), layer_scaling=edpsgd.FirstStepNorms(), seed=8)
    resumed.load_state_dict(saved["optimizer"])
    train(model, optimizer, 4)
    train(again, resumed, 4)
    assert_same(again, layers_of(model), tolerance=0.0)


def test_checkpoints_hold_no_generator_and_the_seed_only_if_given() -> None:
    model = build()
    without, with_seed = private(model), private(model, seed=5)
    for optimizer in (without, with_seed):
        train(model, optimizer, 1)
    assert set(without.state_dict()["edpsgd"]) == {
        "format", "epoch", "step", "scales", "discarded", "clip_norm", "ledger"
    }  # fmt: skip
    assert with_seed.state_dict()["edpsgd"]["seed"] == 5
    assert without._source._secret.hex() not in repr(without.state_dict())
    assert without._source._secret not in pickle.dumps(without)


def test_state_of_a_plain_optimizer_is_refused() -> None:
    model = build()
    plain = torch.optim.Adam(model.parameters())
    train(model, plain, 1)
    with pytest.raises(ValueError, match="load the state of a plain optimizer"):
        private(model, torch.optim.Adam(model.parameters())).load_state_dict(plain.state_dict())


def test_inner_hooks_and_state_survive_wrapping() -> None:
    model, calls = build(), []
    inner = torch.optim.Adam(model.parameters())
    train(model, inner, 2)
    inner.register_step_post_hook(lambda *_: calls.append(1))
    optimizer = exact(model, inner)
    train(model, optimizer, 1)
    assert calls == [1]
    assert all(state["step"] == 3 for state in optimizer.state.values())


def test_freezing_and_unfreezing() -> None:
    model = Bag()
    optimizer = private(model, clip_norm=1e9, noise_multiplier=0.0)
    set_gradients(model, 1.0)
    model.p1.requires_grad_(False)  # its raw gradient is still there
    optimizer.step()
    assert model.p1.abs().sum() == 0
    model.p1.requires_grad_(True)
    set_gradients(model, 1.0)
    optimizer.step()
    assert [p[0].item() for p in model.parameters()] == pytest.approx([-2.0, -1.0, -2.0])


def test_layers_unfrozen_before_the_scales_are_measured() -> None:
    model = Bag()
    model.p1.requires_grad_(False)
    optimizer = private(model, layer_scaling=edpsgd.FirstStepNorms())
    model.p1.requires_grad_(True)
    set_gradients(model, 1.0)
    optimizer.step()
    assert list(optimizer.state_dict()["edpsgd"]["scales"]) == ["p0", "p1", "p2"]


def test_parameters_only_named_are_left_alone() -> None:
    model = build()
    optimizer = private(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    before = layers_of(model)
    train(model, optimizer, 2)
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].weight, before["2.weight"])


def test_disabled_grad_scaler() -> None:
    model, plain = build(), build()
    optimizer = exact(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    optimizer.accumulate(scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    plain(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same(model, layers_of(plain))


def test_parameters_added_behind_the_wrapper() -> None:
    """Directly to the wrapped optimizer, or into a group: clipped and noised like the others if named, else refused."""
    model, stranger = Bag(), nn.Parameter(torch.zeros(3))
    inner = torch.optim.SGD([model.p0], lr=1.0)
    optimizer = private(model, inner, noise_multiplier=0.0)
    inner.add_param_group({"params": [model.p1]})
    model.p1.grad = torch.full_like(model.p1, 123.0)
    optimizer.step()
    assert model.p1.norm().item() == pytest.approx(1.0, rel=1e-5)
    optimizer.param_groups[0]["params"].append(stranger)
    stranger.grad = torch.ones(3)
    with pytest.raises(ValueError, match="raw gradient would slip through"):
        optimizer.step()
    assert stranger.abs().sum() == 0


def test_parameters_added_between_accumulate_and_step() -> None:
    model = Bag()
    inner = torch.optim.SGD([model.p0], lr=1.0)
    optimizer = private(model, inner)
    optimizer.accumulate()
    inner.add_param_group({"params": [model.p1]})
    model.p1.grad = torch.ones_like(model.p1)
    with pytest.raises(RuntimeError, match="added, frozen or moved"):
        optimizer.step()
    assert model.p1.abs().sum() == 0


def test_a_group_without_scales_changes_nothing() -> None:
    model = Bag()
    optimizer = private(model, torch.optim.SGD([model.p0], lr=1.0), layer_scaling=edpsgd.FirstStepNorms())
    set_gradients(model, 1.0)
    optimizer.step()
    for _ in range(2):
        with pytest.raises(ValueError, match="no entry for the parameters p1"):
            optimizer.add_param_group({"params": [model.p1]})
    optimizer.step()
    assert len(optimizer.param_groups) == 1


def test_unfreezing_without_a_scale_is_the_same_error_again() -> None:
    model = Bag()
    model.p1.requires_grad_(False)
    optimizer = private(model, layer_scaling=edpsgd.FirstStepNorms())
    set_gradients(model, 1.0)
    optimizer.step()
    model.p1.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(ValueError, match="no entry for the parameters p1"):
            optimizer.step()
    assert [event.kind for event in optimizer.ledger.events] == ["layer_norms"]


def test_a_scaler_that_was_forgotten_is_refused() -> None:
    """Else every micro-batch but the last one would be clipped as if it were as large as its scaled loss."""
    model = build()
    optimizer = private(model)
    scaler = torch.amp.GradScaler("cpu")
    for forget in (lambda: optimizer.accumulate(), lambda: optimizer.backward(scaler.scale(model(DATA).sum(1)))):
        scaler.scale(model(DATA).sum()).backward()
        forget()
        scaler.scale(model(DATA).sum()).backward()
        with pytest.raises(RuntimeError, match="Pass scaler=scaler to them"):
            scaler.step(optimizer)
        assert not optimizer.ledger.events


DATA = torch.ones(2, 4)


@pytest.mark.parametrize("is_unscaled", [False, True])
def test_what_a_scaler_does_is_a_condition(is_unscaled) -> None:
    model = build()
    optimizer = private(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(DATA).sum()).backward()
    if is_unscaled:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert "a GradScaler follows the micro-batches that were discarded" in str(optimizer.epsilon(1e-5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_one_pass", [False, True])
def test_one_example_moves_the_sum_by_its_clip_norm_in_half_precision_too(dtype, in_one_pass) -> None:
    """257 and 2049 are no numbers of bfloat16 and float16: sums of ones that are rounded stop before them."""

    def released(examples: int) -> torch.Tensor:
        model, spy = nn.Linear(1, 1, bias=False).to(dtype), Spy()
        settings = {"unit": "example", "divisor": 2048.0, "clip_norm": 1.0, "noise_multiplier": 0.0}
        optimizer = private(model, collective=spy, **settings)
        x = torch.full((examples, 1), 5.0, dtype=dtype)
        if in_one_pass:
            optimizer.backward(model(x).squeeze(1))
        for row in () if in_one_pass else x:
            model(row).sum().backward()
            optimizer.accumulate()
        optimizer.step()
        return spy.sent[0][0].double() * 2048

    few = 256 if dtype is torch.bfloat16 else 2048
    assert float(released(few + 1) - released(few)) == pytest.approx(1.0, abs=1e-3)


def test_unscaling_twice_is_refused() -> None:
    model = build()
    optimizer = private(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale twice"):
        optimizer.accumulate(scaler=scaler)


def test_a_seed_from_a_checkpoint_is_marked() -> None:
    seeded = private(Bag(), seed=5)
    seeded.step()
    optimizer = private(Bag())
    optimizer.load_state_dict(seeded.state_dict())
    assert [run.seeded for run in optimizer.ledger.runs] == [True, False, True]


def test_a_decay_that_changes_its_mind_is_asked_once() -> None:
    factors = iter([1.0, 0.5, 0.25, 0.125])
    model, spy = Bag(), Spy()
    optimizer = private(model, noise_decay=lambda epoch: next(factors), collective=spy, seed=1)
    optimizer.set_epoch(0)
    for _ in range(2):
        optimizer.step()
        assert_std(spy.sent[-1][:10500], 2 * optimizer.ledger.events[0].noise_multiplier)


def test_other_default_dtypes() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        optimizer = private(Bag().float(), layer_scaling={"p0": 1.0, "p1": 2.0, "p2": 3.0})
        assert optimizer._layers.scale_tensor.dtype == torch.float32
        assert optimizer._layers.scale_tensor.tolist() == pytest.approx(optimizer._layers.scales, rel=1e-6)
    finally:
        torch.set_default_dtype(torch.float32)


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
