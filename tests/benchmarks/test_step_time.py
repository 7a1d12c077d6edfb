"""The parts of a step come from the labels that edpsgd gives to profilers."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import edpsgd
from benchmarks.harness.step_rows import LABELS, PARTS
from benchmarks.step_time import median_of_checked, part_seconds

OF_EXAMPLES = {"backward", "sums"}
OF_MICRO_BATCHES = {"norm", "scale"}
OF_ALL = {"noise", "ledger", "wire", "adam"}


def private_step(unit: str) -> Callable[[], None]:
    """Trains a small layer with units of one size."""
    model, inputs = torch.nn.Linear(4, 1), torch.ones(3, 4)
    optimizer = edpsgd.PrivateOptimizer(
        torch.optim.Adam(model.parameters()),
        model.named_parameters(),
        clip_norm=1.0,
        noise_multiplier=1.0,
        unit=unit,
        **({"divisor": 3} if unit == "example" else {}),
    )

    def step() -> None:
        losses = model(inputs).squeeze(1)
        if unit == "example":
            optimizer.backward(losses)
        else:
            optimizer.zero_grad()
            losses.mean().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("unit", ["example", "micro_batch"])
def test_parts_are_found_and_add_up(unit) -> None:
    own = OF_EXAMPLES if unit == "example" else OF_MICRO_BATCHES
    found = part_seconds(private_step(unit), lambda: None)
    assert set(found) == own | OF_ALL | {"rest", "whole"}
    assert all(seconds > 0 for seconds in found.values())
    assert sum(found.values()) == pytest.approx(2 * found["whole"])


def test_every_label_is_a_part_of_the_table() -> None:
    assert set(LABELS.values()) == OF_EXAMPLES | OF_MICRO_BATCHES | OF_ALL
    assert set(LABELS.values()) <= set(PARTS)


def test_seconds_are_those_of_the_label() -> None:
    def step() -> None:
        time.sleep(0.02)
        for _ in range(2):
            with torch.profiler.record_function("edpsgd.noise"):
                time.sleep(0.05)

    found = part_seconds(step, lambda: time.sleep(0.5))
    assert found["noise"] >= 0.1
    assert 0.015 <= found["rest"] < 0.5, "waiting is not in it"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [([9, 1], 1), ([9, 1, 5], 1), ([9, 1, 5, 2, 5, 5, 5, 6], 2), ([9, None, 5, 3], 3)],
)
def test_checked_steps_are_those_of_powers_of_two(seconds, expected) -> None:
    assert median_of_checked(seconds) == expected


def test_the_engine_compares_these_steps_with_autograd() -> None:
    """What median_of_checked relies on, seen by the passes of autograd over the layer."""
    model = torch.nn.Linear(4, 1)
    units = edpsgd.per_example.UnitGradients(dict(model.named_parameters()), workers=10**9)
    passes = []
    for _ in range(9):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            units.backward(model(torch.ones(3, 4)).squeeze(1))
        names = [event.name for event in profiler.events()]
        passes.append(sum("AddmmBackward0" in name for name in names))
    usual = passes[2]
    assert [number for number, count in enumerate(passes, 1) if count > usual] == [1, 2, 4, 8]
