"""Samplers, what they put into the ledger, and what the optimizer then refuses."""

from __future__ import annotations

import copy
import errno
import itertools
import os

import numpy as np
import pytest
import torch
from scipy.stats import chi2

import edpsgd
from edpsgd import accounting
from tests.helpers.common import Bag, assert_same, layers_of, private, set_gradients

DELTA = 1e-5


def train(model, optimizer, batches, steps=None) -> int:
    """Steps with a gradient where a batch has examples; how many there were."""
    taken, loader = 0, iter(batches)
    while steps is None or taken < steps:
        micro_batches = list(itertools.islice(loader, batches.micro_batches or 1))
        if not micro_batches:
            break
        units = [[i] for i in micro_batches[0]] if batches.micro_batches is None else micro_batches
        for unit in units:
            if unit:
                set_gradients(model, 1.0)
            optimizer.accumulate()
        optimizer.step()
        taken += 1
    return taken


def everywhere(workers, batches) -> list[list[list[int]]]:
    """The batches of an epoch on every worker."""
    return workers.gather(list(batches))


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


# -------------------------------------------------------------------- with the optimizer


def test_what_a_sampler_vouches_for_is_in_the_ledger(workers) -> None:
    """N workers with calibrated noise account as one."""
    model = Bag()
    batches = edpsgd.ShuffledBatches(list(range(40)), 5)
    optimizer = private(model, batches=batches, noise_multiplier=1.5, noise_decay=edpsgd.LinearDecay(0.1))
    for epoch in range(3):
        optimizer.set_epoch(epoch)
        train(model, optimizer, batches)
    bound = optimizer.epsilon(DELTA)
    assert bound.conditions == ()
    assert bound.neighbours == "replace or blank one example"
    assert float(bound) == pytest.approx(accounting.gaussian_epsilon([1.5, 1.5 / 1.1, 1.5 / 1.2], DELTA), rel=1e-12)
    assert optimizer.ledger.runs[0].batches.kind == "shuffled"


def test_poisson_steps_are_accounted_with_their_rate(workers) -> None:
    model = Bag()
    batches = edpsgd.PoissonBatches(40, 0.1, micro_batches=2)
    optimizer = private(model, batches=batches, noise_decay=edpsgd.ExponentialDecay(0.2))
    asked = []
    for epoch in range(3):
        optimizer.set_epoch(epoch)
        train(model, optimizer, batches)
        asked.append(float(optimizer.epsilon(DELTA)))
    expected = [accounting.poisson_epsilon([np.exp(-0.2 * t) for t in range(n)], 0.1, 10, DELTA) for n in (1, 2, 3)]
    assert asked == pytest.approx(expected, rel=1e-9)
    assert optimizer.epsilon(DELTA).neighbours == "add or remove one example"
    assert [(e.batching, e.sampling_rate, e.steps) for e in optimizer.ledger.events] == [("poisson", 0.1, 10)] * 3


def test_single_examples_follow_the_draw(workers) -> None:
    """K is what the draw says, the divisor what is expected of it."""
    model = Bag()
    batches = edpsgd.PoissonBatches(30, 0.4, unit="example", steps_per_epoch=8, seed=2)
    optimizer = private(model, unit="example", batches=batches, clip_norm=1e6, noise_multiplier=0.0)
    drawn = sum(len(batch) for of_worker in everywhere(workers, batches) for batch in of_worker)
    assert train(model, optimizer, batches) == 8
    assert_same(model, {name: torch.full_like(p, -drawn / 12.0) for name, p in model.named_parameters()}, 1e-4)


@pytest.mark.parametrize("fault", ["not drawn", "too many steps", "wrong K", "set_epoch of the sampler"])
@pytest.mark.parametrize("where", ["everywhere", "on one worker"])
def test_steps_outside_of_what_the_sampler_produced_are_refused(workers, fault, where) -> None:
    if workers.size == 1 and where == "on one worker":
        pytest.skip("needs several workers")
    model = Bag()
    batches = edpsgd.ShuffledBatches(12 * workers.size, 3, micro_batches=2)
    optimizer = private(model, batches=batches)
    optimizer.set_epoch(0)
    train(model, optimizer, batches, steps=2 if fault == "too many steps" and where == "everywhere" else 1)
    at_fault = where == "everywhere" or workers.rank == 1
    if at_fault and fault == "set_epoch of the sampler":
        batches.set_epoch(0)
    drawn = iter(batches)
    if not (at_fault and fault in ("not drawn", "too many steps")):
        next(drawn), next(drawn)
    if at_fault and fault == "too many steps" and where == "on one worker":
        batches.take()
    before, charged = layers_of(model), [e.steps for e in optimizer.ledger.events]
    for _ in range(3 if at_fault and fault == "wrong K" else 2):
        set_gradients(model, 1.0)
        optimizer.accumulate()
    message = {
        "not drawn": "has not produced the batches",
        "too many steps": "all 2 steps of this epoch were taken" if where == "everywhere" else "step may be taken",
        "wrong K": "the step has 3 micro-batches, and the sampler made 2",
        "set_epoch of the sampler": r"set_epoch\(\) or load_state_dict\(\) of the sampler was called",
    }[fault]
    if where == "on one worker":
        message = "the workers disagree on"
    with pytest.raises((RuntimeError, ValueError), match=message):
        optimizer.step()
    assert_same(model, before, tolerance=0.0)
    if where == "everywhere":
        assert [e.steps for e in optimizer.ledger.events] == charged


def test_the_scales_step_is_one_of_the_samplers(workers) -> None:
    model = Bag()
    batches = edpsgd.ShuffledBatches(8 * workers.size, 2)
    optimizer = private(model, batches=batches, layer_scaling=edpsgd.FirstStepNorms(2.0), noise_multiplier=1.0)
    optimizer.set_epoch(0)
    assert train(model, optimizer, batches) == 4
    assert [(e.kind, e.steps) for e in optimizer.ledger.events] == [("gradients", 3), ("layer_norms", 1)]
    assert float(optimizer.epsilon(DELTA)) == pytest.approx(accounting.gaussian_epsilon([1.0, 2.0], DELTA))


def test_paper_noise_is_accounted_with_its_real_multiplier(workers) -> None:
    """2·√N·max α lower than what the published algorithm claims (privacy.md section 3)."""
    model = Bag()
    batches = edpsgd.ShuffledBatches(4 * workers.size, 4)
    scales = {"p0": 1.0, "p1": 2.0, "p2": 4.0}
    optimizer = private(model, noise="paper", layer_scaling=scales, batches=batches)
    optimizer.set_epoch(0)
    train(model, optimizer, batches)
    real = 1.0 / (2 * np.sqrt(workers.size) * 4 / np.sqrt(7))
    assert float(optimizer.epsilon(DELTA)) == pytest.approx(accounting.gaussian_epsilon([real], DELTA), rel=1e-9)


def test_every_condition_is_printed(workers) -> None:
    model = Bag()
    optimizer = private(model, seed=1, layer_scaling=edpsgd.FirstStepNorms())
    optimizer.set_epoch(0)
    for _ in range(3):
        set_gradients(model, 1.0)
        optimizer.step()
    printed = str(optimizer.epsilon(DELTA))
    for condition in ("no sampler vouches", "raw first-step norms", "a given seed"):
        assert condition in printed
    worst = optimizer.ledger.report(DELTA).bounds[-1]
    assert worst.epsilon == pytest.approx(accounting.gaussian_epsilon([1.0] * 2, DELTA))  # both steps


def test_a_ledger_that_cannot_be_written_on_worker_0_is_an_error_on_all(workers, tmp_path, monkeypatch) -> None:
    model = Bag()
    optimizer = private(model, ledger=tmp_path / "ledger.jsonl")
    optimizer.set_epoch(0)
    optimizer.step()
    before = layers_of(model)

    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if workers.rank == 0:
            patch.setattr(os, "write", full)
        if workers.size > 1:
            optimizer.set_epoch(1)
        else:
            with pytest.raises(OSError, match="No space left"):
                optimizer.set_epoch(1)
        with pytest.raises((OSError, ValueError), match="No space left"):
            optimizer.step()
    assert_same(model, before, tolerance=0.0)
    optimizer.set_epoch(1)
    optimizer.step()


def test_a_step_can_be_tried_again_when_there_is_room(workers, tmp_path, monkeypatch) -> None:
    optimizer = private(Bag(), ledger=tmp_path / "ledger.jsonl")
    optimizer.set_epoch(0)

    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if workers.rank == 0:
            patch.setattr(os, "write", full)
        with pytest.raises((OSError, ValueError), match="No space left"):
            optimizer.step()
    optimizer.step()
    counts = workers.gather(sum(event.steps for event in optimizer.ledger.events))
    assert set(counts) == {2}  # with the one that failed


@pytest.mark.parametrize("when", ["in an epoch", "before one"])
def test_a_closed_ledger_refuses_on_all(workers, tmp_path, when) -> None:
    optimizer = private(Bag(), ledger=tmp_path / "ledger.jsonl")
    if when == "in an epoch":
        optimizer.set_epoch(0)
    if workers.rank == 0:
        optimizer.ledger.close()

    def go_on() -> None:
        if when == "before one":
            optimizer.set_epoch(0)
        optimizer.step()

    with pytest.raises(ValueError, match="was closed: nothing more can be charged|disagree on whether"):
        go_on()


@pytest.mark.parametrize("ledger", [123, b"x"])
def test_a_ledger_that_is_no_path(workers, ledger) -> None:
    with pytest.raises(ValueError, match="ledger must be None or a path"):
        private(Bag(), ledger=ledger)


# -------------------------------------------------------------------- budget


def test_the_step_that_would_exceed_the_budget_is_refused_everywhere(workers) -> None:
    """Poisson: in the middle of an epoch, at the step that an independent count says."""
    budget = edpsgd.Budget(epsilon=2.5, delta=DELTA)
    affordable = max(
        n for n in range(200) if accounting.compose([accounting.Steps(1.0, 0.1, n)], DELTA) <= budget.epsilon
    )
    model = Bag()
    batches = edpsgd.PoissonBatches(40, 0.1)
    optimizer = private(model, batches=batches, budget=budget)
    states = []

    def epochs() -> None:
        for epoch in range(100):
            optimizer.set_epoch(epoch)
            for batch in batches:
                if batch:
                    set_gradients(model, 1.0)
                states.append(layers_of(model))
                optimizer.step()

    with pytest.raises(edpsgd.BudgetExhausted, match=r"would exceed the budget of ε = 2\.5 at δ = 1e-05"):
        epochs()
    assert workers.gather(len(states) - 1) == [affordable] * workers.size
    assert_same(model, states[-1], tolerance=0.0)
    assert sum(e.steps for e in optimizer.ledger.events) == affordable
    assert float(optimizer.epsilon(DELTA)) <= budget.epsilon
    with pytest.raises(edpsgd.BudgetExhausted):
        optimizer.step()


@pytest.mark.parametrize("vouched", [True, False])
def test_a_budget_of_whole_epochs(workers, vouched) -> None:
    budget = edpsgd.Budget(accounting.gaussian_epsilon([2.0] * 3, DELTA) * 1.001, DELTA)
    model = Bag()
    batches = edpsgd.ShuffledBatches(20 * workers.size, 5) if vouched else None
    optimizer = private(model, noise_multiplier=2.0, batches=batches, budget=budget)

    def epoch(number) -> None:
        optimizer.set_epoch(number)
        for _ in batches or range(4):
            set_gradients(model, 1.0)
            optimizer.step()

    for number in range(3):
        epoch(number)
    before = layers_of(model)
    with pytest.raises(edpsgd.BudgetExhausted):
        epoch(3)
    assert_same(model, before, tolerance=0.0)
    assert len([e for e in optimizer.ledger.events if e.steps]) == 3


def test_a_budget_pays_for_measured_scales(workers) -> None:
    optimizer = private(Bag(), layer_scaling=edpsgd.FirstStepNorms(0.5), budget=edpsgd.Budget(epsilon=3.0, delta=DELTA))
    optimizer.set_epoch(0)
    with pytest.raises(edpsgd.BudgetExhausted):
        optimizer.step()
    assert all(e.steps == 0 for e in optimizer.ledger.events)


def test_a_budget_counts_steps_if_set_epoch_is_never_called(workers) -> None:
    optimizer = private(Bag(), noise_multiplier=4.0, budget=edpsgd.Budget(2.0, DELTA))
    affordable = max(n for n in range(1, 200) if accounting.gaussian_epsilon([4.0] * n, DELTA) <= 2.0)
    for _ in range(affordable):
        optimizer.step()
    with pytest.raises(edpsgd.BudgetExhausted):
        optimizer.step()
