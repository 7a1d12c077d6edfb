"""The command that times epochs: it may be interrupted, and spreads what it measures."""

from __future__ import annotations

import itertools

import pytest

from benchmarks import epoch_time
from benchmarks.epoch_time import spread
from benchmarks.harness import results
from benchmarks.harness.epoch_rows import in_portions
from tests.benchmarks.harness.test_cost_model import in_a_world_like_the_model
from tests.benchmarks.harness.test_epoch_rows import steps


class Machine:
    """Measures by a formula, and is switched off at some moment."""

    def __init__(self, breaks: int | None) -> None:
        self.breaks, self.measured = breaks, 0

    def __call__(self, job: dict, workers: int, about: dict) -> dict:
        if self.measured == self.breaks:
            raise KeyboardInterrupt
        self.measured += 1
        found = {
            "times": {"parameters": 9, "utterances": job["examples"], "steps": 4, "times": self.times()},
            "memory": {"peak_mib": 100.0 + len(about.get("contender", ""))},
            "parts": {"parameters": 9, **in_a_world_like_the_model(workers, workers - 1, 2)},
        }[job["what"]]
        return {**{name: value for name, value in found.items() if name != "machine"}, "about": about}

    def times(self) -> dict:
        sgd = steps([1.0, 2.0, 3.0, 4.0])
        own = {name: {key: n * value for key, value in sgd.items()} for n, name in enumerate(epoch_time.OURS, 1)}
        return {name: in_portions(one, sgd) for name, one in own.items()}


@pytest.mark.parametrize("breaks", [0, 1, 4, 6])
def test_interrupting_and_going_on_gives_the_same_tables(tmp_path, monkeypatch, breaks) -> None:
    found = {}
    for folder, moment in (("whole", None), ("parts", breaks)):
        monkeypatch.setattr(epoch_time, "measured", first := Machine(moment))
        command = ["--reduced", "--out", str(tmp_path / folder)]
        if moment is not None:
            with pytest.raises(KeyboardInterrupt):
                epoch_time.main(command)
            monkeypatch.setattr(epoch_time, "measured", second := Machine(None))
        epoch_time.main(command)
        found[folder] = results.load("epoch_time", tmp_path / folder)
    assert first.measured + second.measured == len(found["whole"]["pieces"]) == 7
    for name in ("rows", "memory", "cost_model", "is_complete"):
        assert found["parts"][name] == found["whole"][name]
    assert found["whole"]["is_complete"]


@pytest.mark.parametrize(("number", "most"), [(1, 5), (7, 3), (100, 6), (5, 5)])
def test_steps_are_spread_evenly(number, most) -> None:
    found = spread(number, most)
    assert len(found) == len(set(found)) == min(number, most)
    assert max(found) - (number - 1) <= 0 <= min(found)
    gaps = {later - sooner for sooner, later in itertools.pairwise(found)}
    assert max(gaps, default=1) - min(gaps, default=1) <= 1
