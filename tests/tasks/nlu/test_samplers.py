"""The sampler that the settings of a job ask for."""

from __future__ import annotations

import math

import pytest

from edpsgd.distributed.collectives import Local
from tasks.nlu.samplers import make_batches
from tests.helpers.jobs import tiny


class Team:
    """One of several workers that all say the same."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def sum_(self, tensors) -> None:
        raise AssertionError("a sampler sends no tensors")

    def gather(self, value):
        return [value] * self.size


def test_shuffled_batches(tmp_path) -> None:
    batches = make_batches(tiny(tmp_path, batch_size=4, micro_batches=3), 100, Team(1, 2))
    assert (batches.kind, batches.micro_batches, batches.expected_batch) == ("shuffled", 3, 24.0)
    assert batches.steps_per_epoch == math.ceil(50 / 12)
    assert {row % 2 for batch in batches for row in batch} == {1}


def test_shuffled_single_examples(tmp_path) -> None:
    """As many of them in a step as a micro-batch would hold."""
    batches = make_batches(tiny(tmp_path, private="example", batch_size=4), 100, Team(0, 2))
    assert (batches.kind, batches.micro_batches, batches.expected_batch) == ("shuffled", 4, 8.0)
    assert batches.fits("example")
    assert {len(batch) for batch in batches} == {0, 1}  # the last step is not full


@pytest.mark.parametrize(("private", "micro_batches"), [("edp", 3), ("example", None)])
def test_poisson_batches(tmp_path, private, micro_batches) -> None:
    settings = {"sampling": "poisson", "private": private, "batch_size": 4, "micro_batches": micro_batches or 1}
    batches = make_batches(tiny(tmp_path, **settings), 96, Team(0, 2))
    rate = 2 * 4 * (micro_batches or 1) / 96
    assert (batches.kind, batches.sampling_rate, batches.micro_batches) == ("poisson", rate, micro_batches)
    assert batches.steps_per_epoch == round(1 / rate)


def test_plain_training_is_shuffled(tmp_path) -> None:
    assert make_batches(tiny(tmp_path, private="off", sampling="poisson"), 100, Local()).kind == "shuffled"


def test_a_batch_that_is_larger_than_the_data(tmp_path) -> None:
    """Shuffled, it is the whole training set; a probability cannot be above 1."""
    assert make_batches(tiny(tmp_path, batch_size=16), 10, Local()).steps_per_epoch == 1
    assert make_batches(tiny(tmp_path, batch_size=5, sampling="poisson"), 10, Team(0, 2)).sampling_rate == 1.0
    with pytest.raises(ValueError, match=r"12 utterances \(2 workers x .* batch_size 6\), and there are 10"):
        make_batches(tiny(tmp_path, batch_size=6, sampling="poisson"), 10, Team(0, 2))
