"""Samplers: draws of micro-batches that follow no other example, and data that workers have in another order."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from edpsgd import PoissonBatches, PoissonUsers, ShuffledBatches
from edpsgd.ledger import guarantee
from edpsgd.ledger.events import Event
from edpsgd.ledger.records import RunRecord
from edpsgd.sampling.data_order import order_digest
from tests.helpers.common import Bag, private
from tests.helpers.threads import run_workers

DELTA = 1e-5


# -------------------------------------------------------------------- Poisson draws of micro-batches


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


@pytest.mark.parametrize(
    ("run", "neighbours"),
    [
        ({"workers": 1, "batches": {"micro_batches": 1}}, "add or remove one example"),
        ({"workers": 1, "batches": {"micro_batches": 2}}, "blank one example, its index stays"),
        ({"workers": 2, "batches": {"micro_batches": 1}}, "blank one example, its index stays"),
        ({"workers": 2, "batches": {"micro_batches": 2, "slots": "drawn"}}, "add or remove one example"),
        ({"workers": 2, "unit": "example", "batches": {"micro_batches": None}}, "add or remove one example"),
    ],
)
def test_ledgers_in_which_slots_followed_the_index_say_so(run, neighbours) -> None:
    run = {"unit": "micro_batch", **run}
    run["batches"] = {"kind": "poisson", "seeded": False, "order_compared": True, **run["batches"]}
    event = Event("gradients", 0, 1.0, 3, "poisson", 0.1)
    assert guarantee.bound([event], DELTA, [RunRecord.from_settings(run)]).neighbours == neighbours


def losses_of(model: nn.Module, examples: int = 4) -> torch.Tensor:
    return model(torch.arange(2.0 * examples).reshape(examples, 2)).square().sum(1)


# -------------------------------------------------------------------- data in another order


@dataclass
class Said:
    text: str
    kinds: frozenset[str]


class Texts(torch.utils.data.Dataset):
    def __init__(self, order) -> None:
        self.order, self.is_augmented = list(order), False

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict:
        place = self.order[index]
        noise = torch.rand(2) if self.is_augmented else torch.zeros(2)
        return {"text": f"private {place}", "ids": torch.tensor([place]) + noise, "label": np.int64(place)}


@pytest.mark.parametrize("make", [list, Texts, lambda order: [f"private {i}" for i in order]])
@pytest.mark.parametrize(
    "sampler",
    [
        lambda data, worker: ShuffledBatches(data, 4, collective=worker),
        lambda data, worker: PoissonBatches(data, 0.1, collective=worker),
    ],
)
def test_data_in_another_order_are_refused_on_all_workers(make, sampler) -> None:
    def work(worker, order) -> bool:
        made = sampler(make(order(worker)), worker)
        optimizer = private(Bag((5,)), batches=made, collective=worker)
        return made.is_order_compared and "could not compare" not in str(optimizer.epsilon(DELTA))

    rng = [np.random.default_rng(seed).permutation(500).tolist() for seed in range(3)]
    errors = run_workers(3, lambda worker: work(worker, lambda w: rng[w.rank]))
    assert all("or the same in another order" in str(error) for error in errors)
    assert not any("private" in str(error) for error in errors)
    assert run_workers(3, lambda worker: work(worker, lambda w: rng[0])) == [True] * 3


def test_users_in_another_order_are_refused() -> None:
    def work(worker) -> None:
        PoissonUsers([1, 2, 3, 4][:: 1 - 2 * worker.rank], 0.5, collective=worker)

    assert all("the workers have other users, or the same in another order" in str(e) for e in run_workers(2, work))


@pytest.mark.parametrize("data", [40, "augmented"])
def test_data_that_cannot_be_compared_are_a_condition(data) -> None:
    def work(worker) -> str:
        examples = data
        if data == "augmented":
            examples = Texts(range(40))
            examples.is_augmented = True
        batches = ShuffledBatches(examples, 4, collective=worker)
        optimizer = private(Bag((5,)), batches=batches, collective=worker)
        optimizer.set_epoch(0)
        next(iter(batches))
        optimizer.step()
        return str(optimizer.epsilon(DELTA))

    assert all("could not compare the data of the workers" in printed for printed in run_workers(2, work))
    alone = private(Bag((5,)), batches=ShuffledBatches(40, 4, collective="local"), collective="local")
    assert "could not compare" not in str(alone.epsilon(DELTA))


def test_digests_do_not_depend_on_the_process() -> None:
    """Hashes of strings, and so the order of sets, differ between processes; places of objects too."""
    kinds = [f"kind {i}" for i in range(20)]
    items = f"[frozenset({kinds}), {{'x': set({kinds}), 'y': None}}, b'z', 1.5]"
    code = (
        f"from edpsgd.sampling.data_order import order_digest; print(order_digest({items}).hex(), list(set({kinds})))"
    )

    def ask(seed: str) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        return tuple(done.stdout.split(" ", 1))

    (first, order), (second, other_order) = ask("1"), ask("2")
    assert order != other_order
    assert first == second
    assert order_digest([Said("a", frozenset("xyz"))]) == order_digest([Said("a", frozenset("zyx"))]) is not None
    assert order_digest([object()]) is None


def test_reading_the_data_leaves_random_numbers_and_ledger_alone() -> None:
    examples = Texts(range(40))
    examples.is_augmented = True
    state = torch.get_rng_state()
    assert order_digest(examples) is None
    assert torch.equal(state, torch.get_rng_state())
    batches = run_workers(2, lambda worker: ShuffledBatches(Texts(range(40)), 4, collective=worker))[0]
    assert order_digest(Texts(range(40))).hex() not in json.dumps([batches.describe(), batches.state_dict()])
