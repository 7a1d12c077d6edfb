"""Settings: what is refused, and what follows from them."""

from __future__ import annotations

import math

import pytest

from tests.helpers.common import Bag, Spy, assert_std, private


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm must be a finite number > 0, got 0.0"),
        ({"clip_norm": math.nan}, "clip_norm must be a finite number > 0, got nan"),
        ({"clip_norm": "1"}, "clip_norm must be a finite number > 0, got a str"),
        ({"noise_multiplier": -0.1}, "noise_multiplier must be a finite number >= 0, got -0.1"),
        ({"noise_multiplier": math.inf}, "noise_multiplier must be a finite number >= 0, got inf"),
        ({"noise_decay": 0.5}, "noise_decay must be None or a callable"),
        ({"clipping": "layer"}, "clipping must be one of 'flat', 'per_layer', got 'layer'"),
        ({"unit": "word"}, "unit must be one of 'micro_batch', 'example', 'user', got 'word'"),
        ({"unit": "example"}, "unit='example' needs divisor"),
        ({"unit": "example", "divisor": 0}, "divisor must be a finite number > 0, got 0"),
        ({"unit": "example", "divisor": 8, "noise": "paper"}, "noise='paper' is defined for unit='micro_batch'"),
        ({"divisor": 8}, "divisor is for unit='example'"),
        ({"noise": "none"}, "noise must be one of 'calibrated', 'paper', got 'none'"),
        ({"noise_placement": "root"}, "noise_placement must be one of 'sharded', 'per_worker', got 'root'"),
        ({"compression": "int8"}, "compression must be one of None, 'fp16', 'bf16', got 'int8'"),
        ({"compression": "fp16"}, "compression needs noise_placement='per_worker'"),
        ({"seed": 1.5}, "seed must be None or an int, got a float"),
        ({"collective": "mpi"}, "collective must be 'auto', 'horovod', 'torch', 'local' or an object, got 'mpi'"),
        ({"collective": object()}, "collective must have rank, size, sum_ and gather"),
        ({"layer_scaling": 2.0}, "layer_scaling must be None, a mapping"),
        ({"layer_scaling": {"p0": 1.0}}, "layer_scaling has no entry for the parameters p1, p2"),
        ({"layer_scaling": {"p0": 1, "p1": 0, "p2": 1}}, r"layer_scaling\['p1'\] must be a finite number > 0, got 0"),
        ({"layer_scaling": {"p0": 1, "p1": 1, "p2": 1, "p3": 1}}, "parameters that do not exist: p3"),
    ],
)
def test_settings(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        private(Bag(), **settings)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, "a"])
def test_factors_of_a_callable(factor) -> None:
    optimizer = private(Bag(), noise_decay=lambda t: factor if t == 2 else 1.0)
    optimizer.set_epoch(1)
    with pytest.raises(ValueError, match=r"noise_decay\(2\) must be a finite number > 0"):
        optimizer.set_epoch(2)


def test_given_scales_are_copied() -> None:
    model, scales = Bag((5, 5)), {"p0": 1.0, "p1": 1.0}
    optimizer = private(model, layer_scaling=scales)
    scales["p1"] = 1e6
    model.p1.requires_grad_(False)
    model.p1.requires_grad_(True)
    optimizer._lay_out()  # as after a parameter was frozen
    assert optimizer._layers.scales == [1.0, 1.0]


def test_a_decay_that_changes_its_mind_is_asked_once() -> None:
    factors = iter([1.0, 0.5, 0.25, 0.125])
    model, spy = Bag(), Spy()
    optimizer = private(model, noise_decay=lambda epoch: next(factors), collective=spy, seed=1)
    optimizer.set_epoch(0)
    for _ in range(2):
        optimizer.step()
        assert_std(spy.sent[-1][:10500], 2 * optimizer.ledger.events[0].noise_multiplier)
