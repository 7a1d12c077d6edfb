"""The engine on whole models; its arguments, and what it leaves alone."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from edpsgd.per_example import UnitGradients
from tests.edpsgd.per_example.zoo import SAID
from tests.helpers import small_models
from tests.helpers.unit_loop import Fast, check, trained


@pytest.mark.parametrize("kind", ["bert", "clc"])
def test_both_models_with_dropout(kind: str) -> None:
    """Several batches: other sizes, other orders; units of 1, 2, 4 and 8 examples, and an empty one."""
    model = small_models.tiny(kind).train()
    engine = UnitGradients(trained(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if kind == "clc" else "error", RuntimeWarning)  # CLC shares words: see below
        for said in (SAID, SAID[::-1], SAID[2:5], SAID[:1]):
            check(engine, model, model(small_models.batch(kind, said)))
        for units in ([0, 0, 1, 1, 2, 2, 3, 3], [1, 0, 1, 0, 3, 3, 0, 1], [0] * 8):
            check(engine, model, model(small_models.batch(kind, SAID)), torch.tensor(units), max(units) + 2)


def test_frozen_and_unused_layers() -> None:
    """A frozen layer below and between trained ones; a layer that no batch, and one that only some batches use."""
    torch.manual_seed(0)
    parts = {name: nn.Linear(3, 3) for name in ("frozen", "low", "between", "high", "never", "seldom")}
    model = nn.ModuleDict(parts)
    model["frozen"].requires_grad_(False)
    model["between"].requires_grad_(False)
    engine = UnitGradients(trained(model))
    for number in range(3):
        hidden = model["high"](model["between"](model["low"](model["frozen"](torch.randn(4, 2, 3)))).tanh())
        losses = (model["seldom"](hidden) if number == 1 else hidden).square().sum((1, 2))
        with Fast():
            check(engine, model, losses)
    names = list(trained(model))
    assert not engine.backward(model["high"](torch.randn(4, 3)).sum(1))[:, names.index("never.weight")].any()


def test_means_by_hand() -> None:
    """Inputs (3, 4) and (3, -4) in one unit, (0, 1) in another, none in the third."""
    layer = nn.Linear(2, 1)
    losses = layer(torch.tensor([[3.0, 4.0], [0.0, 1.0], [3.0, -4.0]])).squeeze(1)
    norms = UnitGradients(trained(layer)).backward(losses, torch.tensor([0, 1, 0]), 3)
    torch.testing.assert_close(norms, torch.tensor([[3.0, 1.0], [1.0, 1.0], [0.0, 0.0]]))


def test_half_precision() -> None:
    """Under autocast, to the precision of bfloat16; the sums are in single precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    engine = UnitGradients(trained(model))
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            losses = model(torch.randint(0, 9, (4, 6))).float().square().sum((1, 2))
        with Fast():
            check(engine, model, losses, tolerance=0.02)


def test_a_model_in_half_precision() -> None:
    """Also its sums, and losses of which three make a unit: a third is no number of bfloat16."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4).bfloat16()
    engine = UnitGradients(trained(model))
    losses = model(torch.randn(6, 8).bfloat16()).square().sum(1)
    with Fast():
        check(engine, model, losses, torch.tensor([0, 1, 0, 1, 0, 1]), 2, tolerance=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_parameter_that_is_used_in_several_precisions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4).to(dtype)
    engine = UnitGradients(trained(model))
    for _ in range(2):
        x = torch.randn(6, 3, 8)
        both = [x.to(kind) @ model.weight.to(kind).T + model.bias.to(kind) for kind in (torch.float32, torch.float64)]
        with Fast():
            check(engine, model, sum(one.square().sum((1, 2)).to(dtype) for one in both))


def test_the_model_is_left_alone() -> None:
    """No hooks, nothing in its state, and random numbers go on as they would have."""
    model = small_models.tiny("bert").train()
    before = copy.deepcopy(model.state_dict())
    losses = model(small_models.batch("bert", SAID))
    state = torch.get_rng_state()
    engine = UnitGradients(trained(model))
    engine.backward(losses)
    assert torch.equal(state, torch.get_rng_state())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    pickle.loads(pickle.dumps(copy.deepcopy(model)))


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_share_the_checks(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All wait for the one that checks, so that each does so more seldom if there are many."""
    asked: list[int] = []
    monkeypatch.setattr("edpsgd.per_example.engine.secrets.randbelow", lambda most: asked.append(most) or 1)
    model = nn.Linear(3, 1)
    engine = UnitGradients(trained(model), workers)
    for _ in range(3):
        engine.backward(model(torch.randn(4, 3)).squeeze(1))
    assert asked == [64 * workers]  # on the third batch; the first two are checked anyway


def test_no_examples() -> None:
    model = nn.Linear(2, 1)
    engine = UnitGradients(trained(model))
    assert engine.backward(model(torch.zeros(0, 2)).squeeze(1)).shape == (0, 2)
    norms = engine.backward(model(torch.zeros(0, 2)).squeeze(1), torch.zeros(0, dtype=torch.int64), 3)
    sums = [torch.ones(1, 2), torch.ones(1)]
    engine.add_weighted_(sums, torch.ones(3))
    assert norms.tolist() == [[0.0, 0.0]] * 3
    assert sums[0].tolist() == [[1.0, 1.0]]


def test_bad_arguments() -> None:
    model = nn.Linear(2, 1)
    engine = UnitGradients(trained(model))
    losses = model(torch.ones(3, 2)).squeeze(1)
    with pytest.raises(ValueError, match=r"losses must be one number for each example, got .* \(3, 1\)"):
        engine.backward(losses.unsqueeze(1))
    with pytest.raises(ValueError, match="losses must come from the model"):
        engine.backward(losses.detach())
    with pytest.raises(ValueError, match="units must be 3 int64 numbers"):
        engine.backward(losses, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="units must lie between 0 and count - 1, got 0 to 2 and count 2"):
        engine.backward(losses, torch.tensor([0, 1, 2]), 2)
    with pytest.raises(ValueError, match="count must be the number of losses, 3"):
        engine.backward(losses, count=4)
    with pytest.raises(ValueError, match="parameters must have at least one"):
        UnitGradients({})
    with pytest.raises(ValueError, match="under two names"):
        UnitGradients({"one": model.weight, "two": model.weight})
    with pytest.raises(RuntimeError, match="after backward"):
        engine.add_weighted_([], torch.ones(3))
