"""Settings: what is refused, and what follows from them."""

from __future__ import annotations

import math

import pytest

import edpsgd
from edpsgd.mechanism.settings import Settings
from tests.helpers import small_steps
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


def settings(**changes) -> Settings:
    return small_steps.settings(**{"clip_norm": 2.0, "noise_multiplier": 3.0, **changes})


def test_sensitivity_of_units() -> None:
    assert settings().sensitivity == 4.0
    assert settings(unit="example", divisor=8).sensitivity == 2.0
    assert settings(unit="user", divisor=8, sensitivity_factor=2.0).sensitivity == 4.0


@pytest.mark.parametrize("placement", ["sharded", "per_worker"])
def test_the_noise_of_all_workers_is_what_is_promised(placement) -> None:
    """The variance on each coordinate of the sum is (α·s·z)²."""
    scales, workers = [0.5, 1.5], 4
    chosen = settings(noise_placement=placement)
    stds = chosen.noise_per_worker(3.0, workers, 2, scales)
    adding = 1 if chosen.is_sharded else workers  # workers that noise one coordinate
    assert [std * adding**0.5 for std in stds] == pytest.approx([scale * 4.0 * 3.0 for scale in scales])
    assert chosen.effective_noise(3.0, workers, 2, scales) == 3.0


def test_the_noise_with_per_layer_clipping_is_isotropic() -> None:
    assert settings(clipping="per_layer").noise_per_worker(3.0, 4, 2, [0.5, 1.5]) == [12.0, 12.0]


def test_the_noise_of_the_paper_is_smaller() -> None:
    """N = 8, K = 1, α = (0.378, 0.756, 1.512), z = 1: 0.11692679 (privacy.md section 3)."""
    paper = settings(noise="paper", clip_norm=1.0)
    scales = [0.3779644730092272, 0.7559289460184544, 1.5118578920369088]
    assert paper.effective_noise(1.0, 8, 1, scales) == pytest.approx(0.11692679, rel=1e-7)
    assert not paper.is_sharded
    assert paper.noise_per_worker(1.0, 8, 4, scales) == [1.0 / 16] * 3
    per_layer = settings(noise="paper", clipping="per_layer")
    assert per_layer.effective_noise(1.0, 2, 2, scales) == 0.25


def test_the_multiplier_of_an_epoch() -> None:
    assert settings().noise_at(5) == 3.0
    assert settings(noise_decay=edpsgd.LinearDecay(0.5)).noise_at(2) == 1.5


def test_a_description_has_no_secret_and_is_the_same_on_all_workers() -> None:
    def halving(epoch: int) -> float:
        return 0.5**epoch

    described = settings(seed=7, noise_decay=halving, layer_scaling={"a": 1}).describe()
    assert "seed" not in described
    assert described["seeded"]
    assert described["sensitivity"] == 4.0
    assert described["layer_scaling"] == {"a": 1.0}
    assert described["noise_decay"].endswith("halving")  # not its address
    assert settings(noise="paper").describe()["noise_placement"] == "per_worker"
    assert "7" not in repr(settings(seed=7))


def test_only_measured_scales_have_first_step_norms() -> None:
    assert settings(layer_scaling=edpsgd.FirstStepNorms(2.0)).first_step_norms.noise_multiplier == 2.0
    with pytest.raises(TypeError, match="only FirstStepNorms are measured"):
        _ = settings().first_step_norms
