"""optimizer.backward(losses) on every worker: the step is that of one process with a backward for each unit."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

import edpsgd
from edpsgd.distributed.launchers import resolve
from tests.helpers.common import private

WORDS = torch.randint(0, 7, (12, 5), generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.gru, self.out = nn.Embedding(7, 4), nn.GRU(4, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.gru(self.embed(words))[0]).square().sum(dim=(1, 2))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_workers_equal_a_loop_in_one_process(size, clipping) -> None:
    """Units of one example, and of two; each worker has an equal share of them."""
    workers, model = resolve("auto"), Model()
    settings = {"clip_norm": 0.3, "noise_multiplier": 0.0, "clipping": clipping}
    unit = {"unit": "example", "divisor": 12} if size == 1 else {"unit": "micro_batch"}
    reference = copy.deepcopy(model)
    optimizer, loop = private(model, **settings, **unit), private(reference, collective="local", **settings, **unit)
    own = WORDS.view(workers.size, -1, 5)[workers.rank]
    optimizer.backward(model(own), None if size == 1 else torch.arange(len(own)) // size)
    optimizer.step()
    for rows in WORDS.split(size):
        reference(rows).mean().backward()
        loop.accumulate()
    loop.step()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("unit", ["micro_batch", "example"])
def test_steps_in_which_some_workers_have_no_example(workers, unit) -> None:
    """Their micro-batches, which come together, are empty: step() alone counts them."""
    examples = 4 * workers.size + 1
    batches = edpsgd.ShuffledBatches(examples, 1, micro_batches=4, together=True)
    model = Model()
    optimizer = private(model, unit=unit, batches=batches)
    optimizer.set_epoch(0)
    sizes = []
    for rows in batches:
        if rows:
            optimizer.backward(model(WORDS[torch.tensor(rows) % len(WORDS)]))
        optimizer.step()
        sizes.append(len(rows))
    assert sizes == [4, 1 if workers.rank == 0 else 0]
    assert [event.steps for event in optimizer.ledger.events] == [2]


@pytest.mark.parametrize("budget", [None, edpsgd.Budget(0.01, 1e-5)])
def test_all_workers_know_what_one_of_them_did(workers, budget) -> None:
    """A condition of ε that follows from it, and that the budget is exhausted, though only one has it in its ε yet."""
    model = Model()
    optimizer = private(model, unit="example", divisor=12, noise_multiplier=1.0, budget=budget)
    optimizer.set_epoch(0)
    if workers.rank == workers.size - 1:
        optimizer.backward(model(WORDS))
    with contextlib.nullcontext() if budget is None else pytest.raises(edpsgd.BudgetExhausted):
        optimizer.step()
    if budget is None:
        assert "clipped in one backward pass" in str(optimizer.epsilon(1e-5))
