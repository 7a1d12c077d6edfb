"""The engine on whole models; what it does when its rules fail, and with bad or missing numbers."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from edpsgd.per_example import UnitGradients
from edpsgd.per_example import rules as unit_rules
from edpsgd.per_example.ghost import rounding
from tests.helpers import small_models
from tests.helpers.small_models import Said
from tests.helpers.unit_loop import Fast, check, trained

SAID = [
    Said([0, 1, 2], [0, 1, 2], 1),
    Said([0, 2], [1, 1], 2),
    Said([3, 4, 5, 6], [1, 1, 0, 2], 0),
    Said([7], [1], 3),
    Said([2, 2, 8, 1], [0, 0, 1, 2], 1),
    Said([6, 0], [2, 1], 0),
    Said([1, 1, 1], [0, 0, 0], 2),
    Said([5, 3, 0], [1, 2, 0], 2),
]


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


def test_word_rows_that_utterances_share_are_left_to_autograd() -> None:
    model = small_models.tiny("clc")
    engine = UnitGradients(trained(model))
    with pytest.warns(RuntimeWarning, match="words.weight, characters.weight, convolution.weight, convolution.bias"):
        engine.backward(model(small_models.batch("clc", SAID)))
    with Fast():  # says it once
        engine.backward(model(small_models.batch("clc", SAID)))


class Shared(nn.Module):
    """Distinct rows are looked at once, and their features put wherever they stand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)[place].tanh().sum((1, 2))


def test_shared_rows_are_noticed_even_if_the_first_batches_share_nothing() -> None:
    """The shapes are those of rows that lie example by example, in all batches."""
    torch.manual_seed(0)
    model = Shared()
    engine = UnitGradients(trained(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for place in [[[0, 1], [2, 3]]] * 4 + [[[0, 2], [2, 3]], [[3, 2], [1, 1]]]:
            check(engine, model, model(torch.randn(4, 3), torch.tensor(place)))


def test_rows_are_looked_at_when_their_gradient_is_no_longer_zero() -> None:
    """As in low-rank adapters, which begin with a zero matrix: the rows are seen to be mixed in the third batch."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"below": nn.Linear(3, 3), "above": nn.Linear(3, 2)})
    nn.init.zeros_(model["above"].weight)
    engine = UnitGradients(trained(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for number in range(3):
            hidden = model["below"](torch.randn(4, 3)).tanh()
            check(engine, model, model["above"](hidden - hidden.mean(0)).exp().sum(1))
            if number == 1:
                nn.init.normal_(model["above"].weight)


def test_examples_of_other_lengths_are_noticed_even_if_all_were_alike_at_first() -> None:
    """Four rows of two examples each time, put together without padding; the third batch has one of length 1."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    engine = UnitGradients(trained(layer))
    for lengths in ([2, 2], [2, 2], [3, 1], [1, 3], [2, 2]):
        rows = torch.cat([torch.randn(length, 3) for length in lengths])
        losses = torch.stack([part.square().sum() for part in layer(rows).split(lengths)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            check(engine, layer, losses)


def test_a_model_that_shares_no_words_needs_no_loop() -> None:
    model = small_models.tiny("clc").train()
    model.keeps_apart = True
    engine = UnitGradients(trained(model))
    with Fast():
        for said in (SAID, SAID[::-1], SAID[2:5], SAID[:1]):
            check(engine, model, model(small_models.batch("clc", said)))
        check(engine, model, model(small_models.batch("clc", SAID)), torch.tensor([1, 0, 1, 0, 3, 3, 0, 1]), 4)


class Parts(nn.Module):
    """Layers that see some examples of a batch only, which ones the data say."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.below, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        hidden = self.below(x).tanh()
        outer = torch.cat([hidden[:begin], hidden[end:]])
        inner, outer = self.first(hidden[begin:end]), self.second(outer)
        return torch.cat([outer[:begin], inner, outer[begin:]]).square().sum(1)


@pytest.mark.parametrize(
    "parts", [[(0, 1), (0, 1), (2, 3)], [(0, 2), (0, 2), (0, 3)], [(0, 2), (0, 2), (2, 4)], [(1, 3), (0, 2), (0, 1)]]
)
def test_layers_that_see_other_examples_in_every_batch(parts) -> None:
    """The third batch is not due for a check: what the first two had in common must not be taken for a rule."""
    model = Parts()
    engine = UnitGradients(trained(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for number, (begin, end) in enumerate(parts):
            check(engine, model, model(torch.randn(4, 4, generator=torch.Generator().manual_seed(number)), begin, end))


class Labels(nn.Module):
    """Scores against an embedding of each of three labels, which all examples share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.labels, self.below, self.up = nn.Embedding(3, 4), nn.Linear(4, 4), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.up(x).tanh() @ self.below(self.labels(torch.arange(3))).tanh().T).square().sum(1)


def test_a_batch_of_one_teaches_nothing() -> None:
    """In it, all rows belong to the one example; and three labels are not the three examples of a later batch."""
    model = Labels()
    engine = UnitGradients(trained(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for number, examples in enumerate((1, 1, 3, 1, 3, 2, 3)):
            check(engine, model, model(torch.randn(examples, 5, generator=torch.Generator().manual_seed(number))))


class LastStep(nn.Module):
    """Time comes first, and the state of each sequence's last step is picked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.below, self.up = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        hidden = self.below(x).tanh()
        return self.up(hidden[last, torch.arange(x.shape[1])]).square().sum(1)


def test_as_many_steps_as_examples() -> None:
    model = LastStep()
    engine = UnitGradients(trained(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for number, last in enumerate(([0, 1, 2], [0, 1, 2], [2, 0, 1], [1, 1, 0], [2, 1, 0])):
            x = torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(number))
            check(engine, model, model(x, torch.tensor(last)))


class Odd(nn.Module):
    """Operations without rules, and rows that no single example owns."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(4, 4)
        self.normal = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.mixed = nn.Bilinear(4, 4, 3)
        self.places = nn.Parameter(torch.randn(9, 4))
        self.masked = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.below(x).tanh() + self.places[: x.shape[1]]
        hidden = self.normal(hidden).tanh()
        kept = torch.zeros(*mask.shape, 2).index_put((mask,), self.masked(hidden[mask]))
        pooled = hidden.mean(1)
        return self.mixed(pooled, pooled).square().sum(1) + kept.square().sum((1, 2))


def test_what_has_no_rule_is_right_all_the_same() -> None:
    torch.manual_seed(0)
    model = Odd()
    engine = UnitGradients(trained(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for examples, steps in ((4, 3), (3, 3), (6, 2)):
            x = torch.randn(examples, steps, 4)
            check(engine, model, model(x, torch.rand(examples, steps) > 0.3))
        check(engine, model, model(x, torch.ones(6, 2, dtype=torch.bool)), torch.tensor([0, 2, 0, 2, 2, 0]), 4)


def test_a_wrong_rule_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, and autograd takes over; other layers keep their rules."""
    rule, fits = unit_rules.RULES["AddmmBackward0"]

    def wrong(use: unit_rules.Use, received: unit_rules.Received, layer: object) -> None:
        rule(use, received, layer)
        if use.slot == 2:
            rule(use, received, layer)

    monkeypatch.setitem(unit_rules.RULES, "AddmmBackward0", (wrong, fits))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    engine = UnitGradients(trained(model))
    with pytest.warns(RuntimeWarning, match="for 0.weight, 2.weight are .* do not agree"):
        check(engine, model, model(torch.randn(5, 3)).sum(1))
    with Fast():
        check(engine, model, model(torch.randn(5, 3)).sum(1))


def test_one_wrong_example_of_many_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its gradient is small beside the others."""
    rule, fits = unit_rules.RULES["AddmmBackward0"]

    def wrong(use: unit_rules.Use, received: unit_rules.Received, layer: object) -> None:
        scales = torch.ones(64, 1)
        scales[7] = 2.0 if use.slot == 2 else 1.0
        rule(use, replace(received, gradients=[received.gradient * scales]), layer)

    monkeypatch.setitem(unit_rules.RULES, "AddmmBackward0", (wrong, fits))
    torch.manual_seed(0)
    model, weights = nn.Linear(3, 4), torch.ones(64)
    weights[7] = 0.05
    with pytest.warns(RuntimeWarning, match="for weight are .* do not agree"):
        check(UnitGradients(trained(model)), model, weights * model(torch.randn(64, 3)).square().sum(1))


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


class Reordered(nn.Module):
    """Puts the examples into another order, and the losses back."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(4, 4), nn.Linear(4, 2), how

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        moved = self._moved(self.first(x).tanh(), order)
        losses = self.second(moved).square().sum(1)
        if self.how == "matrix":
            return torch.eye(len(x))[order].T @ losses
        return torch.stack([losses[order.index(place)] for place in range(len(order))])

    def _moved(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        if self.how == "stack":
            return torch.stack([x[place] for place in order])
        if self.how == "cat":
            return torch.cat([x[place : place + 1] for place in order])
        if self.how == "unbind":
            rows = x.unbind(0)
            return torch.stack([rows[place] for place in order])
        if self.how == "copy":
            copied = torch.zeros_like(x)
            for place, origin in enumerate(order):
                copied[place] = x[origin]
            return copied
        if self.how == "flip":
            return x.flip(0) if order[0] else x
        return torch.eye(len(x))[order] @ x


@pytest.mark.parametrize("how", ["stack", "cat", "unbind", "copy", "flip"])
def test_examples_that_change_places_in_later_batches_only(how: str) -> None:
    """No batch is trained on before somebody looked at what is new in it."""
    torch.manual_seed(0)
    model = Reordered(how)
    engine = UnitGradients(trained(model))
    for _ in range(4):
        check(engine, model, model(torch.randn(4, 4), [0, 1, 2, 3]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for order in ([3, 2, 1, 0],) if how == "flip" else ([2, 0, 3, 1], [0, 1, 2, 3], [1, 0, 3, 2]):
            check(engine, model, model(torch.randn(4, 4), order))


def test_rows_that_are_split_otherwise_in_later_batches_only() -> None:
    """As many rows in all, but not of the same examples."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    def losses(*lengths: int) -> torch.Tensor:
        rows = model(torch.randn(sum(lengths), 4)).tanh()
        return torch.stack([part.mean(0).square().sum() for part in rows.split(list(lengths))])

    engine = UnitGradients(trained(model))
    for _ in range(2):
        check(engine, model, losses(3, 3))
    with Fast():
        check(engine, model, losses(5, 1))
        check(engine, model, losses(1, 5))


def test_a_matrix_of_the_data_that_moves_examples_is_followed() -> None:
    """All graphs are the same; only the numbers tell."""
    torch.manual_seed(0)
    model = Reordered("matrix")
    engine = UnitGradients(trained(model))
    with Fast():
        for order in ([0, 1, 2, 3], [0, 1, 2, 3], [2, 0, 3, 1], [1, 0, 2, 3]):
            check(engine, model, model(torch.randn(4, 4), order))


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


def test_units_with_nan_harm_no_others() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    engine = UnitGradients(trained(model))
    numbers = torch.tensor([[0, 1], [2, 2], [3, 4]])
    for number in range(5):  # batches that are checked, and one that is not
        hidden = model(numbers)
        sick = hidden * torch.tensor([1.0, math.nan if number % 2 else math.inf, 1.0]).view(3, 1, 1)
        norms = engine.backward(sick.square().sum((1, 2)))
        sums = [torch.zeros_like(p) for p in model.parameters()]
        engine.add_weighted_(sums, torch.ones(3))
        well = model(numbers[[0, 2]]).square().sum((1, 2))
        expected = torch.autograd.grad(well.sum(), list(model.parameters()))
        assert torch.isfinite(norms).all(1).tolist() == [True, False, True]
        torch.testing.assert_close(sums, list(expected))


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


def test_rows_that_are_written_to_other_places_are_noticed(monkeypatch) -> None:
    """Autograd does not say where they go, so that every such batch is compared with it."""

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(6, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
            y, back = self.first(x[torch.tensor(order)]).tanh(), torch.zeros(len(x), 8)
            for row, place in enumerate(order):
                back[place] = y[row]
            return self.out(back).squeeze(1)

    monkeypatch.setattr("edpsgd.per_example.engine.secrets.randbelow", lambda _: 1)  # no check at random
    torch.manual_seed(0)
    model = Sorted()
    engine = UnitGradients(trained(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for order in ([0, 1, 2, 3], [0, 1, 2, 3], [3, 1, 2, 0], [1, 0, 3, 2], [2, 3, 0, 1]):
            check(engine, model, model(torch.randn(4, 6), order))


def test_norms_allow_for_more_where_factors_of_products_may_be_rounded(monkeypatch) -> None:
    assert rounding(torch.device("cpu")) == rounding(torch.device("cuda")) == 1e-5
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")
    assert rounding(torch.device("cpu")) == rounding(torch.device("cuda")) == 1e-2


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
