"""Ledger, sampler and budget of one optimizer: changed workers, flags and conditions, checkpoints that do not fit."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import edpsgd
from edpsgd import Budget, PoissonBatches, ShuffledBatches
from edpsgd.bookkeeping import _FLAGS, Bookkeeping, check_arguments
from edpsgd.distributed.collectives import Local
from edpsgd.ledger.events import LedgerError
from edpsgd.ledger.records import MARKS, RunRecord
from tests.helpers.common import Bag, layers_of, private, set_gradients
from tests.helpers.threads import run_workers

DELTA = 1e-5


@pytest.mark.parametrize("scaling", [None, edpsgd.FirstStepNorms()])
def test_workers_that_swap_their_places_are_refused_on_all(tmp_path, scaling) -> None:
    def work(worker) -> tuple[object, bool]:
        model = Bag((5,))
        optimizer = private(model, collective=worker, ledger=tmp_path / "ledger.jsonl", layer_scaling=scaling)
        optimizer.set_epoch(0)
        if scaling is None:
            optimizer.step()
        before = layers_of(model)["p0"]
        if worker.rank < 2:
            worker.rank = 1 - worker.rank
        set_gradients(model, 1.0)
        try:
            optimizer.step()
        except Exception as error:
            return str(error), torch.equal(before, model.p0.detach())
        return None, False

    answers = run_workers(3, work)
    assert all("whether the workers are those of the start" in str(error) for error, _ in answers)
    assert all("was worker 0 of 3 when its optimizer was made, and is worker 1" in str(error) for error, _ in answers)
    assert all(unchanged for _, unchanged in answers)


def test_a_worker_that_is_left_alone_does_not_go_on_by_itself(tmp_path) -> None:
    """The file belonged to worker 0 of before: steps would be released that no file counts."""
    path, kept = tmp_path / "ledger.jsonl", {}

    def work(worker) -> None:
        optimizer = private(Bag((5,)), collective=worker, ledger=path)
        optimizer.set_epoch(0)
        optimizer.step()
        kept[worker.rank] = worker, optimizer, copy.deepcopy(optimizer.state_dict())

    run_workers(2, work)
    kept[0][1].ledger.close()  # worker 0 is gone
    worker, survivor, state = kept[1]
    worker.rank, worker.size = 0, 1
    worker.gather, worker.sum_ = lambda value: [value], lambda tensors: None
    with pytest.raises(RuntimeError, match="was worker 1 of 2 when its optimizer was made, and is worker 0 of 1 now"):
        survivor.step()
    assert sum(event.steps for event in edpsgd.Ledger.read(path).events) == 1
    survivor.load_state_dict(state)
    survivor.set_epoch(1)
    survivor.step()
    survivor.ledger.close()
    on_disk = edpsgd.Ledger.read(path)
    assert sum(event.steps for event in on_disk.events) == 2
    assert on_disk.runs[-1].workers == 1


def test_a_sampler_stays_with_the_worker_that_it_was_made_for() -> None:
    def work(worker) -> object:
        optimizer = private(Bag((5,)), collective=worker, batches=ShuffledBatches(range(8), 2, collective=worker))
        state = copy.deepcopy(optimizer.state_dict())
        worker.rank = 1 - worker.rank
        optimizer.load_state_dict(state)
        return None

    assert all("the sampler was made for another worker" in str(error) for error in run_workers(2, work))


def test_the_number_of_micro_batches_is_the_users_word() -> None:
    def condition(**settings) -> str:
        optimizer = private(Bag((5,)), **settings)
        optimizer.step()
        return str(optimizer.epsilon(DELTA))

    assert "nor that of micro-batches in a step (which backward() takes from `units`" in condition()
    assert "micro-batches in a step (" not in condition(unit="example", divisor=4)
    assert "the number of steps does not depend on the data" in condition(unit="example", divisor=4)


def followed(optimizer) -> bool:
    return any("after clip_fraction was read" in text for text in optimizer.epsilon(DELTA).conditions)


def test_a_clip_norm_that_is_changed_after_a_look_at_the_fraction() -> None:
    model = Bag((5,))
    optimizer = private(model)

    def step(one) -> None:
        set_gradients(model, 1.0)
        one.step()

    step(optimizer)
    optimizer.clip_norm = 2.0  # a schedule
    step(optimizer)
    assert not followed(optimizer)
    assert optimizer.clip_fraction >= 0
    step(optimizer)
    assert not followed(optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.clip_norm = 3.0
    step(optimizer)
    assert followed(optimizer)
    resumed = private(model)
    resumed.load_state_dict(state)
    step(resumed)
    assert not followed(resumed)
    resumed.clip_norm = 1.0
    step(resumed)
    assert followed(resumed)


def test_a_fraction_that_another_worker_has_read(tmp_path) -> None:
    def work(worker) -> bool:
        optimizer = private(Bag((5,)), collective=worker, ledger=tmp_path / "ledger.jsonl")
        optimizer.step()
        if worker.rank == 1:
            optimizer.clip_fraction  # noqa: B018
        optimizer.step()
        optimizer.clip_norm = 2.0
        optimizer.step()
        return followed(optimizer)

    assert run_workers(2, work) == [True, True]


def test_a_fraction_is_not_read_when_the_ledger_is_closed(tmp_path) -> None:
    """Nothing could say that it was, and the next run on the same ledger may follow from it."""
    model = Bag((5,))
    optimizer = private(model, ledger=tmp_path / "ledger.jsonl")
    set_gradients(model, 1.0)
    optimizer.step()
    optimizer.ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        _ = optimizer.clip_fraction


def opened(worker=None, path=None, batches=None, budget=None) -> Bookkeeping:
    bookkeeping = Bookkeeping(worker or Local(), path, batches, budget)
    bookkeeping.begin_run(RunRecord.from_settings({"noise_multiplier": 1.0}))
    return bookkeeping


def test_every_condition_has_a_bit_of_one_byte() -> None:
    assert tuple(_FLAGS) == MARKS
    assert sorted(_FLAGS.values()) == [1 << place for place in range(len(MARKS))]
    assert max(_FLAGS.values()) < 256


def test_flags_of_other_workers_are_noted() -> None:
    bookkeeping = opened()
    bookkeeping.note_once("one_pass")
    assert bookkeeping.flags == _FLAGS["one_pass"]
    bookkeeping.note_flags([_FLAGS["one_pass"] | _FLAGS["loss_scaling"]])
    assert bookkeeping.flags == _FLAGS["one_pass"] | _FLAGS["loss_scaling"]
    assert bookkeeping.ledger.runs[-1].loss_scaling


def test_worker_0_keeps_the_file_and_all_know_what_it_holds(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    opened(path=path).ledger.close()

    def work(worker) -> tuple[int, bool]:
        bookkeeping = opened(worker, path)
        refusal = bookkeeping.pay_step(1.0, 1, None)
        assert refusal is None
        return len(bookkeeping.ledger.runs), bookkeeping.displaced() is None

    assert run_workers(2, work) == [(2, True)] * 2
    assert len(edpsgd.Ledger.read(path).runs) == 2


def test_a_step_is_paid_or_refused() -> None:
    enough = edpsgd.accounting.gaussian_epsilon([1.0], DELTA) * 1.01
    batches = ShuffledBatches(4, 2, collective="local")
    bookkeeping = opened(batches=batches, budget=Budget(enough, DELTA))
    bookkeeping.open_epoch(0)
    assert "has not produced" in str(bookkeeping.pay_step(1.0, 1, 0))
    drawn = iter(batches)
    next(drawn)
    assert "the sampler made 1" in str(bookkeeping.pay_step(1.0, 2, 0))
    assert bookkeeping.pay_step(1.0, 1, 0) is None
    assert [event.steps for event in bookkeeping.ledger.events] == [1]
    assert batches.position == 0
    bookkeeping.record_step()
    assert batches.position == bookkeeping.position == 1
    next(drawn)
    assert bookkeeping.pay_step(1.0, 1, 0) is None  # the same pass costs no more
    bookkeeping.record_step()
    bookkeeping.open_epoch(1)
    next(iter(batches))
    assert isinstance(bookkeeping.pay_step(1.0, 1, 1), edpsgd.BudgetExhausted)


def test_layer_norms_are_paid_or_refused() -> None:
    bookkeeping = opened(budget=Budget(3.0, DELTA))
    assert bookkeeping.pay_layer_norms(2.0, 1) is None
    assert isinstance(bookkeeping.pay_layer_norms(0.5, 1), edpsgd.BudgetExhausted)
    assert [event.kind for event in bookkeeping.ledger.events] == ["layer_norms"]


def test_a_draw_at_random_of_a_failed_step_does_not_come_again() -> None:
    batches = PoissonBatches(8, 0.5, collective="local")
    bookkeeping = opened(batches=batches)
    bookkeeping.open_epoch(0)
    next(iter(batches))
    assert bookkeeping.pay_step(1.0, 1, 0) is None
    bookkeeping.record_failed_step(0)
    assert batches.position == 1
    assert "its draw must not be used again" in str(bookkeeping.pay_step(1.0, 1, 0))


def test_a_state_holds_ledger_and_sampler() -> None:
    bookkeeping = opened(batches=ShuffledBatches(8, 2, collective="local", seed=1))
    bookkeeping.open_epoch(0)
    next(iter(bookkeeping.batches))
    bookkeeping.pay_step(1.0, 1, 0)
    bookkeeping.record_step()
    state = bookkeeping.state_dict()
    assert set(state) == {"ledger", "batches"}
    resumed = opened(batches=ShuffledBatches(8, 2, collective="local", seed=1))
    resumed.load_state_dict(state)
    resumed.resume()
    resumed.open_epoch(0)  # the rest of the same pass
    assert resumed.position == 1
    assert [event.steps for event in resumed.ledger.events] == [1]


def test_a_copy_leaves_the_file_to_the_original(tmp_path) -> None:
    original = opened(path=tmp_path / "ledger.jsonl")
    with pytest.warns(UserWarning, match="in memory only"):
        twin = pickle.loads(pickle.dumps(original))
    assert twin.pay_step(1.0, 1, None) is None
    original.ledger.close()
    assert not any(event.steps for event in edpsgd.Ledger.read(tmp_path / "ledger.jsonl").events)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ledger": 3}, "ledger must be None or a path, got 3"),
        ({"budget": 3}, "budget must be None or edpsgd.Budget"),
        ({"selection": 3}, "selection must be None or edpsgd.Selection"),
        ({"batches": [1]}, "batches must be None, ShuffledBatches or PoissonBatches, got list"),
        ({"unit": "user"}, "unit='user' needs batches"),
        ({"unit": "example", "batches": ShuffledBatches(8, 2, collective="local")}, "does not fit the sampler"),
    ],
)
def test_arguments(arguments, message) -> None:
    settings = {"batches": None, "budget": None, "selection": None, "unit": "micro_batch", "ledger": None, **arguments}
    with pytest.raises(ValueError, match=message):
        check_arguments(**settings, collective=Local())
