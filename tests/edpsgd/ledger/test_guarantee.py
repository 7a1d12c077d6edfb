"""What hand-made events amount to, and under which conditions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edpsgd.accounting import (
    gaussian_epsilon,
    pld,
    poisson_epsilon,
    rdp_epsilon,
    zcdp_epsilon,
)
from edpsgd.ledger import guarantee
from edpsgd.ledger.events import Event, LedgerError
from edpsgd.ledger.records import RunRecord
from tests.helpers.events import gradients, norms, poisson


def epsilons(report: guarantee.Report) -> dict[str, float]:
    return {b.method: b.epsilon for b in report.bounds}


def some(examples: int):
    return settings(deadline=None, derandomize=True, max_examples=examples)


@st.composite
def split_events(draw, poisson: bool):
    """Epochs, and the same steps as a growing ledger shows them: ever more, the last one unfinished."""
    z, rate = draw(st.floats(0.8, 2.0)), draw(st.floats(0.005, 0.2))
    numbers = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))

    def event(epoch: int, steps: int) -> Event:
        batching = {"batching": "poisson", "sampling_rate": rate} if poisson else {"batching": "shuffled"}
        return Event("gradients", epoch, z / (1 + 0.1 * epoch), steps, **batching)

    whole = [event(epoch, number) for epoch, number in enumerate(numbers)]
    looks = [
        [*whole[:epoch], event(epoch, draw(st.integers(0, number)))]
        for epoch, number in enumerate(numbers)
        if draw(st.booleans())
    ]
    return whole, looks


DELTA = 1e-5


def test_shuffled() -> None:
    events = [gradients(0, 2.0), gradients(1, 1.0)]
    bound = guarantee.bound(events, 1e-5)
    assert bound.epsilon == float(bound) == gaussian_epsilon([2.0, 1.0], 1e-5)
    assert (bound.delta, bound.method, bound.conditions) == (1e-5, "exact Gaussian", ())
    assert bound.neighbours == "replace or blank one example"
    report = guarantee.report(events, 1e-5)
    assert report.bounds[0] == bound
    assert epsilons(report) == {
        "exact Gaussian": bound.epsilon,
        "zCDP, as in the paper": zcdp_epsilon(1 / 8 + 1 / 2, 1e-5),
        "exact Gaussian, every example in every step": pytest.approx(
            gaussian_epsilon([2.0] * 10 + [1.0] * 10, 1e-5), rel=1e-12
        ),
    }
    assert "on condition" not in str(bound) + str(report)


def test_without_epochs_every_step_is_a_pass() -> None:
    bound = guarantee.bound([gradients(None, 2.0, batching="unvouched")], 1e-5)
    assert bound.epsilon == pytest.approx(gaussian_epsilon([2.0] * 10, 1e-5), rel=1e-12)
    (condition,) = bound.conditions
    assert "no example was in two micro-batches of a step and" in condition


def test_an_epoch_that_was_run_twice_costs_twice() -> None:
    assert guarantee.bound([gradients(0), gradients(0)], 1e-5).epsilon == gaussian_epsilon([2.0, 2.0], 1e-5)


def test_poisson() -> None:
    events = [poisson(0, 1.0), poisson(1, 0.8)]
    bound, report = guarantee.bound(events, 1e-5), guarantee.report(events, 1e-5)
    assert bound.epsilon == poisson_epsilon([1.0, 0.8], 0.1, 10, 1e-5)
    assert (bound.neighbours, bound.conditions) == ("add or remove one example", ())
    rdp = rdp_epsilon([pld.Steps(1.0, 0.1, 10), pld.Steps(0.8, 0.1, 10)], 1e-5)
    worst = gaussian_epsilon([1.0] * 10 + [0.8] * 10, 1e-5)
    assert [b.epsilon for b in report.bounds] == [bound.epsilon, rdp, pytest.approx(worst, rel=1e-12)]
    assert bound.epsilon < rdp < worst
    assert {b.neighbours for b in report.bounds} == {"add or remove one example"}


def test_poisson_without_epochs_is_the_same() -> None:
    assert guarantee.bound([poisson(None)], 1e-5) == guarantee.bound([poisson(0)], 1e-5)


def test_measured_scales_are_charged() -> None:
    bound = guarantee.bound([norms(5.0, "shuffled"), gradients(0, 2.0)], 1e-5)
    assert bound.epsilon == gaussian_epsilon([5.0, 2.0], 1e-5)
    assert bound.conditions == ()
    sampled = guarantee.bound([norms(5.0, "poisson"), poisson()], 1e-5)
    assert sampled.epsilon == pld.Composition().epsilon([pld.Steps(5.0, 1.0, 1), pld.Steps(1.0, 0.1, 10)], 1e-5)
    assert sampled.epsilon > gaussian_epsilon([5.0], 1e-5)
    assert sampled.epsilon > guarantee.bound([poisson()], 1e-5).epsilon


def test_measured_scales_alone() -> None:
    assert guarantee.bound([norms(5.0)], 1e-5).epsilon == gaussian_epsilon([5.0], 1e-5)


def test_measured_scales_on_a_poisson_sample_are_not_amplified() -> None:
    event = Event("layer_norms", None, 5.0, 1, "poisson", 0.01)
    expected = pld.Composition().epsilon([pld.Steps(5.0, 1.0, 1), pld.Steps(1.0, 0.1, 10)], 1e-5)
    assert guarantee.bound([event, poisson()], 1e-5).epsilon == expected


def test_single_examples() -> None:
    """Section 2: z is relative to C, so that replacing an example, which moves the sum by 2C, halves it."""
    runs = [RunRecord(unit="example")]
    bound = guarantee.bound([gradients(0, 2.0)], 1e-5, runs)
    assert (bound.epsilon, bound.neighbours) == (gaussian_epsilon([2.0], 1e-5), "blank one example")
    replaced = [
        b for b in guarantee.report([gradients(0, 2.0)], 1e-5, runs).bounds if b.neighbours == "replace one example"
    ]
    assert [b.epsilon for b in replaced] == [gaussian_epsilon([1.0], 1e-5)]
    assert guarantee.bound([poisson()], 1e-5, runs).neighbours == "add or remove one example"


@pytest.mark.parametrize("other", [gradients(1), gradients(1, batching="unvouched"), gradients(None)])
def test_mixtures_are_refused(other) -> None:
    for function in (guarantee.bound, guarantee.report):
        with pytest.raises(LedgerError, match="different neighbours"):
            function([poisson(), other], 1e-5)


def test_unknown_batching_is_refused() -> None:
    with pytest.raises(LedgerError, match="cannot be accounted for: bootstrap"):
        guarantee.bound([gradients(batching="bootstrap")], 1e-5)


def test_nothing_costs_nothing() -> None:
    for events in ([], [gradients(0, None, 0)], [gradients(0, 1.0, 0)]):
        assert guarantee.bound(events, 1e-5).epsilon == 0.0
        assert {b.epsilon for b in guarantee.report(events, 1e-5).bounds} == {0.0}
    assert "ε = 0 " in str(guarantee.bound([], 1e-5))


@pytest.mark.parametrize("events", [[gradients(0, 0.0)], [gradients(), gradients(1, 0.0)], [poisson(0, 0.0)]])
def test_without_noise_it_is_infinite(events) -> None:
    assert guarantee.bound(events, 1e-5).epsilon == math.inf
    assert {b.epsilon for b in guarantee.report(events, 1e-5).bounds} == {math.inf}
    assert "ε = inf at" in str(guarantee.bound(events, 1e-5))


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan, True, "1e-5"])
@pytest.mark.parametrize("events", [[], [gradients()], [poisson()], [norms(5.0), poisson()]])
def test_bounds_check_delta(events, delta) -> None:
    for function in (guarantee.bound, guarantee.report):
        with pytest.raises(ValueError, match="delta"):
            function(events, delta)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    st.one_of(st.floats(1e-12, 1e15), st.floats(0.0, allow_nan=False), st.integers(1, 10**7).map(lambda n: n / 1000))
)
def test_a_printed_epsilon_is_not_below_the_computed_one(epsilon) -> None:
    printed = float(guarantee.format_epsilon(epsilon))
    assert printed >= epsilon
    if 1e-300 < epsilon < 1e300:
        assert printed <= epsilon * (1 + 1.1e-3)


@pytest.mark.parametrize(
    ("epsilon", "printed"),
    [(0.0, "0"), (math.inf, "inf"), (2.0, "2.000"), (2.00001, "2.001"), (0.0123456, "0.01235"), (76.8068, "76.81")],
)
def test_four_digits_rounded_up(epsilon, printed) -> None:
    assert guarantee.format_epsilon(epsilon) == printed


@some(20)
@given(st.one_of(split_events(True), split_events(False)))
def test_looking_in_between_changes_nothing(events) -> None:
    whole, looks = events
    composition = pld.Composition()
    for look in looks:
        guarantee.bound(look, 1e-5, composition=composition)
    epsilon = guarantee.bound(whole, 1e-5, composition=composition).epsilon
    assert epsilon == pytest.approx(guarantee.bound(whole, 1e-5).epsilon, rel=1e-9)


@some(10)
@given(split_events(True), st.randoms(use_true_random=False))
def test_steps_may_be_split_in_any_way(events, random) -> None:
    """One event of n steps costs as much as several that have n together."""
    whole, _ = events
    parts = []
    for e in whole:
        cut = random.randint(0, e.steps)
        parts += [Event(**{**vars(e), "steps": n}) for n in (cut, e.steps - cut)]
    composition = pld.Composition()
    for end in range(1, len(parts) + 1):
        epsilon = guarantee.bound(parts[:end], 1e-5, composition=composition).epsilon
    assert epsilon == pytest.approx(guarantee.bound(whole, 1e-5).epsilon, rel=1e-9)


@pytest.mark.parametrize("batching", ["shuffled", "poisson", "fixed_size"])
def test_steps_whose_noise_is_not_recorded_are_not_free(batching) -> None:
    event = Event("gradients", 0, None, 3, batching, None if batching == "shuffled" else 0.01)
    assert guarantee.bound([event], 1e-5).epsilon == math.inf


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
