"""Samplers in torch's DataLoader, empty batches, bad arguments, and checkpoints that do not fit."""

from __future__ import annotations

import collections
import copy
import json
import os
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import edpsgd
from edpsgd import PoissonBatches, ShuffledBatches
from tests.helpers.common import Bag, private, quiet, set_gradients

Pair = collections.namedtuple("Pair", "words intent")


class Dictionaries(torch.utils.data.Dataset):
    """Examples as dictionaries, with a text beside the tensors."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict:
        return {"words": torch.full((4,), index), "intent": index % 3, "text": f"utterance {index}"}


@pytest.mark.parametrize("processes", [0, 2])
def test_poisson_batches_in_a_data_loader(processes) -> None:
    """Empty ones too, from dictionaries and tensors, in the training's process and in the loader's own."""
    batches = edpsgd.PoissonBatches(Dictionaries(), 0.05, steps_per_epoch=40, seed=1)
    planned = list(batches)
    assert [] in planned
    assert any(planned)
    loader = DataLoader(
        Dictionaries(), batch_sampler=batches, collate_fn=edpsgd.Collate(Dictionaries()[0]), num_workers=processes
    )
    for batch, indices in zip(loader, planned, strict=True):
        assert batch["words"].shape == (len(indices), 4)
        assert batch["words"].dtype == torch.int64
        assert batch["intent"].tolist() == [i % 3 for i in indices]
        assert batch["text"] == [f"utterance {i}" for i in indices]


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
    ("example", "emptied"),
    [
        (torch.zeros(3, 2), torch.zeros(0, 3, 2)),
        (5, torch.zeros(0, dtype=torch.int64)),
        ((torch.zeros(3), 1.5), (torch.zeros(0, 3), torch.zeros(0, dtype=torch.float64))),
        (Pair(torch.zeros(3), 1), Pair(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))),
        ({"a": {"b": torch.zeros(2)}, "text": "x"}, {"a": {"b": torch.zeros(0, 2)}, "text": []}),
        (("call anna", 3), ((), torch.zeros(0, dtype=torch.int64))),
        (("call anna", "intent"), ((), ())),
    ],
)
def test_empty_batches_have_the_structure_of_full_ones(example, emptied) -> None:
    def compare(found, expected) -> None:
        assert type(found) is type(expected) or isinstance(found, list)
        if isinstance(expected, torch.Tensor):
            assert found.shape == expected.shape
            assert found.dtype == expected.dtype
        elif isinstance(expected, dict):
            assert found.keys() == expected.keys()
            for name in expected:
                compare(found[name], expected[name])
        else:
            assert len(found) == len(expected)
            for a, b in zip(found, expected, strict=True):
                compare(a, b)

    compare(edpsgd.Collate(example)([]), emptied)
    pickle.loads(pickle.dumps(edpsgd.Collate(example)))


def test_collate_uses_the_given_function_and_keeps_batch_types() -> None:
    from transformers import BatchEncoding

    collate = edpsgd.Collate(
        {"ids": [1, 2]}, lambda examples: BatchEncoding({"ids": torch.tensor([e["ids"] for e in examples])})
    )
    assert isinstance(collate([]), BatchEncoding)
    assert collate([])["ids"].shape == (0, 2)
    assert collate([{"ids": [3, 4]}])["ids"].tolist() == [[3, 4]]


def test_a_subset_as_data_set() -> None:
    data = Subset(TensorDataset(torch.arange(10.0)), [1, 3, 5])
    batches = edpsgd.PoissonBatches(data, 0.01, steps_per_epoch=5, seed=1)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=edpsgd.Collate(data[0]))
    assert [len(values) for (values,) in loader] == [len(b) for b in batches]


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


def checkpoint(batches, steps=1) -> dict:
    model = Bag((5,))
    optimizer = private(model, batches=batches)
    optimizer.set_epoch(2)
    for _ in zip(range(steps), batches, strict=False):
        optimizer.step()
    return copy.deepcopy(optimizer.state_dict())


def test_the_middle_of_an_epoch_needs_the_same_batches() -> None:
    state = checkpoint(edpsgd.ShuffledBatches(20, 2))
    optimizer = private(Bag((5,)), batches=edpsgd.ShuffledBatches(20, 4))
    with pytest.raises(ValueError, match="some examples would be used twice"):
        optimizer.load_state_dict(state)
    optimizer = private(Bag((5,)), batches=edpsgd.PoissonBatches(20, 0.1))
    with pytest.raises(ValueError, match="the checkpoint's batches are 'shuffled', this sampler's are 'poisson'"):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="another seed"):
        private(Bag((5,)), batches=edpsgd.ShuffledBatches(20, 2, seed=1)).load_state_dict(state)


def test_after_a_complete_epoch_the_batches_may_change() -> None:
    state = checkpoint(edpsgd.ShuffledBatches(20, 2), steps=10)
    batches = edpsgd.ShuffledBatches(20, 1)
    optimizer = private(Bag((5,)), batches=batches)
    optimizer.load_state_dict(state)
    with pytest.raises(RuntimeError, match="all 20 steps of this epoch were taken"):
        optimizer.step()
    optimizer.set_epoch(3)
    for _ in batches:
        optimizer.step()
    assert [(e.epoch, e.steps) for e in optimizer.ledger.events] == [(2, 10), (3, 20)]


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


def test_poisson_steps_after_a_resume_are_drawn_anew_and_counted() -> None:
    """Each step is an independent draw, so nothing needs to be repeated: what was left of the epoch is drawn."""
    state = checkpoint(edpsgd.PoissonBatches(50, 0.1), steps=4)
    batches = edpsgd.PoissonBatches(50, 0.1)
    optimizer = private(Bag((5,)), batches=batches)
    optimizer.load_state_dict(state)
    optimizer.set_epoch(optimizer.epoch)
    assert len(batches) == 6
    for _ in batches:
        optimizer.step()
    assert [(e.epoch, e.steps, e.batching) for e in optimizer.ledger.events] == [(2, 10, "poisson")]


def test_draws_that_are_added_up_or_skipped_are_refused() -> None:
    """Gradient accumulation over two draws is sampling at another rate; a skipped empty draw shows the data."""
    model = Bag((5,))
    batches = edpsgd.PoissonBatches(40, 0.1)
    optimizer = private(model, batches=batches)
    optimizer.set_epoch(0)
    drawn = iter(batches)
    next(drawn), next(drawn)
    with pytest.raises(RuntimeError, match=r"1 batches ahead.*none may be skipped or added to another"):
        optimizer.step()


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


def test_poisson_draws_are_not_repeated_by_a_rewind_or_a_pickle_and_not_by_a_fork() -> None:
    batches = edpsgd.PoissonBatches(200, 0.5, steps_per_epoch=3)
    planned, state = list(batches), batches.state_dict()
    pickled = pickle.dumps(batches)
    assert batches._key not in pickled
    assert batches._secret not in pickled
    assert list(pickle.loads(pickled)) != planned
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, json.dumps(list(batches)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert json.loads(answer.read()) != planned
    assert list(batches) == planned
    batches.load_state_dict(state)
    assert list(batches) != planned


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


def test_nothing_of_the_example_stays_in_an_empty_batch() -> None:
    def joined(examples):
        batch = collections.defaultdict(list)
        batch.update(text=" ".join(examples), count=len(examples))
        return batch

    empty = edpsgd.Collate("private words", joined)([])
    assert (empty["text"], empty["count"], type(empty)) == ("", 0, collections.defaultdict)
    with pytest.raises(ValueError, match="Collate cannot empty a set"):
        edpsgd.Collate("x", set)([])


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


def test_a_checkpoint_that_does_not_fit_leaves_the_sampler_alone() -> None:
    state = checkpoint(edpsgd.ShuffledBatches(20, 2))["edpsgd"]["batches"]
    batches = edpsgd.ShuffledBatches(20, 4, seed=None)
    planned = list(batches)
    with pytest.raises(ValueError, match="some examples would be used twice"):
        batches.load_state_dict(state)
    assert (batches.position, batches.moves, list(batches)) == (0, 0, planned)


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
