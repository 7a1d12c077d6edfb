"""Samplers with the optimizer: what the ledger says of them, and steps that do not fit them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import edpsgd
from edpsgd import accounting
from tests.helpers.common import Bag, assert_same, layers_of, private, set_gradients
from tests.helpers.sampled_steps import everywhere, train

DELTA = 1e-5


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
