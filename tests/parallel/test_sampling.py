"""Draws of samplers on several workers: their law, copies, checkpoints, what they have in common."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chi2

import edpsgd
from tests.helpers.common import Bag, layers_of, private
from tests.helpers.sampled_steps import everywhere, train


def interrupted(workers, model, batches, optimizer, epoch, steps) -> tuple[list[list[list[int]]], dict]:
    """The batches that an epoch would have had, and what worker 0 saved after some of its steps."""
    optimizer.set_epoch(epoch)
    planned = everywhere(workers, batches)
    train(model, optimizer, batches, steps=steps)
    return planned, workers.gather(copy.deepcopy(optimizer.state_dict()))[0]


@pytest.mark.parametrize("examples", [1, 2, 7, 100])
@pytest.mark.parametrize(("batch_size", "micro_batches"), [(1, 1), (4, 1), (3, 2), (200, 3)])
def test_shuffled_batches_hold_every_example_once(workers, examples, batch_size, micro_batches) -> None:
    batches = edpsgd.ShuffledBatches(examples, batch_size, micro_batches=micro_batches)
    orders = []
    for epoch in range(3):
        batches.set_epoch(epoch)
        found = everywhere(workers, batches)
        assert sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(found))) == list(range(examples))
        assert {len(of_worker) for of_worker in found} == {batches.steps_per_epoch * micro_batches} == {len(batches)}
        assert all(len(batch) <= batch_size for of_worker in found for batch in of_worker)
        orders.append(found)
    if examples == 100 and batch_size < 200:
        assert orders[0] != orders[1] != orders[2]


def test_every_epoch_and_every_run_has_another_order_unless_seeded(workers) -> None:
    def order(seed, epoch=0):
        batches = edpsgd.ShuffledBatches(60, 60, seed=seed)
        batches.set_epoch(epoch)
        return workers.gather(next(iter(batches)))

    assert order(None) != order(None)
    assert order(3) == order(3) != order(4)
    assert order(3, epoch=1) != order(3)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_poisson_inclusion_frequencies(workers, micro_batches) -> None:
    """Chi-square over the examples, over the batch sizes, and over pairs: independent, each with probability q."""
    examples, rate, steps = 60, 0.3, 3000
    batches = edpsgd.PoissonBatches(examples, rate, steps_per_epoch=steps, micro_batches=micro_batches, seed=5)
    joined = np.zeros((steps, examples))
    for of_worker in everywhere(workers, batches):
        assert len(of_worker) == steps * micro_batches
        for number, batch in enumerate(of_worker):
            joined[number // micro_batches, batch] += 1
    assert joined.max() == 1
    variance = rate * (1 - rate)

    def assert_plausible(statistic, freedom) -> None:
        low, high = chi2.ppf([0.0005, 0.9995], freedom)
        assert low < statistic < high

    assert_plausible(((joined.sum(0) - steps * rate) ** 2).sum() / (steps * variance), examples)
    assert_plausible(((joined.sum(1) - examples * rate) ** 2).sum() / (examples * variance), steps)
    pairs = (joined[:, ::2] - rate) * (joined[:, 1::2] - rate)  # of examples
    assert_plausible((pairs.sum(0) ** 2).sum() / (steps * variance**2), examples // 2)
    pairs = (joined[::2] - rate) * (joined[1::2] - rate)  # of steps
    assert_plausible((pairs.sum(0) ** 2).sum() / (steps / 2 * variance**2), examples)


def test_worker_and_slot_of_an_example_are_drawn(workers) -> None:
    """Uniform over all micro-batches of all workers, for every example, and never two of them in a step."""
    examples, steps, own = 50, 400, 4
    slots = workers.size * own
    batches = edpsgd.PoissonBatches(examples, 0.5, steps_per_epoch=steps, micro_batches=own, seed=3)
    counts, joined = np.zeros((examples, slots)), np.zeros((steps, examples))
    for rank, of_worker in enumerate(everywhere(workers, batches)):
        for number, batch in enumerate(of_worker):
            counts[batch, rank * own + number % own] += 1
            joined[number // own, batch] += 1
    assert joined.max() == 1
    expected = counts.sum(1, keepdims=True) / slots
    low, high = chi2.ppf([0.0005, 0.9995], examples * (slots - 1))
    assert low < float(((counts - expected) ** 2 / expected).sum()) < high


def test_copies_of_common_draws_are_refused_between_workers(workers) -> None:
    """Workers could not agree on the new secret; single examples are drawn by each worker alone."""
    alone = edpsgd.PoissonBatches(60, 0.5, steps_per_epoch=4, unit="example")
    assert everywhere(workers, copy.deepcopy(alone)) != everywhere(workers, alone)
    common = edpsgd.PoissonBatches(60, 0.5, steps_per_epoch=4)
    if workers.size == 1:
        assert list(copy.deepcopy(common)) != list(common)
    else:
        with pytest.raises(RuntimeError, match="cannot agree on the draws of a copy of PoissonBatches"):
            copy.deepcopy(common)


@pytest.mark.parametrize("seed", [7, None])
def test_poisson_draws_after_a_resume(workers, seed) -> None:
    """With a seed bit for bit those that were planned, without one new ones, alike on all workers."""

    def build():
        model = Bag((5,))
        batches = edpsgd.PoissonBatches(60, 0.4, steps_per_epoch=6, micro_batches=3, seed=seed)
        return model, batches, private(model, batches=batches)

    planned, saved = interrupted(workers, *build(), epoch=2, steps=2)
    again, resumed, other = build()
    other.load_state_dict(saved)
    other.set_epoch(2)
    rest = everywhere(workers, resumed)
    assert (rest == [of_worker[2 * 3 :] for of_worker in planned]) == (seed is not None)
    flat = [i for of_worker in rest for batch in of_worker[:3] for i in batch]
    assert len(flat) == len(set(flat)) > 0
    assert train(again, other, resumed) == 4


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("removed", [29, 28, 27])
def test_removing_an_example_changes_one_micro_batch_of_the_steps_it_joins(workers, micro_batches, removed) -> None:
    """With the same draws. The last ones are removed, so that no other example gets another index; as every index has
    draws of its own, which do not depend on the number of examples, any other removal has the same law."""

    def drawn(examples):
        batches = edpsgd.PoissonBatches(examples, 0.5, steps_per_epoch=50, micro_batches=micro_batches, seed=9)
        return everywhere(workers, batches)

    # Blanking all of the last ones but the removed makes the two data sets neighbours.
    without, with_it = drawn(removed), drawn(30)
    gone = set(range(removed, 30)) - {removed}
    kept = [[[i for i in batch if i not in gone] for batch in of_worker] for of_worker in with_it]
    for step in range(50):
        slots = range(step * micro_batches, (step + 1) * micro_batches)
        pairs = [(kept[rank][s], without[rank][s]) for rank in range(workers.size) for s in slots]
        changed = [(a, b) for a, b in pairs if a != b]
        assert len(changed) <= 1
        assert all(sorted(set(a) ^ set(b)) == [removed] for a, b in changed)
    assert any(a != b for a, b in zip(kept, without, strict=True))


@pytest.mark.parametrize("kind", ["shuffled", "poisson"])
def test_replacing_an_example_changes_one_micro_batch_of_what_is_summed(workers, kind) -> None:
    """On the wire, without noise: the difference of the two sums is that of one clipped micro-batch."""
    data = torch.randn(24, 3000, generator=torch.Generator().manual_seed(0))
    neighbour = data.clone()
    neighbour[13] = 50.0

    def released(examples):
        model, sums = Bag((3000,)), []
        batches = (
            edpsgd.ShuffledBatches(24, 3, micro_batches=2, seed=1)
            if kind == "shuffled"
            else edpsgd.PoissonBatches(24, 0.4, steps_per_epoch=6, micro_batches=2, seed=1)
        )
        optimizer = private(model, batches=batches, noise_multiplier=0.0, clip_norm=1.0)
        optimizer.set_epoch(0)
        for number, batch in enumerate(batches):
            if batch:
                model.p0.grad = examples[batch].mean(0)
            if number % 2 == 0:
                optimizer.accumulate()
            else:
                before = layers_of(model)["p0"]
                optimizer.step()
                sums.append((model.p0.detach() - before) * 2 * workers.size)
        return sums

    differences = [float((a - b).norm()) for a, b in zip(released(data), released(neighbour), strict=True)]
    changed = [d for d in differences if d > 1e-4]
    assert all(d < 2.0001 for d in changed)
    assert len(changed) == 1 if kind == "shuffled" else 1 <= len(changed) < 6


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_shuffled_batches_resume_in_the_middle_of_an_epoch(workers, micro_batches) -> None:
    """From what worker 0 saved, on every worker, without the seed: the rest of the epoch is what was not used."""

    def build():
        model = Bag()
        batches = edpsgd.ShuffledBatches(100, 3, micro_batches=micro_batches)
        return model, batches, private(model, batches=batches)

    planned, saved = interrupted(workers, *build(), epoch=4, steps=3)
    again, resumed, other = build()
    other.load_state_dict(saved)
    other.set_epoch(other.epoch)
    rest = everywhere(workers, resumed)
    assert rest == [of_worker[3 * micro_batches :] for of_worker in planned]
    assert train(again, other, resumed) == resumed.steps_per_epoch - 3
    assert [(e.epoch, e.steps, e.batching) for e in other.ledger.events] == [(4, resumed.steps_per_epoch, "shuffled")]
    other.set_epoch(4)  # a second pass costs a second time
    train(again, other, resumed, steps=1)
    assert [e.steps for e in other.ledger.events] == [resumed.steps_per_epoch, 1]


def test_a_checkpoint_does_not_give_the_sampling_seed_away(workers) -> None:
    def orders(batches, epoch):
        batches.set_epoch(epoch)
        return everywhere(workers, batches)

    shuffled = edpsgd.ShuffledBatches(60, 60)
    future = orders(shuffled, 8)
    shuffled.set_epoch(7)
    state = workers.gather(shuffled.state_dict())[0]
    assert "seed" not in state
    stolen = edpsgd.ShuffledBatches(60, 60)
    stolen.load_state_dict(state)
    assert orders(stolen, 8) != future
    poisson = edpsgd.PoissonBatches(60, 0.5, steps_per_epoch=4, unit="example")
    state = workers.gather(poisson.state_dict())[0]
    assert set(state) == {"kind", "epoch", "position", "passes"}
    stolen = edpsgd.PoissonBatches(60, 0.5, steps_per_epoch=4, unit="example")
    stolen.load_state_dict(state)
    copied = copy.deepcopy(poisson)
    draws = everywhere(workers, poisson)
    assert draws != everywhere(workers, stolen)
    assert draws != everywhere(workers, copied)
    given = edpsgd.PoissonBatches(60, 0.5, seed=3).state_dict()
    assert given["seed"] == 3


def test_poisson_passes_over_the_same_epoch_are_drawn_anew(workers) -> None:
    batches = edpsgd.PoissonBatches(100, 0.5, seed=1)
    batches.set_epoch(0)
    first = everywhere(workers, batches)
    assert everywhere(workers, batches) == first  # nothing was taken: these are still the batches to come
    batches.set_epoch(0)
    assert everywhere(workers, batches) != first
