"""Decays, and their names."""

from __future__ import annotations

import math

import pytest

import edpsgd
from edpsgd.schedules import ExponentialDecay, LinearDecay, parse_decay


@pytest.mark.parametrize("tau", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("decay", [edpsgd.LinearDecay, edpsgd.ExponentialDecay])
def test_decays(decay, tau) -> None:
    with pytest.raises(ValueError, match="tau must be a finite number >= 0"):
        decay(tau)


@pytest.mark.parametrize(
    ("text", "decay"),
    [
        ("none", None),
        ("linear:0.5", LinearDecay(0.5)),
        ("linear:0", LinearDecay(0.0)),
        ("exponential:1e-3", ExponentialDecay(0.001)),
    ],
)
def test_parse_decay(text, decay) -> None:
    assert parse_decay(text) == decay


@pytest.mark.parametrize("text", ["", "linear", "Linear:1", "none:1", "cosine:0.1", " linear:1", "0.05"])
def test_decays_that_do_not_exist(text) -> None:
    with pytest.raises(ValueError, match=f"^decay must be none, linear:TAU or exponential:TAU, got {text!r}$"):
        parse_decay(text)


@pytest.mark.parametrize("text", ["linear:", "linear:-1", "linear:nan", "exponential:inf", "linear:x", "linear:1:2"])
def test_decays_with_a_bad_tau(text) -> None:
    name = text.partition(":")[0]
    with pytest.raises(ValueError, match=f"^decay must have a finite TAU >= 0, as in {name}:0.05, got {text!r}$"):
        parse_decay(text)


def test_factors_by_epoch() -> None:
    assert [LinearDecay(0.5)(epoch) for epoch in range(3)] == [1.0, 1 / 1.5, 0.5]
    assert [ExponentialDecay(0.5)(epoch) for epoch in range(3)] == [1.0, math.exp(-0.5), math.exp(-1.0)]
