"""Whether all workers have the same data in the same order."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from edpsgd import PoissonBatches, PoissonUsers, ShuffledBatches
from edpsgd.sampling.data_order import order_digest
from tests.helpers.common import Bag, private
from tests.helpers.threads import run_workers

DELTA = 1e-5


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
