"""Checkpoints and copies that branch: no ledger hides what another branch has released, nor on what it depends."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from edpsgd import FirstStepNorms, FixedSizeUsers, Ledger, LedgerError, PoissonBatches, PoissonUsers, ShuffledBatches
from tests.helpers.common import Bag, private
from tests.helpers.threads import run_workers

FOLLOWED = "clip_norm was changed"
ORDER = "could not compare the data"


def steps(optimizer, number: int) -> None:
    batches = iter(optimizer.batches)
    for _ in range(number):
        next(batches)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def poisson() -> PoissonBatches:
    return PoissonBatches(100, 0.1, steps_per_epoch=1000, collective="local")


def started(**settings):
    optimizer = private(Bag((3,)), collective="local", **settings)
    return optimizer


def steps_of(ledger: Ledger) -> list[int]:
    return [event.steps for event in ledger.events if event.steps]


@pytest.mark.parametrize("has_file", [False, True])
def test_a_checkpoint_of_another_branch_is_refused(tmp_path, has_file) -> None:
    path = tmp_path / "ledger.jsonl" if has_file else None
    first = started(batches=poisson(), ledger=path)
    first.set_epoch(0)
    steps(first, 5)
    saved = first.state_dict()
    steps(first, 20)
    second = started(batches=poisson())
    second.load_state_dict(saved)
    steps(second, 30)
    with pytest.raises(LedgerError, match="branch" if has_file else "neither continues the other"):
        first.load_state_dict(second.state_dict())
    assert steps_of(first.ledger) == [25]
    third = started(batches=poisson())
    third.load_state_dict(second.state_dict())  # whoever took no steps of its own may go on with any of them
    assert steps_of(third.ledger) == [35]


def test_a_branch_is_seen_behind_measured_scales() -> None:
    """They are written behind the event whose steps go on."""
    scales = FirstStepNorms(noise_multiplier=1.0)
    first = started(batches=poisson(), layer_scaling=scales)
    first.set_epoch(0)
    steps(first, 5)
    saved = first.state_dict()
    steps(first, 20)
    second = started(batches=poisson(), layer_scaling=scales)
    second.load_state_dict(saved)
    steps(second, 30)
    with pytest.raises(LedgerError, match="neither continues the other"):
        first.load_state_dict(second.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_is_a_branch(copied) -> None:
    first = started(batches=poisson())
    first.set_epoch(0)
    steps(first, 1)
    second = copied(first)
    steps(first, 20)
    steps(second, 30)
    for one, other in ((first, second), (second, first)):
        with pytest.raises(LedgerError, match="neither continues the other"):
            one.load_state_dict(other.state_dict())


def test_two_copies_of_one_pickle_are_two_branches() -> None:
    first = started(batches=poisson())
    first.set_epoch(0)
    steps(first, 1)
    stored = pickle.dumps(first)
    second, third = pickle.loads(stored), pickle.loads(stored)
    steps(second, 20)
    steps(third, 30)
    with pytest.raises(LedgerError, match="neither continues the other"):
        third.load_state_dict(second.state_dict())


def test_a_run_goes_back_to_its_own_checkpoint_and_keeps_what_it_released() -> None:
    optimizer = started(batches=poisson())
    optimizer.set_epoch(0)
    steps(optimizer, 5)
    saved = optimizer.state_dict()
    steps(optimizer, 20)
    optimizer.load_state_dict(saved)
    assert steps_of(optimizer.ledger) == [25]


def test_other_changes_of_a_copy_are_not_taken_for_the_same() -> None:
    first = started(batches=ShuffledBatches(40, 4, collective="local"))
    first.set_epoch(0)
    steps(first, 1)
    second = copy.deepcopy(first)
    _ = first.clip_fraction
    second.clip_norm = 0.5
    with pytest.raises(LedgerError, match="neither continues the other"):
        first.load_state_dict(second.state_dict())


def test_ledgers_without_the_places_of_runs_are_read_as_before() -> None:
    """Those that were written before runs said where they begin."""
    old = started(batches=poisson())
    old.set_epoch(0)
    steps(old, 5)
    state = old.state_dict()
    for run in state["edpsgd"]["ledger"]["runs"]:
        del run["begins_after"]
    new = started(batches=poisson())
    new.load_state_dict(state)
    assert steps_of(new.ledger) == [5]


# -------------------------------------------------------------------- conditions that must not get lost on the way


def test_going_back_before_the_first_step_does_not_unread_the_clip_fraction() -> None:
    optimizer = started(batches=ShuffledBatches(40, 4, collective="local"), clip_norm=0.3)
    small = optimizer.state_dict()
    optimizer.clip_norm = 1.0
    large = optimizer.state_dict()
    optimizer.set_epoch(0)
    steps(optimizer, 10)
    _ = optimizer.clip_fraction
    optimizer.load_state_dict(large)
    optimizer.load_state_dict(small)
    optimizer.set_epoch(0)
    steps(optimizer, 10)
    assert any(FOLLOWED in condition for condition in optimizer.epsilon(1e-5).conditions)


@pytest.mark.parametrize("when", ["before a step", "after the last"])
def test_a_fraction_that_another_worker_read_is_a_condition_on_all(when, tmp_path) -> None:
    def work(collective):
        settings = {"collective": collective, "ledger": tmp_path / "ledger.jsonl"}
        examples = list(range(40))
        optimizer = private(Bag((3,)), batches=ShuffledBatches(examples, 2, collective=collective), **settings)
        optimizer.set_epoch(0)
        steps(optimizer, 5)
        if collective.rank == 1:
            _ = optimizer.clip_fraction
        if when == "before a step":
            optimizer.clip_norm = 0.5
            steps(optimizer, 3)
            return optimizer.epsilon(1e-5).conditions
        optimizer.ledger.close()
        batches = ShuffledBatches(examples, 2, collective=collective)
        optimizer = private(Bag((3,)), batches=batches, clip_norm=0.5, **settings)
        optimizer.set_epoch(1)
        steps(optimizer, 5)
        return optimizer.epsilon(1e-5).conditions

    for conditions in run_workers(2, work):
        assert any(FOLLOWED in condition for condition in conditions)


@pytest.mark.parametrize(
    "make",
    [
        lambda collective: FixedSizeUsers([10, 10], cohort=2, collective=collective),
        lambda collective: PoissonUsers([10, 200, 10, 10], 0.5, collective=collective),
        lambda collective: ShuffledBatches(range(40), 2, collective=collective),
    ],
)
def test_numbers_do_not_say_who_is_meant(make) -> None:
    """Counts of users, and numbers of examples, are the same in any order of those that they are of."""
    for compared in run_workers(2, lambda collective: make(collective).describe()["order_compared"]):
        assert compared is False


def test_other_counts_on_another_worker_are_refused() -> None:
    counts = {0: [10, 20], 1: [20, 10]}
    found = run_workers(2, lambda one: PoissonUsers(counts[one.rank], 0.5, collective=one))
    assert all(isinstance(error, ValueError) for error in found)


def test_a_rate_below_what_can_be_drawn_is_told_as_it_is_drawn() -> None:
    batches = PoissonBatches(10, 1e-30, steps_per_epoch=1, collective="local")
    assert batches.sampling_rate == 2.0**-53
    assert PoissonBatches(10, 0.05, collective="local").sampling_rate == 0.05
