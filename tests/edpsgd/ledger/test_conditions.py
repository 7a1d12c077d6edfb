"""Conditions of ε: each is said where it applies, and nowhere else."""

from __future__ import annotations

import pytest

from edpsgd.accounting import (
    gaussian_epsilon,
)
from edpsgd.ledger import guarantee
from edpsgd.ledger.records import BatchesRecord, RunRecord
from tests.helpers.events import gradients, norms, poisson


def test_unvouched() -> None:
    events = [gradients(0, 2.0, batching="unvouched"), gradients(1, 1.0)]
    bound, report = guarantee.bound(events, 1e-5), guarantee.report(events, 1e-5)
    assert bound.epsilon == gaussian_epsilon([2.0, 1.0], 1e-5)
    (condition,) = bound.conditions
    assert "no sampler vouches" in condition
    assert "no example was in two micro-batches of an epoch, of one step or of several, and" in condition
    for text in (str(bound), str(report)):
        assert f"on condition: {condition}" in text
    worst = report.bounds[-1]
    assert worst.method == "exact Gaussian, every example in every step"
    assert worst.epsilon == pytest.approx(gaussian_epsilon([2.0] * 10 + [1.0] * 10, 1e-5), rel=1e-12)
    (condition,) = worst.conditions
    assert "no example was in two micro-batches of a step and" in condition


def test_of_single_examples_it_is_said_that_they_must_be_single() -> None:
    """Nobody but the user knows how many examples a gradient is of."""
    for epoch in (0, None):
        events = [gradients(epoch, 2.0, batching="unvouched")]
        (condition,) = guarantee.bound(events, 1e-5, [RunRecord(unit="example")]).conditions
        assert "it holds if every micro-batch held one example, no example was in two" in condition


def test_a_ledger_without_steps_says_so() -> None:
    assert "no step is recorded" in str(guarantee.bound([], 1e-5))


@pytest.mark.parametrize("training", [gradients(), poisson()])
def test_raw_scales_are_a_condition(training) -> None:
    bound, report = guarantee.bound([norms(0.0), training], 1e-5), guarantee.report([norms(0.0), training], 1e-5)
    assert bound.epsilon == guarantee.bound([training], 1e-5).epsilon
    (condition,) = bound.conditions
    assert "raw first-step norms" in condition
    assert "no noise covers" in str(bound)
    assert "no noise covers" in str(report)


def test_raw_scales_are_marked_before_the_first_step() -> None:
    assert "raw first-step norms" in str(guarantee.bound([norms(0.0)], 1e-5))


def test_seeds_are_conditions() -> None:
    (condition,) = guarantee.bound([gradients()], 1e-5, [RunRecord(seeded=True)]).conditions
    assert "the noise comes from a given seed" in condition
    runs = [RunRecord(seeded=False), RunRecord(seeded=True, batches=BatchesRecord(kind="poisson", seeded=True))]
    noise, batches = guarantee.bound([poisson()], 1e-5, runs).conditions
    assert "the noise comes from a given seed" in noise
    assert "the batches come from a given seed" in batches
    assert batches in str(guarantee.report([poisson()], 1e-5, runs))
    runs = [
        RunRecord(seeded=False, batches=BatchesRecord(kind="shuffled", seeded=True)),
        RunRecord(batches=None),
        RunRecord(),
    ]
    assert guarantee.bound([gradients()], 1e-5, runs).conditions == ()


def test_all_conditions_are_shown() -> None:
    events = [norms(0.0), gradients(0, batching="unvouched")]
    bound = guarantee.bound(events, 1e-5, [RunRecord(seeded=True)])
    assert len(bound.conditions) == 3
    for text in (str(bound), str(guarantee.report(events, 1e-5, [RunRecord(seeded=True)]))):
        assert all(condition in text for condition in bound.conditions)
