"""Comparisons with autograd: on some batches or on all, what they find, and what ε says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import edpsgd
from edpsgd.per_example import UnitGradients, WrongGradients, rules
from edpsgd.per_example.uses import Received, Use
from tests.helpers.threads import ThreadWorker, run_workers
from tests.helpers.unit_loop import Fast, check, trained

SOME = "compared with autograd on some batches only"

ALL = "every batch was compared with autograd"


def make(model: nn.Module, **settings: object) -> edpsgd.PrivateOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    defaults = {"clip_norm": 1.0, "noise_multiplier": 1.0, "unit": "example", "divisor": 4.0}
    return edpsgd.PrivateOptimizer(inner, model.named_parameters(), **{**defaults, **settings})


def plant(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The rule of linear layers counts every fourth row twice, after so many batches."""
    rule = rules.RULES["AddmmBackward0"]
    seen = [0]

    def wrong(use: Use, received: Received, layer: object) -> None:
        seen[0] += use.slot == 2
        if use.slot == 2 and seen[0] > after:
            doubled = received.output_gradient.clone()
            doubled[::4] *= 2.0
            received = replace(received, output_gradients=[doubled])
        rule.add(use, received, layer)

    monkeypatch.setitem(rules.RULES, "AddmmBackward0", replace(rule, add=wrong))


@pytest.mark.parametrize(("verify", "said", "not_said"), [("spot", SOME, ALL), ("always", ALL, SOME)])
def test_the_bound_says_what_was_compared(verify: str, said: str, not_said: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = make(model, verify=verify)
    optimizer.backward(model(torch.randn(4, 3)).squeeze(1))
    optimizer.step()
    printed = str(optimizer.epsilon(1e-5))
    assert said in printed
    assert not_said not in printed
    assert "no loss depends on other examples" in printed


def test_bad_setting() -> None:
    with pytest.raises(ValueError, match="verify must be one of 'spot', 'always', got 'never'"):
        make(nn.Linear(3, 1), verify="never")


def test_every_batch_is_compared_before_it_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that goes wrong in the sixth batch is left to autograd in that batch already."""
    plant(monkeypatch, 5)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    engine = UnitGradients(trained(model), verifies_all=True)
    for number in range(7):
        losses = model(torch.randn(5, 3)).square().sum(1)
        if number == 5:
            with pytest.warns(RuntimeWarning, match="for weight are .* do not agree with autograd"):
                check(engine, model, losses)
        else:
            check(engine, model, losses)


def test_a_wrong_sum_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms are right; what is added up is not."""
    monkeypatch.setattr("edpsgd.per_example.deviations.mixing_factors", lambda norms, chosen: torch.zeros(len(norms)))
    engine_sums = "edpsgd.per_example.ghost.LayerGradients.add_weighted_"

    def halved(self: object, total: torch.Tensor, factors: torch.Tensor) -> None:
        total += 0.5 * factors.sum()

    monkeypatch.setattr(engine_sums, halved)
    model = nn.Linear(3, 2)
    engine = UnitGradients(trained(model), verifies_all=True)
    norms = engine.backward(model(torch.randn(5, 3)).square().sum(1))
    for shape in (norms.shape[:1], norms.shape):
        with pytest.raises(WrongGradients, match="it is not released"):
            engine.add_weighted_([torch.zeros_like(p) for p in model.parameters()], torch.ones(shape))


def test_two_swapped_examples_are_found_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two of a hundred have the same factor."""
    rule = rules.RULES["MmBackward0"]

    def swapped(use: Use, received: Received, layer: object) -> None:
        gradient = received.output_gradient.clone()
        gradient[[3, 8]] = received.output_gradient[[8, 3]]
        rule.add(use, replace(received, output_gradients=[gradient]), layer)

    monkeypatch.setitem(rules.RULES, "MmBackward0", replace(rule, add=swapped))
    torch.manual_seed(0)
    for _ in range(20):
        model = nn.Linear(3, 2, bias=False)
        with pytest.warns(RuntimeWarning, match="do not agree"):
            UnitGradients(trained(model)).backward(model(torch.randn(100, 3)).square().sum(1))


def test_a_failed_comparison_stops_all_workers_in_the_same_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Worker 1 finds it; worker 0 keeps the ledger, and says from then on that ε does not hold."""
    monkeypatch.setattr("edpsgd.per_example.engine.secrets.randbelow", lambda _: 1)  # none at random

    def train(collective: ThreadWorker) -> tuple[list[str], list[int], str]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = make(model, collective=collective, ledger=tmp_path / "ledger.jsonl")
        errors, failed = [], []
        for number in range(6):
            optimizer.backward(model(torch.randn(4, 3)).square().sum(1))
            if collective.rank == 1 and number == 3:
                optimizer.abandon()
                wrong = lambda *_: (_ for _ in ()).throw(WrongGradients("planted"))  # noqa: E731
                monkeypatch.setattr(optimizer._engine, "backward", wrong)
                optimizer.backward(model(torch.randn(4, 3)).square().sum(1))
            try:
                optimizer.step()
            except (ValueError, RuntimeError) as error:
                errors.append(str(error))
                failed.append(number)
                break
        return errors, failed, str(optimizer.ledger.epsilon(1e-5))

    answers = run_workers(2, train)
    assert all("planted" in errors[0] and failed == [3] for errors, failed, _ in answers)
    assert all("found to be wrong" in printed for _, _, printed in answers)
    assert "found to be wrong" in str(edpsgd.Ledger.read(tmp_path / "ledger.jsonl").epsilon(1e-5))


class Positions(nn.Module):
    """Scores by a table of positions that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.table = nn.Linear(4, 4), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.below(self.table)).square().sum((1, 2))


def test_shared_rows_are_a_condition_unless_the_losses_were_checked() -> None:
    said = "check_losses was not run"
    for is_checked in (False, True):
        torch.manual_seed(0)
        model = Positions()
        optimizer = make(model)
        examples = list(torch.randn(6, 3, 4))
        if is_checked:
            edpsgd.check_losses(
                lambda some, model=model: model(torch.stack(some)), examples, model=model, optimizer=optimizer
            )
        with pytest.warns(RuntimeWarning, match="gradients of several examples reach the same rows"):
            optimizer.backward(model(torch.stack(examples[:4])))
        optimizer.step()
        assert (said in str(optimizer.epsilon(1e-5))) == (not is_checked)


def test_what_has_no_rule_is_no_condition() -> None:
    model = nn.Bilinear(3, 3, 2)
    optimizer = make(model)
    x = torch.randn(4, 3)
    with pytest.warns(RuntimeWarning, match="there is no rule for an operation that they go into"):
        optimizer.backward(model(x, x).square().sum(1))
    optimizer.step()
    assert "check_losses" not in str(optimizer.epsilon(1e-5))


def test_a_wrong_rule_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, and autograd takes over; other layers keep their rules."""
    rule = rules.RULES["AddmmBackward0"]

    def wrong(use: Use, received: Received, layer: object) -> None:
        rule.add(use, received, layer)
        if use.slot == 2:
            rule.add(use, received, layer)

    monkeypatch.setitem(rules.RULES, "AddmmBackward0", replace(rule, add=wrong))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    engine = UnitGradients(trained(model))
    with pytest.warns(RuntimeWarning, match="for 0.weight, 2.weight are .* do not agree"):
        check(engine, model, model(torch.randn(5, 3)).sum(1))
    with Fast():
        check(engine, model, model(torch.randn(5, 3)).sum(1))


def test_one_wrong_example_of_many_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its gradient is small beside the others."""
    rule = rules.RULES["AddmmBackward0"]

    def wrong(use: Use, received: Received, layer: object) -> None:
        scales = torch.ones(64, 1)
        scales[7] = 2.0 if use.slot == 2 else 1.0
        rule.add(use, replace(received, output_gradients=[received.output_gradient * scales]), layer)

    monkeypatch.setitem(rules.RULES, "AddmmBackward0", replace(rule, add=wrong))
    torch.manual_seed(0)
    model, weights = nn.Linear(3, 4), torch.ones(64)
    weights[7] = 0.05
    with pytest.warns(RuntimeWarning, match="for weight are .* do not agree"):
        check(UnitGradients(trained(model)), model, weights * model(torch.randn(64, 3)).square().sum(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words, self.layer, self.out = nn.Embedding(50, 48), kind(48, 48, batch_first=True), nn.Linear(48, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.words(words))[0])


class Tied(nn.Module):
    """Autograd adds up the gradients of layers that are used many times in the precision of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.norm = nn.Embedding(50, 48), nn.Linear(48, 48), nn.LayerNorm(48)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.words(words)
        for _ in range(6):
            hidden = self.norm(hidden + self.layer(hidden).tanh())
        return hidden @ self.words.weight.T


def small_half_model(kind: str) -> nn.Module:
    if kind == "transformer":
        layer = nn.TransformerEncoderLayer(48, 4, 128, batch_first=True, dropout=0.0)
        return nn.Sequential(nn.Embedding(50, 48), layer, nn.Linear(48, 5))
    if kind == "mlp":
        return nn.Sequential(nn.Embedding(50, 48), nn.Linear(48, 256), nn.GELU(), nn.Linear(256, 5))
    return Tied() if kind == "tied" else Recurrent(nn.GRU)


@pytest.mark.parametrize("kind", ["mlp", "gru", "tied", "transformer"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0])
def test_no_false_alarm_in_half_precision(kind: str, dtype: torch.dtype, size: float) -> None:
    """Weights of half precision without a scaler: gradients fall below the range, in which autograd is no judge."""
    torch.manual_seed(1)
    model = small_half_model(kind).to(dtype)
    engine = UnitGradients(trained(model), verifies_all=True)
    with Fast():
        for step in range(9):
            words = torch.randint(0, 50, ((8, 5, 16)[step % 3], (7, 12, 16)[step // 3]))
            assert bool(torch.isfinite(engine.backward(size * model(words).float().square().mean((1, 2)))).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e3])
def test_a_wrong_rule_is_found_out_in_half_precision(dtype: torch.dtype, size: float, monkeypatch) -> None:
    """What autograd rounds away is no excuse for everything: one example too many is seen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(dtype)
    plain = rules.RULES["AddmmBackward0"]

    def swapped(use, received, layer):
        mixed = received.output_gradient.roll(1, 0)
        plain.add(use, Received([mixed], received.layout, received.units), layer)

    monkeypatch.setitem(rules.RULES, "AddmmBackward0", replace(plain, add=swapped))
    engine = UnitGradients(trained(model))
    with pytest.warns(RuntimeWarning, match="do not agree with autograd"):
        engine.backward(size * model(torch.randn(6, 8).to(dtype)).float().square().mean(1))
