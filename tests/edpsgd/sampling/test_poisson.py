"""Poisson sampling: in DataLoaders, after a resume, and without any of the examples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import edpsgd
from edpsgd import PoissonBatches
from tests.helpers.common import Bag, private
from tests.helpers.sampler_checkpoints import checkpoint
from tests.helpers.threads import run_workers


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


def test_a_subset_as_data_set() -> None:
    data = Subset(TensorDataset(torch.arange(10.0)), [1, 3, 5])
    batches = edpsgd.PoissonBatches(data, 0.01, steps_per_epoch=5, seed=1)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=edpsgd.Collate(data[0]))
    assert [len(values) for (values,) in loader] == [len(b) for b in batches]


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


@pytest.mark.parametrize(("workers", "micro_batches"), [(1, 8), (2, 1), (3, 2)])
def test_removing_an_example_from_the_middle_moves_no_other(workers, micro_batches) -> None:
    """Coupled worlds: the neighbour's examples keep the draws of their own, whatever their new index is.

    All draws are a function of (seed, step, index) that is independent between indices, so it is enough that the draws
    of an index depend neither on the number of examples nor on the others: then the law is the same under any order.
    """

    def slots(examples: int) -> dict[tuple[int, int], tuple[int, int]]:
        """(step, index) -> (worker, slot)."""

        def drawn(worker) -> list[list[int]]:
            sampler = PoissonBatches(
                examples, 0.5, steps_per_epoch=30, micro_batches=micro_batches, collective=worker, seed=11
            )
            return list(sampler)

        found = {}
        for rank, of_worker in enumerate(run_workers(workers, drawn)):
            for number, batch in enumerate(of_worker):
                for index in batch:
                    assert (number // micro_batches, index) not in found
                    found[number // micro_batches, index] = rank, number % micro_batches
        return found

    large, small = slots(41), slots(29)
    assert {key: place for key, place in large.items() if key[1] < 29} == small
    neighbours = [(large[s, i], large[s, i + 1]) for s, i in large if (s, i + 1) in large]
    alike = np.mean([a == b for a, b in neighbours])  # a slot that follows from the index would say 0 or 1
    expected = 1 / (workers * micro_batches)
    assert abs(alike - expected) < 5 * np.sqrt(expected * (1 - expected) / len(neighbours))


def test_the_law_of_the_clipped_sum_moves_by_no_more_than_claimed_without_an_example() -> None:
    """K = 8, q = 1: data that lie in wait for the others to move up, by which slots that follow the index move 14 C."""
    slots, trials = 8, 4000
    first = [10.0 * k for k in range(slots)]
    second = [-10.0 * k - 1 for k in range(slots)]
    worlds = {True: [*first, 0.0, *second], False: [*first, *second]}

    def sums(has_it: bool) -> np.ndarray:
        data = np.array(worlds[has_it])
        batches = PoissonBatches(
            len(data), 1.0, micro_batches=slots, steps_per_epoch=trials, seed=int(has_it), collective="local"
        )
        clipped = [np.clip(100 * data[batch].mean(), -1, 1) if batch else 0.0 for batch in batches]
        return np.array(clipped).reshape(trials, slots).sum(1)

    with_it, without = sums(True), sums(False)
    for threshold in np.arange(-8.5, 9.0, 1.0):  # a coupling within 2 C exists only if the tails are nested
        for a, b in ((with_it, without), (without, with_it)):
            assert np.mean(a >= threshold + 2) <= np.mean(b >= threshold) + 5 / np.sqrt(trials)


def test_states_of_seeded_draws_of_another_version_are_refused() -> None:
    batches = PoissonBatches(20, 0.5, seed=3, collective="local")
    state = batches.state_dict()
    planned = list(batches)
    batches.load_state_dict(state)
    batches.set_epoch(0)
    assert list(PoissonBatches(20, 0.5, seed=3, collective="local")) == planned
    old = {name: value for name, value in state.items() if name != "draws"}
    with pytest.raises(ValueError, match="of another version, in which the same seed gave other batches"):
        batches.load_state_dict(old)
    PoissonBatches(20, 0.5, collective="local").load_state_dict(  # draws anew in any case
        {name: value for name, value in old.items() if name != "seed"}
    )
