"""Comparisons with autograd: on some batches or on all, what they find, and what ε says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import edpsgd
from edpsgd.per_example import UnitGradients, WrongGradients
from edpsgd.per_example import rules as unit_rules
from tests.helpers.threads import ThreadWorker, run_workers
from tests.helpers.unit_loop import check, trained

SOME = "compared with autograd on some batches only"
ALL = "every batch was compared with autograd"


def make(model: nn.Module, **settings: object) -> edpsgd.PrivateOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    defaults = {"clip_norm": 1.0, "noise_multiplier": 1.0, "unit": "example", "divisor": 4.0}
    return edpsgd.PrivateOptimizer(inner, model.named_parameters(), **{**defaults, **settings})


def plant(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The rule of linear layers counts every fourth row twice, after so many batches."""
    rule, fits = unit_rules.RULES["AddmmBackward0"]
    seen = [0]

    def wrong(use: unit_rules.Use, received: unit_rules.Received, layer: object) -> None:
        seen[0] += use.slot == 2
        if use.slot == 2 and seen[0] > after:
            doubled = received.gradient.clone()
            doubled[::4] *= 2.0
            received = replace(received, gradients=[doubled])
        rule(use, received, layer)

    monkeypatch.setitem(unit_rules.RULES, "AddmmBackward0", (wrong, fits))


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
    monkeypatch.setattr("edpsgd.per_example.engine._mixing", lambda norms, chosen: torch.zeros(len(norms)))
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
    rule, fits = unit_rules.RULES["MmBackward0"]

    def swapped(use: unit_rules.Use, received: unit_rules.Received, layer: object) -> None:
        gradient = received.gradient.clone()
        gradient[[3, 8]] = received.gradient[[8, 3]]
        rule(use, replace(received, gradients=[gradient]), layer)

    monkeypatch.setitem(unit_rules.RULES, "MmBackward0", (swapped, fits))
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


def test_batch_statistics_are_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    engine = UnitGradients(trained(model))
    with pytest.raises(ValueError, match="batch normalisation in training mode mixes the examples"):
        engine.backward(model(torch.randn(5, 3)).squeeze(1))
    model[1].eval()
    check(engine, model, model(torch.randn(5, 3)).squeeze(1))


def test_statistics_of_single_examples_are_none_of_a_batch() -> None:
    """Instance normalisation is a batch normalisation with a channel for each example and feature."""
    model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.InstanceNorm1d(4), nn.Conv1d(4, 2, 1))
    for batch in (5, 4, 1):
        check(UnitGradients(trained(model)), model, model(torch.randn(batch, 3, 4)).square().sum((1, 2)))
