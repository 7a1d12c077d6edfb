"""From the times of steps to those of epochs, and the cost model, against figures that are known."""

from __future__ import annotations

import itertools

import pytest

from benchmarks import epoch_time
from benchmarks.epoch_time import spread
from benchmarks.harness import cost_model, results
from benchmarks.harness.epoch_rows import MANY, in_portions, summarise
from benchmarks.harness.epoch_rows import figures as figures_of
from benchmarks.report.epoch_page import page, readme_table


def steps(seconds, turns=(0,)) -> dict:
    return {(turn, step): value for turn in turns for step, value in enumerate(seconds)}


def piece(times, number, utterances=600, **about) -> dict:
    about = {"model": "clc", "corpus": "SNIPS", "is_peer": False, **about}
    sizes = {"parameters": 7, "utterances": utterances, "steps": number, "machine": {"processor": "p"}}
    return {"about": about, **sizes, "times": {name: in_portions(own, times["sgd"]) for name, own in times.items()}}


def figures(pieces: dict) -> dict:
    return figures_of(pieces, {name: {"batch": 32} for name in pieces})


def test_a_whole_epoch_is_the_sum_of_its_steps() -> None:
    sgd = steps([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    found = piece({"sgd": sgd, "edp": {key: 1.1 * value for key, value in sgd.items()}}, 6)
    row = summarise(**found["about"], found=found)
    assert row["contenders"]["edp"]["ratio"] == pytest.approx(1.1)
    assert row["contenders"]["sgd"]["seconds"] == pytest.approx(21)
    assert not row["contenders"]["edp"]["is_extrapolated"]
    assert row["paper"] == {"dp_sgd": 5.1, "edp": 1.01}


def test_the_ratio_of_a_pass_is_that_of_its_sums() -> None:
    """A slow third counts in full: 1, 1 and 10 seconds of SGD become 2, 1 and 10."""
    found = piece({"sgd": steps([1.0, 1.0, 10.0]), "example": steps([2.0, 1.0, 10.0])}, 3)
    one = summarise(**found["about"], found=found)["contenders"]["example"]
    assert one["seconds"] == pytest.approx(13)
    assert one["ratio"] == pytest.approx(13 / 12)
    assert one["ratio_spread"] == [1.0, 2.0]


def test_repeated_passes_give_the_spread() -> None:
    sgd = {**steps([1.0, 1.0], (0, 1, 2))}
    own = {key: {0: 1.0, 1: 2.0, 2: 4.0}[key[0]] for key in sgd}
    one = summarise("clc", "ATIS", False, piece({"sgd": sgd, "edp": own}, 2))["contenders"]["edp"]
    assert (one["ratio"], one["ratio_spread"], one["repetitions"]) == (2.0, [1.0, 4.0], 3)


def test_slow_contenders_are_compared_on_their_own_steps() -> None:
    """They saw the long step only: the ratio is that of this step, and the epoch is SGD's times it."""
    sgd = steps([1.0, 1.0, 10.0], (0, 1))
    found = piece({"sgd": sgd, "loop": {(0, 2): 50.0}}, 3)
    one = summarise(**found["about"], found=found)["contenders"]["loop"]
    assert (one["ratio"], one["seconds"], one["is_extrapolated"], one["measured_steps"]) == (5.0, 60.0, True, 1)


def test_a_million_utterances_follow_from_a_tenth_and_say_so() -> None:
    times = {name: steps([1.0] * 6) for name in ("sgd", "edp", "groups", "example", "loop")}
    found = figures({"many": piece(times, 1563, MANY, corpus="generated 10^5")})
    small, large = found["rows"]
    assert (large["corpus"], large["utterances"]) == ("generated 10^6", 1_000_000)
    assert (small["contenders"]["sgd"]["seconds"], large["contenders"]["sgd"]["seconds"]) == (1563, 15_625)
    assert all(one["is_extrapolated"] for row in (small, large) for one in row["contenders"].values())
    assert readme_table(found).splitlines()[2] == "| CLC, generated 10^5 | ≈1.00 | ≈1.00 | ≈1.00 | ≈1.00 | – |"
    assert "≈1563.0 s" in page({**found, "command": "c", "minutes": 1.0, "machine": {"processor": "p", "cores": 2}})


def test_rows_of_another_processor_are_marked() -> None:
    times = {name: steps([1.0] * 3) for name in ("sgd", "edp", "groups", "example", "loop")}
    pieces = {corpus: piece(times, 3, corpus=corpus) for corpus in ("ATIS", "SNIPS", "NLU-EVAL")}
    assert "*" not in readme_table(figures(pieces))
    pieces["SNIPS"]["machine"] = {"processor": "q"}
    *table, _, note = readme_table(figures(pieces)).splitlines()
    assert [line.split(" |")[0] for line in table if "*" in line] == ["| CLC, SNIPS *"]
    assert note == r"\* on another processor: q; the others on p"


def test_parts_make_a_whole_epoch() -> None:
    """Two steps of one second and two of three; single examples took twice as long in the second part."""
    parts = {
        f"many, part {seconds}": piece(
            {"sgd": steps([seconds] * 2), "example": {(0, 1): double * seconds}}, 4, corpus="many"
        )
        for seconds, double in ((1.0, 1), (3.0, 2))
    }
    [row] = figures(parts)["rows"]
    sgd, example = row["contenders"]["sgd"], row["contenders"]["example"]
    assert (sgd["seconds"], sgd["spread"], sgd["is_extrapolated"]) == (8.0, [4.0, 12.0], False)
    assert (example["ratio"], example["ratio_spread"], example["measured_steps"]) == (7 / 4, [1.0, 2.0], 2)
    wanted = {name: {"batch": 32} for name in parts}
    assert figures_of({**parts, "many": next(iter(parts.values()))}, wanted)["rows"] == [row]  # of an earlier version
    [row] = figures({"first": parts["many, part 1.0"]})["rows"]  # the rest is not there yet
    assert (row["contenders"]["sgd"]["seconds"], row["contenders"]["sgd"]["is_extrapolated"]) == (4.0, True)


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


def in_a_world_like_the_model(workers: int, beside: int, cores: int) -> dict:
    """100 ms of computation, 10 for each worker beside, 5 of norms, 40 of noise, 30 of wire on two, 7 of the rest."""
    waiting, compute = max(1.0, workers / cores), 100 + 10 * beside
    noise, wire = 40 / workers, 30 * 2 * (workers - 1) / workers
    parts = {"norm": 2.0, "scale": 3.0, "noise": noise, "wire": wire, "whole": 0.0}
    whole = {"sgd": compute * waiting + wire, "edp": waiting * (compute + 5 + 7 + noise) + wire}
    return {"parameters": 9, "whole_ms": whole, "parts_ms": parts, "machine": {"cores": cores}}


def test_the_cost_model_finds_the_parts_and_predicts_the_rest() -> None:
    measured = {workers: in_a_world_like_the_model(workers, workers - 1, 2) for workers in (1, 2, 3)}
    found = cost_model.fit(measured)
    parts = {"compute": 100, "beside": 10, "norm": 5, "noise": 40, "wire": 30, "rest": 7}
    assert found["parts_ms"] == pytest.approx(parts)
    assert all(one["predicted_ms"] == pytest.approx(one["ms"]) for one in found["measured"])
    assert {one["workers"] for one in found["measured"]} == {1, 2, 3}
    for one in found["predicted"]:
        own = in_a_world_like_the_model(one["workers"], 1, 64)["whole_ms"]
        assert (one["sgd_ms"], one["edp_ms"]) == pytest.approx((own["sgd"], own["edp"]))
    assert any("64" in line for line in cost_model.tables(found))


def test_the_cost_model_by_hand() -> None:
    """SGD takes 100 ms on one worker and 120 on two, 6 of them for the wire."""
    alone = {"parameters": 9, "whole_ms": {"sgd": 100.0, "edp": 130.0}, "parts_ms": {}, "machine": {"cores": 2}}
    two = {"parameters": 9, "whole_ms": {"sgd": 120.0, "edp": 145.0}, "machine": {"cores": 2}}
    two["parts_ms"] = {"norm": 4.0, "noise": 10.0, "wire": 6.0}
    found = cost_model.fit({1: alone, 2: two})
    assert found["parts_ms"]["rest"] == pytest.approx(145 - 114 - 4 - 10 - 6)
    [four] = [one for one in found["predicted"] if one["workers"] == 4]
    assert four["edp_ms"] == pytest.approx(114 + 4 + 11 + 20 / 4 + 6 * 1.5)
    assert four["sgd_ms"] == pytest.approx(114 + 6 * 1.5)
