"""Ledgers of the best of a random number of trainings: every ε covers the choice, and says how it was made."""

from __future__ import annotations

import json

import pytest

import edpsgd
from edpsgd import Budget, BudgetExhausted, Ledger, LedgerError, Selection
from edpsgd.accounting import Steps, TrialLaw, selected_epsilon
from edpsgd.ledger import guarantee
from edpsgd.ledger.records import RunRecord
from edpsgd.ledger.selection import PlannedSteps
from edpsgd.planning import as_if
from tests.helpers.common import Bag, private
from tests.helpers.events import gradients, norms, poisson

DELTA = 1e-5
LAW = TrialLaw(10.0)
POISSON = [poisson(0, 1.0), poisson(1, 0.8)]
POISSON_STEPS = [Steps(1.0, 0.1, 10), Steps(0.8, 0.1, 10)]


def chosen(**settings) -> list[RunRecord]:
    return [RunRecord(selection=Selection(**{"mean": 10.0, **settings}))]


def test_every_bound_of_a_report_covers_the_choice() -> None:
    report = guarantee.report(POISSON, DELTA, chosen())
    first, worst = report.bounds
    assert first == guarantee.bound(POISSON, DELTA, chosen())
    assert first.epsilon == selected_epsilon([POISSON_STEPS], DELTA, LAW)
    assert first.method == "RDP, Poisson sampling, best of a random number of trainings, 10 on average"
    assert first.neighbours == "add or remove one example"
    every = [Steps(1.0, 1.0, 10), Steps(0.8, 1.0, 10)]
    assert worst.epsilon == pytest.approx(selected_epsilon([every], DELTA, LAW))
    assert "every example in every step" in worst.method
    for text in (str(first), str(report)):
        assert "that number and all of the others stay with the trainer" in text
    alone = guarantee.bound(POISSON, DELTA)
    assert alone.epsilon < first.epsilon


def test_shuffled_passes_and_measured_scales() -> None:
    events = [norms(3.0), gradients(0, 2.0), gradients(1, 1.0)]
    passes = [Steps(z, 1.0, 1) for z in (3.0, 2.0, 1.0)]
    assert guarantee.bound(events, DELTA, chosen()).epsilon == selected_epsilon([passes], DELTA, LAW)
    single = [RunRecord(unit="example", selection=Selection(mean=10.0))]
    replaced = guarantee.report(events, DELTA, single).bounds[1]
    assert replaced.neighbours == "replace one example"
    halved = [Steps(z / 2, 1.0, 1) for z in (3.0, 2.0, 1.0)]
    assert replaced.epsilon == selected_epsilon([halved], DELTA, LAW)
    raw = guarantee.bound([norms(0.0), *events], DELTA, chosen())
    assert any("raw first-step norms" in condition for condition in raw.conditions)


def test_rounds_of_users() -> None:
    rounds = [gradients(0, 2.0, steps=50, batching="fixed_size", sampling_rate=0.01)]
    runs = [RunRecord(unit="user", selection=Selection(mean=3.0))]
    found = guarantee.bound(rounds, DELTA, runs)
    assert found.neighbours == "replace one user"
    assert found.epsilon == selected_epsilon([[Steps(2.0, 0.01, 50)]], DELTA, TrialLaw(3.0), fixed_size=True)
    assert found.epsilon > guarantee.bound(rounds, DELTA, [RunRecord(unit="user")]).epsilon


def test_the_dearest_candidate_counts_from_the_first_step_on() -> None:
    plans = ((PlannedSteps(0.7, 0.1, 10, 4),), (PlannedSteps(3.0, None, 10, 4), PlannedSteps(2.0, None, 10, 1)))
    runs = chosen(candidates=plans)
    expected = selected_epsilon(
        [POISSON_STEPS, [Steps(0.7, 0.1, 40)], [Steps(3.0, 1.0, 4), Steps(2.0, 1.0, 1)]], DELTA, LAW
    )
    assert guarantee.bound(POISSON, DELTA, runs).epsilon == expected
    before = guarantee.bound([], DELTA, runs).epsilon
    assert 0.9 * expected < before <= expected


@pytest.mark.parametrize(("z", "dearer"), [(50.0, "training"), (0.3, "score")])
def test_a_score_with_noise_is_paid_for(z, dearer) -> None:
    alone = guarantee.bound(POISSON, DELTA, chosen()).epsilon
    of_score = selected_epsilon([[Steps(z, 1.0, 1)]], DELTA, LAW)
    held_out = guarantee.bound(POISSON, DELTA, chosen(score="noisy", score_noise=z, held_out=True))
    together = guarantee.bound(POISSON, DELTA, chosen(score="noisy", score_noise=z))
    assert held_out.epsilon == {"training": alone, "score": of_score}[dearer] == max(alone, of_score)
    assert together.epsilon == selected_epsilon([[Steps(z, 1.0, 1), *POISSON_STEPS]], DELTA, LAW) > held_out.epsilon


@pytest.mark.parametrize(
    ("settings", "condition"),
    [
        ({}, "said to be public"),
        ({"score": "noisy", "score_noise": 2.0}, "moves the score by no more than its noise is for"),
        ({"score": "noisy", "score_noise": 2.0, "held_out": True}, "an example alone decides whether it is one"),
        ({"score": "exact"}, "the choice is not covered"),
    ],
)
def test_how_the_best_was_chosen_is_a_condition(settings, condition) -> None:
    of_choice, of_score = guarantee.bound(POISSON, DELTA, chosen(**settings)).conditions
    assert "best of a random number" in of_choice
    assert condition in of_score


def test_a_run_that_goes_on_outside_the_tuning_keeps_counting(tmp_path) -> None:
    selection = Selection(mean=10.0, id="a")
    optimizer = private(Bag((5,)), ledger=tmp_path / "ledger.jsonl", selection=selection)
    optimizer.set_epoch(0)
    optimizer.step()
    before = optimizer.epsilon(DELTA)
    assert before.epsilon == selected_epsilon([[Steps(1.0, 1.0, 1)]], DELTA, LAW)
    optimizer.ledger.close()
    later = private(Bag((5,)), ledger=tmp_path / "ledger.jsonl")
    assert later.epsilon(DELTA).epsilon == before.epsilon
    later.set_epoch(1)
    later.step()
    assert later.epsilon(DELTA).epsilon == selected_epsilon([[Steps(1.0, 1.0, 2)]], DELTA, LAW)
    later.ledger.close()
    with pytest.raises(LedgerError, match="two tunings"):
        private(Bag((5,)), ledger=tmp_path / "ledger.jsonl", selection=Selection(mean=10.0, id="b"))
    read = Ledger.read(tmp_path / "ledger.jsonl")
    assert read.runs[0].selection == selection
    assert read.epsilon(DELTA).epsilon == later.epsilon(DELTA).epsilon


def test_a_checkpoint_takes_the_choice_into_a_new_ledger() -> None:
    optimizer = private(Bag((5,)), selection=Selection(mean=10.0))
    optimizer.set_epoch(0)
    optimizer.step()
    other = private(Bag((5,)))
    other.load_state_dict(optimizer.state_dict())
    assert other.epsilon(DELTA).epsilon == optimizer.epsilon(DELTA).epsilon


def test_versions_that_know_of_no_choice_refuse_the_ledger(tmp_path) -> None:
    """They read lines of runs, states and events only, and states of format 1."""
    for selection, line, number in ((None, "run", 1), (Selection(mean=10.0), "chosen_run", 2)):
        path = tmp_path / f"{line}.jsonl"
        optimizer = private(Bag((5,)), ledger=path, selection=selection)
        optimizer.ledger.close()
        [record, *_] = map(json.loads, path.read_text().splitlines())
        assert line in record
        assert Ledger.read(path).state_dict()["format"] == number
        other = Ledger()
        other.load_state_dict(Ledger.read(path).state_dict())
        assert other.runs == Ledger.read(path).runs


def test_a_budget_is_one_for_the_whole_tuning() -> None:
    budget = Budget(selected_epsilon([[Steps(1.0, 1.0, 2)]], DELTA, LAW), DELTA)
    optimizer = private(Bag((5,)), selection=Selection(mean=10.0), budget=budget)
    for epoch in range(2):
        optimizer.set_epoch(epoch)
        optimizer.step()
    optimizer.set_epoch(2)
    with pytest.raises(BudgetExhausted):
        optimizer.step()


def test_written_and_read_it_is_the_same() -> None:
    plans = ((PlannedSteps(0.7, 0.1, 10, 4),), ())
    for selection in (
        Selection(mean=3, shape=0.0),
        Selection(mean=3.5, score="noisy", score_noise=2.0, held_out=True, candidates=plans, id="x"),
        Selection(mean=3.5, score="exact", others={"later": [1]}),
    ):
        written = json.loads(json.dumps(RunRecord(id="a", selection=selection).to_json()))
        assert RunRecord.parse(written).selection == selection
    assert "selection" not in RunRecord(id="a").to_json()


@pytest.mark.parametrize(
    "changes",
    [
        None,
        {},
        {"mean": 0.5},
        {"mean": "10"},
        {"mean": True},
        {"mean": float("nan")},
        {"mean": 10**400},
        {"shape": -1.0},
        {"score": "good"},
        {"score": ["public"]},
        {"score": "noisy"},
        {"score_noise": 1.0},
        {"score": "noisy", "score_noise": 0.0},
        {"held_out": True},
        {"held_out": 1},
        {"id": 3},
        {"candidates": {}},
        {"candidates": [3]},
        {"candidates": [[{"noise_multiplier": 1.0}]]},
        {"candidates": [[{"noise_multiplier": -1.0, "sampling_rate": None, "steps": 1, "passes": 1}]]},
        {"candidates": [[{"noise_multiplier": 1.0, "sampling_rate": 1.5, "steps": 1, "passes": 1}]]},
        {"candidates": [[{"noise_multiplier": 1.0, "sampling_rate": 0.5, "steps": -1, "passes": 1}]]},
        {"candidates": [[{"noise_multiplier": 1.0, "sampling_rate": 0.5, "steps": 1.5, "passes": 1}]]},
    ],
)
def test_what_no_run_can_have_written_is_refused(changes) -> None:
    data = {"mean": 10.0, **changes} if changes else changes
    with pytest.raises(LedgerError):
        RunRecord.parse({"id": "a", "selection": data})


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="selection must be None or"):
        private(Bag((5,)), selection=10)
    with pytest.raises(ValueError, match="score of a Selection must be one of"):
        Selection(mean=2.0, score="bleu")
    ledger = Ledger()
    ledger.begin_run(RunRecord(unit="user", selection=Selection(mean=2.0)))
    with pytest.raises(LedgerError, match="not chosen among others"):
        as_if(ledger, 1e-6, users=1000, cohort=10)


def test_card_and_command_cover_the_choice(tmp_path) -> None:
    selection = Selection(mean=10.0, score="noisy", score_noise=3.0, held_out=True)
    optimizer = private(Bag((5,)), ledger=tmp_path / "ledger.jsonl", selection=selection)
    optimizer.set_epoch(0)
    optimizer.step()
    card = edpsgd.card.write(tmp_path, optimizer.ledger, DELTA)
    assert card.epsilon == optimizer.epsilon(DELTA).epsilon
    assert "The best training of a random number of them, 10" in card.facts["Choice"]
    assert any("the other trainings of the tuning" in text for text in card.not_covered)
    assert not any(text.startswith("other training runs") for text in card.not_covered)
    assert edpsgd.card.stated(json.loads(card.json())) == []
    later = edpsgd.card.make(Ledger.read(tmp_path / "ledger.jsonl"), DELTA)
    assert (later.epsilon, later.conditions) == (card.epsilon, card.conditions)
    assert "best of a random number of trainings" in later.markdown()
