"""What all samplers share: DataLoaders, bad arguments, positions, copies and refusals."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import edpsgd
from edpsgd import PoissonBatches, ShuffledBatches
from tests.helpers.common import Bag, private, quiet, set_gradients


def test_training_through_a_data_loader_that_reads_ahead() -> None:
    """The loader draws batches before the optimizer takes them: every step is still one that the sampler made."""
    data = TensorDataset(torch.arange(20.0))
    batches = edpsgd.ShuffledBatches(data, 3, micro_batches=2, read_ahead=2 * 4, seed=1)
    collate = edpsgd.Collate(data[0])  # the last micro-batch is empty
    loader = DataLoader(data, batch_sampler=batches, collate_fn=collate, num_workers=2, prefetch_factor=4)
    model, used = Bag((5,)), []
    optimizer = private(model, batches=batches)
    for epoch in range(2):
        optimizer.set_epoch(epoch)
        for number, (values,) in enumerate(loader):
            used += values.tolist()
            if len(values):
                set_gradients(model, 1.0)
            if number % 2 == 0:
                optimizer.accumulate()
            else:
                optimizer.step()
    assert sorted(used) == sorted(2 * list(range(20)))
    assert [e.steps for e in optimizer.ledger.events] == [4, 4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: edpsgd.ShuffledBatches(0, 3), "examples must be an int >= 1, got 0"),
        (lambda: edpsgd.ShuffledBatches(2.5, 3), "examples must be an int >= 1"),
        (lambda: edpsgd.ShuffledBatches([], 3), "examples must be an int >= 1"),
        (lambda: edpsgd.ShuffledBatches(10, 0), "batch_size must be an int >= 1, got 0"),
        (lambda: edpsgd.ShuffledBatches(10, 2, micro_batches=True), "micro_batches must be an int >= 1, got True"),
        (lambda: edpsgd.ShuffledBatches(10, 2, seed="a"), "seed must be None or an int"),
        (lambda: edpsgd.PoissonBatches(10, 1.5), "sampling_rate must be > 0 and <= 1, got 1.5"),
        (lambda: edpsgd.PoissonBatches(10, float("nan")), "sampling_rate must be > 0 and <= 1, got nan"),
        (lambda: edpsgd.PoissonBatches(10, -0.1), "sampling_rate must be > 0"),
        (lambda: edpsgd.PoissonBatches(10, 0.1, steps_per_epoch=0), "steps_per_epoch must be an int >= 1, got 0"),
        (
            lambda: edpsgd.PoissonBatches(10, 0.1, unit="user"),
            "one of 'micro_batch', 'example', got 'user'",
        ),
        (lambda: edpsgd.PoissonBatches(10, 0.1, unit="example", micro_batches=2), "it follows the draw"),
        (lambda: edpsgd.ShuffledBatches(10, 2).set_epoch(-1), "epoch must be an int >= 0, got -1"),
        (lambda: edpsgd.Budget(0.0, 1e-5), "epsilon of a Budget must be a finite number > 0"),
        (lambda: edpsgd.Budget(float("inf"), 1e-5), "epsilon of a Budget"),
        (lambda: edpsgd.Budget(1.0, 1.0), "delta of a Budget must be between 0 and 1"),
        (lambda: private(Bag(), batches=[[1, 2]]), "batches must be None, ShuffledBatches or PoissonBatches, got list"),
        (lambda: private(Bag(), budget=(8, 1e-5)), "budget must be None or edpsgd.Budget"),
        (lambda: private(Bag(), unit="example", batches=edpsgd.ShuffledBatches(10, 2)), "does not fit the sampler"),
        (lambda: private(Bag(), unit="example", batches=edpsgd.PoissonBatches(10, 0.5)), "does not fit the sampler"),
        (lambda: private(Bag(), batches=edpsgd.PoissonBatches(10, 0.5, unit="example")), "does not fit the sampler"),
    ],
)
def test_bad_arguments(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_without_set_epoch_a_sampler_still_knows_its_pass() -> None:
    batches = edpsgd.ShuffledBatches(6, 2)
    optimizer = private(Bag((5,)), batches=batches)
    for _ in batches:
        optimizer.step()
    assert [(e.epoch, e.steps) for e in optimizer.ledger.events] == [(0, 3)]
    with pytest.raises(RuntimeError, match="all 3 steps of this epoch were taken"):
        optimizer.step()


def test_copies_have_a_sampler_of_their_own() -> None:
    batches = edpsgd.ShuffledBatches(12, 2)
    optimizer = private(Bag((5,)), batches=batches, budget=edpsgd.Budget(50.0, 1e-5))
    optimizer.set_epoch(1)
    for _ in zip(range(2), batches, strict=False):
        optimizer.step()
    with quiet():
        copied = copy.deepcopy(optimizer)
    assert copied.batches is not batches
    assert list(copied.batches) == list(batches)
    next(iter(copied.batches))
    copied.step()
    assert (copied.batches.position, batches.position) == (3, 2)
    assert [e.steps for e in copied.ledger.events] == [3]


def test_a_loader_that_reads_ahead_must_be_announced() -> None:
    data = TensorDataset(torch.arange(20.0))
    batches = edpsgd.ShuffledBatches(data, 2)
    optimizer = private(Bag((5,)), batches=batches)
    optimizer.set_epoch(0)
    next(iter(DataLoader(data, batch_sampler=batches, num_workers=1)))
    with pytest.raises(RuntimeError, match=r"read_ahead=num_workers \* prefetch_factor"):
        optimizer.step()


def test_the_length_of_an_epoch_does_not_change_while_it_runs() -> None:
    batches = edpsgd.ShuffledBatches(20, 2)
    optimizer = private(Bag((5,)), batches=batches)
    optimizer.set_epoch(0)
    for _ in batches:
        optimizer.step()
        assert len(batches) == 10
    with pytest.raises(RuntimeError, match=r"call optimizer\.set_epoch\(\) for the next"):
        next(iter(batches))


def test_a_sampler_of_another_worker_is_refused() -> None:
    """Two workers with the same shard would use every example twice."""

    class Second:
        rank, size = 1, 2

        def sum_(self, tensors) -> None:
            raise AssertionError

        def gather(self, value) -> list:
            return [value, value]

    model = Bag((5,))
    with pytest.raises(ValueError, match="made for another worker than 1 of 2"):
        private(model, collective=Second(), batches=edpsgd.ShuffledBatches(20, 2, collective="local"))


def test_a_sampler_moved_behind_the_optimizer_is_noticed() -> None:
    batches = edpsgd.ShuffledBatches(20, 2)
    optimizer = private(Bag((5,)), batches=batches)
    optimizer.set_epoch(0)
    state = batches.state_dict()
    for _ in batches:
        optimizer.step()
    batches.load_state_dict(state)
    next(iter(batches))
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\) of the sampler was called"):
        optimizer.step()


def test_state_with_numpy_numbers_loads_with_weights_only(tmp_path) -> None:
    optimizer = private(Bag((5,)), clip_norm=np.float64(1.0), noise_multiplier=np.float64(1.0))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    torch.load(tmp_path / "state.pt", weights_only=True)


@pytest.mark.parametrize("what", ["an epoch", "an iteration"])
def test_an_iterator_of_before_gives_no_more_batches(what) -> None:
    """It would hand out the new epoch's batches from the middle, and the next iterator some of them again."""
    batches = edpsgd.ShuffledBatches(20, 2)
    optimizer = private(Bag((5,)), batches=batches)
    optimizer.set_epoch(0)
    old = iter(batches)
    next(old)
    optimizer.step()
    if what == "an epoch":
        optimizer.set_epoch(1)
    else:
        next(iter(batches))
    with pytest.raises(RuntimeError, match="take the batches from a new iterator"):
        next(old)


@pytest.mark.parametrize("make", [lambda data: ShuffledBatches(8, data), lambda data: PoissonBatches(8, data)])
def test_data_in_the_wrong_place_is_not_told(make) -> None:
    with pytest.raises(ValueError, match="got a list") as error:
        make(["my name is Anna"])
    assert "Anna" not in str(error.value)


@pytest.mark.parametrize(
    "columns",
    [
        {"input_ids": torch.zeros(70, 3), "labels": torch.zeros(70)},
        (torch.zeros(70, 3), torch.zeros(70)),
        DataLoader(torch.zeros(70), batch_size=8),
    ],
)
def test_what_has_another_length_than_its_examples_is_refused(columns) -> None:
    with pytest.raises(ValueError, match="examples must be an int >= 1, got a "):
        ShuffledBatches(columns, 8, collective="local")
    assert ShuffledBatches([torch.zeros(3)] * 5, 8, collective="local").examples == 5


def test_refusals_say_what_to_do() -> None:
    def refusal(batches, steps, **settings) -> str:
        optimizer = private(Bag(), batches=batches, **settings)
        optimizer.set_epoch(0)
        next(iter(batches))
        with pytest.raises(RuntimeError) as error:
            steps(optimizer)
        return str(error.value)

    def twice(optimizer) -> None:
        for _ in range(2):
            set_gradients(Bag(), 1.0)
            optimizer.accumulate()
        optimizer.step()

    shuffled = ShuffledBatches(8, batch_size=4, collective="local")
    assert "the sampler made 1 for it: give it micro_batches=2" in refusal(shuffled, twice)
    poisson = PoissonBatches(50, 0.9, unit="example", collective="local")
    said = refusal(poisson, lambda optimizer: optimizer.step(), unit="example")
    assert "call optimizer.backward(losses) with one loss for each example" in said
