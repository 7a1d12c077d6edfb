"""Which parameters are trained: frozen, added, unnamed and unfrozen ones, and their scales."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import edpsgd
from edpsgd.mechanism.parameters import Layers, describe_parameters, find_scales
from tests.helpers.common import Bag, layers_of, private, set_gradients
from tests.helpers.small_steps import build, train


def test_unnamed_parameters_are_refused() -> None:
    model, stranger = build(), nn.Parameter(torch.zeros(7))
    with pytest.raises(ValueError, match=r"position 4, shape \(7,\)"):
        private(model, torch.optim.SGD([*model.parameters(), stranger], lr=0.1))
    optimizer = private(model)
    with pytest.raises(ValueError, match="raw gradient would slip through"):
        optimizer.add_param_group({"params": [stranger]})
    assert len(optimizer.param_groups) == 1


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


def test_other_default_dtypes() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        optimizer = private(Bag().float(), layer_scaling={"p0": 1.0, "p1": 2.0, "p2": 3.0})
        assert optimizer._layers.scale_tensor.dtype == torch.float32
        assert optimizer._layers.scale_tensor.tolist() == pytest.approx(optimizer._layers.scales, rel=1e-6)
    finally:
        torch.set_default_dtype(torch.float32)


def layers_of_bag(model: Bag, **changes) -> Layers:
    groups = [{"params": list(model.parameters())}]
    settings = {"scaling": None, "measured": None, "trailer_size": 2, **changes}
    return Layers(groups, dict(model.named_parameters()), **settings)


def test_what_is_trained_is_seen_to_change() -> None:
    model = Bag((3, 4))
    groups = [{"params": list(model.parameters())}]
    layers = layers_of_bag(model)
    assert (len(layers), list(layers.parameters)) == (2, ["p0", "p1"])
    assert layers.fit(groups)
    model.p1.requires_grad_(False)
    assert not layers.fit(groups)
    assert list(layers_of_bag(model).parameters) == ["p0"]


def test_gradients_are_handed_out_once() -> None:
    model = Bag((3, 4))
    layers = layers_of_bag(model)
    assert not layers.have_gradients()
    model.p1.grad = torch.ones(4)
    assert layers.have_gradients()
    first, second = layers.pop_gradients()
    assert first is None
    assert second is not None
    assert second.tolist() == [1.0] * 4
    assert layers.pop_gradients() == [None, None]


def test_the_sum_is_handed_over_as_a_gradient() -> None:
    model = Bag((3, 4))
    model.p1.data = model.p1.data.half()
    layers = layers_of_bag(model)
    for view in layers.sum.open():
        view.fill_(1e6)
    layers.hand_over_sum()
    assert model.p0.grad is layers.sum.views[0]
    assert model.p1.grad.tolist() == [torch.finfo(torch.float16).max] * 4  # rounded, and finite


def test_descriptions_tell_layers_and_scales_apart() -> None:
    described = [
        layers_of_bag(Bag((3, 4))).description,
        layers_of_bag(Bag((4, 3))).description,
        layers_of_bag(Bag((3, 4)), scaling={"p0": 1.0, "p1": 2.0}).description,
    ]
    assert described[0] == layers_of_bag(Bag((3, 4))).description
    assert len(set(described)) == 3
    assert described[0].startswith("2 tensors, 7 elements, digest ")
    model = Bag((3,))
    model.p0.requires_grad_(False)
    assert describe_parameters(dict(model.named_parameters())) == {
        "parameter 0": ("p0", (3,), "torch.float32", "frozen")
    }


def test_scales_given_and_measured() -> None:
    named = dict(Bag((3, 4)).named_parameters())
    measuring = edpsgd.FirstStepNorms()
    assert find_scales(["p0", "p1"], named, None, None) == [1.0, 1.0]
    assert find_scales(["p0", "p1"], named, measuring, None) is None
    assert find_scales(["p1"], named, measuring, {"p0": 1.0, "p1": 5.0}) == [1.0]
    with pytest.raises(ValueError, match="parameters that do not exist: p2"):
        find_scales(["p0"], named, {"p0": 1.0, "p2": 1.0}, None)
    assert layers_of_bag(Bag((3, 4)), scaling=measuring).scale_tensor is None
