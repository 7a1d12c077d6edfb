"""The audit with all workers: the printed multiplier, correlated noise, and a shard that nobody noised."""

from __future__ import annotations

import pytest

from edpsgd import PrivateOptimizer
from edpsgd.mechanism.noise import GaussianSource
from mia.audit import main
from mia.audited_step import Setup
from mia.mechanism import audit_mechanism
from mia.noise_audit import audit_noise

TRIALS = 100


@pytest.fixture
def three(workers):
    """The trials take long, and what they show with two workers they show with three."""
    if workers.size != 3:
        pytest.skip("runs with three workers")
    return workers


@pytest.mark.parametrize(("placement", "unit"), [("sharded", "micro_batch"), ("per_worker", "example")])
def test_calibrated_noise_stands(three, placement, unit) -> None:
    """Single examples: worker 0 has one less than the others, or not."""
    setup = Setup(noise_multiplier=0.5, noise_placement=placement, unit=unit, micro_batches=2, seed=1)
    finding = audit_mechanism(setup, three, trials=TRIALS)
    assert not finding.is_refuted
    assert finding.bounds.mu > 0.7  # of 2
    assert not audit_noise(setup, three, steps=3).is_refuted


def test_the_noise_of_the_paper_is_refuted(three) -> None:
    """It is too small by 2·√(N·K)."""
    setup = Setup(noise="paper", micro_batches=2, seed=3)
    assert audit_mechanism(setup, three, trials=TRIALS).is_refuted
    assert audit_noise(setup, three, steps=3).is_refuted


class SameStreams(PrivateOptimizer):
    """Every worker draws worker 0's noise."""

    def _set_up(self) -> None:
        super()._set_up()
        self._source = GaussianSource(5, rank=0)


class BareShard(PrivateOptimizer):
    """The last worker forgets its noise."""

    def _add_noise(self, number: int) -> None:
        forgotten = self._collective.rank == self._collective.size - 1
        z, self._noise_multiplier = self._noise_multiplier, 0.0 if forgotten else self._noise_multiplier
        super()._add_noise(number)
        self._noise_multiplier = z


@pytest.mark.parametrize(
    ("placement", "scaling"), [("sharded", "none"), ("sharded", "public:1,2,4"), ("per_worker", "public:1,2,4")]
)
def test_workers_that_draw_the_same_noise(workers, placement, scaling) -> None:
    setup = Setup(noise_placement=placement, scaling=scaling, seed=4)
    failed = [check.name for check in audit_noise(setup, workers, steps=3, make=SameStreams).failed]
    assert any("between workers" in name for name in failed) == (workers.size > 1)


def test_a_bare_shard(workers) -> None:
    finding = audit_noise(Setup(seed=6), workers, steps=3, make=BareShard)
    assert "shards cover every coordinate once" in [check.name for check in finding.failed]
    alike = workers.gather([check.found for check in finding.checks])
    assert all(found == alike[0] for found in alike)


def test_the_command(workers, capsys) -> None:
    """Worker 0 prints, and all of them end with the same status."""
    assert main(["noise", "--noise", "paper", "--steps", "3", "--seed", "7"]) == 1
    out = capsys.readouterr().out
    assert (f"{workers.size} worker" in out and "verdict: REFUTED" in out) == (workers.rank == 0)
    assert main(["noise", "--steps", "1"]) == 2
