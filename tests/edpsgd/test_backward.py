"""optimizer.backward(losses): all units of a batch in one pass, against one backward for each."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import edpsgd
from edpsgd.per_example import UnitGradients
from tests.helpers.common import needs_bf16, private


class Tagger(nn.Module):
    """An embedding, an LSTM and a linear layer, with one loss for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lstm, self.out = nn.Embedding(11, 5), nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores = self.out(self.lstm(self.embed(words))[0])
        each = nn.functional.cross_entropy(scores.flatten(0, 1), (words % 3).flatten(), reduction="none")
        return each.view(words.shape).sum(dim=1)


WORDS = torch.randint(0, 11, (12, 6), generator=torch.Generator().manual_seed(1))


def pair(**settings: Any) -> list[tuple[Tagger, edpsgd.PrivateOptimizer]]:
    """Two models with the same weights, each with an optimizer of its own."""
    first = Tagger()
    models = [first, copy.deepcopy(first)]
    settings = {"clip_norm": 0.5, "noise_multiplier": 0.0, "collective": "local", **settings}
    return [(model, private(model, **settings)) for model in models]


@torch.no_grad()
def way(model: nn.Module, before: nn.Module) -> torch.Tensor:
    """How far the model has moved."""
    return torch.cat([(p - q).flatten() for p, q in zip(model.parameters(), before.parameters(), strict=True)])


def assert_same(one: nn.Module, other: nn.Module, before: nn.Module) -> None:
    """The steps are alike, and there was one."""
    moved = [way(model, before) for model in (one, other)]
    assert float(moved[0].norm()) > 1e-3
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("scaled", [False, True])
def test_single_examples(clipping, scaled) -> None:
    scaling = {name: 1.0 + i for i, (name, _) in enumerate(Tagger().named_parameters())} if scaled else None
    settings = {"unit": "example", "divisor": 12, "clipping": clipping, "layer_scaling": scaling}
    (model, optimizer), (looped, loop) = pair(**settings)
    before = copy.deepcopy(model)
    optimizer.backward(model(WORDS))
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    for row in WORDS.split(1):
        looped(row).mean().backward()
        loop.accumulate()
    loop.step()
    assert_same(model, looped, before)
    assert optimizer.clip_fraction == loop.clip_fraction > 0


def test_a_large_batch_in_parts() -> None:
    (model, optimizer), (whole, at_once) = pair(unit="example", divisor=12)
    before = copy.deepcopy(model)
    for rows in WORDS.split(5):
        optimizer.backward(model(rows))
    optimizer.step()
    at_once.backward(whole(WORDS))
    at_once.step()
    assert_same(model, whole, before)
    assert [e.steps for e in optimizer.ledger.events] == [1]


def test_single_examples_of_a_sampler_of_which_the_last_step_lacks_some() -> None:
    """Ten examples in steps of four: the last step has two, and two empty places that count."""
    model = Tagger()
    batches = edpsgd.ShuffledBatches(10, 1, micro_batches=4, together=True, collective="local", seed=1)
    optimizer = private(model, unit="example", batches=batches, collective="local")
    optimizer.set_epoch(0)
    sizes = []
    for rows in batches:
        optimizer.backward(model(WORDS[rows]))
        optimizer.step()
        sizes.append(len(rows))
    assert sizes == [4, 4, 2]
    assert [event.steps for event in optimizer.ledger.events] == [3]


@pytest.mark.parametrize("kind", ["shuffled", "poisson"])
def test_micro_batches_of_a_sampler_in_one_pass(kind) -> None:
    """K groups as they were drawn, empty ones too, against one backward for each of them."""

    def sampler(**more: Any):
        common = {"micro_batches": 4, "collective": "local", "seed": 3, **more}
        if kind == "shuffled":
            return edpsgd.ShuffledBatches(12, 2, **common)
        return edpsgd.PoissonBatches(12, 0.3, steps_per_epoch=3, **common)

    first = Tagger()
    model, looped = first, copy.deepcopy(first)
    settings = {"clip_norm": 0.5, "noise_multiplier": 0.0, "collective": "local"}
    optimizer = private(model, batches=sampler(together=True), **settings)
    loop = private(looped, batches=sampler(), **settings)
    for one in (optimizer, loop):
        one.set_epoch(0)
    separate = iter(loop.batches)
    sizes = set()
    for rows in optimizer.batches:
        before = copy.deepcopy(model)
        optimizer.backward(model(WORDS[rows]))
        optimizer.step()
        for _ in range(4):
            batch = next(separate)
            sizes.add(len(batch))
            if batch:
                looped(WORDS[batch]).mean().backward()
            loop.accumulate()
        loop.step()
        assert_same(model, looped, before)
    assert len(optimizer.batches) == optimizer.batches.steps_per_epoch
    assert 0 in sizes


def test_groups_without_a_sampler() -> None:
    (model, optimizer), (looped, loop) = pair()
    before, units = copy.deepcopy(model), torch.arange(12) % 3
    optimizer.backward(model(WORDS), units=units)
    optimizer.step()
    for unit in range(3):
        looped(WORDS[units == unit]).mean().backward()
        loop.accumulate()
    loop.step()
    assert_same(model, looped, before)
    (model, optimizer), (looped, loop) = pair()
    optimizer.backward(model(WORDS))  # one micro-batch
    optimizer.step()
    looped(WORDS).mean().backward()
    loop.step()
    assert_same(model, looped, before)


def test_scales_measured_in_the_first_step() -> None:
    scales = []
    for way in ("one pass", "loop"):
        model = Tagger()
        norms = edpsgd.FirstStepNorms(noise_multiplier=1e-6)
        optimizer = private(model, unit="example", divisor=12, layer_scaling=norms, collective="local", seed=1)
        if way == "one pass":
            optimizer.backward(model(WORDS))
        for row in WORDS.split(1) if way == "loop" else ():
            model(row).mean().backward()
            optimizer.accumulate()
        optimizer.step()
        scales.append(optimizer.state_dict()["edpsgd"]["scales"])
    assert scales[0] == pytest.approx(scales[1], rel=1e-3)


def test_a_broken_example_counts_as_zero() -> None:
    (model, optimizer), (looped, loop) = pair(unit="example", divisor=12)
    before = copy.deepcopy(model)
    factors = torch.ones(12)
    factors[4] = math.inf
    optimizer.backward(model(WORDS) * factors)
    with pytest.warns(UserWarning, match="1 micro-batch"):
        optimizer.step()
    assert optimizer.discarded == 1
    for number, row in enumerate(WORDS.split(1)):
        if number != 4:
            looped(row).mean().backward()
        loop.accumulate()
    loop.step()
    assert_same(model, looped, before)


@needs_bf16
def test_half_precision() -> None:
    (model, optimizer), (whole, exact) = pair(unit="example", divisor=12)
    before = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(WORDS)
    optimizer.backward(losses)
    optimizer.step()
    exact.backward(whole(WORDS))
    exact.step()
    moved, expected = way(model, before), way(whole, before)
    assert float((moved - expected).norm()) < 0.05 * float(expected.norm())


def test_a_step_that_does_not_fit_the_draw_is_refused() -> None:
    batches = edpsgd.PoissonBatches(12, 0.5, unit="example", collective="local", seed=1)
    model = Tagger()
    optimizer = private(model, unit="example", batches=batches, collective="local")
    optimizer.set_epoch(0)
    rows = next(iter(batches))
    optimizer.backward(model(WORDS[rows[:-1]]))
    with pytest.raises(RuntimeError, match="the sampler made"):
        optimizer.step()


def test_bad_arguments() -> None:
    (model, optimizer), (_, other) = pair(unit="example", divisor=12)
    with pytest.raises(ValueError, match="losses must be one number for each example"):
        optimizer.backward(model(WORDS).mean())
    with pytest.raises(ValueError, match="units are for unit='micro_batch'"):
        other.backward(model(WORDS), units=torch.arange(12))
    batches = edpsgd.ShuffledBatches(12, 2, micro_batches=3, together=True, collective="local")
    grouped = private(model, batches=batches, collective="local")
    grouped.set_epoch(0)
    rows = next(iter(batches))
    with pytest.raises(ValueError, match="this one knows its micro-batches"):
        grouped.backward(model(WORDS[rows]), units=torch.arange(6))
    with pytest.raises(ValueError, match="one for each of the 6 examples of the step, got 5"):
        grouped.backward(model(WORDS[rows[:-1]]))


def test_a_call_that_fails_counts_nothing(monkeypatch) -> None:
    (model, optimizer), (whole, at_once) = pair(unit="example", divisor=12)
    before = copy.deepcopy(model)
    add = UnitGradients.add_weighted_
    monkeypatch.setattr(UnitGradients, "add_weighted_", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.backward(model(WORDS))
    monkeypatch.setattr(UnitGradients, "add_weighted_", add)
    for one, trained in ((optimizer, model), (at_once, whole)):
        one.backward(trained(WORDS))
        one.step()
    assert_same(model, whole, before)


def test_micro_batches_at_the_end_may_be_empty() -> None:
    (model, optimizer), (looped, loop) = pair()
    before = copy.deepcopy(model)
    optimizer.backward(model(WORDS), units=torch.arange(12) % 2, count=4)
    optimizer.step()
    for unit in range(4):
        if unit < 2:
            looped(WORDS[unit::2]).mean().backward()
        loop.accumulate()
    loop.step()
    assert_same(model, looped, before)
    assert optimizer.clip_fraction == loop.clip_fraction == 1.0


def test_the_epsilon_has_its_condition() -> None:
    (model, optimizer), (looped, loop) = pair(unit="example", divisor=12)
    for _ in range(2):
        optimizer.backward(model(WORDS))
        optimizer.step()
    looped(WORDS[:1]).mean().backward()
    loop.accumulate()
    loop.step()
    assert any("one backward pass" in text for text in optimizer.epsilon(1e-5).conditions)
    assert not any("one backward pass" in text for text in loop.epsilon(1e-5).conditions)
    assert len(optimizer.ledger.runs) == 2


class Normed(nn.Module):
    """A layer without a rule, which keeps what it was given."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 6, dtype=dtype), nn.GroupNorm(2, 6, dtype=dtype)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(data)).square().sum(1)


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:gradients for")
def test_a_step_of_nothing_but_nan_adds_nothing(clipping, dtype, bad) -> None:
    model = Normed(dtype)
    optimizer = private(model, clipping=clipping, noise_multiplier=0.0, collective="local")
    before = copy.deepcopy(model)
    optimizer.backward(model(torch.tensor([[bad, 1.0, 1.0, 1.0]], dtype=dtype)))
    optimizer.step()
    assert optimizer.discarded == 1
    assert not way(model, before).any()
    optimizer.backward(model(torch.tensor([[2.0, 1.0, 1.0, 1.0]], dtype=dtype)))
    optimizer.step()
    assert way(model, before).isfinite().all()
    assert way(model, before).any()
